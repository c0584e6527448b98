"""Exported files, read by the frameworks' own parsers: `cases` names them, `readers` read them, `proven.json` records it.

python -m tests.evidence.exported        # reads again what this environment can read, and writes the record
"""

"""The `rung` command: thin, with lazy imports."""

// Compile modules once, so that no reader's browser has to; starting then takes half the work.
//   node pyodide_compile.mjs FOLDER          of python_stdlib.zip in there, what Pyodide and lablib.live import
//   node pyodide_compile.mjs FOLDER ARCHIVE  every module of another zip file
// What is not compiled stays as source in the same zip file.
import fs from "node:fs";
import { pathToFileURL } from "node:url";

const folder = process.argv[2].replace(/\/*$/, "/");
const archive = process.argv[3] ?? folder + "python_stdlib.zip";
const { loadPyodide } = await import(pathToFileURL(folder + "pyodide.mjs").href);
const python = await loadPyodide({ indexURL: folder });
python.FS.writeFile("/source.zip", fs.readFileSync(archive));
python.globals.set("everything", process.argv[3] !== undefined);
python.runPython(`
import dataclasses, functools, heapq, html, importlib.resources, json, math, shlex, statistics, sys, textwrap, zipfile
from importlib.util import source_hash
from importlib._bootstrap_external import _code_to_hash_pyc

used = {m.__file__.partition(".zip/")[2] for m in list(sys.modules.values()) if ".zip/" in (getattr(m, "__file__", 0) or "")}
with zipfile.ZipFile("/source.zip") as source, zipfile.ZipFile("/compiled.zip", "w", zipfile.ZIP_DEFLATED) as compiled:
    found = {name for name in source.namelist() if name.endswith(".py") and (everything or name in used)}
    assert everything or len(found) > 100, f"only {len(found)} modules were imported from python_stdlib.zip"
    for name in source.namelist():
        content = source.read(name)
        if name in found:
            # A hash that nobody checks: the source is not there to check it against.
            code = compile(content, name, "exec", dont_inherit=True)
            name, content = name + "c", bytes(_code_to_hash_pyc(code, source_hash(content), False))
        entry = zipfile.ZipInfo(name)
        entry.compress_type = zipfile.ZIP_DEFLATED
        compiled.writestr(entry, content)
`);
fs.writeFileSync(archive, python.FS.readFile("/compiled.zip"));

// Compile what Pyodide imports when it starts, once, so that no reader's browser has to: node pyodide_compile.mjs FOLDER
// Starting then takes less than half the work. Modules that are not imported then stay as source in the same zip file.
import fs from "node:fs";
import { pathToFileURL } from "node:url";

const folder = process.argv[2].replace(/\/*$/, "/");
const { loadPyodide } = await import(pathToFileURL(folder + "pyodide.mjs").href);
const python = await loadPyodide({ indexURL: folder });
python.FS.writeFile("/source.zip", fs.readFileSync(folder + "python_stdlib.zip"));
python.runPython(`
import dataclasses, functools, html, json, math, sys, zipfile
from importlib.util import source_hash
from importlib._bootstrap_external import _code_to_hash_pyc

used = {m.__file__.partition(".zip/")[2] for m in list(sys.modules.values()) if ".zip/" in (getattr(m, "__file__", 0) or "")}
with zipfile.ZipFile("/source.zip") as source, zipfile.ZipFile("/compiled.zip", "w", zipfile.ZIP_DEFLATED) as compiled:
    found = used & set(source.namelist())
    assert len(found) > 100, f"only {len(found)} modules were imported from python_stdlib.zip"
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
fs.writeFileSync(folder + "python_stdlib.zip", python.FS.readFile("/compiled.zip"));

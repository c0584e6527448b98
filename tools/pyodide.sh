#!/usr/bin/env bash
# Pyodide for the live pages: taken from npm into .cache, once. Without npm the pages use its CDN.
set -euo pipefail
cd "$(dirname "$0")/.."
version=314.0.7
say() { echo "Live pages: $1, so they load Pyodide from its CDN."; exit 0; }
. tools/npm_fetch.sh pyodide "$version"
for name in pyodide.mjs pyodide.asm.mjs pyodide.asm.wasm python_stdlib.zip pyodide-lock.json package.json README.md; do
  cp "$packages/pyodide/$name" "$kept/"
done
timeout 300 node tools/pyodide_compile.mjs "$kept" || say "node cannot run pyodide@$version"
publish

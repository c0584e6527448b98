#!/usr/bin/env bash
# Pyodide for the live pages: taken from npm into .cache, once. Without npm the pages use its CDN.
set -euo pipefail
cd "$(dirname "$0")/.."
version=314.0.7
target=.cache/pyodide-$version
[ -d "$target" ] && exit 0
say() { echo "Live pages: $1, so they load Pyodide from its CDN."; exit 0; }
command -v npm >/dev/null || say "npm is not installed"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
(cd "$folder" && timeout 90 npm pack --silent "pyodide@$version" >/dev/null 2>&1) || say "npm cannot fetch pyodide@$version"
tar -xzf "$folder"/pyodide-*.tgz -C "$folder"
mkdir -p "$folder/kept"
for name in pyodide.mjs pyodide.asm.mjs pyodide.asm.wasm python_stdlib.zip pyodide-lock.json package.json README.md; do
  cp "$folder/package/$name" "$folder/kept/"
done
timeout 300 node tools/pyodide_compile.mjs "$folder/kept" || say "node cannot run pyodide@$version"
mkdir -p .cache
mv "$folder/kept" "$target"

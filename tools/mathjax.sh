#!/usr/bin/env bash
# MathJax for pages that work offline: taken from npm into .cache, once. Without npm the pages use its CDN.
set -euo pipefail
cd "$(dirname "$0")/.."
version=3.2.2
target=.cache/mathjax-$version
[ -d "$target" ] && exit 0
say() { echo "Formulas: $1, so pages load MathJax from its CDN."; exit 0; }
command -v npm >/dev/null || say "npm is not installed"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
(cd "$folder" && timeout 90 npm pack --silent "mathjax@$version" >/dev/null 2>&1) || say "npm cannot fetch mathjax@$version"
tar -xzf "$folder"/mathjax-*.tgz -C "$folder"
mkdir -p "$folder/kept/output/chtml/fonts"
cp "$folder/package/es5/tex-chtml.js" "$folder/package/LICENSE" "$folder/kept/"
cp -r "$folder/package/es5/output/chtml/fonts/woff-v2" "$folder/kept/output/chtml/fonts/"
mkdir -p .cache
mv "$folder/kept" "$target"

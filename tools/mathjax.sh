#!/usr/bin/env bash
# MathJax for pages that work offline: taken from npm into .cache, once. Without npm the pages use its CDN.
set -euo pipefail
cd "$(dirname "$0")/.."
version=3.2.2
say() { echo "Formulas: $1, so pages load MathJax from its CDN."; exit 0; }
. tools/npm_fetch.sh mathjax "$version"
mkdir -p "$kept/output/chtml/fonts"
cp "$package/es5/tex-chtml.js" "$package/LICENSE" "$kept/"
cp -r "$package/es5/output/chtml/fonts/woff-v2" "$kept/output/chtml/fonts/"
publish

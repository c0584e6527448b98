#!/usr/bin/env bash
# MathJax for pages that work offline: taken from npm into .cache, once. Without npm the pages use its CDN.
set -euo pipefail
cd "$(dirname "$0")/.."
version=4.1.3
say() { echo "Formulas: $1, so pages load MathJax from its CDN."; exit 0; }
. tools/npm_fetch.sh mathjax "$version" @mathjax/mathjax-tex-font
mkdir -p "$kept/a11y" "$kept/mathjax-tex-font/chtml"
cp "$packages/mathjax/tex-chtml-nofont.js" "$packages/mathjax/LICENSE" "$kept/"
cp "$packages/mathjax/a11y/assistive-mml.js" "$kept/a11y/"
cp "$packages/mathjax-tex-font/chtml.js" "$packages/mathjax-tex-font/package.json" "$kept/mathjax-tex-font/"
cp -r "$packages/mathjax-tex-font/chtml/woff2" "$kept/mathjax-tex-font/chtml/"
publish

#!/usr/bin/env bash
# Pagefind, which indexes the site for its search: taken from npm into .cache, once. Without it Sphinx's search is there.
set -euo pipefail
cd "$(dirname "$0")/.."
version=1.6.0
say() { echo "Search: $1, so it finds pages and not sections."; exit 0; }
case $(uname -m) in x86_64 | amd64) machine=x64 ;; *) machine=arm64 ;; esac
platform=@pagefind/$(uname -s | tr '[:upper:]' '[:lower:]')-$machine
. tools/npm_fetch.sh pagefind "$version" "$platform"
cp "$packages/pagefind/LICENSE/LICENSE" "$kept/"
cp "$packages/${platform##*/}/bin/pagefind_extended" "$kept/pagefind"
"$kept/pagefind" --version >/dev/null 2>&1 || say "pagefind@$version cannot run here"
publish

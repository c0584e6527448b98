# Sourced by a script that wants files of an npm package in .cache, once:
#
#   say() { echo "Formulas: $1, so ..."; exit 0; }   # why there are none; the build goes on without
#   . tools/npm_fetch.sh NAME VERSION
#   cp "$package/..." "$kept/"
#   publish
#
# What follows it runs only where the files are not there yet and npm can fetch them.
target=.cache/$1-$2
[ -d "$target" ] && exit 0
command -v npm >/dev/null || say "npm is not installed"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
(cd "$folder" && timeout 90 npm pack --silent "$1@$2" >/dev/null 2>&1) || say "npm cannot fetch $1@$2"
tar -xzf "$folder/$1-"*.tgz -C "$folder"
package=$folder/package kept=$folder/kept
mkdir "$kept"
publish() { mkdir -p .cache && mv "$kept" "$target"; }

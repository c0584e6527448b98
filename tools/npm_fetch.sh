# Sourced by a script that wants files of npm packages of one version in .cache, once:
#
#   say() { echo "Formulas: $1, so ..."; exit 0; }   # why there are none; the build goes on without
#   . tools/npm_fetch.sh NAME VERSION [OTHERNAME ...]
#   cp "$packages/NAME/..." "$kept/"                 # a name without its scope
#   publish
#
# What follows it runs only where the files are not there yet and npm can fetch them.
target=.cache/$1-$2
[ -d "$target" ] && exit 0
command -v npm >/dev/null || say "npm is not installed"
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
kept=$packages/.kept
mkdir "$kept"
for name in "$1" "${@:3}"; do
  mkdir "$packages/${name##*/}"
  (cd "$packages/${name##*/}" && timeout 90 npm pack --silent "$name@$2" >/dev/null 2>&1 &&
    tar -xzf ./*.tgz --strip-components=1) || say "npm cannot fetch $name@$2"
done
publish() { mkdir -p .cache && mv "$kept" "$target"; }

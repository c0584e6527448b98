#!/usr/bin/env bash
# A Chromium for the browser tests: found, installed from Debian's packages by root, or its absence explained.
set -euo pipefail
for name in chromium chromium-browser google-chrome; do
  command -v "$name" >/dev/null && exit 0
done
missing="The browser tests will be skipped: there is no Chromium"
[ "$(id -u)" = 0 ] || { echo "$missing, and only root can install one (sudo apt-get install chromium)."; exit 0; }
command -v apt-get >/dev/null || { echo "$missing, and no apt-get to install one."; exit 0; }
log=$(mktemp)
trap 'rm -f "$log"' EXIT
echo "Installing Chromium from Debian's packages for the browser tests ..."
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } >"$log" 2>&1; then
  tail -n 3 "$log"
  echo "$missing, and apt-get could not install one (offline?)."
fi

#!/bin/sh
# On a CUDA image, which may have no make and no git: find the Python that has a torch for the labs, and install them
# around it. The course's folder is all that it needs.
#   tools/setup_gpu.sh              then .venv/bin/rung doctor --gpu
#   tools/setup_gpu.sh --dry-run    what pip would bring
#   tools/setup_gpu.sh --own-torch  the image has no torch, or one that is too old: bring the course's own
#   PYTHON=/path/to/python tools/setup_gpu.sh
set -eu
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}

if [ -n "${PYTHON:-}" ]; then
  exec "$PYTHON" tools/image_venv.py "$venv" "$@"
fi

has_torch() {
  "$1" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' 2>/dev/null
}

fallback=
for python in python3 python /opt/conda/bin/python /opt/venv/bin/python /venv/main/bin/python \
  /usr/local/bin/python3 /usr/bin/python3 python3.13 python3.12 python3.11; do
  command -v "$python" >/dev/null 2>&1 || continue
  if "$python" tools/image_venv.py --check "$venv" "$@" 2>/dev/null; then
    exec "$python" tools/image_venv.py "$venv" "$@"
  fi
  if [ -z "$fallback" ] && has_torch "$python"; then
    fallback=$python
  fi
done
if [ -n "$fallback" ]; then
  exec "$fallback" tools/image_venv.py "$venv" "$@" # which says what is wrong with it
fi
echo "No Python from 3.11 to 3.13 with torch is here: choose an image with PyTorch, name its Python with" \
  "PYTHON=/path/to/python tools/setup_gpu.sh, or bring the course's own torch with tools/setup_gpu.sh --own-torch." >&2
exit 1

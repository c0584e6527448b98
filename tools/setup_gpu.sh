#!/bin/sh
# On a bare CUDA image, which may have no make: find the Python that has torch, and install the labs around it.
#   tools/setup_gpu.sh            then .venv/bin/rung doctor --gpu
#   tools/setup_gpu.sh --dry-run  what pip would bring
#   PYTHON=/path/to/python tools/setup_gpu.sh
set -eu
cd "$(dirname "$0")/.."

has_torch() {
  "$1" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' 2>/dev/null
}

for python in "${PYTHON:-python3}" python3 python /opt/conda/bin/python /opt/venv/bin/python /venv/main/bin/python \
  python3.13 python3.12 python3.11; do
  if command -v "$python" >/dev/null 2>&1 && has_torch "$python"; then
    exec "$python" tools/image_venv.py "${VENV:-.venv}" "$@"
  fi
done
echo "No Python here has torch. Name the image's own: PYTHON=/path/to/python tools/setup_gpu.sh; or choose an image with PyTorch." >&2
exit 1

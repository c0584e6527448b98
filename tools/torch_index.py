"""Print the pip option that makes Linux without a GPU take the CPU build of torch, where one is needed.

PyPI's torch for Linux brings some gigabytes of CUDA libraries. PyTorch's own CPU index does not.
The option is left out where there is an NVIDIA driver, where pip is already told an extra index or a
folder of wheels, and where that index cannot be reached.
"""

import os
import platform
import shutil
import urllib.error
import urllib.request

INDEX = "https://download.pytorch.org/whl/cpu"


def main() -> None:
    """Print the option, or nothing."""
    told = any(os.environ.get(f"PIP_{name}") for name in ("INDEX_URL", "EXTRA_INDEX_URL", "FIND_LINKS"))
    if platform.system() != "Linux" or shutil.which("nvidia-smi") or told:
        return
    try:
        urllib.request.urlopen(urllib.request.Request(f"{INDEX}/torch/", method="HEAD"), timeout=10).close()
    except (urllib.error.URLError, TimeoutError):
        return
    print(f"--extra-index-url {INDEX}")


if __name__ == "__main__":
    main()

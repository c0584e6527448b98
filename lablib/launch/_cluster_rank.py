"""What torchrun starts on every host: one rank that calls the notebook's function and writes its result to a file.

Usage: torchrun ... --module lablib.launch._cluster_rank FOLDER
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path


def main(folder: Path) -> None:
    """Join the process group, call the function and write `FOLDER/RANK.result`, or why it failed to `RANK.error`.

    Args:
        folder: Where the pickled call is, and where the result goes.
    """
    import cloudpickle
    import torch
    import torch.distributed as dist

    from lablib.launch._rank_pickle import pickle_result

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    try:
        fn, args = cloudpickle.loads((folder / "call").read_bytes())
        result = pickle_result(fn(*args))
    except BaseException:
        (folder / f"{dist.get_rank()}.error").write_text(traceback.format_exc())
        raise
    (folder / f"{dist.get_rank()}.result").write_bytes(result)
    # Nobody leaves before all are done: an early goodbye would break the others' connections.
    dist.barrier()
    dist.destroy_process_group()
    # Taking an interpreter with torch apart costs each rank half a second, and there is nothing left to save.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

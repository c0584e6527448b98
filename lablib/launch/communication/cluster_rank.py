"""One rank on a host of a cluster: it calls the notebook's function and writes its result to a file.

torchrun ... --run-path --start-method=fork cluster_rank.py FOLDER
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from lablib.launch.runs import like_a_new_process


def main(folder: Path) -> None:
    """Join the process group, call the function and write `FOLDER/RANK.result`, or why it failed to `RANK.error`."""
    import cloudpickle
    import torch
    import torch.distributed as dist

    from lablib.launch.ranks import pickle_result

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


if __name__ == "__main__":
    like_a_new_process()
    main(Path(sys.argv[1]))

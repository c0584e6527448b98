"""A run that survives: started by torchrun, it goes on from its newest whole checkpoint, whatever ended it before.

    torchrun --standalone --nproc-per-node 2 --max-restarts 1 \
        labs/scripts/train_resilient.py runs/a '{"model": "tiny", "steps": 30}' --save-every 10

`--kill 1:15` ends rank 1 with SIGKILL after step 15, once. Exit codes: see `lablib.launch.training.callbacks`.
"""

from __future__ import annotations

import argparse
import json
import sys

from lablib.launch.ranks import one_sentence
from lablib.launch.runs import launched_ranks
from lablib.launch.training import (
    KillOnce,
    LogEvents,
    SaveEvery,
    StopOnSignal,
    TrainConfig,
    Trainer,
    exit_code,
    resume,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="of the run")
    parser.add_argument(
        "config", type=json.loads, help="settings of TrainConfig as JSON"
    )
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument(
        "--kill",
        metavar="RANK:STEP",
        type=lambda text: [int(part) for part in text.split(":")],
    )
    options = parser.parse_args()

    try:
        config = TrainConfig(folder=options.folder, **options.config)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    callbacks = [SaveEvery(options.save_every), StopOnSignal()]
    if options.kill:
        rank, step = options.kill
        callbacks.append(KillOnce(rank, step, f"{options.folder}/killed"))
    callbacks.append(LogEvents())
    with launched_ranks():
        trainer = Trainer(config, callbacks)
        for sentence in resume(trainer):
            if trainer.rank == 0:
                print(sentence, flush=True)
        trainer.run()
    return exit_code(trainer)


if __name__ == "__main__":
    with one_sentence():
        sys.exit(main())

"""The arguments of a training run, shared by its two doors.

`dflash-lab train ...` and `accelerate launch -m dflash_lab.training ...` take the same
ones. Importing this is light.

Leaves out: the run itself (`train.py`).
"""

from __future__ import annotations

import sys
from pathlib import Path


def add_arguments(parser) -> None:
    """Arguments of `train`, for this command and `python -m dflash_lab.training`."""
    parser.add_argument("--config", type=Path, required=True, help="YAML settings")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="override a setting; may be repeated",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the run's checkpoint"
    )
    parser.add_argument("--threads", type=int, help="default: one per core")


def run(arguments) -> int:
    """Train; 130 if interrupted."""
    import torch

    from dflash_lab.errors import DFlashLabError
    from dflash_lab.training.run.config import load_config
    from dflash_lab.training.run.train import train

    if arguments.threads is not None:
        if arguments.threads < 1:
            raise DFlashLabError(f"--threads {arguments.threads} must be 1 or more")
        torch.set_num_threads(arguments.threads)
    config = load_config(arguments.config, arguments.set)
    result = train(config, resume=arguments.resume)
    if not result.finished:
        print(
            "stopped, with a checkpoint; go on with the same command and --resume",
            file=sys.stderr,
        )
        return 130
    if result.drafter is not None:  # the first process alone has it
        for name, tau in result.facts["held_out_tau"].items():
            print(f"tau {name:12} {tau:.2f}")
        print(f"drafter: {result.folder}")
    return 0

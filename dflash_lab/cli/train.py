"""`dflash-lab train`: a training run from a YAML file.

Leaves out: its arguments (`training/run/launch.py`), and the run
    (`training/run/train.py`).
"""

from __future__ import annotations

from dflash_lab.training.run import launch


def add(commands) -> None:
    """Add the parser of `train`."""
    parser = commands.add_parser(
        "train",
        help="train a drafter",
        description="Train a drafter. Several processes: "
        "accelerate launch -m dflash_lab.training --config FILE",
    )
    launch.add_arguments(parser)
    parser.set_defaults(run=launch.run)

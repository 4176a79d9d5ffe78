"""The machine side of a run: devices through `accelerate`, and interrupts.

Leaves out: the training loop (`trainer.py`).
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from typing import Any

import torch

from dflash_lab.errors import DFlashLabError
from dflash_lab.training.run.config import TrainConfig


def make_accelerator(config: TrainConfig):
    """`accelerate.Accelerator` for a run; CUDA if asked for or found, else the CPU."""
    try:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
    except ImportError:
        raise DFlashLabError(
            "training needs accelerate; pip install 'dflash-lab[train]'"
        ) from None
    # A second run of one process may want another precision than the first.
    AcceleratorState._reset_state()
    cpu = config.device == "cpu" or not torch.cuda.is_available()
    if config.device not in ("cpu", "cuda", "auto"):
        raise DFlashLabError(
            f"device {config.device!r} cannot train; choose cpu, cuda or auto"
        )
    if config.device == "cuda" and cpu:
        raise DFlashLabError("device 'cuda' is not here; use cpu or auto")
    _check_tracker(config.log.tracker)
    return Accelerator(
        cpu=cpu,
        mixed_precision=config.objective.mixed_precision,
        log_with=config.log.tracker,
        project_dir=config.out,
    )


def _check_tracker(name: str | None) -> None:
    # `accelerate` leaves a tracker that is not installed out without a word.
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    known = sorted(str(kind) for kind in LOGGER_TYPE_TO_CLASS)
    if name is not None and name not in known:
        raise DFlashLabError(
            f"log.tracker {name!r} is unknown to accelerate; choose {', '.join(known)}"
        )
    if name is not None and name not in map(str, get_available_trackers()):
        raise DFlashLabError(
            f"log.tracker {name!r} is not installed; pip install {name}, or leave "
            "log.tracker out (metrics.jsonl is always written)"
        )


@contextlib.contextmanager
def interrupts(ask: Callable[[], None]):
    """Call `ask` at the first Ctrl-C or SIGTERM; a second one ends at once.

    Outside the main thread (some notebooks) signals cannot be caught and nothing is
    changed.
    """
    before: dict[signal.Signals, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(number, frame):
        ask()
        restore()

    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(ValueError):
            before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        restore()

"""The machine side of a run: devices through `accelerate`, and interrupts.

Leaves out: the training loop (`trainer.py`).
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable

import torch

from dflash_lab.errors import DFlashLabError
from dflash_lab.training.config import TrainConfig


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
    return Accelerator(
        cpu=cpu,
        mixed_precision=config.objective.mixed_precision,
        log_with=config.log.tracker,
        project_dir=config.out,
    )


@contextlib.contextmanager
def interrupts(ask: Callable[[], None]):
    """Call `ask` at the first Ctrl-C or SIGTERM; a second one ends at once.

    Outside the main thread (some notebooks) signals cannot be caught and nothing is
    changed.
    """
    before = {}

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

"""How far a run has come, how long it lasts, and how fast it learns on the way.

Leaves out: the loop that asks (`trainer.py`), and what is saved (`checkpoints.py`).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from dflash_lab.training.run.config import OptimizerSettings


@dataclass
class Progress:
    """How far a run has come; saved with each checkpoint.

    Attributes:
        step: optimiser steps done.
        blocks: blocks seen, over all processes.
        seconds: wall clock of the loop, measurements of tau on the way included.
        cpu_seconds: processor time of the same, over all processes.
        tau: the last measured ones, by prompt set.
    """

    step: int = 0
    blocks: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    tau: dict[str, float] | None = None


class Stopwatch:
    """Adds the time since it was made to a run's progress.

    Args:
        progress: of the run, with the time before.
        processes: that take part; their processor time is taken to be alike.
    """

    def __init__(self, progress: Progress, processes: int):
        self.progress, self.processes = progress, processes
        self._before = progress.seconds, progress.cpu_seconds
        self._started = time.monotonic(), time.process_time()

    def read(self) -> None:
        """Bring the progress up to now."""
        seconds = time.monotonic() - self._started[0]
        cpu_seconds = (time.process_time() - self._started[1]) * self.processes
        self.progress.seconds = self._before[0] + seconds
        self.progress.cpu_seconds = self._before[1] + cpu_seconds


class Schedule:
    """Length of a run, by steps or by a clock, and its learning rate.

    Args:
        settings: of the optimiser.
        steps_per_epoch: steps in which every text is seen once.

    Attributes:
        steps: optimiser steps of the run; None if only a clock ends it.
    """

    def __init__(self, settings: OptimizerSettings, steps_per_epoch: int):
        self.settings = settings
        self.steps = settings.steps
        if settings.steps is None and settings.minutes is None:
            self.steps = math.ceil(settings.epochs * steps_per_epoch)

    def share_done(self, progress: Progress) -> float:
        """Finished share of the run, 0..1."""
        share = 0.0 if self.steps is None else progress.step / self.steps
        if self.settings.minutes is not None:
            cpu = self.settings.clock == "cpu"
            spent = progress.cpu_seconds if cpu else progress.seconds
            share = max(share, spent / (60 * self.settings.minutes))
        return min(1.0, share)

    def learning_rate(self, done: float) -> float:
        """Linear warm-up, then cosine to zero; `done` is the finished share, 0..1."""
        peak, warmup = self.settings.learning_rate, self.settings.warmup_ratio
        if done < warmup:
            return peak * max(done, 1e-3) / warmup
        rest = (done - warmup) / (1 - warmup)
        return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, rest)))

"""How long a run lasts, and how fast it learns on the way.

Leaves out: the loop that asks (`trainer.py`).
"""

from __future__ import annotations

import math

from dflash_lab.training.run.config import OptimizerSettings
from dflash_lab.training.run.progress import Progress


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

"""What a run says on its way: metric lines, the progress bar, trackers.

Leaves out: the form of a line on the disk and behind the bar (`metrics.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from dflash_lab.training.run.config import TrainConfig
from dflash_lab.training.run.metrics import (
    MetricLog,
    StepSums,
    predicted_tau,
    progress_line,
)
from dflash_lab.training.run.progress import Progress

if TYPE_CHECKING:
    from accelerate import Accelerator


class Reporter:
    """Turns the sums of steps into a line every so often.

    Args:
        config: settings of logging and the run's folder.
        accelerator: says which process writes, and has the trackers.
        progress: where the run starts.
        steps: of the whole run, None if not known.
        on_line: gets each metric line, in the first process.
        quiet: no progress bar.

    Attributes:
        bar: a context manager around the run.
    """

    def __init__(
        self,
        config: TrainConfig,
        accelerator: Accelerator,
        progress: Progress,
        steps: int | None,
        on_line: Callable[[dict], None] | None,
        quiet: bool,
    ):
        self.settings, self.accelerator = config.log, accelerator
        self.on_line = on_line or (lambda line: None)
        main = accelerator.is_main_process
        path = Path(config.out) / "metrics.jsonl"
        self.log = MetricLog(path, progress.step) if main else None
        self.bar = tqdm(
            total=steps,
            initial=progress.step,
            desc="train",
            unit="step",
            mininterval=2,
            disable=quiet or not main,
        )
        self._sums: list[StepSums] = []

    def add(self, sums: StepSums) -> None:
        """Count one step in."""
        self._sums.append(sums)

    def due(self, step: int) -> bool:
        """Whether a line is to be written behind this step."""
        return step % self.settings.every == 0

    def write(
        self, progress: Progress, learning_rate: float, share: float, measured: bool
    ) -> None:
        """Report the steps since the last line.

        Args:
            progress: how far the run is; its tau is reported if `measured`.
            learning_rate: of the last step.
            share: finished share of the run, 0..1.
            measured: whether tau was measured at this step.
        """
        sums, self._sums = self._sums, []
        right = torch.stack([s.right for s in sums]).sum(0)
        total = torch.stack([s.total for s in sums]).sum(0)
        accuracy = (right / total.clamp(min=1)).tolist()
        line = {
            "step": progress.step,
            "loss": float(torch.stack([s.loss for s in sums]).mean()),
            "accuracy": accuracy,
            "predicted_tau": predicted_tau(accuracy),
            "learning_rate": learning_rate,
            "blocks": progress.blocks,
            "blocks_per_second": progress.blocks / progress.seconds,
            "seconds": progress.seconds,
            "cpu_seconds": progress.cpu_seconds,
            "seconds_left": progress.seconds * (1 - share) / max(share, 1e-9),
        }
        tau = progress.tau or {}
        if measured and tau:
            line |= {"held_out_tau": tau, "measured_tau": tau.get("pooled")}
        if self.log is not None:
            self.log.write(line)
            shown = line | {"measured_tau": tau.get("pooled")}
            self.bar.set_postfix_str(progress_line(shown))
            self.on_line(line)
        numbers = {k: v for k, v in line.items() if isinstance(v, (int, float))}
        self.accelerator.log(numbers, step=progress.step)

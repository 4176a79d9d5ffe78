"""The training loop: AdamW, warm-up, cosine, on one device or many.

`accelerate` supplies devices, mixed precision, DDP and FSDP. Losses are summed over all
blocks of a step and divided by the sum of their weights over all processes and
accumulation rounds, so one process and two see the same gradient. Since all randomness
of the data is a function of the step, going on from a checkpoint repeats what an
uninterrupted run would have done.

Leaves out: putting a run together (`train.py`), its length (`progress.py`), its files
(`checkpoints.py`) and what it says (`reporter.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.errors import DFlashLabError
from dflash_lab.training.data.pipeline import Pipeline
from dflash_lab.training.objective import Objective
from dflash_lab.training.run.checkpoints import Checkpoints
from dflash_lab.training.run.config import TrainConfig
from dflash_lab.training.run.devices import interrupts
from dflash_lab.training.run.metrics import StepSums
from dflash_lab.training.run.progress import Progress, Schedule, Stopwatch
from dflash_lab.training.run.reporter import Reporter

if TYPE_CHECKING:
    from accelerate import Accelerator


class Trainer:
    """Trains one objective on one pipeline.

    Args:
        objective: holds the drafter, in float32.
        pipeline: the batches.
        config: settings of optimiser, logging and the run's folder.
        accelerator: see `devices.make_accelerator`.
        evaluate: gives tau by prompt set for an exported drafter; called in the first
            process at `log.eval_every`.
        on_line: gets each metric line, in the first process.
        should_stop: asked behind every step; True ends the run with a checkpoint.
        quiet: no progress line.
    """

    def __init__(
        self,
        objective: Objective,
        pipeline: Pipeline,
        config: TrainConfig,
        accelerator: Accelerator,
        evaluate: Callable[[DFlashDraftModel], dict[str, float]] | None = None,
        *,
        on_line: Callable[[dict], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
        quiet: bool = False,
    ):
        self.objective, self.pipeline, self.config = objective, pipeline, config
        self.accelerator, self.evaluate = accelerator, evaluate
        self.on_line, self.quiet = on_line, quiet
        self.should_stop = should_stop or (lambda: False)
        settings = config.optimizer
        optimizer = torch.optim.AdamW(
            [p for p in objective.parameters() if p.requires_grad],
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
        )
        self.model, self.optimizer = accelerator.prepare(objective, optimizer)
        self.schedule = Schedule(settings, pipeline.plan.steps_per_epoch)
        self.files = Checkpoints(
            Path(config.out), accelerator, self.export, config.log.save_minutes
        )
        self.progress = Progress()
        self._asked = self._stop = False

    def run(self) -> Progress:
        """Train to the end, or to an interrupt; a checkpoint is left either way.

        Returns:
            How far it came; `finished` says whether to the end.

        Raises:
            DFlashLabError: a loss or gradient that is not finite; the checkpoint before
                it stays.
        """
        watch = Stopwatch(self.progress, self.accelerator.num_processes)
        reporter = Reporter(
            self.config,
            self.accelerator,
            self.progress,
            self.schedule.steps,
            self.on_line,
            self.quiet,
        )
        with interrupts(self.stop), reporter.bar:
            while not self.finished and not self._stop:
                rate = self.schedule.learning_rate(self.share_done)
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                sums = self.step(self.progress.step)
                seen = self.progress.blocks
                self.progress.step += 1
                self.progress.blocks += int(sums.blocks)
                watch.read()
                self._agree()
                reporter.add(sums)
                measured = self._measure()
                if measured or self.finished or reporter.due(self.progress.step):
                    reporter.write(self.progress, rate, self.share_done, measured)
                reporter.bar.update()
                if self.config.log.keep_drafters:
                    self.files.keep_drafter(seen, self.progress.blocks)
                if self.files.due or self.finished:
                    self.files.save(self.progress)
            if not self.finished:
                self.files.save(self.progress)
        return self.progress

    def step(self, number: int) -> StepSums:
        """Gradients and update of one step; sums over all processes.

        Raises:
            DFlashLabError: a loss or gradient that is not finite; no weight was moved.
        """
        world = self.accelerator.num_processes
        batches = self.pipeline.step(number, self.accelerator.process_index, world)
        totals: list[Tensor] = []
        blocks = 0
        for i, batch in enumerate(batches):
            last = i == len(batches) - 1
            # Gradients travel between processes once a step, not once a pass.
            quiet = nullcontext() if last else self.accelerator.no_sync(self.model)
            with quiet:
                with self.accelerator.autocast():
                    loss, weight, right, total = self.model(batch, number)
                self.accelerator.backward(loss)
            blocks += int(batch.blocks.valid.sum())
            totals.append(
                torch.cat([torch.stack([loss.detach(), weight]), right, total])
            )
        mine = torch.cat([torch.stack(totals).sum(0), totals[0].new_tensor([blocks])])
        sums = self.accelerator.reduce(mine, "sum") if world > 1 else mine
        self._normalise(world / sums[1].clamp(min=1e-9))
        mean = sums[0] / sums[1].clamp(min=1e-9)
        limit = self.config.optimizer.max_grad_norm
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), limit)
        self._check_finite(number + 1, mean, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        right, total = sums[2:-1].chunk(2)
        return StepSums(mean, right, total, sums[-1])

    def _normalise(self, factor: Tensor) -> None:
        # Processes average their gradients of sums; the mean over weights is wanted.
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.dtype))

    def _check_finite(self, step: int, loss: Tensor, norm: Tensor) -> None:
        for name, value in (("loss", float(loss)), ("gradient's norm", float(norm))):
            if not math.isfinite(value):
                raise DFlashLabError(
                    f"the {name} is {value} at step {step}; no weight was moved, and "
                    "the last checkpoint is good. Lower optimizer.learning_rate, or "
                    "look for NaN in the features"
                )

    def stop(self) -> None:
        """End the run behind the current step, with a checkpoint."""
        self._asked = True

    @property
    def share_done(self) -> float:
        """Finished share of the run, 0..1, by steps or by a clock."""
        return self.schedule.share_done(self.progress)

    @property
    def finished(self) -> bool:
        """Whether the last step is done."""
        return self.share_done >= 1.0

    def _agree(self) -> None:
        """All processes stop at the same step, and share one clock."""
        self._asked = self._asked or self.should_stop()
        world = self.accelerator.num_processes
        if world == 1:
            self._stop = self._asked
            return
        clocks = [self.progress.seconds, self.progress.cpu_seconds]
        mine = torch.tensor(
            [float(self._asked), *clocks], device=self.accelerator.device
        )
        asked, seconds, cpu_seconds = self.accelerator.reduce(mine, "sum").tolist()
        self._stop = asked > 0
        self.progress.seconds = seconds / world
        self.progress.cpu_seconds = cpu_seconds / world

    def _measure(self) -> bool:
        """Measure tau by decoding, if this step asks for it."""
        every = self.config.log.eval_every
        due = self.finished or (every is not None and self.progress.step % every == 0)
        if self.evaluate is None or not due:
            return False
        exported = self.export()
        if exported is not None:
            self.progress.tau = self.evaluate(exported)
        self.accelerator.wait_for_everyone()
        return True

    def export(self, dtype: torch.dtype = torch.bfloat16) -> DFlashDraftModel | None:
        """The drafter in its published form, for the first process; all must call it.

        Where weights are sharded (FSDP), only the first process gathers them.
        """
        state = self.accelerator.get_state_dict(self.model)
        if not self.accelerator.is_main_process:
            return None
        return self.objective.export(state, dtype)

    def resume(self) -> bool:
        """Go on from the run's checkpoint; False if there is none."""
        found = self.files.load()
        self.progress = found or self.progress
        return found is not None

"""The training loop: AdamW, warm-up, cosine, on one device or many.

`accelerate` supplies devices, mixed precision, DDP and FSDP. Losses are summed over all
blocks of a step and divided by the sum of their weights over all processes and
accumulation rounds, so one process and two see the same gradient. A checkpoint is a
whole folder, renamed into place; since all randomness of the data is a function of the
step, going on from one repeats what an uninterrupted run would have done.

Leaves out: putting a run together (`run.py`).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.errors import DFlashLabError
from dflash_lab.training.data.pipeline import Pipeline
from dflash_lab.training.objective import Objective
from dflash_lab.training.run.config import TrainConfig
from dflash_lab.training.run.devices import interrupts
from dflash_lab.training.run.metrics import MetricLog, predicted_tau, progress_line
from dflash_lab.training.run.progress import Progress, passed_doubling


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
        accelerator,
        evaluate: Callable[[DFlashDraftModel], dict[str, float]] | None = None,
        *,
        on_line: Callable[[dict], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
        quiet: bool = False,
    ):
        self.objective, self.pipeline, self.config = objective, pipeline, config
        self.accelerator, self.evaluate = accelerator, evaluate
        self.on_line, self.should_stop, self.quiet = on_line, should_stop, quiet
        self.out = Path(config.out)
        settings = config.optimizer
        optimizer = torch.optim.AdamW(
            [p for p in objective.parameters() if p.requires_grad],
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
        )
        self.model, self.optimizer = accelerator.prepare(objective, optimizer)
        self.progress = Progress()
        if settings.steps is not None:
            self.steps = settings.steps
        elif settings.minutes is not None:
            self.steps = 10**9
        else:
            self.steps = math.ceil(settings.epochs * pipeline.plan.steps_per_epoch)
        self._stop = False

    # --- one step -------------------------------------------------------------------

    def step(self, number: int) -> dict[str, Tensor]:
        """Gradients and update of one step; sums over all processes."""
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
        limit = self.config.optimizer.max_grad_norm
        self.accelerator.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        self.optimizer.zero_grad()
        slots = (len(sums) - 3) // 2
        return {
            "loss": sums[0] / sums[1].clamp(min=1e-9),
            "right": sums[2 : 2 + slots],
            "total": sums[2 + slots : 2 + 2 * slots],
            "blocks": sums[-1],
        }

    def _normalise(self, factor: Tensor) -> None:
        # Processes average their gradients of sums; the mean over weights is wanted.
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.dtype))

    def learning_rate(self, done: float) -> float:
        """Linear warm-up, then cosine to zero; `done` is the finished share, 0..1."""
        settings = self.config.optimizer
        if done < settings.warmup_ratio:
            return settings.learning_rate * max(done, 1e-3) / settings.warmup_ratio
        rest = (done - settings.warmup_ratio) / (1 - settings.warmup_ratio)
        return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, rest)))

    # --- the run --------------------------------------------------------------------

    def run(self) -> Progress:
        """Train to the end, or to an interrupt; a checkpoint is left either way.

        Returns:
            How far it came; `finished` says whether to the end.
        """
        main = self.accelerator.is_main_process
        log = None
        if main:
            log = MetricLog(self.out / "metrics.jsonl", self.progress.step)
        progress = tqdm(
            total=self.steps if self.steps < 10**9 else None,
            initial=self.progress.step,
            desc="train",
            unit="step",
            mininterval=2,
            disable=self.quiet or not main,
        )
        before, before_cpu = self.progress.seconds, self.progress.cpu_seconds
        started, started_cpu = time.monotonic(), time.process_time()
        saved = started
        sums: list[dict[str, Tensor]] = []
        with interrupts(self.stop):
            while not self.finished and not self._stop:
                for group in self.optimizer.param_groups:
                    group["lr"] = self.learning_rate(self.share_done)
                sums.append(self.step(self.progress.step))
                self.progress.step += 1
                seen = self.progress.blocks
                self.progress.blocks += int(sums[-1]["blocks"])
                self.progress.seconds = before + time.monotonic() - started
                cpu = (time.process_time() - started_cpu) * (
                    self.accelerator.num_processes
                )
                self.progress.cpu_seconds = before_cpu + cpu
                if self.should_stop is not None and self.should_stop():
                    self.stop()
                self._agree()
                line = self._report(sums, log, progress)
                if line:
                    sums = []
                progress.update()
                if self.config.log.keep_drafters:
                    self._keep(seen)
                minutes = (time.monotonic() - saved) / 60
                if minutes > self.config.log.save_minutes or self.finished:
                    self.save()
                    saved = time.monotonic()
            if not self.finished:
                self.save()
        progress.close()
        return self.progress

    def stop(self) -> None:
        """End the run behind the current step, with a checkpoint."""
        self._stop = True

    @property
    def share_done(self) -> float:
        """Finished share of the run, 0..1, by steps or by a clock."""
        share = self.progress.step / self.steps
        minutes = self.config.optimizer.minutes
        if minutes is not None:
            cpu = self.config.optimizer.clock == "cpu"
            spent = self.progress.cpu_seconds if cpu else self.progress.seconds
            share = max(share, spent / (60 * minutes))
        return min(1.0, share)

    @property
    def finished(self) -> bool:
        """Whether the last step is done."""
        return self.share_done >= 1.0

    def _agree(self) -> None:
        """All processes stop at the same step, and share one clock."""
        world = self.accelerator.num_processes
        if world == 1:
            return
        clocks = [self.progress.seconds, self.progress.cpu_seconds]
        mine = torch.tensor(
            [float(self._stop), *clocks], device=self.accelerator.device
        )
        all_of_them = self.accelerator.reduce(mine, "sum")
        self._stop = bool(all_of_them[0] > 0)
        self.progress.seconds = float(all_of_them[1]) / world
        self.progress.cpu_seconds = float(all_of_them[2]) / world

    def _report(self, sums: list[dict], log: MetricLog | None, progress) -> dict:
        """Metric line of the steps since the last one, when it is due."""
        step, settings = self.progress.step, self.config.log
        measure = self.evaluate is not None and (
            self.finished or (settings.eval_every and step % settings.eval_every == 0)
        )
        if not (step % settings.every == 0 or self.finished or measure):
            return {}
        if measure:
            exported = self.export()
            if self.accelerator.is_main_process:
                self.progress.tau = self.evaluate(exported)
            self.accelerator.wait_for_everyone()
        right = torch.stack([s["right"] for s in sums]).sum(0)
        total = torch.stack([s["total"] for s in sums]).sum(0)
        accuracy = (right / total.clamp(min=1)).tolist()
        loss = float(torch.stack([s["loss"] for s in sums]).mean())
        if not math.isfinite(loss):
            raise DFlashLabError(
                f"the loss is {loss} at step {step}; lower optimizer.learning_rate, or "
                "look for NaN in the features"
            )
        share = self.share_done
        line = {
            "step": step,
            "loss": loss,
            "accuracy": accuracy,
            "predicted_tau": predicted_tau(accuracy),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "blocks": self.progress.blocks,
            "blocks_per_second": self.progress.blocks / self.progress.seconds,
            "seconds": self.progress.seconds,
            "cpu_seconds": self.progress.cpu_seconds,
            "seconds_left": self.progress.seconds * (1 - share) / max(share, 1e-9),
        }
        if measure and self.progress.tau:
            line["held_out_tau"] = self.progress.tau
            line["measured_tau"] = self.progress.tau.get("pooled")
        if log is not None:
            log.write(line)
            shown = dict(line)
            shown["measured_tau"] = (self.progress.tau or {}).get("pooled")
            progress.set_postfix_str(progress_line(shown))
            if self.on_line is not None:
                self.on_line(line)
        self.accelerator.log(
            {k: v for k, v in line.items() if isinstance(v, (int, float))}, step=step
        )
        return line

    # --- files ----------------------------------------------------------------------

    def export(self, dtype: torch.dtype = torch.bfloat16) -> DFlashDraftModel | None:
        """The drafter in its published form, for the first process; all must call it.

        Where weights are sharded (FSDP), only the first process gathers them.
        """
        state = self.accelerator.get_state_dict(self.model)
        if not self.accelerator.is_main_process:
            return None
        return self.objective.export(state, dtype)

    def _keep(self, seen: int) -> None:
        """Leave the drafter behind when the number of blocks has doubled."""
        if not passed_doubling(seen, self.progress.blocks):
            return
        exported = self.export()
        if exported is not None:
            name = f"blocks-{self.progress.blocks:09d}"
            exported.save_pretrained(self.out / "kept" / name)

    def save(self) -> None:
        """Leave a checkpoint: model, optimiser and progress, whole or not at all."""
        folder = self.out / "checkpoints"
        name = f"step-{self.progress.step:08d}"
        scratch = folder / f".{name}.partial"
        main = self.accelerator.is_main_process
        if main:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        self.accelerator.save_state(str(scratch))
        self.accelerator.wait_for_everyone()
        exported = self.export()
        if not main:
            return
        exported.save_pretrained(scratch / "drafter")
        (scratch / "progress.json").write_text(
            json.dumps(asdict(self.progress)), encoding="utf-8"
        )
        shutil.rmtree(folder / name, ignore_errors=True)
        os.replace(scratch, folder / name)
        for old in folder.iterdir():
            if old.name != name:
                shutil.rmtree(old, ignore_errors=True)

    def resume(self) -> bool:
        """Go on from the run's checkpoint; False if there is none."""
        folder = latest_checkpoint(self.out)
        if folder is None:
            return False
        self.accelerator.load_state(str(folder))
        text = (folder / "progress.json").read_text(encoding="utf-8")
        self.progress = Progress(**json.loads(text))
        return True


def latest_checkpoint(out: Path) -> Path | None:
    """The last whole checkpoint of a run's folder, None if there is none."""
    folders = sorted((Path(out) / "checkpoints").glob("step-*"))
    return folders[-1] if folders else None

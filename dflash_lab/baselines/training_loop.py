"""The loop that trains heads and assistants, and how long it may take.

Texts, features, order of batches and draws are those of the DFlash trainer, so that all
can have the same data and the same time.

Leaves out: what is trained and its loss; several processes, resuming, distillation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm import tqdm

from dflash_lab.errors import DFlashLabError
from dflash_lab.training.data.dataset import BatchPlan, Example, anchor_scores, collate

WARMUP = 0.04


@dataclass(frozen=True, kw_only=True)
class TrainingBudget:
    """What all of them share.

    Attributes:
        batch_size: texts per step.
        learning_rate: peak; warm-up over 4 % of the run, then cosine to 0.
        steps: optimiser steps; None to follow `cpu_minutes`.
        cpu_minutes: budget of processor time, all threads together.
        seed: of weights, order and places.
    """

    batch_size: int = 16
    learning_rate: float = 1e-3
    steps: int | None = None
    cpu_minutes: float | None = None
    seed: int = 0

    def check(self) -> None:
        """Refuse a budget that is missing or out of range.

        Raises:
            DFlashLabError: naming the field.
        """
        if (self.steps is None) == (self.cpu_minutes is None):
            raise DFlashLabError("give either steps or cpu_minutes, not both")
        for name in ("steps", "cpu_minutes", "batch_size", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise DFlashLabError(f"{name} {value} must be above 0 and finite")


@dataclass(frozen=True)
class Batch:
    """The texts of a step.

    Attributes:
        indices: their numbers.
        ids: (B, S) int64.
        mask: (B, S) bool, supervised tokens.
        scores: (B, S) float32 uniform, from which places are drawn.
    """

    indices: Sequence[int]
    ids: Tensor
    mask: Tensor
    scores: Tensor


# Loss, and right and counted drafts: scalars, or one of each for every draft.
StepLoss = tuple[Tensor, Tensor, Tensor]
OnStep = Callable[[dict], None]


def train_loop(
    name: str,
    parameters: Iterable[nn.Parameter],
    examples: Sequence[Example],
    budget: TrainingBudget,
    loss_of: Callable[[Batch], StepLoss],
    on_step: OnStep | None = None,
    quiet: bool = False,
) -> None:
    """Minimise a loss with AdamW; only these parameters get a gradient.

    Args:
        name: before the progress bar.
        parameters: what is trained.
        examples: the texts.
        budget: how long, and how fast.
        loss_of: of a batch.
        on_step: gets `step`, `loss` and `accuracy` of every step.
        quiet: no progress bar.

    Raises:
        DFlashLabError: a loss that is not a number.
    """
    parameters = list(parameters)
    lengths = [len(example.input_ids) for example in examples]
    plan = BatchPlan(lengths, budget.batch_size, budget.seed)
    optimizer = torch.optim.AdamW(parameters, budget.learning_rate, weight_decay=0.0)
    started, step = time.process_time(), 0
    with tqdm(total=budget.steps, desc=name, disable=quiet) as progress:
        while (share := _share_done(budget, step, started)) < 1:
            for group in optimizer.param_groups:
                group["lr"] = budget.learning_rate * _schedule(share)
            epoch, indices = plan.batch(step)
            ids, mask = collate(examples, indices)
            scores = anchor_scores(budget.seed, epoch, indices, ids.shape[1])
            loss, right, total = loss_of(Batch(indices, ids, mask, scores))
            if not math.isfinite(loss.item()):
                raise DFlashLabError(
                    f"the loss is {loss.item()} at step {step}; lower the learning "
                    f"rate, which is {budget.learning_rate}"
                )
            loss.backward(inputs=parameters)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            progress.update()
            if on_step is not None:
                accuracy = (right / total.clamp(min=1)).tolist()
                on_step({"step": step, "loss": loss.item(), "accuracy": accuracy})


def _share_done(budget: TrainingBudget, step: int, started: float) -> float:
    if budget.steps is not None:
        return step / budget.steps
    assert budget.cpu_minutes is not None  # `check` wants one of the two
    return (time.process_time() - started) / (60 * budget.cpu_minutes)


def _schedule(share: float) -> float:
    if share < WARMUP:
        return max(share, 1e-3) / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (share - WARMUP) / (1 - WARMUP)))

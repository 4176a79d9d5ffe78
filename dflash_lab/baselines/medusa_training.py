"""Training Medusa-style heads on the target's own answers, the target frozen.

Blocks are those of the DFlash trainer: an anchor, and the text's own K-1 tokens behind
it as labels. The heads read the target's hidden state one place before the anchor, as
they will when decoding (see `medusa.py`). Head k weighs 0.8 ** (k - 1), as in Medusa.
Texts, features, order and anchors are shared with the other trainers, so that all can
have the same data and the same time.

Leaves out: several processes, resuming, and distillation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from dflash_lab.baselines.medusa import MedusaConfig, MedusaHeads
from dflash_lab.errors import DFlashLabError
from dflash_lab.target.target import Target
from dflash_lab.training.data.anchors import make_blocks, select_anchors
from dflash_lab.training.data.dataset import BatchPlan, Example, anchor_scores, collate
from dflash_lab.training.losses import LossSums, frozen_head_loss

DECAY = 0.8


@dataclass(frozen=True)
class MedusaTraining:
    """How heads are trained.

    Attributes:
        block_size: K; there are K-1 heads.
        num_anchors: N, places of each text and step at which the loss is taken.
        batch_size: texts per step.
        learning_rate: peak; warm-up over 4 % of the run, then cosine to 0.
        steps: optimiser steps; None to follow `cpu_minutes`.
        cpu_minutes: budget of processor time.
        seed: of order and anchors; fresh heads have nothing random.
    """

    block_size: int = 8
    num_anchors: int = 32
    batch_size: int = 16
    learning_rate: float = 1e-3
    steps: int | None = None
    cpu_minutes: float | None = None
    seed: int = 0

    def __post_init__(self):
        if (self.steps is None) == (self.cpu_minutes is None):
            raise DFlashLabError("give either steps or cpu_minutes, not both")
        for name in ("num_anchors", "batch_size", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DFlashLabError(f"{name} {value} must be 1 or more")
        for name in ("learning_rate", "cpu_minutes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise DFlashLabError(f"{name} {value} must be above 0 and finite")


def train_medusa(
    target: Target,
    examples: Sequence[Example],
    features,
    settings: MedusaTraining,
    *,
    on_step: Callable[[dict], None] | None = None,
    quiet: bool = False,
) -> MedusaHeads:
    """Train heads from the identity.

    Args:
        target: supplies the frozen head.
        examples: the texts.
        features: online or offline, with head inputs, of the same texts in the same
            order; which layers are tapped does not matter.
        settings: see `MedusaTraining`.
        on_step: gets `step`, `loss`, `accuracy` (a list by head) of every step.
        quiet: no progress bar.

    Raises:
        DFlashLabError: features without head inputs, or a loss that is not a number.
    """
    if not features.with_head_inputs:
        raise DFlashLabError(
            "the heads are trained on what the target's head reads, and these features "
            "come without it; make them with with_head_inputs=True (a store with "
            "head_inputs=True)"
        )
    heads = MedusaHeads(MedusaConfig.for_target(target, settings.block_size))
    heads.to(target.device)
    plan = BatchPlan(
        [len(e.input_ids) for e in examples], settings.batch_size, settings.seed
    )
    optimizer = torch.optim.AdamW(
        heads.parameters(), lr=settings.learning_rate, weight_decay=0.0
    )
    started, step = time.process_time(), 0
    with tqdm(total=settings.steps, desc="medusa", disable=quiet) as progress:
        while True:
            share = (
                step / settings.steps
                if settings.steps is not None
                else (time.process_time() - started) / (60 * settings.cpu_minutes)
            )
            if share >= 1:
                break
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * _schedule(share)
            epoch, indices = plan.batch(step)
            ids, mask = collate(examples, indices)
            hidden = features.batch(indices, ids)[1]
            scores = anchor_scores(settings.seed, epoch, indices, ids.shape[1])
            sums = heads_loss(
                heads, target, ids, mask, hidden, scores, settings.num_anchors
            )
            loss = sums.loss / sums.weight.clamp(min=1e-6)
            if not math.isfinite(loss.item()):
                raise DFlashLabError(
                    f"the loss is {loss.item()} at step {step}; lower the learning "
                    f"rate, which is {settings.learning_rate}"
                )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            progress.update()
            if on_step is not None:
                accuracy = (sums.right / sums.total.clamp(min=1)).tolist()
                on_step({"step": step, "loss": loss.item(), "accuracy": accuracy})
    return heads.eval()


def heads_loss(
    heads: MedusaHeads,
    target: Target,
    ids: Tensor,
    mask: Tensor,
    hidden: Tensor,
    scores: Tensor,
    num_anchors: int,
) -> LossSums:
    """Weighted cross entropy of a batch, as sums.

    Args:
        heads: in training.
        target: supplies the frozen head.
        ids: (B, S) texts; mask: (B, S) supervised tokens.
        hidden: (B, S, D) head inputs of the texts.
        scores: (B, S) from which anchors are drawn.
        num_anchors: N.
    """
    size = heads.config.block_size
    anchors, valid = select_anchors(mask, num_anchors, scores)
    blocks = make_blocks(ids, mask, anchors, valid, size, mask_token_id=0)
    # An anchor is an answer's token, so there is always a row before it.
    place = (anchors - 1).clamp(min=0)[..., None].expand(-1, -1, hidden.shape[-1])
    rows = hidden.gather(1, place.to(hidden.device)).flatten(0, 1)  # (B*N, D)
    decay = DECAY ** torch.arange(size - 1, dtype=torch.float32)
    return frozen_head_loss(
        heads(rows.to(heads.device)),
        target.head.weight.detach(),
        blocks.labels[..., 1:].flatten(0, 1).to(heads.device),
        blocks.label_mask[..., 1:].flatten(0, 1).to(heads.device),
        decay,
    )


def _schedule(share: float, warmup: float = 0.04) -> float:
    if share < warmup:
        return max(share, 1e-3) / warmup
    return 0.5 * (1 + math.cos(math.pi * (share - warmup) / (1 - warmup)))

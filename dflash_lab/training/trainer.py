"""A plain training loop for drafters: AdamW, warm-up, cosine, random anchors.

The drafter sees what it will see when decoding: target features strictly before each
anchor, and blocks of one known token and masks, under the mask that decoding uses. All
blocks of a batch go through one pass.

Leaves out: GPUs, several processes, accumulation and resuming.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from tqdm import tqdm

from dflash_lab.drafter import DFlashDraftModel
from dflash_lab.errors import DFlashLabError
from dflash_lab.masks import block_position_ids
from dflash_lab.target import Target
from dflash_lab.training.anchors import make_blocks, select_anchors
from dflash_lab.training.features import FeatureCache
from dflash_lab.training.losses import (
    decay_weights,
    default_gamma,
    frozen_head_cross_entropy,
)


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run (defaults follow the paper's appendix A.1).

    Args:
        steps: optimiser steps, or the most of them if `minutes` is given.
        batch_size: sequences per step.
        num_anchors: N, most blocks per sequence.
        learning_rate: peak of the schedule.
        warmup_ratio: share of the steps with rising rate; cosine to 0 afterwards.
        max_grad_norm: gradient clipping.
        gamma: of the loss decay; the paper's value for the block size if None.
        seed: of weights, order and anchors.
        bfloat16: autocast the passes; weights and optimiser stay float32.
        log_every: steps between metric lines.
        save_minutes: minutes between checkpoints.
        minutes: wall-clock budget; the schedule then follows the clock, so that a
            run on a busy machine still ends with a small learning rate.
        extra_negatives: vocabulary rows outside the corpus that join each step's
            softmax, redrawn every step, when the head is restricted.
    """

    steps: int
    batch_size: int = 8
    num_anchors: int = 32
    learning_rate: float = 6e-4
    warmup_ratio: float = 0.04
    max_grad_norm: float = 1.0
    gamma: float | None = None
    seed: int = 0
    bfloat16: bool = True
    log_every: int = 50
    save_minutes: float = 10.0
    minutes: float | None = None
    extra_negatives: int = 1024


@dataclass(frozen=True)
class Example:
    """One training text: `input_ids` (S,), the first `prompt_length` unsupervised."""

    input_ids: list[int]
    prompt_length: int


class _ScaleColumns(nn.Module):
    """Training-time form of `fc`: weight = trained matrix x fixed column scale."""

    def __init__(self, scale: Tensor):
        super().__init__()
        self.register_buffer("scale", scale)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.scale

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / self.scale


def training_hidden(
    drafter: DFlashDraftModel,
    target_hidden: Tensor,
    block_ids: Tensor,
    anchor_positions: Tensor,
    valid: Tensor,
    embedding_table: Tensor,
) -> Tensor:
    """The training path: hidden states of all blocks in one pass.

    Args:
        drafter: the drafter.
        target_hidden: (B, S, n*D).
        block_ids: (B, N, K) int64.
        anchor_positions: (B, N) int64.
        valid: (B, N) bool.
        embedding_table: (V', D), the target's, frozen.

    Returns:
        (B, N, K-1, D) normed hidden states of slots 1..K-1, ready for the head.
    """
    batch, blocks, block_size = block_ids.shape
    length = target_hidden.shape[1]
    scale = drafter.config.input_embedding_scale
    noise = F.embedding(block_ids.flatten(1), embedding_table) * scale
    context_ids = torch.arange(length, device=block_ids.device).expand(batch, -1)
    block_positions = block_position_ids(anchor_positions, block_size)
    hidden = drafter(
        noise.to(drafter.dtype),
        target_hidden,
        torch.cat([context_ids, block_positions], dim=1),
        drafter.block_masks(anchor_positions, length, block_size, valid),
    )
    return hidden.view(batch, blocks, block_size, -1)[:, :, 1:]


class Trainer:
    """Trains one drafter on one corpus.

    Args:
        drafter: in float32; trained in place.
        target: supplies embedding and head.
        examples: the texts.
        features: their target features, same order.
        config: settings.
        folder: metrics and checkpoints go here.
        fresh: the drafter has just been initialised, so its `fc` may be scaled to the
            features; False to go on from trained weights.
    """

    def __init__(
        self,
        drafter: DFlashDraftModel,
        target: Target,
        examples: Sequence[Example],
        features: FeatureCache,
        config: TrainConfig,
        folder: Path,
        fresh: bool = True,
    ):
        if not examples:
            raise DFlashLabError("the corpus is empty; write some answers first")
        if config.steps < 1:
            raise DFlashLabError(f"steps {config.steps} must be 1 or more")
        if target.device.type != "cpu":
            raise DFlashLabError(
                f"this trainer runs on the CPU only, the target is on {target.device}; "
                "load it with device='cpu'"
            )
        self.drafter, self.target, self.config = drafter, target, config
        self.examples, self.features = examples, features
        self.folder = Path(folder)
        self.generator = torch.Generator().manual_seed(config.seed)
        # Scaled features train faster; the scale is folded into fc when saving.
        scale = features.feature_scale()
        if fresh:
            drafter.fc.weight.data *= scale
        parametrize.register_parametrization(drafter.fc, "weight", _ScaleColumns(scale))
        self._prepare_head()
        block_size = drafter.config.block_size
        gamma = config.gamma or default_gamma(block_size)
        self.weights = decay_weights(block_size, gamma)[1:]
        self.optimizer = torch.optim.AdamW(
            drafter.parameters(), lr=config.learning_rate, weight_decay=0.0
        )
        self.blocks_seen = 0
        self.steps_done = 0

    def _prepare_head(self) -> None:
        """Rows of the head that the corpus needs, and where each token went.

        On a CPU the head is the largest single cost; tokens that never occur as a
        label only serve as negatives, so a redrawn sample of them is enough.
        """
        seen = torch.tensor(sorted({t for e in self.examples for t in e.input_ids}))
        self.seen = seen
        self.unseen = torch.ones(self.target.vocab_size, dtype=torch.bool)
        self.unseen[seen] = False
        self.unseen = self.unseen.nonzero()[:, 0]
        self.place = torch.zeros(self.target.vocab_size, dtype=torch.long)
        self.place[seen] = torch.arange(len(seen))
        dtype = torch.bfloat16 if self.config.bfloat16 else torch.float32
        self.head = self.target.head.weight.detach().to(dtype)
        self.embedding = self.target.embedding_table.detach().float()
        self.seen_head = self.head[seen].clone()

    def _head_rows(self) -> Tensor:
        count = min(self.config.extra_negatives, len(self.unseen))
        if count == 0:
            return self.seen_head
        picked = torch.randint(len(self.unseen), (count,), generator=self.generator)
        return torch.cat([self.seen_head, self.head[self.unseen[picked]]])

    def _batches(self) -> Iterator[list[int]]:
        """Batches of similar length in random order, epoch after epoch."""
        while True:
            noise = torch.rand(len(self.examples), generator=self.generator) * 16
            lengths = torch.tensor([len(e.input_ids) for e in self.examples])
            order = (lengths + noise).argsort().tolist()
            size = self.config.batch_size
            groups = [order[i : i + size] for i in range(0, len(order), size)]
            for g in torch.randperm(len(groups), generator=self.generator).tolist():
                yield groups[g]

    def step(self, indices: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Loss and counts of one batch; gradients are left in the drafter."""
        length = max(len(self.examples[i].input_ids) for i in indices)
        ids = torch.zeros(len(indices), length, dtype=torch.long)
        loss_mask = torch.zeros(len(indices), length, dtype=torch.bool)
        for row, i in enumerate(indices):
            example = self.examples[i]
            ids[row, : len(example.input_ids)] = torch.tensor(example.input_ids)
            loss_mask[row, example.prompt_length : len(example.input_ids)] = True
        anchors, valid = select_anchors(
            loss_mask, self.config.num_anchors, self.generator
        )
        config = self.drafter.config
        blocks = make_blocks(
            ids, loss_mask, anchors, valid, config.block_size, config.mask_token_id
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=self.config.bfloat16):
            hidden = training_hidden(
                self.drafter,
                self.features.batch(indices),
                blocks.input_ids,
                anchors,
                valid,
                self.embedding,
            )
        loss, right, total = frozen_head_cross_entropy(
            hidden.flatten(0, 1).to(self.head.dtype),
            self._head_rows(),
            self.place[blocks.labels[:, :, 1:]].flatten(0, 1),
            blocks.label_mask[:, :, 1:].flatten(0, 1),
            self.weights,
            self.drafter.scale_logits,
        )
        loss.backward()
        self.blocks_seen += int(valid.sum())
        return loss.detach(), right, total

    def learning_rate(self, done: float) -> float:
        """Linear warm-up, then cosine to zero; `done` is the finished share, 0..1."""
        warmup = self.config.warmup_ratio
        if done < warmup:
            return self.config.learning_rate * max(done, 1e-3) / warmup
        rest = (done - warmup) / (1 - warmup)
        return self.config.learning_rate * 0.5 * (1 + math.cos(math.pi * rest))

    def run(self, evaluate=None) -> DFlashDraftModel:
        """Train and return the drafter as it should be saved.

        Args:
            evaluate: called with an exported drafter at each checkpoint; its
                dictionary joins the metrics.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        started = saved = time.monotonic()
        sums: list = []
        batches = self._batches()
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as metrics:
            progress = tqdm(range(self.config.steps), desc="train", mininterval=5)
            for step in progress:
                done = self._share_done(step, time.monotonic() - started)
                for group in self.optimizer.param_groups:
                    group["lr"] = self.learning_rate(done)
                sums.append(self.step(next(batches)))
                torch.nn.utils.clip_grad_norm_(
                    self.drafter.parameters(), self.config.max_grad_norm
                )
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
                self.steps_done = step + 1
                elapsed = time.monotonic() - started
                last = self._share_done(step + 1, elapsed) >= 1
                line = {}
                if (step + 1) % self.config.log_every == 0 or last:
                    line = self._summary(sums, step + 1, elapsed)
                    sums = []
                    progress.set_postfix_str(
                        f"loss {line['loss']:.3f} slot 1 {line['accuracy'][0]:.3f}"
                    )
                if time.monotonic() - saved > 60 * self.config.save_minutes or last:
                    exported = self.export()
                    exported.save_pretrained(self.folder / "drafter")
                    if evaluate is not None:
                        line |= {"step": step + 1, **evaluate(exported)}
                    saved = time.monotonic()
                if line:
                    metrics.write(json.dumps(line) + "\n")
                    metrics.flush()
                if last:
                    break
            progress.close()
        return exported

    def _share_done(self, steps: int, seconds: float) -> float:
        share = steps / self.config.steps
        if self.config.minutes is not None:
            share = max(share, seconds / (60 * self.config.minutes))
        return min(1.0, share)

    def _summary(self, sums: list, step: int, seconds: float) -> dict:
        losses, right, total = zip(*sums, strict=True)
        accuracy = (sum(right) / sum(total).clamp(min=1)).tolist()
        return {
            "step": step,
            "loss": float(torch.stack(losses).mean()),
            "accuracy": accuracy,
            "blocks": self.blocks_seen,
            "blocks_per_second": self.blocks_seen / seconds,
            "seconds": seconds,
        }

    def export(self) -> DFlashDraftModel:
        """A copy in the published form: feature scale folded in, bfloat16."""
        with torch.device("meta"):
            copy = DFlashDraftModel(self.drafter.config)
        with torch.no_grad():
            state = {"fc.weight": self.drafter.fc.weight.detach().clone()}
            for name in copy.state_dict():
                if name != "fc.weight":
                    state[name] = self.drafter.get_parameter(name).detach().clone()
        copy.load_state_dict(state, assign=True)
        return copy.to(torch.bfloat16).eval()

    def describe(self) -> dict:
        """Settings for a card."""
        return asdict(self.config) | {"examples": len(self.examples)}

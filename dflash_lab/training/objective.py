"""The training pass: all blocks of a batch through the drafter, then the loss.

`Objective` is the module that is trained, alone or wrapped for several processes. Its
parameters are the drafter's; the target's embedding and head are frozen and stay
outside. Features are multiplied by a factor each on the way in, which makes them
equally large; `export` folds the factors into `fc`, so that the published form reads
raw features.

Leaves out: optimisation (`training/run/trainer.py`).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.drafter.variants import build_drafter
from dflash_lab.errors import DFlashLabError
from dflash_lab.target.target import Target
from dflash_lab.training.data.batch import TrainingBatch
from dflash_lab.training.data.dataset import Example
from dflash_lab.training.losses import (
    LossSums,
    decay_weights,
    default_gamma,
    frozen_head_loss,
)


class HeadRows:
    """The head's rows that serve as candidates in training.

    On a CPU the head is a large part of a step. Tokens that never occur as a label
    only serve as negatives, so a redrawn sample of them is enough.

    Args:
        target: supplies the head.
        examples: texts whose answer tokens are counted; none for the whole vocabulary.
        limit: so many most frequent tokens at most; labels outside do not count.
        extra_negatives: other rows that join each step, redrawn every step.
        seed: of the redrawing.
    """

    def __init__(
        self,
        target: Target,
        examples: Sequence[Example] = (),
        limit: int | None = None,
        extra_negatives: int = 0,
        seed: int = 0,
    ):
        self.head = target.head.weight.detach()
        self.seed, self.extra = seed, extra_negatives
        self.kept: Tensor | None = None
        if limit is None:
            return
        answers = [example.input_ids[example.prompt_length :] for example in examples]
        counts = np.bincount(np.concatenate(answers), minlength=target.vocab_size)
        order = np.argsort(-counts, kind="stable")
        kept = np.sort(order[: min(limit, int((counts > 0).sum()))])
        self.kept = torch.from_numpy(kept)
        self.place = torch.full((target.vocab_size,), -1)
        self.place[self.kept] = torch.arange(len(kept))
        self.rest = (self.place < 0).nonzero()[:, 0]
        self.kept_rows = self.head[self.kept.to(self.head.device)]
        self.place = self.place.to(self.head.device)

    def rows(self, step: int) -> Tensor:
        """(V', D) rows of the head for a step."""
        if self.kept is None:
            return self.head
        count = min(self.extra, len(self.rest))
        if count == 0:
            return self.kept_rows
        noise = np.random.default_rng((self.seed, 3, step))
        picked = self.rest[noise.choice(len(self.rest), count, replace=False)]
        return torch.cat([self.kept_rows, self.head[picked.to(self.head.device)]])

    def labels(self, labels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Labels as indices into `rows`, and which of them count."""
        if self.kept is None:
            return labels, mask
        places = self.place[labels]
        return places.clamp(min=0), mask & (places >= 0)


class Objective(nn.Module):
    """Drafter and loss in one module.

    Args:
        drafter: its parameters are the module's.
        target: supplies embedding table and head.
        head_rows: see `HeadRows`.
        scale: (n*D,) float32, factors on the features; ones if None.
        kind: one of `losses.LOSSES`.
        gamma: of the decay; the paper's for this block size if None.
        chunk: rows whose logits exist at a time.
    """

    def __init__(
        self,
        drafter: DFlashDraftModel,
        target: Target,
        head_rows: HeadRows,
        scale: Tensor | None = None,
        kind: str = "ce",
        gamma: float | None = None,
        chunk: int = 512,
    ):
        super().__init__()
        self.scale: Tensor
        self.decay: Tensor
        self.drafter, self.kind, self.chunk = drafter, kind, chunk
        self._pass = drafter.forward
        # In a tuple, so that they are neither parameters nor part of a state dict.
        self._frozen = (target.embedding_table.detach(), head_rows)
        width = drafter.fc.in_features
        scale = torch.ones(width) if scale is None else scale.float().cpu()
        # Features come in bfloat16; a factor of that precision is folded in exactly.
        scale = scale.bfloat16().float().to(target.device)
        self.register_buffer("scale", scale, persistent=False)
        block_size = drafter.config.block_size
        decay = decay_weights(block_size, gamma or default_gamma(block_size))[1:]
        self.register_buffer("decay", decay.to(target.device), persistent=False)

    def hidden(self, batch: TrainingBatch) -> Tensor:
        """(B, N, K-1, D) normed hidden states of slots 1..K-1, ready for the head."""
        table = self._frozen[0]
        ids = batch.blocks.input_ids  # (B, N, K)
        noise = F.embedding(ids.flatten(1), table).to(self.decay.dtype)
        noise = noise * self.drafter.config.input_embedding_scale
        dtype = self._dtype(batch.target_hidden)
        hidden = self._pass(
            noise.to(self.drafter.dtype),
            batch.target_hidden.to(dtype) * self.scale.to(dtype),
            batch.position_ids,
            batch.masks,
        )
        return hidden.view(*ids.shape, -1)[:, :, 1:]

    def _dtype(self, tensor: Tensor) -> torch.dtype:
        narrow = torch.is_autocast_enabled(tensor.device.type)
        return torch.bfloat16 if narrow else self.drafter.dtype

    def forward(self, batch: TrainingBatch, step: int = 0) -> LossSums:
        """Loss sums of a batch."""
        hidden = self.hidden(batch).flatten(0, 1)
        rows = self._frozen[1]
        labels, mask = rows.labels(
            batch.blocks.labels[:, :, 1:], batch.blocks.label_mask[:, :, 1:]
        )
        teacher = batch.teacher if self.kind == "kl" else None
        return frozen_head_loss(
            hidden.to(self._dtype(hidden)),
            rows.rows(step),
            labels.flatten(0, 1),
            mask.flatten(0, 1),
            self.decay,
            kind=self.kind,
            teacher=None if teacher is None else teacher.flatten(0, 1),
            transform=self.drafter.scale_logits,
            chunk=self.chunk,
        )

    def compile_pass(self) -> None:
        """Fuse the drafter's pass; the first step then takes about a minute.

        Raises:
            DFlashLabError: no C++ compiler, which a CPU needs.
        """
        if self.decay.device.type == "cpu" and not any(
            map(shutil.which, ("g++", "clang++", "c++"))
        ):
            raise DFlashLabError(
                "objective.compile needs a C++ compiler on a CPU; install g++, or set "
                "it to false"
            )
        self._pass = torch.compile(self.drafter.forward, dynamic=True)

    def start_from(self, drafter: DFlashDraftModel) -> None:
        """Take the weights of a drafter in the published form."""
        state = {k: v.detach().clone().float() for k, v in drafter.state_dict().items()}
        state["fc.weight"] /= self.scale.to(state["fc.weight"].device)
        self.drafter.load_state_dict(state)

    def export(
        self,
        state: dict[str, Tensor] | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> DFlashDraftModel:
        """A copy of the drafter in the published form, which reads raw features.

        Args:
            state: this module's state dict where it is gathered elsewhere.
            dtype: of the copy.
        """
        state = state if state is not None else self.state_dict()
        prefix = "drafter."
        weights = {
            name.removeprefix(prefix): tensor.detach().float().cpu().clone()
            for name, tensor in state.items()
            if name.startswith(prefix)
        }
        weights["fc.weight"] *= self.scale.cpu()
        with torch.device("meta"):
            copy = build_drafter(self.drafter.config)
        copy.load_state_dict(weights, assign=True)
        return copy.to(dtype).eval()

"""Training Medusa-style heads on the target's own answers, the target frozen.

Blocks are those of the DFlash trainer: an anchor, and the text's own K-1 tokens behind
it as labels. The heads read the target's hidden state one place before the anchor, as
they will when decoding (see `medusa.py`). Head k weighs 0.8 ** (k - 1), as in Medusa.

Leaves out: the loop and its budget (`training_loop.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_lab.baselines.medusa import MedusaConfig, MedusaHeads
from dflash_lab.baselines.training_loop import (
    Batch,
    OnStep,
    StepLoss,
    TrainingBudget,
    train_loop,
)
from dflash_lab.errors import DFlashLabError
from dflash_lab.target.target import Target
from dflash_lab.training.data.anchors import make_blocks, select_anchors
from dflash_lab.training.data.dataset import Example
from dflash_lab.training.losses import LossSums, frozen_head_loss

DECAY = 0.8


@dataclass(frozen=True)
class MedusaTraining(TrainingBudget):
    """How heads are trained; fresh ones have nothing random.

    Attributes:
        block_size: K; there are K-1 heads.
        num_anchors: N, places of each text and step at which the loss is taken.
    """

    block_size: int = 8
    num_anchors: int = 32

    def check(self) -> None:
        """As `TrainingBudget.check`, for `num_anchors` too."""
        super().check()
        if self.num_anchors < 1:
            raise DFlashLabError(f"num_anchors {self.num_anchors} must be 1 or more")


def train_medusa(
    target: Target,
    examples: Sequence[Example],
    features,
    settings: MedusaTraining,
    *,
    on_step: OnStep | None = None,
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
    settings.check()
    if not features.with_head_inputs:
        raise DFlashLabError(
            "the heads are trained on what the target's head reads, and these features "
            "come without it; make them with with_head_inputs=True (a store with "
            "head_inputs=True)"
        )
    heads = MedusaHeads(MedusaConfig.for_target(target, settings.block_size))
    heads.to(target.device)

    def loss_of(batch: Batch) -> StepLoss:
        hidden = features.batch(batch.indices, batch.ids)[1]
        sums = heads_loss(heads, target, batch, hidden, settings.num_anchors)
        return sums.loss / sums.weight.clamp(min=1e-6), sums.right, sums.total

    train_loop(
        "medusa", heads.parameters(), examples, settings, loss_of, on_step, quiet
    )
    return heads.eval()


def heads_loss(
    heads: MedusaHeads,
    target: Target,
    batch: Batch,
    hidden: Tensor,
    num_anchors: int,
) -> LossSums:
    """Weighted cross entropy of a batch, as sums.

    Args:
        heads: in training.
        target: supplies the frozen head.
        batch: the texts.
        hidden: (B, S, D), their head inputs.
        num_anchors: N.
    """
    size = heads.config.block_size
    anchors, valid = select_anchors(batch.mask, num_anchors, batch.scores)
    blocks = make_blocks(batch.ids, batch.mask, anchors, valid, size, mask_token_id=0)
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

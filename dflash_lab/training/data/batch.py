"""Everything a training pass reads, as plain tensors.

`build_batch` turns texts and their features into a `TrainingBatch`: blocks at random
anchors, positions, masks, and for distillation the target's own head inputs. It holds
the whole convention of training; `training/parity.py` compares it with decoding, and
`faults.py` breaks it on purpose.

Leaves out: the passes (`training/objective.py`), and where features come from
    (`features.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_lab.conditioning.masks import Mask, block_position_ids, training_masks
from dflash_lab.drafter.config import DFlashConfig
from dflash_lab.training.data.anchors import Blocks, make_blocks, select_anchors

Masks = dict[str, Mask]


@dataclass(frozen=True)
class TrainingBatch:
    """N blocks for each of B texts, with what they may see.

    Attributes:
        blocks: inputs and labels.
        target_hidden: (B, S, n*D), features of the texts.
        position_ids: (B, S + N*K) int64, context positions, then block positions.
        masks: for each layer type, in one of the forms that `attend` takes.
        teacher: (B, N, K-1, D), the target's head inputs one position before each
            label, or None.
    """

    blocks: Blocks
    target_hidden: Tensor
    position_ids: Tensor
    masks: Masks
    teacher: Tensor | None = None

    def to(self, device: torch.device) -> TrainingBatch:
        """The same on another device; masks must already be there."""
        moved = {k: v.to(device) for k, v in vars(self.blocks).items()}
        return TrainingBatch(
            Blocks(**moved),
            self.target_hidden.to(device),
            self.position_ids.to(device),
            self.masks,
            None if self.teacher is None else self.teacher.to(device),
        )


def build_batch(
    config: DFlashConfig,
    input_ids: Tensor,
    loss_mask: Tensor,
    target_hidden: Tensor,
    scores: Tensor,
    num_anchors: int,
    *,
    head_inputs: Tensor | None = None,
    backend: str = "sdpa",
    device: torch.device | str = "cpu",
) -> TrainingBatch:
    """Draw anchors and lay out blocks, positions and masks.

    Args:
        config: the drafter's.
        input_ids: (B, S) int64.
        loss_mask: (B, S) bool, True for supervised tokens.
        target_hidden: (B, S, n*D).
        scores: (B, S) float32 uniform, from which anchors are drawn.
        num_anchors: N, most anchors per text.
        head_inputs: (B, S, D), what the target's head reads, for distillation.
        backend: form of the masks, one of `masks.FORMS`.
        device: where the passes run.
    """
    anchors, valid = select_anchors(loss_mask, num_anchors, scores)
    blocks = make_blocks(
        input_ids, loss_mask, anchors, valid, config.block_size, config.mask_token_id
    )
    batch, length = input_ids.shape
    context = torch.arange(length, device=anchors.device).expand(batch, -1)
    block_positions = block_position_ids(anchors, config.block_size)
    teacher = None
    if head_inputs is not None:
        teacher = _before_labels(head_inputs, anchors, config.block_size)
    return TrainingBatch(
        blocks,
        target_hidden,
        torch.cat([context, block_positions], dim=1),
        training_masks(
            config.attention_patterns,
            anchors.to(device),
            length,
            config.block_size,
            valid.to(device),
            backend,
        ),
        teacher,
    ).to(torch.device(device))


def _before_labels(head_inputs: Tensor, anchors: Tensor, block_size: int) -> Tensor:
    """(B, S, D) -> (B, N, K-1, D): rows anchor .. anchor+K-2, which predict the labels
    at anchor+1 .. anchor+K-1. Places past the end repeat the last row; no label is
    there."""
    _, length, width = head_inputs.shape
    offset = torch.arange(block_size - 1, device=anchors.device)
    place = (anchors[..., None] + offset).clamp(max=length - 1)  # (B, N, K-1)
    flat = place.flatten(1)[..., None].expand(-1, -1, width).to(head_inputs.device)
    return head_inputs.gather(1, flat).view(*place.shape, width)

"""Where training blocks start, and what they should say.

Decoding can stop and start anywhere, so training blocks start at random anchors, drawn
anew whenever a sequence is seen (paper section 4.2). An anchor is a supervised token
followed by another supervised token; blocks may overlap and may run past the end, where
their labels do not count.

Leaves out: the attention mask of the blocks (`conditioning/masks.py`), which decoding
    shares.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dflash_lab.conditioning.masks import block_position_ids


@dataclass(frozen=True)
class Blocks:
    """N training blocks for each of B sequences.

    Attributes:
        anchor_positions: (B, N) int64, ascending; 0 where invalid.
        valid: (B, N) bool; a sequence with few candidates has fewer blocks.
        input_ids: (B, N, K) int64, the anchor token followed by mask tokens.
        labels: (B, N, K) int64, the text's own tokens at anchor + j.
        label_mask: (B, N, K) bool, labels that count; never slot 0.
    """

    anchor_positions: Tensor
    valid: Tensor
    input_ids: Tensor
    labels: Tensor
    label_mask: Tensor


def anchor_candidates(loss_mask: Tensor) -> Tensor:
    """(B, S) bool supervised tokens -> (B, S) bool tokens that may be anchors."""
    following = torch.zeros_like(loss_mask)
    following[:, :-1] = loss_mask[:, 1:]
    return loss_mask & following


def select_anchors(
    loss_mask: Tensor, num_anchors: int, scores: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw anchors uniformly without replacement: the candidates of highest score.

    Args:
        loss_mask: (B, S) bool, True for supervised (answer) tokens.
        num_anchors: N, most anchors per sequence.
        scores: (B, S) float32, independent and uniform in [0, 1).

    Returns:
        (B, N) int64 anchor positions, ascending where valid, and (B, N) bool validity.
    """
    candidates = anchor_candidates(loss_mask)
    draw = scores.to(loss_mask.device).masked_fill(~candidates, -1.0)
    width = min(num_anchors, loss_mask.shape[1])
    score, position = draw.topk(width, dim=1)
    # Invalid places sort behind every real position.
    position = position.masked_fill(score < 0, loss_mask.shape[1]).sort(dim=1).values
    valid = position < loss_mask.shape[1]
    return position.masked_fill(~valid, 0), valid


def make_blocks(
    input_ids: Tensor,
    loss_mask: Tensor,
    anchor_positions: Tensor,
    valid: Tensor,
    block_size: int,
    mask_token_id: int,
) -> Blocks:
    """Inputs and labels of the blocks at given anchors.

    Args:
        input_ids: (B, S) int64.
        loss_mask: (B, S) bool.
        anchor_positions: (B, N) int64.
        valid: (B, N) bool.
        block_size: K.
        mask_token_id: id of slots 1..K-1.
    """
    length = input_ids.shape[1]
    position = block_position_ids(anchor_positions, block_size)  # (B, N*K)
    inside = position < length
    position = position.clamp(max=length - 1)
    shape = (*anchor_positions.shape, block_size)
    labels = input_ids.gather(1, position).view(shape)
    supervised = (inside & loss_mask.gather(1, position)).view(shape)
    label_mask = supervised & valid[..., None]
    label_mask[..., 0] = False
    blocks = torch.full_like(labels, mask_token_id)
    blocks[..., 0] = labels[..., 0]
    return Blocks(anchor_positions, valid, blocks, labels, label_mask)


def reveal_slots(blocks: Blocks, share: float, draws: Tensor) -> Blocks:
    """Show some slots' tokens in a share of the blocks; those slots are not asked.

    In a chosen block every slot has the same chance, which differs from block to block,
    so any number of slots is as likely as any other: the states of a block on its way
    through several denoising steps.

    Args:
        blocks: with masks in all slots.
        share: of blocks with shown slots, 0 to 1.
        draws: (B, N, K) uniform; that of slot 0 is the block's own.
    """
    if share <= 0:
        return blocks
    shown = draws < draws[..., :1] / share  # (B, N, K)
    shown = shown & (draws[..., :1] < share) & blocks.label_mask
    # At least one slot is left to ask for: the one with the largest draw.
    asked = draws.masked_fill(~blocks.label_mask, -1).argmax(-1, keepdim=True)
    shown = shown.scatter(-1, asked, False)
    return replace(
        blocks,
        input_ids=torch.where(shown, blocks.labels, blocks.input_ids),
        label_mask=blocks.label_mask & ~shown,
    )

"""Who sees whom in a drafter pass: the one rule for training and decoding.

A block of K rows starts at its anchor. Row i stands for position anchor + i. It sees
the context strictly before the anchor (the anchor's own features do not exist yet when
decoding) and rows of its own block, never another block. Sliding layers see less
context, and look back only inside the block unless the checkpoint says otherwise.

Leaves out: sparse backends; the mask is an ordinary boolean tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor


def anchor_block_mask(
    anchor_positions: Tensor,
    context_length: int,
    block_size: int,
    *,
    causal: bool = False,
    window: int | None = None,
    valid: Tensor | None = None,
    with_blocks: bool = True,
) -> Tensor:
    """Mask of N blocks over a shared context followed by the blocks themselves.

    Args:
        anchor_positions: (B, N) int64, absolute position of each block's anchor.
        context_length: S, number of context rows; row c is position c.
        block_size: K, rows per block, the anchor included.
        causal: whether a block row sees only block rows up to itself.
        window: a row at position p sees context positions c with p - c < window.
        valid: (B, N) bool; rows of an invalid block see nothing.
        with_blocks: False leaves the N*K columns of the blocks out.

    Returns:
        (B, 1, N*K, S + N*K) bool, True where attention is allowed (paper section 4.2
        and figure 4; window rule of the published sliding-window checkpoints).
    """
    device = anchor_positions.device
    batch, blocks = anchor_positions.shape
    offset = torch.arange(block_size, device=device).repeat(blocks)  # (N*K,)
    block = torch.arange(blocks, device=device).repeat_interleave(block_size)
    anchor = anchor_positions.repeat_interleave(block_size, dim=1)[..., None]
    position = anchor + offset[:, None]  # (B, N*K, 1)

    context = torch.arange(context_length, device=device)
    sees_context = context < anchor  # (B, N*K, S)
    if window is not None:
        sees_context = sees_context & (position - context < window)

    mask = sees_context
    if with_blocks:
        sees_block = _same_block(block, offset, causal).expand(batch, -1, -1)
        mask = torch.cat([sees_context, sees_block], dim=-1)
    if valid is not None:
        mask = mask & valid.repeat_interleave(block_size, dim=1)[..., None]
    return mask[:, None]


def _same_block(block: Tensor, offset: Tensor, causal: bool) -> Tensor:
    """(N*K, N*K) bool."""
    sees_block = block[:, None] == block[None, :]  # (N*K, N*K)
    if causal:
        sees_block = sees_block & (offset[None, :] <= offset[:, None])
    return sees_block


def block_position_ids(anchor_positions: Tensor, block_size: int) -> Tensor:
    """(B, N) anchors -> (B, N*K) int64 positions anchor, anchor + 1, ... per block."""
    offset = torch.arange(block_size, device=anchor_positions.device)
    return (anchor_positions[..., None] + offset).flatten(1)

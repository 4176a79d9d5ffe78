"""Attention over context and block with either of two mask backends.

`attend` takes a boolean mask (scaled dot-product attention, any device, with backward)
or a FlexAttention `BlockMask`, which never forms the (N*K) x (S + N*K) matrix and skips
its empty tiles. `flex_block_mask` states the rule of `masks.anchor_block_mask` once
more, element by element, as FlexAttention wants it.

Leaves out: choosing between them (`training/objective.py`). FlexAttention trains on
CUDA only; on a CPU it has no backward and serves for tests.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    flex_attention,
)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | BlockMask | None
) -> Tensor:
    """Softmax attention with grouped key/value heads.

    Args:
        queries: (B, Hq, Q, d).
        keys: (B, Hkv, T, d).
        values: (B, Hkv, T, d).
        mask: (B, 1, Q, T) bool, True where attention is allowed; a `BlockMask` of the
            same shape; None if everything is visible.

    Returns:
        (B, Hq, Q, d). With a boolean mask a row that sees nothing gives zeros.
    """
    grouped = queries.shape[1] != keys.shape[1]
    if isinstance(mask, BlockMask):
        kernel = _compiled() if queries.is_cuda else flex_attention
        return kernel(queries, keys, values, block_mask=mask, enable_gqa=grouped)
    return F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, enable_gqa=grouped
    )


def flex_block_mask(
    anchor_positions: Tensor,
    context_length: int,
    block_size: int,
    *,
    causal: bool = False,
    window: int | None = None,
    valid: Tensor | None = None,
) -> BlockMask:
    """FlexAttention's form of `masks.anchor_block_mask`; same arguments and rule."""
    batch, blocks = anchor_positions.shape
    if valid is None:
        valid = torch.ones_like(anchor_positions, dtype=torch.bool)

    def sees(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        block, offset = row // block_size, row % block_size
        anchor = anchor_positions[b, block]
        in_context = (column < context_length) & (column < anchor)
        if window is not None:
            in_context = in_context & (anchor + offset - column < window)
        other = column - context_length
        in_block = (other >= 0) & (other // block_size == block)
        if causal:
            in_block = in_block & (other % block_size <= offset)
        return (in_context | in_block) & valid[b, block]

    rows = blocks * block_size
    return create_block_mask(
        sees, batch, None, rows, context_length + rows, device=anchor_positions.device
    )


@functools.cache
def _compiled():
    # Unfused FlexAttention would form the matrix that it is there to avoid.
    return torch.compile(flex_attention, dynamic=True)

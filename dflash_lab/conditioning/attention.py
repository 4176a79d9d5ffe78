"""Attention over context and block, for each form of a mask.

`attend` takes a boolean mask (scaled dot-product attention, any device); a `SplitMask`,
which scores a block's rows against the context and their own block only, not against
the N - 1 other blocks; or a FlexAttention `BlockMask`, which never forms the matrix of
scores and skips its empty tiles.

Leaves out: making the masks (`masks.py`), and choosing a form (`training/run/`).
FlexAttention trains on CUDA only; on a CPU it has no backward and serves for tests.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash_lab.conditioning.masks import Mask, SplitMask


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Mask | None) -> Tensor:
    """Softmax attention with grouped key/value heads.

    Args:
        queries: (B, Hq, Q, d).
        keys: (B, Hkv, T, d).
        values: (B, Hkv, T, d).
        mask: (B, 1, Q, T) bool, True where attention is allowed; a `SplitMask` or
            `BlockMask` of the same shape; None if everything is visible.

    Returns:
        (B, Hq, Q, d). Rows of invalid blocks are arbitrary.
    """
    if isinstance(mask, SplitMask):
        return _attend_split(queries, keys, values, mask)
    grouped = queries.shape[1] != keys.shape[1]
    if isinstance(mask, BlockMask):
        kernel = _compiled() if queries.is_cuda else flex_attention
        return kernel(queries, keys, values, block_mask=mask, enable_gqa=grouped)
    if grouped and queries.is_cuda and mask is not None:
        return _attend_folded(queries, keys, values, mask)
    return F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, enable_gqa=grouped
    )


def _attend_folded(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor
) -> Tensor:
    """Query heads that share a key head, as more rows of one head.

    CUDA's fused kernels take no mask together with `enable_gqa`.
    """
    batch, heads, rows, d = queries.shape
    shared = keys.shape[1]
    folded = queries.reshape(batch, shared, heads // shared * rows, d)
    mask = mask.repeat(1, 1, heads // shared, 1)
    mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
    return mixed.view(batch, heads, rows, d)


def _attend_split(
    queries: Tensor, keys: Tensor, values: Tensor, mask: SplitMask
) -> Tensor:
    batch, heads, rows, d = queries.shape
    shared, size = keys.shape[1], len(mask.block)
    length, group = mask.context.shape[-1], heads // shared
    # Query heads of one key head lie side by side and go through one product.
    queries = queries.view(batch, shared, group, rows, d) * d**-0.5
    context = queries.flatten(2, 3) @ keys[:, :, :length].transpose(-1, -2)
    context = context.view(batch, shared, group, rows, length)
    hidden = ~mask.context[:, None, None]
    context = context.masked_fill(hidden, float("-inf"))

    blocks = (batch, shared, -1, rows // size, size, d)
    own = queries.view(blocks) @ keys[:, :, length:].reshape(blocks).transpose(-1, -2)
    own = own.masked_fill(~mask.block, float("-inf")).flatten(3, 4)  # (.., rows, K)

    weights = torch.cat([context, own], dim=-1).softmax(dim=-1)
    from_context, from_own = weights.split([length, size], dim=-1)
    mixed = from_context.flatten(2, 3) @ values[:, :, :length]
    from_own = from_own.unflatten(3, (-1, size)) @ values[:, :, length:].reshape(blocks)
    mixed = mixed.view(batch, shared, group, rows, d) + from_own.flatten(3, 4)
    return mixed.view(batch, heads, rows, d)


@functools.cache
def _compiled():
    # Unfused FlexAttention would form the matrix that it is there to avoid.
    return torch.compile(flex_attention, dynamic=True)

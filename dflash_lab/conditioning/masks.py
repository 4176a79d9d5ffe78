"""Who sees whom in a drafter pass: the one rule for training and decoding.

A block of K rows starts at its anchor. Row i stands for position anchor + i. It sees
the context strictly before the anchor (the anchor's own features do not exist yet when
decoding) and rows of its own block, never another block. Sliding layers see less
context, and look back only inside the block unless the checkpoint says otherwise.

The rule is two predicates, `sees_context` and `sees_block`; `anchor_block_mask`,
`split_block_mask` and `flex_block_mask` put it into the forms that kernels take.

Leaves out: the kernels (`attention.py`), and the target's own causal mask
(`cache.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask


class AttentionPattern(NamedTuple):
    """What one kind of layer may see, beside the rule that holds for all.

    Attributes:
        causal: whether a block row sees only block rows up to itself.
        window: a row at position p sees context positions c with p - c < window;
            None for all.
    """

    causal: bool = False
    window: int | None = None


@dataclass(frozen=True)
class SplitMask:
    """What N blocks see, as two small masks.

    Attributes:
        context: (B, N*K, S) bool, context rows that each block row sees.
        block: (K, K) bool, rows of its own block that a row sees.
    """

    context: Tensor
    block: Tensor


Mask = Tensor | SplitMask | BlockMask
Patterns = Mapping[str, AttentionPattern]  # by kind of layer
LayerMasks = Mapping[str, Mask | None]  # by kind of layer; None hides nothing


def sees_context(
    anchor: Tensor, offset: Tensor, context: Tensor, window: int | None
) -> Tensor:
    """Whether row `offset` of the block at `anchor` sees context row `context`."""
    visible = context < anchor
    if window is not None:
        visible = visible & (anchor + offset - context < window)
    return visible


def sees_block(offset: Tensor, other: Tensor, causal: bool) -> Tensor:
    """Whether row `offset` of a block sees row `other` of the same block."""
    # Without causality all rows do, in the shape that both broadcast to.
    return other <= offset if causal else (other >= 0) & (offset >= 0)


def block_position_ids(anchor_positions: Tensor, block_size: int) -> Tensor:
    """(B, N) anchors -> (B, N*K) int64 positions anchor, anchor + 1, ... per block."""
    offset = torch.arange(block_size, device=anchor_positions.device)
    return (anchor_positions[..., None] + offset).flatten(1)


def anchor_block_mask(
    anchor_positions: Tensor,
    context_length: int,
    block_size: int,
    *,
    causal: bool = False,
    window: int | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """Mask of N blocks over a shared context followed by the blocks themselves.

    Args:
        anchor_positions: (B, N) int64, absolute position of each block's anchor.
        context_length: S, number of context rows; row c is position c.
        block_size: K, rows per block, the anchor included.
        causal, window: see `AttentionPattern`.
        valid: (B, N) bool; rows of an invalid block see nothing.

    Returns:
        (B, 1, N*K, S + N*K) bool, True where attention is allowed (paper section 4.2
        and figure 4; window rule of the published sliding-window checkpoints).
    """
    batch, blocks = anchor_positions.shape
    device = anchor_positions.device
    offset = torch.arange(block_size, device=device).repeat(blocks)  # (N*K,)
    block = torch.arange(blocks, device=device).repeat_interleave(block_size)
    in_context = _context_part(anchor_positions, context_length, block_size, window)
    in_block = (block[:, None] == block) & sees_block(offset[:, None], offset, causal)
    mask = torch.cat([in_context, in_block.expand(batch, -1, -1)], dim=-1)
    return _only_valid(mask, valid, block_size)[:, None]


def split_block_mask(
    anchor_positions: Tensor,
    context_length: int,
    block_size: int,
    *,
    causal: bool = False,
    window: int | None = None,
    valid: Tensor | None = None,
) -> SplitMask:
    """`anchor_block_mask` in two parts; invalid blocks see themselves."""
    context = _context_part(anchor_positions, context_length, block_size, window)
    offset = torch.arange(block_size, device=anchor_positions.device)
    return SplitMask(
        _only_valid(context, valid, block_size),
        sees_block(offset[:, None], offset, causal),
    )


def _context_part(
    anchor_positions: Tensor, length: int, block_size: int, window: int | None
) -> Tensor:
    """(B, N*K, S) bool, context rows that each block row sees."""
    device = anchor_positions.device
    offset = torch.arange(block_size, device=device).repeat(anchor_positions.shape[1])
    anchor = anchor_positions.repeat_interleave(block_size, dim=1)[..., None]
    context = torch.arange(length, device=device)
    return sees_context(anchor, offset[:, None], context, window)


def _only_valid(mask: Tensor, valid: Tensor | None, block_size: int) -> Tensor:
    if valid is None:
        return mask
    return mask & valid.repeat_interleave(block_size, dim=1)[..., None]


def flex_block_mask(
    anchor_positions: Tensor,
    context_length: int,
    block_size: int,
    *,
    causal: bool = False,
    window: int | None = None,
    valid: Tensor | None = None,
) -> BlockMask:
    """FlexAttention's form of `anchor_block_mask`; same arguments."""
    batch, blocks = anchor_positions.shape
    if valid is None:
        valid = torch.ones_like(anchor_positions, dtype=torch.bool)

    def sees(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        block, offset = row // block_size, row % block_size
        anchor, other = anchor_positions[b, block], column - context_length
        in_context = (other < 0) & sees_context(anchor, offset, column, window)
        in_block = (other >= 0) & (other // block_size == block)
        in_block = in_block & sees_block(offset, other % block_size, causal)
        return (in_context | in_block) & valid[b, block]

    rows = blocks * block_size
    return create_block_mask(
        sees, batch, None, rows, context_length + rows, device=anchor_positions.device
    )


FORMS: dict[str, Callable[..., Mask]] = {
    "sdpa": anchor_block_mask,
    "split": split_block_mask,
    "flex": flex_block_mask,
}


def training_masks(
    patterns: Patterns,
    anchor_positions: Tensor,
    context_length: int,
    block_size: int,
    valid: Tensor | None = None,
    form: str = "sdpa",
) -> dict[str, Mask]:
    """One mask for each kind of layer; arguments as in `anchor_block_mask`.

    Args:
        patterns: of the drafter's layers.
        form: one of `FORMS`.
    """
    make = FORMS[form]
    return {
        kind: make(
            anchor_positions,
            context_length,
            block_size,
            **pattern._asdict(),
            valid=valid,
        )
        for kind, pattern in patterns.items()
    }


def decoding_masks(
    patterns: Patterns, start: Tensor, span: int, block_size: int, exact: bool
) -> dict[str, Tensor | None]:
    """One mask for each kind of layer for one block per row, None if all is visible.

    Args:
        patterns: of the drafter's layers.
        start: (B,) int64, positions of the anchors, on the device of the pass.
        span: S, context positions that are read.
        block_size: K.
        exact: every row's context ends where reading ends, so nothing stale is read.
    """
    return {
        kind: None
        if exact and pattern == AttentionPattern()
        else anchor_block_mask(start[:, None], span, block_size, **pattern._asdict())
        for kind, pattern in patterns.items()
    }

"""Checks of lesson 05, train a DFlash drafter.

Leaves out: models and features; rules on small lists only.
"""

from __future__ import annotations

import math

from dflash_lab.course.checks.core import tried_on

_IDS = [11, 12, 13, 14, 15, 16]


@tried_on(
    [
        ([False, False, True, True, True, True],),
        ([False, True, True, False, True, False, True, True],),
        ([True, False, False],),
    ],
    what="token",
)
def check_may_be_anchor(answer: list[bool]) -> list[bool]:
    """`may_be_anchor(answer)`: answer tokens that have an answer token behind them."""
    found = []
    for place, inside in enumerate(answer):
        behind = place + 1 < len(answer) and answer[place + 1]
        found.append(bool(inside and behind))
    return found


@tried_on([(_IDS, 0, 3, 99), (_IDS, 2, 4, 99), (_IDS, 4, 2, 99)], what="slot")
def check_block(ids: list[int], anchor: int, block_size: int, mask: int) -> list[int]:
    """`block(ids, anchor, block_size, mask)`: the K input tokens of a block."""
    found = [ids[anchor]]
    while len(found) < block_size:
        found.append(mask)
    return found


@tried_on(
    [(_IDS, 0, 3), (_IDS, 2, 4), (_IDS, 3, 5), (_IDS, 4, 4)], what="slot", first=1
)
def check_labels(ids: list[int], anchor: int, block_size: int) -> list[int | None]:
    """`labels(ids, anchor, block_size)`: tokens of slots 1..K-1, None past the end."""
    found = []
    for slot in range(1, block_size):
        place = anchor + slot
        found.append(ids[place] if place < len(ids) else None)
    return found


@tried_on([(1, 4), (3, 5), (4, 5)])
def check_sees_context(anchor: int, length: int) -> list[bool]:
    """`sees_context(anchor, length)`: which positions' features a block may use."""
    return [place < anchor for place in range(length)]


@tried_on([(4, 2.0), (8, 4.0), (2, 1.0)], what="slot", first=1)
def check_slot_weights(block_size: int, gamma: float) -> list[float]:
    """`slot_weights(block_size, gamma)`: exp(-(k - 1) / gamma) for slots 1..K-1."""
    return [math.exp(-k / gamma) for k in range(block_size - 1)]

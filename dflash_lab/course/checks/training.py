"""Checks of lesson 05, train a DFlash drafter.

Leaves out: models and features; rules on small lists only.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dflash_lab.course.checks.core import call, passed, same_list

_TEXTS = (
    [False, False, True, True, True, True],
    [False, True, True, False, True, False, True, True],
    [True, False, False],
)


def check_may_be_anchor(may_be_anchor: Callable) -> None:
    """`may_be_anchor(answer)`: answer tokens that have an answer token behind them."""
    for answer in _TEXTS:
        expected = []
        for place, inside in enumerate(answer):
            behind = place + 1 < len(answer) and answer[place + 1]
            expected.append(bool(inside and behind))
        case = f"answer={answer}"
        same_list(call(may_be_anchor, answer, case=case), expected, case, "token")
    passed(may_be_anchor, len(_TEXTS))


def check_block(block: Callable) -> None:
    """`block(ids, anchor, block_size, mask)`: the K input tokens of a block."""
    ids = [11, 12, 13, 14, 15, 16]
    cases = ((0, 3), (2, 4), (4, 2))
    for anchor, size in cases:
        expected = [ids[anchor]]
        while len(expected) < size:
            expected.append(99)
        case = f"ids={ids}, anchor={anchor}, block_size={size}"
        same_list(call(block, ids, anchor, size, 99, case=case), expected, case, "slot")
    passed(block, len(cases))


def check_labels(labels: Callable) -> None:
    """`labels(ids, anchor, block_size)`: tokens of slots 1..K-1, None past the end."""
    ids = [11, 12, 13, 14, 15, 16]
    cases = ((0, 3), (2, 4), (3, 5), (4, 4))
    for anchor, size in cases:
        expected = []
        for slot in range(1, size):
            place = anchor + slot
            expected.append(ids[place] if place < len(ids) else None)
        case = f"ids={ids}, anchor={anchor}, block_size={size}"
        found = call(labels, ids, anchor, size, case=case)
        same_list(found, expected, case, "slot", first=1)
    passed(labels, len(cases))


def check_sees_context(sees_context: Callable) -> None:
    """`sees_context(anchor, length)`: which positions' features a block may use."""
    cases = ((1, 4), (3, 5), (4, 5))
    for anchor, length in cases:
        expected = [place < anchor for place in range(length)]
        case = f"anchor={anchor}, length={length}"
        found = call(sees_context, anchor, length, case=case)
        same_list(found, expected, case)
    passed(sees_context, len(cases))


def check_slot_weights(slot_weights: Callable) -> None:
    """`slot_weights(block_size, gamma)`: exp(-(k - 1) / gamma) for slots 1..K-1."""
    cases = ((4, 2.0), (8, 4.0), (2, 1.0))
    for size, gamma in cases:
        expected = [math.exp(-k / gamma) for k in range(size - 1)]
        case = f"block_size={size}, gamma={gamma}"
        found = call(slot_weights, size, gamma, case=case)
        same_list(found, expected, case, "slot", first=1)
    passed(slot_weights, len(cases))

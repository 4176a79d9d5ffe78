"""Checks of lesson 03, draft and verify.

Leaves out: models; rules on small lists only.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from dflash_lab.course.checks.core import leading, tried_on, try_cases

# Drafts, and the target's token for each of them and for one place more.
_CYCLES: tuple[tuple[list[int], list[int]], ...] = (
    ([1, 2, 3], [1, 2, 3, 4]),
    ([1, 2, 3], [1, 9, 3, 4]),
    ([1, 2, 3], [7, 2, 3, 4]),
    ([5, 5, 5], [5, 5, 6, 5]),
    ([], [8]),
)


def _count(drafts: list[int], target_tokens: list[int]) -> int:
    return leading(
        draft == own for draft, own in zip(drafts, target_tokens, strict=False)
    )


@tried_on(_CYCLES)
def check_accepted(drafts: list[int], target_tokens: list[int]) -> int:
    """`accepted(drafts, target_tokens)`: drafts before the first wrong one."""
    return _count(drafts, target_tokens)


@tried_on(_CYCLES)
def check_emitted(drafts: list[int], target_tokens: list[int]) -> list[int]:
    """`emitted(drafts, target_tokens)`: what a cycle adds to the text."""
    return target_tokens[: _count(drafts, target_tokens) + 1]


def check_lookup(lookup: Callable) -> None:
    """`lookup(text, n, count)`: what followed the last n tokens the last time."""
    cases: tuple[tuple, ...] = (
        ([1, 2, 3, 9, 1, 2], 2, 2, [3, 9]),
        ([1, 2, 3, 9, 1, 2], 2, 9, [3, 9, 1, 2]),
        ([1, 2, 7, 1, 2, 8, 1, 2], 2, 1, [8]),
        ([1, 2, 3, 4], 2, 3, []),
        ([4, 4, 4], 1, 2, [4]),
        ([6], 2, 3, []),
    )
    try_cases(lookup, "text n count", cases)


def _distributions(seed: int, size: int = 4) -> list[list[float]]:
    rng = random.Random(seed)
    pair = []
    for _ in range(2):
        shares = [rng.random() for _ in range(size)]
        pair.append([share / sum(shares) for share in shares])
    return pair


def _say(p: list[float], q: list[float]) -> str:
    return f"p={[round(x, 3) for x in p]}, q={[round(x, 3) for x in q]}"


@tried_on([*map(_distributions, range(3)), [[0.5, 0.5], [0.5, 0.5]]], say=_say)
def check_keep_chance(p: list[float], q: list[float]) -> float:
    """`keep_chance(p, q)`: how often a draft from q is kept if the target has p."""
    total = 0.0
    for mine, drawn in zip(p, q, strict=True):
        total += drawn * min(1.0, mine / drawn)
    return total


@tried_on([*map(_distributions, range(3, 6))], what="token", say=_say)
def check_excess(p: list[float], q: list[float]) -> list[float]:
    """`excess(p, q)`: distribution of the token that replaces a rejected draft."""
    over = []
    for mine, drawn in zip(p, q, strict=True):
        over.append(mine - drawn if mine > drawn else 0.0)
    return [x / sum(over) for x in over]

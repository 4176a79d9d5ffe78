"""Checks of lesson 03, draft and verify.

Leaves out: models; rules on small lists only.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from dflash_lab.course.checks.core import call, passed, same_list, same_number

# Drafts, and the target's pick for each of them and for one place more.
_CYCLES = (
    ([1, 2, 3], [1, 2, 3, 4]),
    ([1, 2, 3], [1, 9, 3, 4]),
    ([1, 2, 3], [7, 2, 3, 4]),
    ([5, 5, 5], [5, 5, 6, 5]),
    ([], [8]),
)


def _count(drafts: list[int], picks: list[int]) -> int:
    count = 0
    for draft, pick in zip(drafts, picks, strict=False):
        if draft != pick:
            break
        count += 1
    return count


def check_accepted(accepted: Callable) -> None:
    """`accepted(drafts, picks)`: drafts before the first that is not the pick."""
    for drafts, picks in _CYCLES:
        case = f"drafts={drafts}, picks={picks}"
        found = call(accepted, drafts, picks, case=case)
        same_number(found, _count(drafts, picks), case)
    passed(accepted, len(_CYCLES))


def check_emitted(emitted: Callable) -> None:
    """`emitted(drafts, picks)`: what a cycle adds to the text."""
    for drafts, picks in _CYCLES:
        case = f"drafts={drafts}, picks={picks}"
        count = _count(drafts, picks)
        same_list(call(emitted, drafts, picks, case=case), picks[: count + 1], case)
    passed(emitted, len(_CYCLES))


def check_lookup(lookup: Callable) -> None:
    """`lookup(text, n, count)`: what followed the last n tokens the last time."""
    cases = (
        ([1, 2, 3, 9, 1, 2], 2, 2, [3, 9]),
        ([1, 2, 3, 9, 1, 2], 2, 9, [3, 9, 1, 2]),
        ([1, 2, 7, 1, 2, 8, 1, 2], 2, 1, [8]),
        ([1, 2, 3, 4], 2, 3, []),
        ([4, 4, 4], 1, 2, [4]),
        ([6], 2, 3, []),
    )
    for text, n, count, expected in cases:
        case = f"text={text}, n={n}, count={count}"
        same_list(call(lookup, text, n, count, case=case), expected, case)
    passed(lookup, len(cases))


def _laws(seed: int, size: int = 4) -> tuple[list[float], list[float]]:
    rng = random.Random(seed)
    pair = []
    for _ in range(2):
        shares = [rng.random() for _ in range(size)]
        pair.append([share / sum(shares) for share in shares])
    return pair[0], pair[1]


def check_keep_chance(keep_chance: Callable) -> None:
    """`keep_chance(p, q)`: how often a draft from q is kept, for target law p."""
    for seed in range(3):
        p, q = _laws(seed)
        total = 0.0
        for mine, drawn in zip(p, q, strict=True):
            total += drawn * min(1.0, mine / drawn)
        case = f"p={_round(p)}, q={_round(q)}"
        same_number(call(keep_chance, p, q, case=case), total, case)
    case = "p=q"
    same_number(call(keep_chance, [0.5, 0.5], [0.5, 0.5], case=case), 1.0, case)
    passed(keep_chance, 4)


def check_excess(excess: Callable) -> None:
    """`excess(p, q)`: law of the token that replaces a rejected draft."""
    for seed in range(3, 6):
        p, q = _laws(seed)
        over = []
        for mine, drawn in zip(p, q, strict=True):
            over.append(mine - drawn if mine > drawn else 0.0)
        case = f"p={_round(p)}, q={_round(q)}"
        same_list(
            call(excess, p, q, case=case), [x / sum(over) for x in over], case, "token"
        )
    passed(excess, 3)


def _round(law: list[float]) -> list[float]:
    return [round(share, 3) for share in law]

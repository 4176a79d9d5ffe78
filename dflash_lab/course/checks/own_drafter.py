"""Checks of lesson 11, your own drafter.

Leaves out: whether a drafter is any good; the race tells.
"""

from __future__ import annotations

from collections.abc import Callable

from dflash_lab.course.checks.core import (
    CheckFailed,
    call,
    leading,
    passed,
    same_list,
    tried_on,
)

Counts = dict[int, dict[int, int]]

_TABLE: Counts = {3: {5: 4, 7: 1}, 5: {9: 2, 3: 2}, 7: {7: 3}, 9: {}}
_ENDS = ((3, 3), (5, 2), (7, 4), (9, 3), (8, 3), (3, 0))  # last token, limit
_SCORES = [[0.0, 1.0, 0.9], [0.5, 0.6, 0.0], [2.0, 1.9, 0.0]]
_SHIFTS = [[0.0, -3.0, -1.0], [-2.0, -2.0, 0.0], [-1.0, 0.0, -4.0]]
_WEIGHTS = ((0, 0.0), (0, 1.0), (1, 0.5), (2, 2.0))  # last token, weight


def check_followers(followers: Callable) -> None:
    """`followers(texts)`: how often each token follows each, as nested dictionaries."""
    cases = ([[1, 2, 1, 2, 3]], [[4, 4, 4], [4, 5]], [[7]])
    for texts in cases:
        expected: Counts = {}
        for text in texts:
            for place in range(1, len(text)):
                row = expected.setdefault(text[place - 1], {})
                row[text[place]] = row.get(text[place], 0) + 1
        case = f"texts={texts}"
        found = call(followers, texts, case=case)
        try:
            mine = _triples(found)
        except (AttributeError, TypeError, ValueError):
            raise CheckFailed(
                f"{case}: expected a dictionary of dictionaries such as {expected}, "
                f"got {found!r}"
            ) from None
        case += ", as (token, follower, count)"
        same_list(mine, _triples(expected), case, "entry")
    passed(followers, len(cases))


def _triples(table: Counts) -> list[tuple[int, int, int]]:
    rows = {int(a): row for a, row in table.items()}
    return sorted(
        (a, int(b), int(n)) for a, row in rows.items() for b, n in row.items()
    )


@tried_on([(_TABLE, *end) for end in _ENDS], what="draft")
def check_chain(table: Counts, last: int, limit: int) -> list[int]:
    """`chain(table, last, limit)`: likeliest followers; ties to the lower id."""
    found: list[int] = []
    while len(found) < limit and table.get(last):
        row = table[last]
        last = min(row, key=lambda t: (-row[t], t))
        found.append(last)
    return found


@tried_on(
    [
        ([0.9, 0.8, 0.2, 0.9], 0.5),
        ([0.1, 0.9], 0.5),
        ([0.9, 0.9], 0.5),
        ([0.5, 0.4], 0.5),
        ([0.7, 0.7, 0.7], 0.5),
    ],
    what="count",
)
def check_sure_drafts(confidence: list[float], least: float) -> int:
    """`sure_drafts(confidence, least)`: drafts before the first that is below."""
    return leading(chance >= least for chance in confidence)


@tried_on([(_SCORES, _SHIFTS, *end) for end in _WEIGHTS], what="slot")
def check_corrected(
    scores: list[list[float]], table: list[list[float]], last: int, weight: float
) -> list[int]:
    """`corrected(scores, table, last, weight)`: each slot after the one before."""
    found = []
    for row in scores:
        sums = [s + weight * table[last][v] for v, s in enumerate(row)]
        last = sums.index(max(sums))
        found.append(last)
    return found


@tried_on(
    [
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([[1, 2], [3]], [[1, 2], [4]]),
        ([[1, 2], [3]], [[1], [3]]),
        ([[1], [3, 4]], [[1], [3]]),
        ([[1], [2]], [[3], [4]]),
        ([[1, 2]], [[2, 1]]),
    ],
    what="index",
)
def check_first_wrong(texts: list[list[int]], plain: list[list[int]]) -> int | None:
    """`first_wrong(texts, plain)`: number of the first text that differs, or None."""
    for number, (mine, right) in enumerate(zip(texts, plain, strict=True)):
        if mine != right:
            return number
    return None

"""Checks of lesson 11, your own drafter.

Leaves out: whether a drafter is any good; the race tells.
"""

from __future__ import annotations

from collections.abc import Callable

from dflash_lab.course.checks.core import CheckFailed, call, passed, same_list

_TABLE = {3: {5: 4, 7: 1}, 5: {9: 2, 3: 2}, 7: {7: 3}, 9: {}}


def check_followers(followers: Callable) -> None:
    """`followers(texts)`: how often each token follows each, as nested dictionaries."""
    cases = ([[1, 2, 1, 2, 3]], [[4, 4, 4], [4, 5]], [[7]])
    for texts in cases:
        expected: dict[int, dict[int, int]] = {}
        for text in texts:
            for place in range(1, len(text)):
                row = expected.setdefault(text[place - 1], {})
                row[text[place]] = row.get(text[place], 0) + 1
        case = f"texts={texts}"
        found = call(followers, texts, case=case)
        try:
            plain = {
                int(a): {int(b): int(n) for b, n in row.items()}
                for a, row in found.items()
            }
        except (AttributeError, TypeError, ValueError):
            raise CheckFailed(
                f"{case}: expected a dictionary of dictionaries such as {expected}, "
                f"got {found!r}"
            ) from None
        pairs = sorted((a, b, n) for a, row in expected.items() for b, n in row.items())
        mine = sorted((a, b, n) for a, row in plain.items() for b, n in row.items())
        same_list(mine, pairs, f"{case}, as (token, follower, count)", "entry")
    passed(followers, len(cases))


def check_chain(chain: Callable) -> None:
    """`chain(table, last, limit)`: likeliest followers; ties to the lower id."""
    cases = ((3, 3), (5, 2), (7, 4), (9, 3), (8, 3), (3, 0))
    for last, limit in cases:
        expected, token = [], last
        while len(expected) < limit and _TABLE.get(token):
            row = _TABLE[token]
            token = min(row, key=lambda t: (-row[t], t))
            expected.append(token)
        case = f"table={_TABLE}, last={last}, limit={limit}"
        found = call(chain, _TABLE, last, limit, case=case)
        same_list(found, expected, case, "draft")
    passed(chain, len(cases))


def check_sure_drafts(sure_drafts: Callable) -> None:
    """`sure_drafts(confidence, least)`: drafts before the first that is below."""
    cases = (
        ([0.9, 0.8, 0.2, 0.9], 0.5),
        ([0.1, 0.9], 0.5),
        ([0.9, 0.9], 0.5),
        ([0.5, 0.4], 0.5),
        ([0.7, 0.7, 0.7], 0.5),
    )
    for confidence, least in cases:
        expected = 0
        for chance in confidence:
            if chance < least:
                break
            expected += 1
        case = f"confidence={confidence}, least={least}"
        same_list(
            [call(sure_drafts, confidence, least, case=case)], [expected], case, "count"
        )
    passed(sure_drafts, len(cases))


def check_corrected(corrected: Callable) -> None:
    """`corrected(scores, table, last, weight)`: each slot after the one before."""
    scores = [[0.0, 1.0, 0.9], [0.5, 0.6, 0.0], [2.0, 1.9, 0.0]]
    table = [[0.0, -3.0, -1.0], [-2.0, -2.0, 0.0], [-1.0, 0.0, -4.0]]
    cases = ((0, 0.0), (0, 1.0), (1, 0.5), (2, 2.0))
    for last, weight in cases:
        expected, before = [], last
        for row in scores:
            sums = [s + weight * table[before][v] for v, s in enumerate(row)]
            before = sums.index(max(sums))
            expected.append(before)
        case = f"scores={scores}, table={table}, last={last}, weight={weight}"
        found = call(corrected, scores, table, last, weight, case=case)
        same_list(found, expected, case, "slot")
    passed(corrected, len(cases))


def check_first_wrong(first_wrong: Callable) -> None:
    """`first_wrong(texts, plain)`: number of the first text that differs, or None."""
    cases = (
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([[1, 2], [3]], [[1, 2], [4]]),
        ([[1, 2], [3]], [[1], [3]]),
        ([[1], [3, 4]], [[1], [3]]),
        ([[1], [2]], [[3], [4]]),
        ([[1, 2]], [[2, 1]]),
    )
    for texts, plain in cases:
        expected = None
        for number, (mine, right) in enumerate(zip(texts, plain, strict=True)):
            if mine != right:
                expected = number
                break
        case = f"texts={texts}, plain={plain}"
        same_list(
            [call(first_wrong, texts, plain, case=case)], [expected], case, "index"
        )
    passed(first_wrong, len(cases))

"""Checks of lesson 09, ablations.

Leaves out: drafters; settings, sums and verdicts only.
"""

from __future__ import annotations

from collections.abc import Callable

from dflash_lab.course.checks.core import tried_on, try_cases

_ADDED = [40, 36, 50, 28]
_CYCLES = [10, 12, 10, 14]
_OTHER = [12, 12, 14, 14]
_SETTINGS = (
    ({"layers": 1, "K": 8, "loss": "ce"}, {"layers": 2, "K": 8, "loss": "ce"}),
    ({"layers": 1, "K": 8, "loss": "ce"}, {"layers": 1, "K": 16, "loss": "kl"}),
    ({"layers": 1}, {"layers": 1}),
    ({"layers": 1, "seed": None}, {"layers": 1, "seed": 0}),
)
_SUMS = (
    (_ADDED, _CYCLES, _ADDED, _OTHER),
    (_ADDED, _OTHER, _ADDED, _CYCLES),
    ([8, 90], [1, 30], [30, 60], [10, 20]),
)
_DRAWN = ([0, 1, 2, 3], [0, 0, 3, 2], [3, 3, 3, 3])


@tried_on(_SETTINGS, what="entry")
def check_changes(one: dict, other: dict) -> list[str]:
    """`changes(one, other)`: names of the settings that differ, in order."""
    found = []
    for name in one:
        if one[name] != other[name]:
            found.append(name)
    return found


@tried_on(_SUMS)
def check_tau_difference(
    added: list[int], cycles: list[int], base_added: list[int], base_cycles: list[int]
) -> float:
    """`tau_difference(added, cycles, base_added, base_cycles)`: of pooled taus."""
    return sum(added) / sum(cycles) - sum(base_added) / sum(base_cycles)


@tried_on([(_ADDED, _CYCLES, drawn) for drawn in _DRAWN])
def check_resampled(added: list[int], cycles: list[int], drawn: list[int]) -> float:
    """`resampled(added, cycles, drawn)`: tau of the prompts that were drawn."""
    top = bottom = 0
    for prompt in drawn:
        top += added[prompt]
        bottom += cycles[prompt]
    return top / bottom


def check_verdict(verdict: Callable) -> None:
    """`verdict(low, high, noise)`: 'better', 'worse', or 'not told'."""
    cases = (
        (0.4, 0.9, 0.2, "better"),
        (-0.9, -0.4, 0.2, "worse"),
        (-0.1, 0.5, 0.2, "not told"),
        (0.05, 0.15, 0.2, "not told"),
        (-0.15, -0.05, 0.2, "not told"),
        (0.1, 0.6, 0.2, "not told"),
        (-0.5, 0.1, 0.2, "not told"),
    )
    try_cases(verdict, "low high noise", cases, what="verdict")

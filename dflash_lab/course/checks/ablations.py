"""Checks of lesson 09, ablations.

Leaves out: drafters; settings, sums and verdicts only.
"""

from __future__ import annotations

from collections.abc import Callable

from dflash_lab.course.checks.core import call, passed, same_list, same_number

_ADDED = [40, 36, 50, 28]
_CYCLES = [10, 12, 10, 14]
_OTHER = [12, 12, 14, 14]


def check_changes(changes: Callable) -> None:
    """`changes(one, other)`: names of the settings that differ, in order."""
    cases = (
        ({"layers": 1, "K": 8, "loss": "ce"}, {"layers": 2, "K": 8, "loss": "ce"}),
        ({"layers": 1, "K": 8, "loss": "ce"}, {"layers": 1, "K": 16, "loss": "kl"}),
        ({"layers": 1}, {"layers": 1}),
        ({"layers": 1, "seed": None}, {"layers": 1, "seed": 0}),
    )
    for one, other in cases:
        expected = []
        for name in one:
            if one[name] != other[name]:
                expected.append(name)
        case = f"one={one}, other={other}"
        found = call(changes, dict(one), dict(other), case=case)
        same_list(found, expected, case, "entry")
    passed(changes, len(cases))


def check_tau_difference(tau_difference: Callable) -> None:
    """`tau_difference(added, cycles, base_added, base_cycles)`: of pooled taus."""
    cases = (
        (_ADDED, _CYCLES, _ADDED, _OTHER),
        (_ADDED, _OTHER, _ADDED, _CYCLES),
        ([8, 90], [1, 30], [30, 60], [10, 20]),
    )
    for added, cycles, base_added, base_cycles in cases:
        expected = sum(added) / sum(cycles) - sum(base_added) / sum(base_cycles)
        case = f"added={added}, cycles={cycles}, base {base_added}, {base_cycles}"
        found = call(tau_difference, added, cycles, base_added, base_cycles, case=case)
        same_number(found, expected, case)
    passed(tau_difference, len(cases))


def check_resampled(resampled: Callable) -> None:
    """`resampled(added, cycles, picks)`: tau of the prompts that were drawn."""
    cases = ([0, 1, 2, 3], [0, 0, 3, 2], [3, 3, 3, 3])
    for picks in cases:
        top = bottom = 0
        for pick in picks:
            top += _ADDED[pick]
            bottom += _CYCLES[pick]
        case = f"added={_ADDED}, cycles={_CYCLES}, picks={picks}"
        found = call(resampled, _ADDED, _CYCLES, picks, case=case)
        same_number(found, top / bottom, case)
    passed(resampled, len(cases))


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
    for low, high, noise, expected in cases:
        case = f"low={low}, high={high}, noise={noise}"
        same_list(
            [call(verdict, low, high, noise, case=case)], [expected], case, "verdict"
        )
    passed(verdict, len(cases))

"""Checks of lesson 07, when drafting pays.

Leaves out: clocks; arithmetic on costs only.
"""

from __future__ import annotations

from collections.abc import Callable

from dflash_lab.course.checks.core import call, passed, same_number

# draft, verify, other and plain in milliseconds, tau
_CYCLES = (
    (1.0, 10.0, 0.5, 8.0, 3.0),
    (0.6, 1.7, 0.2, 1.4, 5.5),
    (10.0, 55.0, 1.0, 42.0, 1.5),
    (2.0, 2.0, 0.0, 4.0, 1.0),
)


def check_speedup(speedup: Callable) -> None:
    """`speedup(draft, verify, other, plain, tau)`: over plain decoding."""
    for draft, verify, other, plain, tau in _CYCLES:
        per_token = (draft + verify + other) / tau
        case = (
            f"draft={draft}, verify={verify}, other={other}, plain={plain}, tau={tau}"
        )
        found = call(speedup, draft, verify, other, plain, tau, case=case)
        same_number(found, plain / per_token, case)
    passed(speedup, len(_CYCLES))


def check_break_even(break_even: Callable) -> None:
    """`break_even(draft, verify, other, plain)`: tau at which the speed-up is 1."""
    for draft, verify, other, plain, _ in _CYCLES:
        case = f"draft={draft}, verify={verify}, other={other}, plain={plain}"
        cycle = draft + verify + other
        found = call(break_even, draft, verify, other, plain, case=case)
        same_number(found, cycle / plain, case)
    passed(break_even, len(_CYCLES))


def check_smaller_block(smaller_block: Callable) -> None:
    """`smaller_block(survival, block_size)`: tau if fewer tokens were drafted."""
    survival = [0.9, 0.8, 0.5, 0.4, 0.25]
    for size in (1, 2, 4, 6):
        total = 1.0
        for slot in range(1, size):
            total += survival[slot - 1]
        case = f"survival={survival}, block_size={size}"
        found = call(smaller_block, survival, size, case=case)
        same_number(found, total, case)
    passed(smaller_block, 4)


def check_best(best: Callable) -> None:
    """`best(cycle_ms, taus)`: the block size with the least time per token."""
    cases = (
        ({2: 10.0, 4: 12.0, 8: 20.0}, {2: 1.6, 4: 2.4, 8: 3.0}, 4),
        ({2: 10.0, 8: 11.0}, {2: 1.7, 8: 2.5}, 8),
        ({4: 30.0, 16: 90.0}, {4: 2.0, 16: 3.0}, 4),
    )
    for cycle_ms, taus, expected in cases:
        case = f"cycle_ms={cycle_ms}, taus={taus}"
        same_number(call(best, cycle_ms, taus, case=case), expected, case)
    passed(best, len(cases))

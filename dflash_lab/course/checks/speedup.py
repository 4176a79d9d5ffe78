"""Checks of lesson 07, when drafting pays.

Leaves out: clocks; arithmetic on costs only.
"""

from __future__ import annotations

from collections.abc import Callable

from dflash_lab.course.checks.core import tried_on, try_cases

# draft, verify, other and plain in milliseconds, tau
_CYCLES = (
    (1.0, 10.0, 0.5, 8.0, 3.0),
    (0.6, 1.7, 0.2, 1.4, 5.5),
    (10.0, 55.0, 1.0, 42.0, 1.5),
    (2.0, 2.0, 0.0, 4.0, 1.0),
)


@tried_on(_CYCLES)
def check_speedup(
    draft: float, verify: float, other: float, plain: float, tau: float
) -> float:
    """`speedup(draft, verify, other, plain, tau)`: over plain decoding."""
    per_token = (draft + verify + other) / tau
    return plain / per_token


@tried_on([costs[:4] for costs in _CYCLES])
def check_break_even(draft: float, verify: float, other: float, plain: float) -> float:
    """`break_even(draft, verify, other, plain)`: tau at which the speed-up is 1."""
    cycle = draft + verify + other
    return cycle / plain


@tried_on([([0.9, 0.8, 0.5, 0.4, 0.25], size) for size in (1, 2, 4, 6)])
def check_smaller_block(survival: list[float], block_size: int) -> float:
    """`smaller_block(survival, block_size)`: tau if fewer tokens were drafted."""
    total = 1.0
    for slot in range(1, block_size):
        total += survival[slot - 1]
    return total


def check_best(best: Callable) -> None:
    """`best(cycle_ms, taus)`: the block size with the least time per token."""
    cases = (
        ({2: 10.0, 4: 12.0, 8: 20.0}, {2: 1.6, 4: 2.4, 8: 3.0}, 4),
        ({2: 10.0, 8: 11.0}, {2: 1.7, 8: 2.5}, 8),
        ({4: 30.0, 16: 90.0}, {4: 2.0, 16: 3.0}, 4),
    )
    try_cases(best, "cycle_ms taus", cases)

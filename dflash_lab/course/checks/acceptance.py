"""Checks of lesson 06, what acceptance means.

A block is a list of truth values, one per drafted slot: did the draft equal the
target's choice at that place?

Leaves out: traces; the library has the same definitions for them.
"""

from __future__ import annotations

import random

from dflash_lab.course.checks.core import leading, tried_on

Blocks = list[list[bool]]


def _tables() -> list[tuple[Blocks]]:
    """The example of docs/metrics.md, and two random tables."""
    rng = random.Random(0)
    tables = [[[True, True, False], [False, True, False], [True, True, True]]]
    for slots in (2, 5):
        tables.append([[rng.random() < 0.7 for _ in range(slots)] for _ in range(9)])
    return [(table,) for table in tables]


def _say(blocks: Blocks) -> str:
    return f"{len(blocks)} blocks beginning {blocks[0]}, {blocks[1]}"


@tried_on(_tables(), say=_say)
def check_tau(blocks: Blocks) -> float:
    """`tau(blocks)`: mean acceptance length, the bonus token counted."""
    return sum(leading(block) + 1 for block in blocks) / len(blocks)


@tried_on(_tables(), what="slot", say=_say)
def check_marginal(blocks: Blocks) -> list[float]:
    """`marginal(blocks)`: share of blocks in which each slot is right."""
    return [
        sum(block[slot] for block in blocks) / len(blocks)
        for slot in range(len(blocks[0]))
    ]


@tried_on(_tables(), what="slot", say=_say)
def check_survival(blocks: Blocks) -> list[float]:
    """`survival(blocks)`: share of blocks in which each slot's draft became text."""
    return [
        sum(leading(block) > slot for block in blocks) / len(blocks)
        for slot in range(len(blocks[0]))
    ]


@tried_on(_tables(), what="slot", say=_say)
def check_conditional(blocks: Blocks) -> list[float]:
    """`conditional(blocks)`: share right, of the blocks that are right before it."""
    found = []
    for slot in range(len(blocks[0])):
        reached = [block for block in blocks if leading(block) >= slot]
        found.append(sum(block[slot] for block in reached) / len(reached))
    return found


@tried_on(
    [([0.5],), ([2 / 3, 1.0, 1 / 3],), ([0.9, 0.8, 0.7, 0.6],), ([0.0, 1.0],)],
    say=lambda rates: f"rates={[round(rate, 2) for rate in rates]}",
)
def check_independent(rates: list[float]) -> float:
    """`independent(rates)`: 1 + r1 + r1 r2 + ..., tau if slots failed independently."""
    total = 1.0
    for end in range(1, len(rates) + 1):
        product = 1.0
        for rate in rates[:end]:
            product *= rate
        total += product
    return total

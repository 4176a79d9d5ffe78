"""Checks of lesson 06, what acceptance means.

A block is a list of truth values, one per drafted slot: did the draft equal the
target's choice at that place?

Leaves out: traces; the library has the same definitions for them.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from dflash_lab.course.checks.core import call, passed, same_list, same_number

# The example of docs/metrics.md, and two random tables.
_EXAMPLE = [[True, True, False], [False, True, False], [True, True, True]]


def _tables() -> list[list[list[bool]]]:
    rng = random.Random(0)
    tables = [_EXAMPLE]
    for slots in (2, 5):
        tables.append([[rng.random() < 0.7 for _ in range(slots)] for _ in range(9)])
    return tables


def _kept(block: list[bool]) -> int:
    count = 0
    for right in block:
        if not right:
            break
        count += 1
    return count


def _case(blocks: list[list[bool]]) -> str:
    return f"{len(blocks)} blocks beginning {blocks[0]}, {blocks[1]}"


def check_tau(tau: Callable) -> None:
    """`tau(blocks)`: mean acceptance length, the bonus token counted."""
    for blocks in _tables():
        expected = sum(_kept(block) + 1 for block in blocks) / len(blocks)
        same_number(call(tau, blocks, case=_case(blocks)), expected, _case(blocks))
    passed(tau, 3)


def check_marginal(marginal: Callable) -> None:
    """`marginal(blocks)`: share of blocks in which each slot is right."""
    for blocks in _tables():
        expected = []
        for slot in range(len(blocks[0])):
            expected.append(sum(block[slot] for block in blocks) / len(blocks))
        found = call(marginal, blocks, case=_case(blocks))
        same_list(found, expected, _case(blocks), "slot")
    passed(marginal, 3)


def check_survival(survival: Callable) -> None:
    """`survival(blocks)`: share of blocks in which each slot's draft became text."""
    for blocks in _tables():
        expected = []
        for slot in range(len(blocks[0])):
            alive = [block for block in blocks if _kept(block) > slot]
            expected.append(len(alive) / len(blocks))
        found = call(survival, blocks, case=_case(blocks))
        same_list(found, expected, _case(blocks), "slot")
    passed(survival, 3)


def check_conditional(conditional: Callable) -> None:
    """`conditional(blocks)`: share right, of the blocks that are right before it."""
    for blocks in _tables():
        expected = []
        for slot in range(len(blocks[0])):
            reached = [block for block in blocks if _kept(block) >= slot]
            right = sum(block[slot] for block in reached)
            expected.append(right / len(reached))
        found = call(conditional, blocks, case=_case(blocks))
        same_list(found, expected, _case(blocks), "slot")
    passed(conditional, 3)


def check_independent(independent: Callable) -> None:
    """`independent(rates)`: 1 + r1 + r1 r2 + ..., tau if slots failed independently."""
    cases = ([0.5], [2 / 3, 1.0, 1 / 3], [0.9, 0.8, 0.7, 0.6], [0.0, 1.0])
    for rates in cases:
        total = 1.0
        for end in range(1, len(rates) + 1):
            product = 1.0
            for rate in rates[:end]:
                product *= rate
            total += product
        case = f"rates={[round(rate, 2) for rate in rates]}"
        same_number(call(independent, rates, case=case), total, case)
    passed(independent, len(cases))

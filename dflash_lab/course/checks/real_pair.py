"""Checks of lesson 10, a real pair.

Leaves out: models and log files; numbers only.
"""

from __future__ import annotations

from collections.abc import Callable

from dflash_lab.course.checks.core import tried_on, try_cases

_EPSILON = 1 / 128  # of bfloat16


def check_differs_at_tie(differs_at_tie: Callable) -> None:
    """`differs_at_tie(mine, plain, logits, epsilon)`: is the first difference a tie?

    Token ids are 0 to 3; `logits[i]` are those of the place where the texts have
    `mine[i]` and `plain[i]`.
    """
    flat = [1.0, 1.0, 9.0, 1.0]
    rows = (
        ([2, 0], [2, 1], [flat, [20.0, 20.125, 4.0, 3.0]], True),
        ([2, 0], [2, 1], [flat, [20.0, 21.0, 4.0, 3.0]], False),
        ([2, 0], [2, 1], [flat, [2.0, 2.125, 0.5, 0.25]], False),
        ([2, 0], [2, 1], [flat, [-20.0, -20.25, -30.0, -31.0]], True),
        ([0, 3], [1, 2], [[20.0, 20.25, 1.0, 1.0], [1.0, 1.0, 9.0, 2.0]], True),
        ([0, 3], [1, 2], [[20.0, 24.0, 1.0, 1.0], [1.0, 1.0, 9.0, 9.0]], False),
        ([3, 0], [1, 0], [[20.0, 20.0, 1.0, 16.0], flat], False),
        ([0], [1], [[2.0, 2.125, 50.0, 0.0]], False),
    )
    cases = [(*given, _EPSILON, expected) for *given, expected in rows]

    def say(mine: list, plain: list, logits: list, epsilon: float) -> str:
        return f"mine={mine}, plain={plain}, logits={logits}, epsilon=1/128"

    names = "mine plain logits epsilon"
    try_cases(differs_at_tie, names, cases, what="answer", say=say)


_RUNS = [
    ("plain", "bfloat16", 100, 4.0),
    ("dflash", "bfloat16", 100, 2.5),
    ("plain", "float32", 100, 4.5),
    ("dflash", "float32", 100, 4.6),
    ("plain", "bfloat16", 20, 0.75),
    ("dflash", "bfloat16", 60, 2.25),
]


def _say_runs(runs: list[tuple], dtype: str) -> str:
    return f"{len(runs)} runs beginning {runs[0]}, {runs[1]}, dtype={dtype!r}"


@tried_on([(_RUNS, "bfloat16"), (_RUNS, "float32")], say=_say_runs)
def check_speedup(runs: list[tuple], dtype: str) -> float:
    """`speedup(runs, dtype)`: `dflash` over `plain`, both in this dtype.

    A run is (method, dtype, tokens, seconds).
    """
    speed = {}
    for method in ("plain", "dflash"):
        rows = [row for row in runs if row[:2] == (method, dtype)]
        speed[method] = sum(row[2] for row in rows) / sum(row[3] for row in rows)
    return speed["dflash"] / speed["plain"]


@tried_on([(36, 5), (30, 5), (8, 3), (28, 2), (36, 4)], what="feature")
def check_state_indices(num_layers: int, num_features: int) -> list[int]:
    """`state_indices(num_layers, num_features)`: entries of `hidden_states`."""
    found = []
    for feature in range(num_features):
        layer = round(1 + feature * (num_layers - 4) / (num_features - 1))
        found.append(layer + 1)
    return found


@tried_on([(150, 300, 3), (0, 70, 7), (70, 70, 7), (2310, 6300, 15)])
def check_tau_from_counters(accepted: int, drafted: int, slots: int) -> float:
    """`tau_from_counters(accepted, drafted, slots)`: of a log line's counters."""
    cycles = drafted / slots
    return 1 + accepted / cycles


@tried_on(
    [
        ([[3, 1, 4]], True),
        ([[3, 1, 4]], False),
        ([[1, 1, 1, 5], [4, 4]], True),
        ([[1, 1, 1, 5], [4, 4]], False),
        ([[0, 2], [7]], False),  # with the bonus token counted no cycle has 0
    ]
)
def check_tau_of(responses: list[list[int]], bonus_counted: bool) -> float:
    """`tau_of(responses, bonus_counted)`: pooled over cycles, bonus token counted."""
    lengths = [length for response in responses for length in response]
    return sum(lengths) / len(lengths) + (0 if bonus_counted else 1)

"""Checks of lesson 10, a real pair.

Leaves out: models and log files; numbers only.
"""

from __future__ import annotations

from collections.abc import Callable

from dflash_lab.course.checks.core import call, passed, same_list, same_number

_EPSILON = 1 / 128  # of bfloat16


def check_differs_at_tie(differs_at_tie: Callable) -> None:
    """`differs_at_tie(mine, plain, logits, epsilon)`: is the first difference a tie?

    Token ids are 0 to 3; `logits[i]` are those of the place where the texts have
    `mine[i]` and `plain[i]`.
    """
    flat = [1.0, 1.0, 9.0, 1.0]
    cases = (
        ([2, 0], [2, 1], [flat, [20.0, 20.125, 4.0, 3.0]], True),
        ([2, 0], [2, 1], [flat, [20.0, 21.0, 4.0, 3.0]], False),
        ([2, 0], [2, 1], [flat, [2.0, 2.125, 0.5, 0.25]], False),
        ([2, 0], [2, 1], [flat, [-20.0, -20.25, -30.0, -31.0]], True),
        ([0, 3], [1, 2], [[20.0, 20.25, 1.0, 1.0], [1.0, 1.0, 9.0, 2.0]], True),
        ([0, 3], [1, 2], [[20.0, 24.0, 1.0, 1.0], [1.0, 1.0, 9.0, 9.0]], False),
        ([3, 0], [1, 0], [[20.0, 20.0, 1.0, 16.0], flat], False),
        ([0], [1], [[2.0, 2.125, 50.0, 0.0]], False),
    )
    for mine, plain, logits, expected in cases:
        case = f"mine={mine}, plain={plain}, logits={logits}, epsilon=1/128"
        found = call(differs_at_tie, mine, plain, logits, _EPSILON, case=case)
        found = found.item() if hasattr(found, "item") else found
        same_list([found], [expected], case, "answer")
    passed(differs_at_tie, len(cases))


def check_speedup(speedup: Callable) -> None:
    """`speedup(runs, dtype)`: `dflash` over `plain`, both in this dtype.

    A run is (method, dtype, tokens, seconds).
    """
    runs = [
        ("plain", "bfloat16", 100, 4.0),
        ("dflash", "bfloat16", 100, 2.5),
        ("plain", "float32", 100, 4.5),
        ("dflash", "float32", 100, 4.6),
        ("plain", "bfloat16", 20, 0.75),
        ("dflash", "bfloat16", 60, 2.25),
    ]
    for dtype in ("bfloat16", "float32"):
        speed = {}
        for method in ("plain", "dflash"):
            rows = [row for row in runs if row[:2] == (method, dtype)]
            speed[method] = sum(row[2] for row in rows) / sum(row[3] for row in rows)
        case = f"{len(runs)} runs beginning {runs[0]}, {runs[1]}, dtype={dtype!r}"
        found = call(speedup, runs, dtype, case=case)
        same_number(found, speed["dflash"] / speed["plain"], case)
    passed(speedup, 2)


def check_state_indices(state_indices: Callable) -> None:
    """`state_indices(num_layers, num_features)`: entries of `hidden_states`."""
    cases = ((36, 5), (30, 5), (8, 3), (28, 2), (36, 4))
    for num_layers, num_features in cases:
        expected = []
        for feature in range(num_features):
            layer = round(1 + feature * (num_layers - 4) / (num_features - 1))
            expected.append(layer + 1)
        case = f"num_layers={num_layers}, num_features={num_features}"
        found = call(state_indices, num_layers, num_features, case=case)
        same_list(found, expected, case, "feature")
    passed(state_indices, len(cases))


def check_tau_from_counters(tau_from_counters: Callable) -> None:
    """`tau_from_counters(accepted, drafted, slots)`: of a log line's counters."""
    cases = ((150, 300, 3), (0, 70, 7), (70, 70, 7), (2310, 6300, 15))
    for accepted, drafted, slots in cases:
        cycles = drafted / slots
        case = f"accepted={accepted}, drafted={drafted}, slots={slots}"
        found = call(tau_from_counters, accepted, drafted, slots, case=case)
        same_number(found, 1 + accepted / cycles, case)
    passed(tau_from_counters, len(cases))


def check_tau_of(tau_of: Callable) -> None:
    """`tau_of(responses, bonus_counted)`: pooled over cycles, bonus token counted."""
    tables = ([[3, 1, 4]], [[1, 1, 1, 5], [4, 4]], [[0, 2], [7]])
    cases = 0
    for responses in tables:
        for bonus_counted in (True, False):
            lengths = [length for response in responses for length in response]
            if bonus_counted and 0 in lengths:
                continue  # a cycle adds one token at least
            expected = sum(lengths) / len(lengths) + (0 if bonus_counted else 1)
            case = f"responses={responses}, bonus_counted={bonus_counted}"
            found = call(tau_of, responses, bonus_counted, case=case)
            same_number(found, expected, case)
            cases += 1
    passed(tau_of, cases)

"""Checks of lesson 04, listening to the target.

Leaves out: models; the rules of conditioning on small lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dflash_lab.course.checks.core import call, passed, same_list, same_number


def check_layer_ids(layer_ids: Callable) -> None:
    """`layer_ids(num_layers, n)`: evenly spaced, from 1 to num_layers - 3."""
    cases = ((36, 5), (8, 3), (8, 4), (10, 5), (30, 2))
    for layers, n in cases:
        step = (layers - 4) / (n - 1)
        expected = [round(1 + i * step) for i in range(n)]
        case = f"num_layers={layers}, n={n}"
        same_list(call(layer_ids, layers, n, case=case), expected, case, "feature")
    passed(layer_ids, len(cases))


def check_features(features: Callable) -> None:
    """`features(hidden_states, layer_ids, place)`: states after layers, joined."""
    # hidden_states[i][place] is a list of D numbers; entry 0 is the embedding.
    states = [[[10.0 * i + p, -i] for p in range(3)] for i in range(6)]
    cases = (([1, 3], 0), ([0, 2, 4], 2), ([3], 1))
    for ids, place in cases:
        expected = []
        for layer in ids:
            expected += [float(x) for x in states[layer + 1][place]]
        case = f"layer_ids={ids}, place={place}"
        found = call(features, states, ids, place, case=case)
        same_list(found, expected, case, "number")
    passed(features, len(cases))


def check_context_row(context_row: Callable) -> None:
    """`context_row(feature, fc)`: fc times the feature, over its root mean square."""
    cases = (
        ([1.0, 2.0, 3.0, 4.0], [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, -1.0, 0.0]]),
        ([0.5, -1.0], [[2.0, 0.0], [0.0, 2.0], [1.0, 1.0]]),
    )
    for feature, fc in cases:
        row = [sum(w * x for w, x in zip(line, feature, strict=True)) for line in fc]
        size = math.sqrt(sum(x * x for x in row) / len(row))
        case = f"feature={feature}, fc={fc}"
        found = call(context_row, feature, fc, case=case)
        same_list(found, [x / size for x in row], case, "number")
    passed(context_row, len(cases))


def check_attention_weights(attention_weights: Callable) -> None:
    """`attention_weights(query, context_keys, block_keys)`: one softmax."""
    cases = (
        ([1.0, 0.0], [[2.0, 1.0], [0.0, 3.0]], [[1.0, 1.0]]),
        ([0.5, -0.5, 1.0, 0.0], [[1.0, 0.0, 1.0, 0.0]], [[0.0, 2.0, 0.0, 1.0]] * 2),
    )
    for query, context, block in cases:
        scores = []
        for key in [*context, *block]:
            dot = sum(q * k for q, k in zip(query, key, strict=True))
            scores.append(math.exp(dot / math.sqrt(len(query))))
        expected = [score / sum(scores) for score in scores]
        case = f"query={query}, context_keys={context}, block_keys={block}"
        found = call(attention_weights, query, context, block, case=case)
        same_list(found, expected, case, "key")
    passed(attention_weights, len(cases))


def check_new_context(new_context: Callable) -> None:
    """`new_context(anchor, accepted)`: places whose features a cycle adds."""
    cases = ((10, 0), (10, 3), (0, 7))
    for anchor, accepted in cases:
        expected = list(range(anchor, anchor + accepted + 1))
        case = f"anchor={anchor}, accepted={accepted}"
        found = call(new_context, anchor, accepted, case=case)
        same_list(list(found) if isinstance(found, range) else found, expected, case)
    passed(new_context, len(cases))


def check_rows_per_token(rows_per_token: Callable) -> None:
    """`rows_per_token(block_size, tau, steps)`: drafter rows for each new token."""
    cases = ((8, 4.0, 1), (8, 4.0, 2), (16, 6.0, 4))
    for size, tau, steps in cases:
        case = f"block_size={size}, tau={tau}, steps={steps}"
        found = call(rows_per_token, size, tau, steps, case=case)
        same_number(found, size * steps / tau, case)
    passed(rows_per_token, len(cases))

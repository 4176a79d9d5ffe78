"""Checks of lesson 04, listening to the target.

Leaves out: models; the rules of conditioning on small lists.
"""

from __future__ import annotations

import math

from dflash_lab.course.checks.core import tried_on

Rows = list[list[float]]

# states[i][place] is a list of D numbers; entry 0 is the embedding.
_STATES = [[[10.0 * i + p, -i] for p in range(3)] for i in range(6)]


@tried_on([(36, 5), (8, 3), (8, 4), (10, 5), (30, 2)], what="feature")
def check_layer_ids(num_layers: int, n: int) -> list[int]:
    """`layer_ids(num_layers, n)`: evenly spaced, from 1 to num_layers - 3."""
    step = (num_layers - 4) / (n - 1)
    return [round(1 + i * step) for i in range(n)]


@tried_on(
    [(_STATES, [1, 3], 0), (_STATES, [0, 2, 4], 2), (_STATES, [3], 1)],
    what="number",
    say=lambda _, ids, place: f"layer_ids={ids}, place={place}",
)
def check_features(hidden_states: list[Rows], ids: list[int], place: int) -> list:
    """`features(hidden_states, layer_ids, place)`: states after layers, joined."""
    joined = []
    for layer in ids:
        joined += [float(x) for x in hidden_states[layer + 1][place]]
    return joined


@tried_on(
    [
        ([1.0, 2.0, 3.0, 4.0], [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, -1.0, 0.0]]),
        ([0.5, -1.0], [[2.0, 0.0], [0.0, 2.0], [1.0, 1.0]]),
    ],
    what="number",
)
def check_context_row(feature: list[float], fc: Rows) -> list[float]:
    """`context_row(feature, fc)`: fc times the feature, over its root mean square."""
    row = [sum(w * x for w, x in zip(line, feature, strict=True)) for line in fc]
    size = math.sqrt(sum(x * x for x in row) / len(row))
    return [x / size for x in row]


@tried_on(
    [
        ([1.0, 0.0], [[2.0, 1.0], [0.0, 3.0]], [[1.0, 1.0]]),
        ([0.5, -0.5, 1.0, 0.0], [[1.0, 0.0, 1.0, 0.0]], [[0.0, 2.0, 0.0, 1.0]] * 2),
    ],
    what="key",
)
def check_attention_weights(
    query: list[float], context_keys: Rows, block_keys: Rows
) -> list[float]:
    """`attention_weights(query, context_keys, block_keys)`: one softmax."""
    scores = []
    for key in [*context_keys, *block_keys]:
        dot = sum(q * k for q, k in zip(query, key, strict=True))
        scores.append(math.exp(dot / math.sqrt(len(query))))
    return [score / sum(scores) for score in scores]


@tried_on([(10, 0), (10, 3), (0, 7)])
def check_new_context(anchor: int, accepted: int) -> list[int]:
    """`new_context(anchor, accepted)`: places whose features a cycle adds."""
    return list(range(anchor, anchor + accepted + 1))


@tried_on([(8, 4.0, 1), (8, 4.0, 2), (16, 6.0, 4)])
def check_rows_per_token(block_size: int, tau: float, steps: int) -> float:
    """`rows_per_token(block_size, tau, steps)`: drafter rows for each new token."""
    return block_size * steps / tau

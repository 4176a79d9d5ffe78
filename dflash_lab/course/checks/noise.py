"""Checks of lesson 01, noise for words.

Leaves out: anything about models; these are rules on small lists.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from dflash_lab.course.checks.core import tried_on, try_cases

_MASK = 99


def _texts_to_mask() -> list[tuple]:
    rng = random.Random(0)
    cases = []
    for alpha in (0.0, 0.3, 0.75, 1.0):
        ids = [rng.randrange(50) for _ in range(8)]
        cases.append((ids, alpha, [rng.random() for _ in ids], _MASK))
    return cases


def _texts_to_denoise() -> list[tuple]:
    rng = random.Random(1)
    cases = []
    for alpha_s, alpha_t in ((1.0, 0.5), (0.5, 0.25), (0.25, 0.0), (0.4, 0.4)):
        ids = [rng.choice((_MASK, _MASK, rng.randrange(50))) for _ in range(10)]
        proposals = [rng.randrange(50) for _ in ids]
        draws = [rng.random() for _ in ids]
        cases.append((ids, proposals, draws, alpha_s, alpha_t, _MASK))
    return cases


@tried_on(
    _texts_to_mask(),
    say=lambda _, alpha, us, mask: f"alpha={alpha}, draws {[round(u, 2) for u in us]}",
)
def check_mask_words(
    ids: list[int], alpha: float, draws: list[float], mask: int
) -> list[int]:
    """`mask_words(ids, alpha, draws, mask)`: a token stays if draw < alpha."""
    return [t if u < alpha else mask for t, u in zip(ids, draws, strict=True)]


@tried_on([(0.05,), (0.3,), (0.5,), (0.9,), (1.0,)])
def check_weight(t: float) -> float:
    """`weight(t)` for alpha(t) = cos(pi t / 2): -alpha'(t) / (1 - alpha(t))."""
    step = 1e-6
    low, high = (math.cos(math.pi / 2 * (t + d)) for d in (-step, step))
    return (low - high) / (2 * step) / (1 - math.cos(math.pi / 2 * t))


@tried_on(
    [
        ([1.0, 2.0, 3.0, 4.0], [True, False, True, False], 1.0),
        ([0.5, 0.5], [False, False], 7.0),
        ([2.0, 8.0, 4.0], [True, True, True], 0.25),
    ]
)
def check_text_loss(nats: list[float], masked: list[bool], weight: float) -> float:
    """`text_loss(nats, masked, weight)`: weighted nats of masked places per token."""
    total = 0.0
    for loss, hidden in zip(nats, masked, strict=True):
        total += weight * loss if hidden else 0.0
    return total / len(nats)


@tried_on(
    _texts_to_denoise(),
    say=lambda ids, _, __, s, t, mask: f"from alpha={t} to alpha={s}, ids {ids}",
)
def check_reverse_step(
    ids: list[int],
    proposals: list[int],
    draws: list[float],
    alpha_s: float,
    alpha_t: float,
    mask: int,
) -> list[int]:
    """`reverse_step(ids, proposals, draws, alpha_s, alpha_t, mask)`: one step back.

    A masked token becomes its proposal if its draw is below
    (alpha_s - alpha_t) / (1 - alpha_t); everything else stays.
    """
    share = (alpha_s - alpha_t) / (1 - alpha_t)
    for place, token in enumerate(ids):
        if token == mask and draws[place] < share:
            ids[place] = proposals[place]
    return ids


def check_surest(surest: Callable) -> None:
    """`surest(confidence, masked, count)`: places to write next, surest first."""
    cases: tuple[tuple, ...] = (
        ([0.1, 0.9, 0.5, 0.7], [True, False, True, True], 2, [3, 2]),
        ([0.3, 0.2], [True, True], 1, [0]),
        ([0.2, 0.4, 0.6], [True, True, False], 5, [1, 0]),
        ([0.9, 0.8], [False, False], 1, []),
    )
    try_cases(surest, "confidence masked count", cases)

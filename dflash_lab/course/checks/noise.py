"""Checks of lesson 01, noise for words.

Leaves out: anything about models; these are rules on small lists.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from dflash_lab.course.checks.core import call, passed, same_list, same_number

_MASK = 99


def check_mask_words(mask_words: Callable) -> None:
    """`mask_words(ids, alpha, draws, mask)`: a token stays if draw < alpha."""
    cases = 0
    rng = random.Random(0)
    for alpha in (0.0, 0.3, 0.75, 1.0):
        ids = [rng.randrange(50) for _ in range(8)]
        draws = [rng.random() for _ in ids]
        expected = [t if u < alpha else _MASK for t, u in zip(ids, draws, strict=True)]
        case = f"alpha={alpha}, draws {[round(u, 2) for u in draws]}"
        same_list(call(mask_words, ids, alpha, draws, _MASK, case=case), expected, case)
        cases += 1
    passed(mask_words, cases)


def check_weight(weight: Callable) -> None:
    """`weight(t)` for alpha(t) = cos(pi t / 2): -alpha'(t) / (1 - alpha(t))."""
    step = 1e-6
    times = (0.05, 0.3, 0.5, 0.9, 1.0)
    for t in times:
        low, high = (math.cos(math.pi / 2 * (t + d)) for d in (-step, step))
        expected = (low - high) / (2 * step) / (1 - math.cos(math.pi / 2 * t))
        case = f"t={t}"
        same_number(call(weight, t, case=case), expected, case, 1e-4)
    passed(weight, len(times))


def check_text_loss(text_loss: Callable) -> None:
    """`text_loss(nats, masked, weight)`: weighted nats of masked places per token."""
    cases = (
        ([1.0, 2.0, 3.0, 4.0], [True, False, True, False], 1.0),
        ([0.5, 0.5], [False, False], 7.0),
        ([2.0, 8.0, 4.0], [True, True, True], 0.25),
    )
    for nats, masked, weight in cases:
        total = 0.0
        for loss, hidden in zip(nats, masked, strict=True):
            total += weight * loss if hidden else 0.0
        case = f"nats={nats}, masked={masked}, weight={weight}"
        found = call(text_loss, nats, masked, weight, case=case)
        same_number(found, total / len(nats), case)
    passed(text_loss, len(cases))


def check_reverse_step(reverse_step: Callable) -> None:
    """`reverse_step(ids, proposals, draws, alpha_s, alpha_t, mask)`: one step back.

    A masked token becomes its proposal if its draw is below
    (alpha_s - alpha_t) / (1 - alpha_t); everything else stays.
    """
    rng = random.Random(1)
    grid = ((1.0, 0.5), (0.5, 0.25), (0.25, 0.0), (0.4, 0.4))
    for alpha_s, alpha_t in grid:
        ids = [rng.choice((_MASK, _MASK, rng.randrange(50))) for _ in range(10)]
        proposals = [rng.randrange(50) for _ in ids]
        draws = [rng.random() for _ in ids]
        share = (alpha_s - alpha_t) / (1 - alpha_t)
        expected = list(ids)
        for place, token in enumerate(ids):
            if token == _MASK and draws[place] < share:
                expected[place] = proposals[place]
        case = f"from alpha={alpha_t} to alpha={alpha_s}, ids {ids}"
        found = call(
            reverse_step, ids, proposals, draws, alpha_s, alpha_t, _MASK, case=case
        )
        same_list(found, expected, case)
    passed(reverse_step, len(grid))


def check_surest(surest: Callable) -> None:
    """`surest(confidence, masked, count)`: places to write next, surest first."""
    cases = (
        ([0.1, 0.9, 0.5, 0.7], [True, False, True, True], 2, [3, 2]),
        ([0.3, 0.2], [True, True], 1, [0]),
        ([0.2, 0.4, 0.6], [True, True, False], 5, [1, 0]),
        ([0.9, 0.8], [False, False], 1, []),
    )
    for confidence, masked, count, expected in cases:
        case = f"confidence={confidence}, masked={masked}, count={count}"
        found = call(surest, confidence, masked, count, case=case)
        same_list(found, expected, case)
    passed(surest, len(cases))

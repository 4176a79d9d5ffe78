"""Intervals for ratios of sums, by resampling prompts.

Nearly every figure here is a ratio of two sums over prompts: tau is tokens over
cycles, speed is tokens over seconds. Cycles of one prompt resemble each other, so
prompts are what is resampled, whole. Two methods on the same prompts are compared with
the same draws, which takes the difficulty of the prompts out of the comparison.

Leaves out: other statistics, and corrections for few prompts; below about ten prompts
an interval is too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_lab.errors import DFlashLabError

DRAWS = 4000


@dataclass(frozen=True)
class Interval:
    """A figure with its bootstrap interval.

    Attributes:
        value: of all prompts.
        low, high: bounds.
        level: share of resamples between them.
    """

    value: float
    low: float
    high: float
    level: float = 0.95

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"

    def excludes(self, value: float) -> bool:
        """Whether a value lies outside."""
        return not self.low <= value <= self.high


def ratio_interval(
    numerators: Sequence[float],
    denominators: Sequence[float],
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Sum of numerators over sum of denominators, one of each per prompt.

    Args:
        numerators: such as tokens.
        denominators: such as cycles or seconds.
        level: of the interval.
        seed: of the draws.

    Raises:
        DFlashLabError: no prompt, or lists of unequal lengths.
    """
    top, bottom = _checked(numerators, denominators)
    weights = _draws(len(top), seed)
    return _interval(
        top.sum() / bottom.sum(), weights @ top / (weights @ bottom), level
    )


def paired_ratio_interval(
    numerators: Sequence[float],
    denominators: Sequence[float],
    base_numerators: Sequence[float],
    base_denominators: Sequence[float],
    level: float = 0.95,
    seed: int = 0,
    difference: bool = False,
) -> Interval:
    """One method's ratio over a base's, on the same prompts in the same order.

    Args:
        numerators, denominators: of the method, one of each per prompt.
        base_numerators, base_denominators: of the base.
        level: of the interval.
        seed: of the draws.
        difference: the method's ratio minus the base's instead.

    Raises:
        DFlashLabError: no prompt, or lists of unequal lengths.
    """
    top, bottom = _checked(numerators, denominators)
    base_top, base_bottom = _checked(base_numerators, base_denominators)
    if len(top) != len(base_top):
        raise DFlashLabError(
            f"{len(top)} prompts of the method and {len(base_top)} of the base cannot "
            "be paired; run both on the same prompts"
        )
    weights = _draws(len(top), seed)
    mine, base = weights @ top / (weights @ bottom), weights @ base_top
    base = base / (weights @ base_bottom)
    value, base_value = top.sum() / bottom.sum(), base_top.sum() / base_bottom.sum()
    if difference:
        return _interval(value - base_value, mine - base, level)
    return _interval(value / base_value, mine / base, level)


def _checked(numerators, denominators) -> tuple[np.ndarray, np.ndarray]:
    top, bottom = np.asarray(numerators, float), np.asarray(denominators, float)
    if top.ndim != 1 or top.shape != bottom.shape or len(top) == 0:
        raise DFlashLabError(
            f"{top.shape} numerators and {bottom.shape} denominators: one of each is "
            "needed per prompt, and at least one prompt"
        )
    if not (bottom >= 0).all() or bottom.sum() <= 0:
        raise DFlashLabError("denominators must not be negative, nor all be 0")
    return top, bottom


def _draws(count: int, seed: int) -> np.ndarray:
    """(draws, prompts), how often each prompt is in a resample."""
    noise = np.random.default_rng(seed)
    return noise.multinomial(count, [1 / count] * count, size=DRAWS).astype(float)


def _interval(value: float, resampled: np.ndarray, level: float) -> Interval:
    if not 0 < level < 1:
        raise DFlashLabError(f"level {level} must lie between 0 and 1")
    resampled = resampled[np.isfinite(resampled)]
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(value), float(low), float(high), level)

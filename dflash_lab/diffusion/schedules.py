"""Noise schedules: which share of a text is still clean at time t.

A schedule gives alpha(t), falling from 1 at t = 0 (text) to 0 at t = 1 (noise only),
and its derivative. For the absorbing process 1 - alpha(t) is the chance that a token is
masked, and the objective weights a masked token by -alpha'(t) / (1 - alpha(t))
(Sahoo et al. 2024, "Simple and effective masked diffusion language models", eq. 10).

Leaves out: schedules that are learned, or that differ between tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_lab.errors import DFlashLabError

# Times are kept this far from 0, where the weight of the objective has its pole.
EPS = 1e-4


@dataclass(frozen=True)
class Schedule:
    """A named schedule.

    Args:
        name: `linear` (1 - t), `cosine` (cos(pi t / 2)), or `power` (1 - t**exponent).
        exponent: of `power`; above 1 it keeps texts clean for longer.

    Raises:
        DFlashLabError: an unknown name, or an exponent that is not positive.
    """

    name: str = "linear"
    exponent: float = 2.0

    def __post_init__(self):
        if self.name not in ("linear", "cosine", "power"):
            raise DFlashLabError(
                f"no schedule {self.name!r}; choose linear, cosine or power"
            )
        if self.exponent <= 0:
            raise DFlashLabError(f"exponent is {self.exponent}; it must be above 0")

    def masked_share(self, t: Tensor) -> Tensor:
        """1 - alpha(t) at times t in [0, 1]; any shape, exact near 0."""
        if self.name == "linear":
            return t.clone()
        if self.name == "cosine":
            return 2 * torch.sin(t * (math.pi / 4)) ** 2
        return t**self.exponent

    def alpha(self, t: Tensor) -> Tensor:
        """Share of clean tokens at times t in [0, 1]; any shape."""
        return 1 - self.masked_share(t)

    def derivative(self, t: Tensor) -> Tensor:
        """d alpha / dt at times t; any shape, never positive."""
        if self.name == "linear":
            return torch.full_like(t, -1.0)
        if self.name == "cosine":
            return -torch.sin(t * (math.pi / 2)) * (math.pi / 2)
        return -self.exponent * t ** (self.exponent - 1)

    def weight(self, t: Tensor) -> Tensor:
        """-alpha'(t) / (1 - alpha(t)): what a masked token counts in the objective."""
        t = t.clamp(min=EPS)
        return -self.derivative(t) / self.masked_share(t)


def spread_times(
    count: int, generator: torch.Generator, device: torch.device | None = None
) -> Tensor:
    """One time for each text of a batch, one in each of `count` equal intervals.

    Independent times would do as well; spread ones make the loss of a batch less noisy.

    Returns:
        (count,) float32 in [EPS, 1).
    """
    offset = torch.rand(1, generator=generator)
    times = (torch.arange(count) + offset) / count
    # The order is drawn, so that no text of a batch is always the cleanest.
    times = times[torch.randperm(count, generator=generator)]
    return times.clamp(min=EPS).to(device)

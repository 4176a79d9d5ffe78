"""Forward processes: how noise comes over the words of a text.

A process acts on each token alone. `absorbing` turns tokens into a mask that never
leaves; `uniform` replaces them by any token. Both are interpolations: at time t a token
is itself with the share alpha(t), else noise (Austin et al. 2021, "Structured denoising
diffusion models in discrete state-spaces").

Leaves out: processes that use a distance between tokens, and texts of changing length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_lab.errors import DFlashLabError


@dataclass(frozen=True)
class Process:
    """A forward process over `size` states per token.

    Args:
        kind: `absorbing` or `uniform`.
        size: number of states M; with `absorbing` the mask is one of them.
        mask_token_id: the mask's state; only for `absorbing`.

    Raises:
        DFlashLabError: an unknown kind, or a mask outside the states.
    """

    kind: str
    size: int
    mask_token_id: int | None = None

    def __post_init__(self):
        if self.kind not in ("absorbing", "uniform"):
            raise DFlashLabError(
                f"no process {self.kind!r}; choose absorbing or uniform"
            )
        mask = -1 if self.mask_token_id is None else self.mask_token_id
        if self.kind == "absorbing" and not 0 <= mask < self.size:
            raise DFlashLabError(
                f"mask_token_id is {self.mask_token_id}; the absorbing process needs "
                f"one from 0 to {self.size - 1}"
            )

    def noise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """(M,) distribution of a token that is all noise."""
        if self.kind == "uniform":
            return torch.full((self.size,), 1 / self.size, dtype=dtype)
        probs = torch.zeros(self.size, dtype=dtype)
        probs[self.mask_token_id] = 1
        return probs

    def matrix(self, kept: float, dtype: torch.dtype = torch.float64) -> Tensor:
        """(M, M) chances of going from row to column.

        Args:
            kept: alpha(t) / alpha(s) for a step from time s to time t; alpha(t) for the
                whole way from the text.
            dtype: of the result.
        """
        clean = torch.eye(self.size, dtype=dtype)
        return kept * clean + (1 - kept) * self.noise(dtype).expand(self.size, -1)

    def sample(self, ids: Tensor, alpha: Tensor, generator: torch.Generator) -> Tensor:
        """Noise texts.

        Args:
            ids: (B, S) int64, clean.
            alpha: share of clean tokens, broadcast against ids; (B, 1) for one time
                each.
            generator: of the draws.

        Returns:
            (B, S) int64. Under `uniform` a replaced token may come out as it was.
        """
        draw = torch.rand(ids.shape, generator=generator).to(ids.device)
        replaced = draw >= alpha
        if self.mask_token_id is not None and self.kind == "absorbing":
            return torch.where(replaced, self.mask_token_id, ids)
        other = torch.randint(self.size, ids.shape, generator=generator)
        return torch.where(replaced, other.to(ids.device), ids)

    def posterior(self, alpha_s: float, alpha_t: float) -> Tensor:
        """Distribution of a token at time s < t, given it at time t and in the text.

        Bayes' rule: q(x_s | x_t, x_0) = q(x_t | x_s) q(x_s | x_0) / q(x_t | x_0).

        Args:
            alpha_s: share of clean tokens at the earlier time.
            alpha_t: at the later time, not above alpha_s.

        Returns:
            (M, M, M) float64, axes x_0, x_t, x_s. Pairs that cannot happen have zeros.
        """
        if alpha_t > alpha_s:
            raise DFlashLabError(
                f"alpha rises from {alpha_s} to {alpha_t}; give the earlier time first"
            )
        step = self.matrix(alpha_t / alpha_s if alpha_s > 0 else 0.0)
        early = self.matrix(alpha_s)
        joint = early[:, None, :] * step.T[None, :, :]  # (x_0, x_t, x_s)
        total = joint.sum(-1, keepdim=True)
        return torch.where(total > 0, joint / total.clamp(min=1e-300), 0.0)

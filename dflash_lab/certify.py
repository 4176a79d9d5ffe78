"""Is an output really the target's own? Equality, or a certificate for each tie.

In float32 speculative and plain decoding agree token by token. In bfloat16 a pass over
K rows rounds otherwise than K passes over one row, and where the two best tokens are
nearly equal either may win. `certify` walks along an output one token at a time, as
plain decoding would, and checks at every step that the token taken is the target's
choice, or that it ties with it within the dtype's tolerance.

Leaves out: making the two kernels agree bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash_lab.sampling import (
    STREAM_TARGET,
    Sampling,
    gumbel_noise,
    warped_log_probs,
)
from dflash_lab.target import Target

# Largest gap between two logits that counts as a tie, as a multiple of the dtype's
# epsilon times the size of the logits. Rounding errors of tens of layers add up; the
# constant was chosen from measured differences between one-row and K-row passes.
TIE_FACTOR = {torch.float64: 64.0, torch.float32: 64.0, torch.bfloat16: 4.0}


@dataclass(frozen=True)
class Tie:
    """One place where the output took another token than plain decoding.

    Attributes:
        index: place in the output.
        token: what the output has there.
        choice: what a one-row pass chooses.
        gap: by how much the scores differ.
        tolerance: largest gap that counts as a tie.
    """

    index: int
    token: int
    choice: int
    gap: float
    tolerance: float

    @property
    def certified(self) -> bool:
        """True if rounding explains the difference."""
        return self.gap <= self.tolerance


@torch.inference_mode()
def certify(
    target: Target,
    prompt: Sequence[int],
    output: Sequence[int],
    sampling: Sampling | None = None,
) -> list[Tie]:
    """Every place where an output differs from the target's one-row choice.

    Args:
        target: the target.
        prompt: ids of the prompt.
        output: ids to check.
        sampling: as used for the output.

    Returns:
        The differences; an empty list proves that plain decoding, led along this
        output, takes every one of its tokens.
    """
    sampling = sampling or Sampling()
    seed = torch.tensor([sampling.seed])
    cache = target.new_cache(1, len(prompt) + len(output))
    ids, start = list(prompt), 0
    differences = []
    for index, token in enumerate(output):
        positions = torch.arange(start, start + len(ids))[None]
        logits = target.forward(torch.tensor([ids]), positions, cache, logits_to_keep=1)
        scores = logits[0, 0].float()
        scale = float(scores.abs().max())
        if not sampling.greedy:
            where = torch.tensor([[len(prompt) + index]])
            noise = gumbel_noise(seed, where, len(scores), STREAM_TARGET)[0, 0]
            scores = warped_log_probs(logits[0, 0], sampling) + noise.to(scores.device)
            scale /= sampling.temperature
        choice = int(scores.argmax())
        if choice != token:
            gap = float(scores[choice] - scores[token])
            tolerance = TIE_FACTOR[target.dtype] * torch.finfo(target.dtype).eps * scale
            differences.append(Tie(index, token, choice, gap, tolerance))
        start += len(ids)
        ids = [token]
    return differences

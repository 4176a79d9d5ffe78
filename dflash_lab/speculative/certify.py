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

from dflash_lab.errors import DFlashLabError
from dflash_lab.speculative.sampling import (
    STREAM_TARGET,
    Sampling,
    gumbel_noise,
    warped_log_probs,
)
from dflash_lab.target.target import Target

# Largest gap between two logits that counts as a tie, as a multiple of the dtype's
# epsilon times the larger of the two. In bfloat16 the head's output alone is rounded to
# one epsilon; on SmolLM2-135M the gap of the two best logits was seen to change by up
# to 0.25 at logits around 20, 1.6 epsilons, between passes over one row and several.
TIE_FACTOR = {torch.float64: 64.0, torch.float32: 64.0, torch.bfloat16: 2.0}


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
        sampling: as used for the output; sampled text only under the rule `match`.

    Returns:
        The differences; an empty list proves that plain decoding, led along this
        output, takes every one of its tokens.
    """
    sampling = sampling or Sampling()
    if not sampling.greedy and sampling.rule != "match":
        raise DFlashLabError(
            f"text sampled under the rule {sampling.rule!r} follows the target's "
            "distribution, not its draws; only rule 'match' can be compared token by "
            "token"
        )
    seed = torch.tensor([sampling.seed])
    cache = target.new_cache(1, len(prompt) + len(output))
    ids, start = list(prompt), 0
    differences = []
    for index, token in enumerate(output):
        positions = torch.arange(start, start + len(ids))[None]
        logits = target.forward(torch.tensor([ids]), positions, cache, logits_to_keep=1)
        raw = scores = logits[0, 0].float()
        if not sampling.greedy:
            where = torch.tensor([[len(prompt) + index]])
            noise = gumbel_noise(seed, where, len(scores), STREAM_TARGET)[0, 0]
            scores = warped_log_probs(logits[0, 0], sampling) + noise.to(scores.device)
        choice = int(scores.argmax())
        if choice != token:
            gap = float(scores[choice] - scores[token])
            scale = float(raw[[choice, token]].abs().max()) / (
                sampling.temperature or 1
            )
            tolerance = TIE_FACTOR[target.dtype] * torch.finfo(target.dtype).eps * scale
            differences.append(Tie(index, token, choice, gap, tolerance))
        start += len(ids)
        ids = [token]
    return differences


def explain(
    target: Target,
    prompt: Sequence[int],
    output: Sequence[int],
    plain: Sequence[int],
    sampling: Sampling | None = None,
) -> list[Tie]:
    """The ties behind two outputs that differ.

    Args:
        target, prompt, output, sampling: as for `certify`.
        plain: what plain decoding gave.

    Returns:
        Differences of `output` from the one-row choices; if it has none, those of
        `plain`, whose kernels may round otherwise than a pass without mask. Empty only
        for equal outputs, or where one is the beginning of the other.
    """
    if list(output) == list(plain):
        return []
    found = certify(target, prompt, output, sampling)
    return found or certify(target, prompt, plain, sampling)

"""From logits to tokens: warpers, and noise that belongs to a position.

Sampling adds Gumbel noise to log-probabilities and takes the largest (the Gumbel-max
trick), which draws exactly from the distribution. Here the noise is a hash of (seed,
stream, position, token) instead of the next number of a generator. So the draw at a
position does not depend on how many passes it took to get there, and speculative
decoding returns, for the same seed, the very text that plain decoding returns.

Leaves out: penalties that depend on earlier text, and the acceptance rules
(`acceptance.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_lab.errors import DFlashLabError

# Independent uses of randomness at one position.
STREAM_TARGET, STREAM_DRAFT, STREAM_COIN = 0, 1, 2
RULES = ("match", "speculative")


@dataclass(frozen=True)
class Sampling:
    """How the target chooses its tokens, and how drafts are judged.

    Args:
        temperature: 0 for greedy decoding, otherwise the divisor of the logits.
        top_k: keep the k largest logits; 0 keeps all.
        top_p: keep the smallest set of tokens with at least this probability.
        seed: of the position-keyed noise. Under the rule `match` the same seed gives
            the text of plain decoding.
        rule: `match` accepts a draft that equals the target's own sample;
            `speculative` lets the drafter sample too and accepts with min(1, p / q),
            which keeps the target's distribution but not plain decoding's draws. Greedy
            decoding is the same under both.

    Raises:
        DFlashLabError: a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    rule: str = "match"

    def __post_init__(self):
        warm = 1e-4 <= self.temperature < float("inf")
        if self.temperature != 0 and not warm:
            raise DFlashLabError(
                f"temperature {self.temperature} is neither 0 (greedy) nor a finite "
                "number of 0.0001 or more"
            )
        if not -(2**63) <= self.seed < 2**63:
            raise DFlashLabError(f"seed {self.seed} does not fit 64 bits")
        if not 0 < self.top_p <= 1:
            raise DFlashLabError(
                f"top_p {self.top_p} is outside (0, 1]; use 1 to keep every token"
            )
        if self.top_k < 0:
            raise DFlashLabError(
                f"top_k {self.top_k} is negative; use 0 to keep all tokens"
            )
        if self.rule not in RULES:
            raise DFlashLabError(
                f"unknown acceptance rule {self.rule!r}; choose {' or '.join(RULES)}"
            )

    @property
    def greedy(self) -> bool:
        """True if the target takes its most likely token."""
        return self.temperature == 0


def warped_log_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities after temperature, top-k and top-p, in that order.

    The order and the treatment of ties are those of `transformers`' warpers, so that
    the distribution is the one of `generate`.

    Args:
        logits: (..., V), any float dtype.
        sampling: with temperature > 0.

    Returns:
        (..., V) normalised, -inf where filtered; float64 for float64 logits,
        otherwise float32 (a distribution rounded to bfloat16 is another one).
    """
    scores = logits if logits.dtype == torch.float64 else logits.float()
    scores = scores / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        smallest = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < smallest, -torch.inf)
    if sampling.top_p < 1:
        ascending, order = scores.sort(dim=-1)
        mass_up_to = ascending.softmax(dim=-1).cumsum(dim=-1)
        drop = mass_up_to <= 1 - sampling.top_p
        drop[..., -1] = False  # the most likely token always stays
        scores = scores.masked_fill(drop.scatter(-1, order, drop), -torch.inf)
    return scores.log_softmax(dim=-1)


def uniform_noise(seeds: Tensor, positions: Tensor, size: int, stream: int) -> Tensor:
    """Uniform numbers in (0, 1) that depend on nothing but their keys.

    Args:
        seeds: (B,) int64, one per row.
        positions: (B, T) int64, absolute positions.
        size: numbers per position.
        stream: which use of randomness, one of the STREAM constants.

    Returns:
        (B, T, size) float64; never exactly 0 or 1.
    """
    # Two 32-bit keys per position, each with its own way from seed and position. One
    # would not do: two positions whose keys share their upper half would get
    # permutations of the same numbers.
    keys = []
    for salt in (0x9E3779B9, 0xC2B2AE35):
        word = _mix(seeds + salt & _MASK32) ^ (seeds >> 32 & _MASK32)
        word = _mix(word + salt * (stream + 1) & _MASK32)
        keys.append(_mix(word[:, None] + 0x85EBCA6B * positions & _MASK32))
    key, other_key = keys
    lane = torch.arange(size, device=positions.device)
    bits = _mix(_mix(lane ^ key[..., None]) ^ other_key[..., None])
    return (bits.double() + 0.5) / 2**32


def gumbel_noise(seeds: Tensor, positions: Tensor, size: int, stream: int) -> Tensor:
    """Standard Gumbel noise, keyed like `uniform_noise`; (B, T, size) float64."""
    return uniform_noise(seeds, positions, size, stream).log_().neg_().log_().neg_()


def gumbel_sample(log_probs: Tensor, noise: Tensor) -> Tensor:
    """Tokens drawn by the Gumbel-max trick: (..., V) and (..., V) -> (...) int64."""
    return (log_probs + noise).argmax(dim=-1)


def inverse_cdf_sample(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """Tokens drawn with one uniform number each: (..., V) and (...) -> (...) int64.

    Cheaper than a whole row of Gumbel noise, for writing corpora in large batches.
    """
    mass = log_probs.double().exp().cumsum(dim=-1)
    # Scaled by the total, so that rounding cannot leave a number beyond the last token.
    threshold = uniform[..., None] * mass[..., -1:]
    return torch.searchsorted(mass, threshold, right=True)[..., 0]


def sample_tokens(
    logits: Tensor, positions: Tensor, sampling: Sampling, seeds: Tensor
) -> Tensor:
    """The target's own choice at every row, greedy or sampled.

    Args:
        logits: (B, T, V); row t predicts the token at `positions[t]`.
        positions: (B, T) int64, absolute position of the token being chosen.
        sampling: greedy or not, with its warpers.
        seeds: (B,) int64.

    Returns:
        (B, T) int64.

    Raises:
        DFlashLabError: NaN among the logits.
    """
    check_finite(logits)
    return sample_tokens_unchecked(logits, positions, sampling, seeds)


def sample_tokens_unchecked(
    logits: Tensor, positions: Tensor, sampling: Sampling, seeds: Tensor
) -> Tensor:
    """`sample_tokens` without the look at the logits, for which a device would wait."""
    if sampling.greedy:
        return most_likely(logits)
    positions = positions.to(logits.device)
    noise = gumbel_noise(
        seeds.to(logits.device), positions, logits.shape[-1], STREAM_TARGET
    )
    return gumbel_sample(warped_log_probs(logits, sampling), noise)


def most_likely(logits: Tensor) -> Tensor:
    """argmax over the last dimension, the first of equals."""
    # On a CPU `max` is four times faster than `argmax` over a large vocabulary.
    return logits.max(dim=-1).indices


def check_finite(logits: Tensor, whose: str = "target") -> None:
    """Refuse NaN logits: every comparison with them is false, so decoding would go on
    and emit garbage."""
    if logits.amax(dim=-1).isnan().any():
        raise nan_error(whose, logits.dtype)


def nan_error(whose: str, dtype: torch.dtype) -> DFlashLabError:
    """What to raise where NaN was found among logits."""
    return DFlashLabError(
        f"the {whose}'s logits contain NaN; its weights are damaged or overflow in "
        f"{dtype}; load it in float32 or bfloat16"
    )


_MASK32 = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """Scramble 32-bit words held in int64: a bijection in which every input bit
    changes every output bit about half of the time."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D & _MASK32
    x = x ^ (x >> 15)
    x = x * 0x846CA68B & _MASK32
    return x ^ (x >> 16)

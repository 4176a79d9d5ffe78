"""Noise by position, warpers against `transformers`, and what they draw."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dflash_lab.errors import DFlashLabError
from dflash_lab.speculative.sampling import (
    STREAM_DRAFT,
    STREAM_TARGET,
    Sampling,
    gumbel_noise,
    gumbel_sample,
    inverse_cdf_sample,
    sample_tokens,
    uniform_noise,
    warped_log_probs,
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 1e-9),
        ("seed", 2**63),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("rule", "typical"),
    ],
)
def test_values_out_of_range_are_refused(field, value):
    with pytest.raises(DFlashLabError, match=str(value).replace("-", "\\-")):
        Sampling(**{field: value})


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.7),
        Sampling(1.0, top_k=5),
        Sampling(1.3, top_p=0.7),
        Sampling(0.5, top_k=9, top_p=0.9),
        Sampling(1.0, top_p=1e-6),
        Sampling(1.0, top_k=10_000),
    ],
    ids=str,
)
def test_warpers_equal_those_of_transformers(sampling):
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(0)) * 3
    logits[:, 7] = logits[:, 3]  # ties
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    expected = scores.log_softmax(dim=-1)
    torch.testing.assert_close(warped_log_probs(logits, sampling), expected)


def test_noise_depends_on_its_keys_and_nothing_else():
    seeds = torch.tensor([3, 4])
    positions = torch.tensor([[10, 11, 12], [10, 11, 12]])
    together = gumbel_noise(seeds, positions, 100, STREAM_TARGET)
    for b in range(2):
        for t in range(3):
            alone = gumbel_noise(
                seeds[b : b + 1], positions[b : b + 1, t : t + 1], 100, STREAM_TARGET
            )
            assert torch.equal(alone[0, 0], together[b, t])
    other = gumbel_noise(seeds, positions, 100, STREAM_DRAFT)
    flat = torch.cat([together.flatten(), other.flatten()])
    assert len(flat.unique()) == len(flat)
    larger = torch.tensor([3 + 2**32, 4])  # the seed's upper half counts too
    assert not torch.equal(
        gumbel_noise(larger, positions, 100, STREAM_TARGET)[0], together[0]
    )


def test_noise_is_uniform_and_independent_across_positions():
    draws = uniform_noise(
        torch.tensor([0]), torch.arange(400)[None], 500, STREAM_TARGET
    )[0]
    assert draws.min() > 0 and draws.max() < 1
    count = draws.numel()
    cells = torch.histc(draws, bins=64, min=0, max=1)
    chi2 = float(((cells - count / 64) ** 2 / (count / 64)).sum())
    assert chi2 < 63 + 5 * math.sqrt(2 * 63)
    centred = draws - 0.5
    for other in (centred.roll(1, 0), centred.roll(1, 1), centred.roll((1, 1), (0, 1))):
        correlation = float((centred * other).mean() * 12)
        assert abs(correlation) < 5 / math.sqrt(count)


@pytest.mark.parametrize("method", ["gumbel", "inverse"])
def test_draws_follow_the_distribution(method):
    probs = torch.tensor([0.5, 0.0, 0.2, 0.05, 0.25], dtype=torch.float64)
    count = 20_000
    seeds, positions = torch.zeros(1, dtype=torch.long), torch.arange(count)[None]
    log_probs = probs.log().expand(1, count, -1)
    if method == "gumbel":
        noise = gumbel_noise(seeds, positions, 5, STREAM_TARGET)
        tokens = gumbel_sample(log_probs, noise)
    else:
        noise = uniform_noise(seeds, positions, 1, STREAM_TARGET)[..., 0]
        tokens = inverse_cdf_sample(log_probs, noise)
    seen = torch.bincount(tokens.flatten(), minlength=5).double() / count
    assert seen[1] == 0
    assert float((seen - probs).abs().max()) < 5 * math.sqrt(0.25 / count)


def test_nan_logits_are_refused():
    logits = torch.zeros(1, 2, 5)
    logits[0, 1, 3] = float("nan")
    with pytest.raises(DFlashLabError, match="NaN"):
        sample_tokens(
            logits, torch.zeros(1, 2).long(), Sampling(), torch.zeros(1).long()
        )

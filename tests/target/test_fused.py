"""Fused passes give what the modules give: logits, features, caches, drafts."""

from __future__ import annotations

import pytest
import torch
from helpers import random_drafter, random_target
from torch.nn import functional as F
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dflash_lab.conditioning.attention import _attend_folded, attend
from dflash_lab.conditioning.cache import PositionCache
from dflash_lab.target import packed
from dflash_lab.target.fused import FusedDrafter, FusedTarget, as_fast_drafter, can_fuse
from dflash_lab.target.packed import PackedLinear
from dflash_lab.target.target import Target

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama with biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True}),
    "llama 3 rope": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mistral with a window": (
        MistralForCausalLM,
        MistralConfig,
        {"sliding_window": 7, "head_dim": 8},
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "qwen3 with windows": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 2,
        },
    ),
}


def make_model(name, dtype=torch.float32):
    kind, config, changes = MODELS[name]
    torch.manual_seed(0)
    model = kind(config(**{**SHAPE, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).eval()


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_logits_features_and_cache_equal_those_of_the_modules(name, dtype):
    model = make_model(name, dtype)
    assert can_fuse(model)
    plain, fused = Target(model), FusedTarget(model)
    exact = dtype == torch.float32
    close = {"rtol": 1e-4, "atol": 1e-4} if exact else {"rtol": 0.1, "atol": 0.1}
    caches = [target.new_cache(2, 40) for target in (plain, fused)]
    noise = torch.Generator().manual_seed(0)
    steps = (
        # a prompt of one row, then of the other, then blocks of unequal starts
        (torch.randint(61, (1, 20), generator=noise), [[0]], torch.tensor([0]), 1),
        (torch.randint(61, (1, 12), generator=noise), [[0]], torch.tensor([1]), 0),
        (torch.randint(61, (2, 5), generator=noise), [[20], [12]], None, 0),
        (
            torch.randint(61, (2, 5), generator=noise),
            [[22], [17]],
            None,
            torch.tensor([4, 1]),
        ),
    )
    with plain.tap((1, 3)) as heard, fused.tap((1, 3)) as fused_heard:
        for ids, start, rows, keep in steps:
            positions = torch.tensor(start) + torch.arange(ids.shape[1])
            found, expected = (
                target.forward(ids, positions, cache, rows, keep)
                for target, cache in zip((fused, plain), reversed(caches), strict=True)
            )
            assert found.shape == expected.shape and found.dtype == dtype
            torch.testing.assert_close(found, expected, **close)
            torch.testing.assert_close(fused_heard.take(), heard.take(), **close)
    for layer in range(5):
        pairs = [cache.read(layer, 27) for cache in caches]
        for a, b in zip(*pairs, strict=True):
            torch.testing.assert_close(a[0], b[0], **close)
            torch.testing.assert_close(a[1, :, :22], b[1, :, :22], **close)


def test_other_architectures_run_as_their_modules():
    model = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=61,
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=48,
        )
    )
    assert not can_fuse(model)
    for change in (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        {"mlp_bias": True},
        {"hidden_act": "gelu"},
    ):
        model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **change}))
        assert not can_fuse(model), change
    model = LlamaForCausalLM._from_config(
        LlamaConfig(**SHAPE), attn_implementation="eager"
    )
    assert not can_fuse(model)

    class Changed(LlamaForCausalLM):
        pass

    assert not can_fuse(Changed(LlamaConfig(**SHAPE)))


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"causal": True},
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4},
    ],
)
@torch.inference_mode()
def test_the_fused_drafter_equals_its_modules(target, overrides):
    drafter = random_drafter(target, **overrides)
    fused = as_fast_drafter(drafter)
    assert isinstance(fused, FusedDrafter)
    noise = torch.Generator().manual_seed(0)
    caches = [PositionCache(2, 40), PositionCache(2, 40)]
    for row, length in enumerate((9, 6)):
        features = torch.randn(1, length, drafter.fc.in_features, generator=noise)
        for model, cache in zip((drafter, fused), caches, strict=True):
            positions = torch.arange(length)[None]
            model.append_context(features, positions, cache, torch.tensor([row]))
    block = torch.randn(2, 6, drafter.config.hidden_size, generator=noise)
    start = torch.tensor([9, 6])
    found, expected = (
        model.draft(block, start, cache)
        for model, cache in zip((fused, drafter), reversed(caches), strict=True)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for cache in caches:
        cache.keep_rows(torch.tensor([0]))
    alone = fused.draft(block[:1], start[:1], caches[1])
    torch.testing.assert_close(alone, expected[:1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 4, 40])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_products_equal_plain_ones(dtype, rows, bias, monkeypatch):
    monkeypatch.setattr(packed, "SMALL_WEIGHT", 1)
    noise = torch.Generator().manual_seed(0)
    sizes = (24, 8, 40)
    weights = [torch.randn(n, 32, generator=noise).to(dtype) for n in sizes]
    biases = [None for _ in sizes]
    if bias:
        biases = [torch.randn(n, generator=noise).to(dtype) for n in sizes]
    x = torch.randn(1, rows, 32, generator=noise).to(dtype)
    pairs = zip(weights, biases, strict=True)
    expected = torch.cat([F.linear(x, w, b) for w, b in pairs], dim=-1)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for copy in (True, False):
        product = PackedLinear(weights, biases, copy)
        torch.testing.assert_close(product(x), expected, rtol=tolerance, atol=1e-4)
        assert product.packed == (copy and packed.can_pack(weights[0]))


def test_packing_is_left_out_where_it_cannot_be(monkeypatch):
    weight = torch.randn(8, 8)
    assert not PackedLinear([weight]).packed  # too small to gain
    monkeypatch.setattr(packed, "SMALL_WEIGHT", 64)
    assert PackedLinear([weight]).packed == torch.backends.mkldnn.is_available()
    assert not PackedLinear([weight.double()]).packed
    assert not PackedLinear([weight.to("meta")]).packed
    monkeypatch.setattr(packed, "MOST_BYTES", 255)
    assert not packed.small_enough([weight])
    monkeypatch.setattr(packed, "MOST_BYTES", 256)
    assert packed.small_enough([weight])


def test_folded_query_heads_attend_alike():
    noise = torch.Generator().manual_seed(0)
    queries = torch.randn(2, 6, 5, 8, generator=noise)
    keys, values = torch.randn(2, 2, 2, 9, 8, generator=noise)
    mask = torch.rand(2, 1, 5, 9, generator=noise) < 0.7
    mask[..., 0] = True
    torch.testing.assert_close(
        _attend_folded(queries, keys, values, mask), attend(queries, keys, values, mask)
    )


def test_a_small_target_is_fused_by_default():
    assert isinstance(random_target(1), FusedTarget)

"""Taps: the right layers, only those, on every kind of decoder."""

from __future__ import annotations

import pytest
import torch
from helpers import random_target
from reference import generate_greedily
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from dflash_lab.conditioning.taps import (
    build_target_layer_ids,
    check_layer_ids,
    find_decoder_layers,
)
from dflash_lab.errors import DFlashLabError
from dflash_lab.speculative.generate import speculative_generate
from dflash_lab.speculative.proposer import Plain
from dflash_lab.target.target import Target

SMALL = {
    "vocab_size": 71,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**GROUPED)),
    "qwen2 with windows": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            **GROUPED, use_sliding_window=True, sliding_window=6, max_window_layers=2
        )
    ),
    "mistral with a window": lambda: MistralForCausalLM(
        MistralConfig(**GROUPED, sliding_window=6)
    ),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=6)
    ),
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL)),
}


def family(name):
    torch.manual_seed(0)
    model = FAMILIES[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return Target(model)


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_features_are_the_states_after_each_layer(name):
    target = family(name)
    ids = torch.randint(71, (2, 9), generator=torch.Generator().manual_seed(1))
    states = target.model(ids, output_hidden_states=True).hidden_states
    cache = target.new_cache(2, 16)
    with target.tap((0, 2, 3)) as tap:
        target.forward(ids, torch.arange(9).expand(2, -1), cache)
        features = tap.take()
    assert tap.captures == 3  # the other layers' states are never kept
    expected = torch.cat([states[1], states[3], states[4]], dim=-1)
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_decodes_as_its_own_generate(name):
    target = family(name)
    prompt = [3, 14, 15, 9, 26, 5, 35]
    result = speculative_generate(target, Plain(), [prompt, [2]], max_new_tokens=16)
    assert result.output_ids[0] == generate_greedily(target, prompt, 16)
    assert result.output_ids[1] == generate_greedily(target, [2], 16)


def test_eager_attention_gives_the_same_logits():
    target = random_target(0)
    ids = torch.tensor([[1, 2, 3, 4]])
    positions = torch.arange(4)[None]
    logits = target.forward(ids, positions, target.new_cache(1, 8))
    eager = random_target(0, attn_implementation="eager")
    other = eager.forward(ids, positions, eager.new_cache(1, 8))
    torch.testing.assert_close(logits, other, rtol=1e-4, atol=1e-4)


def test_unknown_attention_is_refused():
    target = random_target(0)
    target.model.config._attn_implementation = "flex_attention"
    with pytest.raises(DFlashLabError, match="flex_attention"):
        Target(target.model)


def test_recurrent_layers_are_refused():
    target = random_target(0)
    target.model.config.layer_types = ["linear_attention"] * 5
    with pytest.raises(DFlashLabError, match="linear_attention"):
        Target(target.model)


def test_a_model_without_known_layers_is_refused():
    with pytest.raises(DFlashLabError, match="no decoder layers"):
        find_decoder_layers(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("ids", "message"),
    [((4,), "last of 5"), ((-1,), "-1"), ((33,), "at least 35 layers.*has 5")],
)
def test_bad_layer_ids_are_refused(ids, message):
    with pytest.raises(DFlashLabError, match=message):
        check_layer_ids(ids, 5)


def test_default_layers_of_shallow_targets():
    assert build_target_layer_ids(8, 1) == [4]
    assert build_target_layer_ids(36, 5) == [1, 9, 17, 25, 33]
    assert build_target_layer_ids(40, 8) == [1, 6, 11, 16, 22, 27, 32, 37]
    assert build_target_layer_ids(60, 6) == [1, 12, 23, 35, 46, 57]
    for layers, features in ((4, 2), (5, 4), (3, 2), (8, 0)):
        with pytest.raises(DFlashLabError, match="distinct layers"):
            build_target_layer_ids(layers, features)

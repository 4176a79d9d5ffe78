"""Configs in all their forms, refusals, caching, and the masks' plain twin."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from helpers import CONFORMANCE, random_drafter, random_target
from reference import block_mask
from safetensors.torch import load_file, save_file

from dflash_lab.conditioning.cache import PositionCache
from dflash_lab.conditioning.masks import anchor_block_mask
from dflash_lab.drafter.config import DFlashConfig
from dflash_lab.drafter.layers import rotate
from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.errors import DFlashLabError
from dflash_lab.speculative.proposer import DFlash, check_pair

BASE = json.loads((CONFORMANCE / "drafter" / "config.json").read_text("utf-8"))


def config_with(drop=(), own=None, **fields):
    config = {k: v for k, v in {**BASE, **fields}.items() if k not in drop}
    config["dflash_config"] = {**BASE["dflash_config"], **(own or {})}
    return config


def write_checkpoint(folder, config=None, state=None):
    folder.mkdir(exist_ok=True)
    source = CONFORMANCE / "drafter"
    text = json.dumps(BASE if config is None else config)
    (folder / "config.json").write_text(text, encoding="utf-8")
    state = load_file(source / "model.safetensors") if state is None else state
    save_file(state, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("layers", "width", "inner", "count"),
    [(5, 4096, 12288, 1_048_626_432), (5, 2560, 9728, 537_427_200)],
)
def test_published_parameter_counts(layers, width, inner, count):
    config = DFlashConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        target_layer_ids=(1, 9, 17, 25, 33),
        mask_token_id=151_669,
    )
    with torch.device("meta"):
        model = DFlashDraftModel(config)
    assert sum(p.numel() for p in model.parameters()) == count
    assert len(model.state_dict()) == 11 * layers + 3


def test_block_size_is_read_from_both_places():
    assert DFlashConfig.from_dict(config_with()).block_size == 8
    nested = config_with(drop=["block_size"], own={"block_size": 12})
    assert DFlashConfig.from_dict(nested).block_size == 12
    both = config_with(own={"block_size": 12})
    assert DFlashConfig.from_dict(both).block_size == 12
    neither = config_with(drop=["block_size"])
    assert DFlashConfig.from_dict(neither).block_size == 16


def test_rope_is_read_flat_and_nested():
    flat = config_with(rope_theta=5e5, rope_scaling={"type": "yarn", "factor": 4.0})
    nested = config_with(
        drop=["rope_theta", "rope_scaling"],
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5},
    )
    assert DFlashConfig.from_dict(flat).rope == DFlashConfig.from_dict(nested).rope
    plain = DFlashConfig.from_dict(config_with(rope_theta=123.0)).rope
    assert plain == {"rope_type": "default", "rope_theta": 123.0}


@pytest.mark.parametrize("rope_type", ["default", "yarn"])
def test_rotary_frequencies(rope_type):
    """Against the formulas, written out."""
    rope = {"rope_type": rope_type, "rope_theta": 1e4}
    original, factor, d = 64, 4.0, 8
    if rope_type == "yarn":
        rope |= {"factor": factor, "original_max_position_embeddings": original}
    fields = {**BASE, "head_dim": d, "max_position_embeddings": 256}
    config = config_with(**{**fields, "rope_parameters": rope})
    model = DFlashDraftModel(DFlashConfig.from_dict(config)).to(torch.bfloat16)
    positions = torch.tensor([[0, 3, 200]])
    cos, sin = model.rotary(torch.zeros(1, dtype=torch.float32), positions)
    import math

    inverse = [1e4 ** (-2 * i / d) for i in range(d // 2)]
    scale = 1.0
    if rope_type == "yarn":

        def dim_of(turns):
            return d * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(1e4))

        low, high = max(math.floor(dim_of(32)), 0), min(math.ceil(dim_of(1)), d - 1)
        ramp = [min(max((i - low) / (high - low), 0), 1) for i in range(d // 2)]
        inverse = [
            f / factor * r + f * (1 - r) for f, r in zip(inverse, ramp, strict=True)
        ]
        scale = 0.1 * math.log(factor) + 1
    angles = positions[0, :, None] * torch.tensor(inverse)[None]
    angles = torch.cat([angles, angles], dim=-1)
    torch.testing.assert_close(cos[0], angles.cos() * scale, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sin[0], angles.sin() * scale, rtol=1e-4, atol=1e-5)


def test_rotation_keeps_relative_positions():
    x = torch.randn(1, 1, 1, 8, generator=torch.Generator().manual_seed(0))
    y = torch.randn(1, 1, 1, 8, generator=torch.Generator().manual_seed(1))
    model = random_drafter(random_target())
    dots = []
    for a, b in ((5, 9), (105, 109)):
        rope = [model.rotary(x, torch.tensor([[p]])) for p in (a, b)]
        dots.append(float((rotate(x, *rope[0]) * rotate(y, *rope[1])).sum()))
    assert dots[0] == pytest.approx(dots[1], abs=1e-4)


def test_auto_map_is_ignored_and_never_run(tmp_path):
    folder = tmp_path / "drafter"
    config = config_with(auto_map={"AutoModel": "dflash.DFlashDraftModel"})
    write_checkpoint(folder, config)
    (folder / "dflash.py").write_text("raise SystemExit('remote code ran')", "utf-8")
    DFlashDraftModel.from_pretrained(folder)


@pytest.mark.parametrize(
    ("fields", "kind", "causal"),
    [
        ({}, "full_attention", False),
        ({}, "sliding_attention", True),
        ({"is_causal": True}, "full_attention", True),
        ({"is_causal": False}, "sliding_attention", False),
        ({"own": {"causal": False}}, "sliding_attention", False),
        ({"own": {"causal": True}, "is_causal": False}, "full_attention", False),
    ],
)
def test_causality_rule(fields, kind, causal):
    config = config_with(
        layer_types=["sliding_attention", "full_attention"], sliding_window=4, **fields
    )
    assert DFlashConfig.from_dict(config).causal_in_block(kind) is causal


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2"),
        ({"own": {"selector_rank": 256}}, "DFlash2"),
        ({"own": {"use_swa": True}}, "MiMo"),
        ({"own": {"attention_sink_bias": True}}, "MiMo"),
        ({"partial_rotary_factor": 0.5}, "MiMo"),
        ({"v_head_dim": 64}, "MiMo"),
        ({"own": {"projector_type": "domino"}}, "Domino"),
        ({"own": {"sample_from_anchor": True}}, "DSpark"),
        ({"own": {"shift_label": True}}, "Domino"),
        ({"transformer_layer_config": {"a": 1}}, "speculators"),
        ({"draft_vocab_size": 32000}, "speculators"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM"),
        ({"own": {"target_layer_ids": None}}, "target_layer_ids"),
        ({"own": {"mask_token_id": None}}, "mask_token_id"),
        ({"own": {"mask_token_id": 128}}, "mask_token_id 128"),
        ({"block_size": 1}, "block_size 1"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window"),
        ({"drop": ["hidden_size"]}, "hidden_size"),
        ({"num_key_value_heads": 3}, "evenly"),
        ({"num_attention_heads": 0, "num_key_value_heads": 1}, "1 or more"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "unknown rope_type 'spiral'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn' needs a factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "MiMo"),
        ({"own": {"target_layer_ids": 5}}, "wrong type"),
        ({"own": {"block_size": "16"}}, "wrong type"),
    ],
)
def test_unsupported_configs_are_refused_by_name(change, message):
    with pytest.raises(DFlashLabError, match=message):
        DFlashConfig.from_dict(config_with(**change))


def test_sliding_layers_implied_by_max_window_layers():
    config = config_with(
        drop=["layer_types"],
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
    )
    kinds = DFlashConfig.from_dict(config).layer_types
    assert kinds == ("full_attention", "sliding_attention")


def test_a_drafter_for_a_target_rotates_whole_heads_in_one_way():
    target = random_target()
    base = target.config.to_dict()
    full = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.25}
    base["rope_parameters"] = {"full_attention": full, "sliding_attention": {}}
    config = copy.copy(target.config)
    config.to_dict = lambda: base
    made = DFlashConfig.for_target(config, mask_token_id=1, target_layer_ids=(1, 2))
    assert made.rope == {"rope_type": "default", "rope_theta": 5e5}


def test_fresh_biases_are_zero():
    drafter = random_drafter(random_target(), attention_bias=True)
    biases = [p for n, p in drafter.named_parameters() if n.endswith("bias")]
    assert biases and not any(bias.any() for bias in biases)


def test_harmless_values_of_foreign_fields_are_accepted():
    harmless = {"projector_type": "dflash", "use_swa": False, "shift_label": False}
    DFlashConfig.from_dict(config_with(own=harmless, partial_rotary_factor=1.0))


def test_config_survives_writing():
    config = DFlashConfig.from_dict(
        config_with(
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=4,
            is_causal=False,
            rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e6},
            own={
                "output_multiplier": 0.2,
                "final_logit_softcapping": 20.0,
                "input_embedding_scale": 3.0,
            },
        )
    )
    written = json.loads(json.dumps(config.to_dict()))
    assert DFlashConfig.from_dict(written) == config
    # Old readers look at the top level, new ones inside; both must find the same.
    assert written["block_size"] == written["dflash_config"]["block_size"]
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"]
    assert written["rope_scaling"] == {"rope_type": "yarn", "factor": 2.0}
    assert written["architectures"] == ["DFlashDraftModel"]


def test_wrong_folders_are_refused(tmp_path):
    with pytest.raises(DFlashLabError, match=r"config\.json"):
        DFlashDraftModel.from_pretrained(tmp_path)
    with pytest.raises(DFlashLabError, match="neither a folder"):
        DFlashDraftModel.from_pretrained("nobody/no-such-drafter")
    state = load_file(CONFORMANCE / "drafter" / "model.safetensors")
    missing = {k: v for k, v in state.items() if k != "fc.weight"}
    with pytest.raises(DFlashLabError, match=r"1 missing \(fc.weight\)"):
        DFlashDraftModel.from_pretrained(
            write_checkpoint(tmp_path / "a", state=missing)
        )
    extra = {**state, "embed_tokens.weight": torch.zeros(2, 2)}
    with pytest.raises(DFlashLabError, match="embed_tokens"):
        DFlashDraftModel.from_pretrained(write_checkpoint(tmp_path / "b", state=extra))
    two_taps = config_with(own={"target_layer_ids": [1, 3]})
    with pytest.raises(DFlashLabError, match=r"fc\.weight.*\(64, 192\)"):
        DFlashDraftModel.from_pretrained(write_checkpoint(tmp_path / "c", two_taps))
    (tmp_path / "a" / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(DFlashLabError, match="cannot be read"):
        DFlashDraftModel.from_pretrained(tmp_path / "a")


def test_float16_is_refused(tmp_path):
    with pytest.raises(DFlashLabError, match="float16 overflows"):
        DFlashDraftModel.from_pretrained(CONFORMANCE / "drafter", torch.float16)
    state = load_file(CONFORMANCE / "drafter" / "model.safetensors")
    half = {k: v.half() for k, v in state.items()}
    folder = write_checkpoint(tmp_path / "half", state=half)
    with pytest.raises(DFlashLabError, match="float16 overflows"):
        DFlashDraftModel.from_pretrained(folder)
    assert (
        DFlashDraftModel.from_pretrained(folder, torch.float32).dtype == torch.float32
    )


def test_rope_frequencies_survive_a_cast(conformance_drafter):
    narrow = DFlashDraftModel.from_pretrained(CONFORMANCE / "drafter", torch.bfloat16)
    x, positions = torch.zeros(1), torch.tensor([[511]])
    assert torch.equal(
        narrow.rotary(x, positions)[0], conformance_drafter.rotary(x, positions)[0]
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 6])
def test_mask_equals_its_plain_twin(causal, window):
    anchors = [[0, 2, 3, 9], [4, 4, 8, 0]]
    valid = [[True, True, True, True], [True, True, True, False]]
    mask = anchor_block_mask(
        torch.tensor(anchors),
        9,
        4,
        causal=causal,
        window=window,
        valid=torch.tensor(valid),
    )
    assert torch.equal(mask, block_mask(anchors, valid, 9, 4, causal, window))


MIXED = {
    "layer_types": ("sliding_attention", "full_attention", "sliding_attention"),
    "sliding_window": 4,
    "num_hidden_layers": 3,
}


@pytest.mark.parametrize(
    "fields",
    [{}, {"causal": True}, MIXED, {**MIXED, "causal": False}],
    ids=["full", "causal", "mixed", "mixed, bidirectional"],
)
@torch.inference_mode()
def test_cached_pass_equals_recomputation(fields):
    target = random_target()
    drafter = random_drafter(target, **fields)
    noise = torch.Generator().manual_seed(0)
    features = torch.randn(3, 12, 64, generator=noise)
    block = torch.randn(3, 6, 32, generator=noise)
    start = torch.tensor([12, 7, 3])
    cache = PositionCache(3, 32)
    # In pieces, with stale rows of other lengths behind each row's start.
    for piece in (slice(0, 3), slice(3, 7), slice(7, 12)):
        positions = torch.arange(12)[None, piece].expand(3, -1)
        drafter.append_context(features[:, piece], positions, cache)
    cached = drafter.draft(block, start, cache)
    for b in range(3):
        length = int(start[b])
        positions = torch.arange(length + 6)[None]
        masks = {
            kind: block_mask(
                [[length]],
                [[True]],
                length,
                6,
                drafter.config.causal_in_block(kind),
                drafter.config.window_of(kind),
            )
            for kind in set(drafter.config.layer_types)
        }
        fresh = drafter(
            block[b : b + 1], features[b : b + 1, :length], positions, masks
        )
        torch.testing.assert_close(cached[b], fresh[0], rtol=1e-4, atol=1e-4)
        # One row alone takes the path without a mask where nothing is hidden.
        alone = PositionCache(1, 32)
        drafter.append_context(
            features[b : b + 1, :length], torch.arange(length)[None], alone
        )
        single = drafter.draft(block[b : b + 1], start[b : b + 1], alone)
        torch.testing.assert_close(single[0], fresh[0], rtol=1e-4, atol=1e-4)


def test_logit_scaling():
    target = random_target()
    drafter = random_drafter(target, output_multiplier=0.5, final_logit_softcapping=3.0)
    logits = torch.tensor([-10.0, 0.0, 2.0])
    expected = 3.0 * torch.tanh(torch.tensor([-5.0, 0.0, 1.0]) / 3.0)
    torch.testing.assert_close(drafter.scale_logits(logits), expected)


def test_embedding_scale_reaches_the_block():
    target = random_target()
    session = DFlash(random_drafter(target, input_embedding_scale=2.0)).start(
        target, 1, 16
    )
    embedded = session.embed(torch.tensor([[5]]))
    torch.testing.assert_close(embedded[0, 0], 2 * target.embedding_table[5])


@pytest.mark.parametrize("size", [0, 1, 7])
def test_block_size_at_decoding(size):
    drafter = random_drafter(random_target(), block_size=6)
    with pytest.raises(DFlashLabError, match=f"block_size {size} is outside 2..6"):
        DFlash(drafter, block_size=size)


def test_misfits_name_both_sides():
    target = random_target()
    deep = random_target(num_hidden_layers=9)
    wide = random_target(hidden_size=48)
    other = random_target(vocab_size=67)
    with pytest.raises(DFlashLabError, match=r"target of 9 layers.*has 5"):
        check_pair(random_drafter(deep), target)
    with pytest.raises(DFlashLabError, match=r"hidden size 48.*32"):
        check_pair(random_drafter(wide), target)
    with pytest.raises(DFlashLabError, match=r"vocabulary of 67.*61"):
        check_pair(random_drafter(other), target)

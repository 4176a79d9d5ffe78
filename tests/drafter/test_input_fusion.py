"""Input fusion: context rows pass through the layers, cached or not, alike."""

from __future__ import annotations

import pytest
import torch
from helpers import random_drafter
from reference import generate_greedily

from dflash_lab.conditioning.cache import PositionCache
from dflash_lab.drafter.config import DFlashConfig
from dflash_lab.drafter.input_fusion import InputFusionDraftModel
from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.drafter.variants import load_drafter
from dflash_lab.errors import DFlashLabError
from dflash_lab.interop.engines import check_engine
from dflash_lab.speculative.generate import speculative_generate
from dflash_lab.speculative.proposer import DFlash

LENGTH, SIZE = 9, 4


@pytest.fixture(scope="module")
def fused(target):
    drafter = random_drafter(target, num_hidden_layers=3, conditioning="input")
    assert isinstance(drafter, InputFusionDraftModel)
    return drafter


def inputs(drafter, seed=0):
    noise = torch.Generator().manual_seed(seed)
    width = drafter.config.hidden_size
    features = torch.randn(1, LENGTH, drafter.fc.in_features, generator=noise)
    return features, torch.randn(1, SIZE, width, generator=noise)


def run_plainly(drafter, features, block):
    """One row of the sequence after the other; every row keeps its keys by layer."""
    rows = [*drafter.fuse(features)[0], *block[0]]
    states = [row[None, None] for row in rows]
    for layer in drafter.layers:
        pairs = []
        for position, state in enumerate(states):
            rope = drafter.rotary(state, torch.tensor([[position]]))
            normed = layer.input_layernorm(state)
            pairs.append((layer.self_attn.keys_values(normed, *rope), rope))
        made = []
        for position, state in enumerate(states):
            last = position + 1 if position < LENGTH else len(states)
            seen = [p for i, (p, _) in enumerate(pairs[:last]) if i != position]
            nothing = tuple(t[:, :, :0] for t in pairs[0][0])
            seen = [nothing, *seen]
            earlier = tuple(torch.cat([p[k] for p in seen], dim=2) for k in (0, 1))
            made.append(layer(state, *pairs[position][1], earlier, None))
        states = made
    return drafter.norm(torch.cat(states[LENGTH:], dim=1))


@torch.inference_mode()
def test_the_pass_equals_a_loop_over_rows(fused):
    features, block = inputs(fused)
    positions = torch.arange(LENGTH + SIZE)[None]
    found = fused(block, features, positions)
    torch.testing.assert_close(found, run_plainly(fused, features, block))
    assert not torch.allclose(
        found, DFlashDraftModel.forward(_as_kv(fused), block, features, positions)
    )


def _as_kv(fused):
    from dataclasses import replace

    drafter = DFlashDraftModel(replace(fused.config, conditioning="kv"))
    drafter.load_state_dict(fused.state_dict())
    return drafter


@torch.inference_mode()
@pytest.mark.parametrize("cuts", [[9], [5, 9], [1, 2, 6, 9]])
def test_cached_context_in_pieces_is_the_whole_context(fused, cuts):
    features, block = inputs(fused)
    whole = fused(block, features, torch.arange(LENGTH + SIZE)[None])
    cache, start = PositionCache(1, 20), 0
    for end in cuts:
        fused.append_context(
            features[:, start:end], torch.arange(start, end)[None], cache
        )
        start = end
    drafted = fused.draft(block, torch.tensor([LENGTH]), cache)
    torch.testing.assert_close(drafted, whole)


@torch.inference_mode()
def test_tokens_of_several_rows_at_once_are_those_of_each_row(fused):
    """The loop hands over one token per entry, rows named as often as they grew."""
    one, two = inputs(fused, 1)[0], inputs(fused, 2)[0]
    together = PositionCache(2, 20)
    for row, features in enumerate((one, two)):
        fused.append_context(
            features[:, :4], torch.arange(4)[None], together, torch.tensor([row])
        )
    rows = torch.tensor([0, 0, 0, 1])
    positions = torch.tensor([[4], [5], [6], [4]])
    new = torch.cat([one[0, 4:7], two[0, 4:5]])[:, None]
    fused.append_context(new, positions, together, rows)
    for row, (features, length) in enumerate(((one, 7), (two, 5))):
        alone = PositionCache(1, 20)
        positions = torch.arange(length)[None]
        fused.append_context(features[:, :length], positions, alone)
        for layer in range(3):
            pair = together.read(layer, length, torch.tensor([row]))
            for found, expected in zip(pair, alone.read(layer, length), strict=True):
                torch.testing.assert_close(found, expected)


def test_decoding_with_it_is_lossless(fused, target):
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    found = speculative_generate(target, DFlash(fused), prompts, max_new_tokens=20)
    for prompt, ids in zip(prompts, found.output_ids, strict=True):
        assert ids == generate_greedily(target, prompt, 20)


def test_it_is_saved_loaded_and_kept_from_engines(fused, tmp_path):
    fused.save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path)
    assert isinstance(loaded, InputFusionDraftModel)
    assert loaded.config == fused.config
    with pytest.raises(DFlashLabError, match="load_drafter"):
        DFlashDraftModel.from_pretrained(tmp_path)
    for engine in ("vllm", "sglang", "speculators"):
        with pytest.raises(DFlashLabError, match="known to no engine"):
            check_engine(loaded.config, engine)
    check_engine(loaded.config, "dflash")


def test_unknown_conditioning_and_sliding_windows_are_refused(target):
    with pytest.raises(DFlashLabError, match="choose kv or input"):
        DFlashConfig.for_target(
            target.config, mask_token_id=60, num_features=1, conditioning="add"
        )
    with pytest.raises(DFlashLabError, match="no sliding windows"):
        random_drafter(
            target,
            conditioning="input",
            layer_types=("full_attention", "sliding_attention"),
            sliding_window=8,
        )

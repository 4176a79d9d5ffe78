"""Our drafter and loop against vectors made by the authors' implementation."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import CONFORMANCE
from safetensors import safe_open

from dflash_lab.conditioning.cache import PositionCache
from dflash_lab.conditioning.taps import build_target_layer_ids
from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.speculative.generate import speculative_generate
from dflash_lab.speculative.ngram import NGramLookup
from dflash_lab.speculative.proposer import DFlash, Plain


@pytest.fixture(scope="module")
def vectors():
    with safe_open(CONFORMANCE / "vectors.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, file.metadata()


@torch.inference_mode()
def test_hidden_states_without_cache(vectors, conformance_target, conformance_drafter):
    tensors, _ = vectors
    noise = conformance_target.embedding_table[tensors["forward_block"]]
    context = tensors["forward_context_feature"]
    hidden = conformance_drafter(noise, context, torch.arange(15 + 8)[None])
    torch.testing.assert_close(hidden, tensors["forward_hidden"], rtol=0, atol=1e-5)
    logits = conformance_target.head(hidden)
    torch.testing.assert_close(logits, tensors["forward_logits"], rtol=0, atol=1e-4)


@torch.inference_mode()
def test_hidden_states_with_cache(vectors, conformance_target, conformance_drafter):
    tensors, _ = vectors
    noise = conformance_target.embedding_table[tensors["forward_block"]]
    context = tensors["forward_context_feature"]
    cache = PositionCache(1, 64)
    for rows in (slice(0, 11), slice(11, 15)):
        positions = torch.arange(15)[None, rows]
        conformance_drafter.append_context(context[:, rows], positions, cache)
    hidden = conformance_drafter.draft(noise, torch.tensor([15]), cache)
    expected = tensors["forward_hidden_cached"]
    torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-5)


@torch.inference_mode()
def test_tapped_features(vectors, conformance_target, conformance_drafter):
    tensors, _ = vectors
    cache = conformance_target.new_cache(1, 32)
    with conformance_target.tap(conformance_drafter.config.target_layer_ids) as tap:
        ids = tensors["forward_tokens"][:, :15]
        conformance_target.forward(ids, torch.arange(15)[None], cache)
        features = tap.take()
    expected = tensors["forward_context_feature"]
    torch.testing.assert_close(features, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("j", range(6))
def test_loop_reproduces_ids_and_acceptance(
    j, vectors, conformance_target, conformance_drafter
):
    tensors, metadata = vectors
    prompt = tensors[f"prompt_{j}"][0].tolist()
    expected = tensors[f"output_{j}"][0].tolist()[len(prompt) :]
    result = speculative_generate(
        conformance_target, DFlash(conformance_drafter), prompt, max_new_tokens=40
    )
    assert result.output_ids == [expected]
    # The authors' last cycle verifies a full block even beyond the limit, and if the
    # block before it reached the limit exactly, all of it lies beyond.
    theirs = json.loads(metadata[f"acceptance_{j}"])
    ours = result.trace.acceptance_lengths[0]
    assert ours[:-1] == theirs[: len(ours) - 1]
    assert ours[-1] <= theirs[len(ours) - 1]
    assert len(theirs) == len(ours) + (1 + sum(theirs[:-1]) == 40)


def test_batch_and_other_proposers_give_the_same_ids(
    vectors, conformance_target, conformance_drafter
):
    tensors, _ = vectors
    prompts = [tensors[f"prompt_{j}"][0].tolist() for j in range(6)]
    expected = [tensors[f"output_{j}"][0].tolist()[len(prompts[j]) :] for j in range(6)]
    for proposer in (
        DFlash(conformance_drafter),
        DFlash(conformance_drafter, block_size=3),
        NGramLookup(6),
        Plain(),
    ):
        result = speculative_generate(
            conformance_target, proposer, prompts, max_new_tokens=40
        )
        assert result.output_ids == expected


def test_default_layer_ids(vectors):
    _, metadata = vectors
    cases = {k: v for k, v in metadata.items() if k.startswith("target_layer_ids_")}
    assert len(cases) >= 5
    for name, expected in cases.items():
        layers, features = map(int, name.split("_")[-2:])
        assert build_target_layer_ids(layers, features) == json.loads(expected)


def test_saved_checkpoint_is_bit_equal(tmp_path, conformance_drafter):
    conformance_drafter.save_pretrained(tmp_path)
    again = DFlashDraftModel.from_pretrained(tmp_path)
    assert again.config == conformance_drafter.config
    with safe_open(CONFORMANCE / "drafter" / "model.safetensors", "pt") as file:
        keys = set(file.keys())
        assert set(again.state_dict()) == keys
        for name, tensor in again.state_dict().items():
            assert tensor.dtype == file.get_tensor(name).dtype
            assert torch.equal(tensor, file.get_tensor(name))

"""The small world of the tiny pair."""

from __future__ import annotations

import itertools

import torch

from dflash_lab.conditioning.masks import block_position_ids
from dflash_lab.training.corpus.tiny_text import KINDS, is_held_out, tiny_texts

# --- the small world ----------------------------------------------------------------


def test_small_world_never_trains_on_held_out_prompts():
    train = list(itertools.islice(tiny_texts(0), 4000))
    test = list(itertools.islice(tiny_texts(0, held_out=True), 400))
    assert not any(is_held_out(text["prompt"]) for text in train)
    assert all(is_held_out(text["prompt"]) for text in test)
    assert {t["prompt"] for t in train}.isdisjoint(t["prompt"] for t in test)
    assert {t["kind"] for t in train} == {t["kind"] for t in test} == set(KINDS)
    assert list(itertools.islice(tiny_texts(0), 50)) == train[:50]


def test_positions_of_blocks():
    positions = block_position_ids(torch.tensor([[3, 7]]), 3)
    assert positions.tolist() == [[3, 4, 5, 7, 8, 9]]

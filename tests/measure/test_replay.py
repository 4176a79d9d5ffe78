"""Replay gives what the loop gives, and trees are what a plain search makes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import random_drafter, random_target
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_lab.errors import DFlashLabError
from dflash_lab.measure.explain import (
    NOWHERE,
    advice,
    levers,
    lost_slots,
    reason_of,
    reasons_by_slot,
)
from dflash_lab.measure.replay import ReplayTable, replay, replay_table, walk
from dflash_lab.measure.tree_policies import (
    TreePolicy,
    best_lookup,
    calibration,
    chain,
    step_table,
)
from dflash_lab.speculative.generate import speculative_generate
from dflash_lab.speculative.proposer import DFlash, Plain


@pytest.fixture(scope="module")
def pair():
    """A drafter that is often right: its own hidden states are the target's."""
    target = random_target(3)
    return target, random_drafter(target, seed=3, block_size=5)


def table_of(text, prompt_length, candidates, log_probs, budget=None) -> ReplayTable:
    """A table by hand; candidates (A, K-1, M)."""
    candidates, log_probs = np.array(candidates), np.array(log_probs, dtype=float)
    answer = text[prompt_length:]
    rank = np.full(candidates.shape[:2], -1)
    own = np.full(candidates.shape[:2], np.nan)
    for a in range(candidates.shape[0]):
        for j in range(candidates.shape[1]):
            if a + j + 1 < len(answer):
                found = np.flatnonzero(candidates[a, j] == answer[a + j + 1])
                rank[a, j] = found[0] if len(found) else 99
                own[a, j] = log_probs[a, j, found[0]] if len(found) else -9.0
    ones = np.ones(len(answer))
    return ReplayTable(
        text,
        prompt_length,
        budget or len(answer),
        candidates,
        log_probs,
        rank,
        own,
        ones,
        ones,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("limit", [1, 2, 7, 30])
def test_the_chain_replays_as_the_loop_decodes(dtype, limit):
    """Cycle by cycle, also with a stop token in a block and with a sliding window."""
    target = random_target(1, dtype=dtype)
    drafter = random_drafter(
        target,
        block_size=5,
        layer_types=("full_attention", "sliding_attention"),
        sliding_window=6,
    ).to(dtype)
    plain = speculative_generate(target, Plain(), [1, 2, 3], max_new_tokens=30)
    for stops in ((), (plain.output_ids[0][12],)):
        found = speculative_generate(
            target,
            DFlash(drafter),
            [1, 2, 3],
            max_new_tokens=limit,
            stop_token_ids=stops,
        )
        table = replay_table(
            drafter, target, [1, 2, 3], found.output_ids[0], budget=limit
        )
        walked = replay([table], chain(5))
        assert walked.lengths == found.trace.acceptance_lengths
        drafted = [[len(c.draft_tokens) + 1 for c in found.trace.cycles]]
        assert walked.rows == drafted


def test_candidates_are_the_drafters_own(pair):
    """The first candidate of each slot is what the loop drafts from that anchor."""
    target, drafter = pair
    answer = speculative_generate(
        target, Plain(), [4, 5], max_new_tokens=12
    ).output_ids[0]
    table = replay_table(drafter, target, [4, 5], answer, candidates=4)
    for place in range(len(answer) - 1):
        text = [4, 5, *answer[: place + 1]]
        session = DFlash(drafter).start(target, 1, 40)
        cache = target.new_cache(1, 40)
        positions = torch.arange(len(text) - 1)[None]
        with torch.inference_mode(), target.tap(drafter.config.target_layer_ids) as tap:
            target.forward(torch.tensor([text[:-1]]), positions, cache)
            session.observe(tap.take(), positions, torch.tensor([0]))
            logits = session.block_logits([text], 4)[0].float().log_softmax(-1)
        top = logits.topk(4, dim=-1)
        assert table.candidates[place].tolist() == top.indices.tolist()
        np.testing.assert_allclose(table.log_probs[place], top.values, atol=1e-4)
    # Rank and probability of the text's own tokens agree with the candidates.
    own = table.candidates[0, 0].tolist()
    if answer[1] in own:
        assert table.rank[0, 0] == own.index(answer[1])
    assert (table.rank[-1] == -1).all() and np.isnan(table.log_prob[-1]).all()
    assert np.isnan(table.target_prob[-1]) and (table.target_prob[:-1] > 0).all()


def test_walk_and_budget_by_hand():
    # Two paths: 7 8, and 7 9; the text goes 7 9.
    assert walk([(-1, 7), (0, 8), (0, 9)], [7, 9, 1]) == 2
    assert walk([(-1, 8)], [7]) == 0 and walk([], [7]) == 0
    # All drafts right: cycles of 3 of them and the target's own token, then the end.
    text = [0, 1, 2, 3, 4, 5, 6, 7]
    right = [[[min(a + j + 2, 99)] for j in range(3)] for a in range(7)]
    table = table_of(text, 1, right, np.zeros((7, 3, 1)))
    found = replay([table], chain(4))
    assert found.lengths == [[4, 2]] and found.rows == [[4, 2]]
    assert found.tau == 3 and found.survival(3) == [1.0, 0.5, 0.5]


def plain_tree(table, place, rows):
    """Best-first by listing every path of the drafter's candidates."""
    slots = table.candidates.shape[1]
    paths = [((), 0.0)]
    every = []
    for slot in range(slots):
        paths = [
            ((*path, int(token)), score + float(log_prob))
            for path, score in paths
            for token, log_prob in zip(
                table.candidates[place, slot], table.log_probs[place, slot], strict=True
            )
        ]
        every += paths
    every.sort(key=lambda item: -item[1])
    return {path for path, _ in every[: rows - 1]}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 9))
def test_a_tree_holds_the_likeliest_paths(seed, rows):
    noise = np.random.default_rng(seed)
    scores = np.sort(noise.random((1, 3, 3)))[:, :, ::-1]
    log_probs = np.log(scores / scores.sum(-1, keepdims=True) * 0.98)
    candidates = np.stack([noise.permutation(20)[:3] for _ in range(3)])[None]
    table = table_of(
        [0, 1, 2, 3, 4], 1, candidates.repeat(4, 0), log_probs.repeat(4, 0)
    )
    tree = TreePolicy(rows)(table)(0, 99)
    paths: list[tuple[int, ...]] = []
    for parent, token in tree:
        assert parent < len(paths)  # parents come first
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert set(paths) == plain_tree(table, 0, rows)


def test_lookup_paths_join_the_drafters():
    """A token that both offer is one node, and lookup goes deeper than the block."""
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6]
    candidates = np.full((5, 2, 2), 0)
    candidates[0] = [[3, 9], [8, 4]]  # anchor 2: slot 1 says 3, slot 2 says 8 before 4
    log_probs = np.log(np.full((5, 2, 2), 0.3))
    table = table_of(text, 7, candidates, log_probs)
    steps = np.full((8, 3, 3), 0.9)
    tree = TreePolicy(6, steps)(table)(0, 99)
    assert tree[:4] == [(-1, 3), (0, 4), (1, 5), (2, 6)]
    assert replay([table], TreePolicy(6, steps)).lengths == [[4]]
    assert replay([table], best_lookup(3)).lengths == [[3, 1]]
    # Without lookup the fourth token cannot be reached by a block of three.
    assert replay([table], TreePolicy(6)).lengths[0][0] == 3
    assert TreePolicy(6, steps)(table)(0, 2)[-1] != (1, 5)  # at most two deep


def test_step_table_counts_by_hand():
    # Behind 1 2 came 3 and is right; behind 1 2 3 came 4, and the text says 5.
    text = [1, 2, 3, 4, 1, 2, 3, 5]
    table = table_of(text, 5, np.zeros((3, 1, 1), int), np.zeros((3, 1, 1)))
    steps = step_table([table])
    # One right and one wrong to begin with; the match of length 2 behind "1 2".
    assert steps[1, 0, 0] == (1 + 1) / (2 + 1)
    assert steps[1, 0, 1] == 1 / (2 + 1)
    assert steps[2, 0, 0] == 1 / (2 + 1)
    assert steps[5, 2, 2] == 0.5


def test_calibration_makes_the_mean_honest():
    noise = np.random.default_rng(0)
    prob = noise.uniform(0.3, 0.9, 4000)
    right = noise.random(4000) < prob**2  # says p where p ** 2 is true
    log_probs = np.log(prob)[:, None, None]
    table = table_of([0] * 4001, 1, np.zeros((4000, 1, 1), int), log_probs)
    object.__setattr__(table, "rank", np.where(right, 0, 1)[:, None])
    (exponent,) = calibration([table])
    assert exponent == pytest.approx(2.0, abs=0.2)


def test_reasons_and_levers_by_hand():
    """Slot 1 right, slot 2 second choice, slot 3 right but behind a wrong one."""
    text = [0, 1, 2, 3, 4, 5]
    candidates = np.full((5, 3, 2), 9)
    candidates[0] = [[2, 8], [7, 3], [4, 8]]
    table = table_of(text, 1, candidates, np.log(np.full((5, 3, 2), 0.4)))
    lost = lost_slots([table], 4)
    one = lost[lost["place"] == 0]
    assert one["slot"].tolist() == [2, 3] and one["first"].tolist() == [True, False]
    assert one["reason"].tolist() == ["second choice", "first choice"]
    assert not one["in_lookup"].any()
    shares = reasons_by_slot(lost)
    assert np.allclose(shares.sum(axis=1), 1)
    won = levers([table, table], 4)
    assert won["chain"].lengths[0][0] == 2
    assert won["+ siblings"].tau >= won["chain"].tau
    assert won["slot 1 always right"].tau >= won["chain"].tau
    assert any("second or third" in line for line in advice(lost, won))
    assert [reason_of(r) for r in (0, 1, 2, 3, 9, 10, 31, 32)] == [
        "first choice",
        "second choice",
        "third choice",
        "choice 4 to 10",
        "choice 4 to 10",
        "choice 11 to 32",
        "choice 11 to 32",
        NOWHERE,
    ]


def test_what_cannot_be_replayed_is_refused(pair):
    target, drafter = pair
    with pytest.raises(DFlashLabError, match="without tokens"):
        replay_table(drafter, target, [1], [])
    with pytest.raises(DFlashLabError, match="two or more"):
        levers([], 4)
    right = table_of([0, 1, 2], 1, [[[2]], [[5]]], np.zeros((2, 1, 1)))
    with pytest.raises(DFlashLabError, match="no draft was lost"):
        lost_slots([right], 2)

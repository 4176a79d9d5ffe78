"""Drafters of one's own: whatever they offer, the text stays the target's."""

from __future__ import annotations

import pytest
import torch
from helpers import random_drafter, random_target

from dflash_lab import DFlash, Plain, speculative_generate
from dflash_lab.errors import DFlashLabError
from dflash_lab.measure.race import race, standings, tau_differences
from dflash_lab.speculative.ngram import NGramLookup
from dflash_lab.speculative.own_drafters import (
    BigramDFlash,
    ConfidenceCut,
    FromFunction,
    bigram_table,
)
from dflash_lab.speculative.sampling import Sampling

PROMPTS = [[3, 4, 5, 6], [7, 8], [9, 10, 11, 12, 13]]


@pytest.fixture(scope="module")
def world():
    target = random_target(0)
    drafter = random_drafter(target)
    texts = speculative_generate(target, Plain(), PROMPTS, max_new_tokens=40)
    table = bigram_table(texts.output_ids, target.vocab_size)
    return target, drafter, table


def decode(target, proposer, **options):
    return speculative_generate(target, proposer, PROMPTS, max_new_tokens=24, **options)


def proposers(drafter, table):
    vocab = table.shape[0]
    return [
        FromFunction(lambda text, limit: [text[-1]] * limit),
        FromFunction(lambda text, limit: [(len(text) + i) % vocab for i in range(99)]),
        FromFunction(lambda text, limit: []),
        ConfidenceCut(DFlash(drafter), 0.05),
        BigramDFlash(drafter, table, 2.0),
        ConfidenceCut(BigramDFlash(drafter, table, 1.0), 0.5),
    ]


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize(
    "sampling", [None, Sampling(1.0, seed=3), Sampling(1.0, seed=3, rule="speculative")]
)
def test_texts_are_the_targets(world, number, sampling):
    target, drafter, table = world
    proposer = proposers(drafter, table)[number]
    if sampling is not None and sampling.rule == "speculative":
        made = decode(target, proposer, sampling=sampling)
        assert all(len(ids) == 24 for ids in made.output_ids)
        return
    plain = decode(target, Plain(), sampling=sampling)
    assert decode(target, proposer, sampling=sampling).output_ids == plain.output_ids


def test_a_weight_of_zero_and_a_limit_of_zero_change_nothing(world):
    target, drafter, table = world
    lengths = decode(target, DFlash(drafter), loop="host").trace.acceptance_lengths
    for proposer in (
        BigramDFlash(drafter, table, 0.0),
        ConfidenceCut(DFlash(drafter), 0),
    ):
        assert decode(target, proposer).trace.acceptance_lengths == lengths


def drafts(session, texts, count=7):
    seeds = torch.zeros(len(texts), dtype=torch.long)
    return session.propose(texts, count, Sampling(), seeds, True)


def listening(proposer, target, text):
    """A session that has heard the features of all but the text's last token."""
    session = proposer.start(target, 1, 64)
    ids = torch.tensor([text[:-1]])
    with torch.inference_mode():
        states = target.model(ids, output_hidden_states=True).hidden_states
    layers = proposer.target_layer_ids
    hidden = torch.cat([states[layer + 1] for layer in layers], dim=-1)
    session.observe(hidden, torch.arange(ids.shape[1])[None], torch.tensor([0]))
    return session


def test_slots_follow_the_table_as_in_a_plain_loop(world):
    target, drafter, table = world
    text, weight = [3, 4, 5, 6, 7], 1.5
    proposer = BigramDFlash(drafter, table, weight)
    with torch.inference_mode():
        session = listening(proposer, target, text)
        logits = session.block_logits([text], 7)[0]
        found = drafts(session, [text])
    last, expected, chances = text[-1], [], []
    for row in logits:
        scores = [
            float(x) + weight * float(y) for x, y in zip(row, table[last], strict=True)
        ]
        last = scores.index(max(scores))
        expected.append(last)
        chances.append(float(torch.tensor(scores).softmax(0)[last]))
    assert found.tokens[0].tolist() == expected
    torch.testing.assert_close(found.confidence[0], torch.tensor(chances))
    plain = listening(DFlash(drafter), target, text)
    with torch.inference_mode():
        assert drafts(plain, [text]).tokens[0].tolist() != expected


def test_the_cut_ends_before_the_first_doubt(world):
    target, drafter, _ = world
    text = [3, 4, 5, 6, 7]
    with torch.inference_mode():
        whole = drafts(listening(DFlash(drafter), target, text), [text])
        chances = whole.confidence[0].tolist()
        for least in (0.0, min(chances), sorted(chances)[3], max(chances), 1.0):
            cut = ConfidenceCut(DFlash(drafter), least)
            found = drafts(listening(cut, target, text), [text])
            kept = 0
            while kept < len(chances) and chances[kept] >= least:
                kept += 1
            assert int(found.num_drafts[0]) == kept
            assert found.tokens[0].tolist() == whole.tokens[0].tolist()[:kept]


def test_the_table_counts_followers():
    table = bigram_table([[0, 1, 0, 1, 2], [1, 1]], 3, smoothing=1.0).exp()
    # After 1: one 0, one 1, one 2, and one of each for smoothing.
    torch.testing.assert_close(table[1], torch.tensor([2, 2, 2]) / 6)
    torch.testing.assert_close(table[0], torch.tensor([1.0, 3, 1]) / 5)
    torch.testing.assert_close(table[2], torch.tensor([1.0, 1, 1]) / 3)


def test_what_cannot_work_is_refused(world):
    target, drafter, table = world
    with pytest.raises(DFlashLabError, match=r"least 1\.5"):
        ConfidenceCut(DFlash(drafter), 1.5)
    with pytest.raises(DFlashLabError, match="block_size 1"):
        FromFunction(lambda text, limit: [], block_size=1)
    with pytest.raises(DFlashLabError, match="vocabulary"):
        BigramDFlash(drafter, table[:-1])
    with pytest.raises(DFlashLabError, match="no confidence"):
        decode(target, ConfidenceCut(FromFunction(lambda t, n: [5] * n), 0.5))
    with pytest.raises(DFlashLabError, match="drafted token -1"):
        decode(target, FromFunction(lambda text, limit: [-1]))


def test_a_race_is_fair_and_complete(world):
    target, drafter, _ = world
    entered = {"plain": Plain(), "dflash": DFlash(drafter), "ngram": NGramLookup(8)}
    results = race(target, entered, PROMPTS, max_new_tokens=20)
    found = {row.name: row for row in standings(results, "plain")}
    assert set(found) == set(entered)
    for name, row in found.items():
        lengths = [n for r in results[name] for n in r.trace.acceptance_lengths[0]]
        assert row.tau.value == pytest.approx(sum(lengths) / len(lengths))
        assert (row.equal, row.prompts) == (3, 3)
    assert found["plain"].speedup.value == pytest.approx(1.0)
    differences = tau_differences(results, "plain")
    assert set(differences) == {"dflash", "ngram"}
    expected = found["ngram"].tau.value - found["plain"].tau.value
    assert differences["ngram"].value == pytest.approx(expected)
    with pytest.raises(DFlashLabError, match="did not run"):
        standings(results, "eagle")
    with pytest.raises(DFlashLabError, match="did not run"):
        tau_differences(results, "eagle")
    with pytest.raises(DFlashLabError, match="0 proposers"):
        race(target, {}, PROMPTS)


def test_what_exists_is_out_of_the_collectors_sight_while_something_is_timed():
    import gc

    from dflash_lab.measure.race import short_collections

    before = gc.get_freeze_count()
    with pytest.raises(KeyboardInterrupt), short_collections():
        assert gc.get_freeze_count() > before + 1000
        assert len(gc.get_objects(generation=2)) < 1000
        raise KeyboardInterrupt
    assert gc.get_freeze_count() == 0

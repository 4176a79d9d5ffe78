"""Anchors, loss, corpus and features against plain twins; training as decoding."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from conftest import random_drafter, random_target
from reference import decayed_loss, generate_greedily

from dflash_lab.errors import DFlashLabError
from dflash_lab.masks import block_position_ids
from dflash_lab.proposers import DFlash
from dflash_lab.speculative import speculative_generate
from dflash_lab.training.anchors import anchor_candidates, make_blocks, select_anchors
from dflash_lab.training.corpus import (
    read_corpus,
    self_written_prompts,
    write_corpus,
)
from dflash_lab.training.features import FeatureCache, cache_features
from dflash_lab.training.losses import (
    decay_weights,
    default_gamma,
    frozen_head_cross_entropy,
)
from dflash_lab.training.tiny_text import KINDS, is_held_out, tiny_texts
from dflash_lab.training.trainer import (
    Example,
    TrainConfig,
    Trainer,
    training_hidden,
)

# --- anchors ----------------------------------------------------------------------


def loss_masks(count=30, length=17):
    noise = torch.Generator().manual_seed(0)
    return torch.rand(count, length, generator=noise) < 0.6


def test_anchors_are_supervised_and_followed_by_supervised():
    mask = loss_masks()
    generator = torch.Generator().manual_seed(1)
    for number in (1, 4, 50):
        anchors, valid = select_anchors(mask, number, generator)
        for b in range(len(mask)):
            allowed = [i for i in range(16) if mask[b, i] and mask[b, i + 1]]
            drawn = anchors[b][valid[b]].tolist()
            assert drawn == sorted(set(drawn)) and set(drawn) <= set(allowed)
            assert len(drawn) == min(number, len(allowed))


def test_anchors_are_redrawn_and_reach_every_candidate():
    mask = loss_masks(1)
    generator = torch.Generator().manual_seed(1)
    counts = torch.zeros(17)
    for _ in range(600):
        anchors, valid = select_anchors(mask, 2, generator)
        counts[anchors[valid]] += 1
    candidates = anchor_candidates(mask)[0]
    assert (counts[~candidates] == 0).all()
    expected = counts.sum() / candidates.sum()
    assert (counts[candidates] - expected).abs().max() < 5 * math.sqrt(expected)


def test_blocks_equal_their_plain_twin():
    ids = torch.arange(2 * 10).view(2, 10) + 100
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[0, 5] = False
    anchors = torch.tensor([[2, 3, 8], [0, 7, 0]])
    valid = torch.tensor([[True, True, True], [True, True, False]])
    blocks = make_blocks(ids, mask, anchors, valid, block_size=4, mask_token_id=7)
    for b, n, j in itertools.product(range(2), range(3), range(4)):
        position = int(anchors[b, n]) + j
        counts = j > 0 and position < 10 and bool(valid[b, n])
        counts = counts and bool(mask[b, position])
        assert bool(blocks.label_mask[b, n, j]) is counts
        if counts:
            assert int(blocks.labels[b, n, j]) == int(ids[b, position])
        wanted = int(ids[b, anchors[b, n]]) if j == 0 else 7
        assert int(blocks.input_ids[b, n, j]) == wanted


# --- loss -------------------------------------------------------------------------


def test_papers_decay():
    assert [default_gamma(k) for k in (8, 10, 16)] == [4.0, 5.0, 7.0]
    weights = decay_weights(5, 4.0)
    assert weights[0] == 0
    expected = [math.exp(-k / 4) for k in range(4)]
    torch.testing.assert_close(weights[1:], torch.tensor(expected))
    assert decay_weights(4, None).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("cap", [None, 2.0])
def test_loss_and_gradient_equal_the_plain_twin(cap):
    noise = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 4, 6, generator=noise, dtype=torch.float64)
    head = torch.randn(11, 6, generator=noise, dtype=torch.float64)
    labels = torch.randint(11, (9, 4), generator=noise)
    mask = torch.rand(9, 4, generator=noise) < 0.7

    def transform(logits):
        return logits if cap is None else cap * torch.tanh(logits / cap)

    fast = hidden.clone().requires_grad_()
    loss, right, total = frozen_head_cross_entropy(
        fast, head, labels, mask, decay_weights(5, 4.0)[1:].double(), transform, chunk=5
    )
    (3 * loss).backward()
    logits = transform(hidden @ head.T)
    expected = decayed_loss(logits.tolist(), labels.tolist(), mask.tolist(), 4.0)
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-6)
    assert total.tolist() == mask.sum(0).tolist()
    assert right.tolist() == ((logits.argmax(-1) == labels) & mask).sum(0).tolist()

    slow = hidden.clone().requires_grad_()
    log_probs = transform(slow @ head.T).log_softmax(-1)
    picked = log_probs.gather(-1, labels[..., None])[..., 0]
    weight = mask * decay_weights(5, 4.0)[1:].double()
    (-3 * (picked * weight).sum() / weight.sum()).backward()
    torch.testing.assert_close(fast.grad, slow.grad, rtol=1e-6, atol=1e-9)


# --- the training path is the decoding path ----------------------------------------


def training_case():
    target = random_target(0)
    drafter = random_drafter(target)
    ids = torch.tensor([generate_greedily(target, [5, 9, 2], 20)])
    with torch.inference_mode(), target.tap(drafter.config.target_layer_ids) as tap:
        target.forward(ids, torch.arange(20)[None], target.new_cache(1, 20))
        features = tap.take()
    anchors = torch.tensor([[1, 2, 3, 9, 16]])  # overlapping, and past the end
    valid = torch.ones(1, 5, dtype=torch.bool)
    return target, drafter, ids, features, anchors, valid


def path_hidden(target, drafter, ids, features, anchors, valid):
    mask = torch.ones_like(ids, dtype=torch.bool)
    config = drafter.config
    blocks = make_blocks(
        ids, mask, anchors, valid, config.block_size, config.mask_token_id
    )
    with torch.inference_mode():
        return training_hidden(
            drafter, features, blocks.input_ids, anchors, valid, target.embedding_table
        )


def test_training_path_equals_decoding_path():
    target, drafter, ids, features, anchors, valid = training_case()
    trained = path_hidden(target, drafter, ids, features, anchors, valid)
    for n, anchor in enumerate(anchors[0].tolist()):
        session = DFlash(drafter).start(target, 1, 40)
        with torch.inference_mode():
            session.observe(
                features[:, :anchor], torch.arange(anchor)[None], torch.tensor([0])
            )
            block = torch.full((1, 6), drafter.config.mask_token_id)
            block[0, 0] = ids[0, anchor]
            start = torch.tensor([anchor])
            decoded = drafter.draft(session.embed(block), start, session.cache)
        torch.testing.assert_close(trained[0, n], decoded[0, 1:], rtol=1e-4, atol=1e-4)
        with torch.inference_mode():
            logits = target.head(trained[0, n])
            expected = session.logits(decoded)[0, 1:]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)


def test_a_block_does_not_see_its_own_future_or_its_neighbours():
    target, drafter, ids, features, anchors, valid = training_case()
    before = path_hidden(target, drafter, ids, features, anchors, valid)
    for n, anchor in enumerate(anchors[0].tolist()):
        changed, text = features.clone(), ids.clone()
        changed[:, anchor:] += 1.0
        text[:, anchor + 1 :] = (text[:, anchor + 1 :] + 1) % 61
        after = path_hidden(target, drafter, text, changed, anchors, valid)
        assert torch.equal(before[0, n], after[0, n])
    # The features right before the anchor do matter, so the test can fail.
    changed = features.clone()
    changed[:, 8] += 1.0
    after = path_hidden(target, drafter, ids, changed, anchors, valid)
    assert not torch.equal(before[0, 3], after[0, 3])


# --- features and corpus -----------------------------------------------------------


def test_cached_features_equal_a_plain_pass(tmp_path):
    target = random_target(0)
    texts = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 10]]
    path = tmp_path / "features.bin"
    cache = cache_features(target, texts, (1, 3), path, batch_tokens=6)
    batch = cache.batch([1, 0])
    for row, text in enumerate((texts[1], texts[0])):
        with torch.inference_mode():
            states = target.model(
                torch.tensor([text]), output_hidden_states=True
            ).hidden_states
        expected = torch.cat([states[2], states[4]], -1)[0].bfloat16()
        assert torch.equal(batch[row, : len(text)], expected)
        assert not batch[row, len(text) :].any()
    assert path.stat().st_size == 2 * 10 * 64
    before = path.stat().st_mtime_ns
    cache_features(target, texts, (1, 3), path)
    assert path.stat().st_mtime_ns == before  # a finished file is used again
    # Another target, other layers or other texts of the same size are noticed.
    other = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 11]]
    for arguments in (
        (random_target(1), texts, (1, 3)),
        (target, texts, (0, 3)),
        (target, other, (1, 3)),
    ):
        changed = cache_features(*arguments, path)
        fresh = cache_features(*arguments, tmp_path / "fresh.bin")
        assert torch.equal(changed.features, fresh.features)
        (tmp_path / "fresh.bin").unlink()
    assert not list(tmp_path.glob("*.partial"))


def corpus_prompts(count=9):
    return [{"prompt_ids": [1 + i, 2 + i % 3, *([7] * (i % 4))]} for i in range(count)]


def test_corpus_rows_are_the_targets_own_answers(tmp_path):
    target = random_target(0)
    prompts = corpus_prompts()
    texts = [generate_greedily(target, p["prompt_ids"], 12) for p in prompts]
    stop = [texts[0][4], texts[3][1]]
    path = tmp_path / "corpus.jsonl"
    settings = {
        "stop_token_ids": stop,
        "header": {"target": "random"},
        "max_new_tokens": 12,
        "batch_size": 4,
    }
    assert write_corpus(target, prompts, path, **settings) == 9
    header, rows = read_corpus(path)
    assert header["target"] == "random"
    assert sorted(row["index"] for row in rows) == list(range(9))
    for row in rows:
        expected = generate_greedily(target, row["prompt_ids"], 12, stop)
        assert row["answer_ids"] == expected
        assert row["truncated"] is (expected[-1] not in stop)


def test_corpus_resumes_where_it_was_killed(tmp_path):
    target = random_target(0)
    settings = {
        "stop_token_ids": [],
        "header": {"target": "random"},
        "temperatures": (0.0, 0.8),
        "max_new_tokens": 6,
        "batch_size": 3,
    }
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    write_corpus(target, corpus_prompts(), whole, **settings)
    lines = whole.read_text("utf-8").split("\n")
    # Killed while the fifth line was being written.
    broken.write_text("\n".join(lines[:4]) + "\n" + lines[4][:17], encoding="utf-8")
    write_corpus(target, corpus_prompts(), broken, **settings)

    def by_index(path):
        return sorted(read_corpus(path)[1], key=lambda row: row["index"])

    assert by_index(broken) == by_index(whole)
    with pytest.raises(DFlashLabError, match="other settings"):
        write_corpus(target, corpus_prompts(), broken, **{**settings, "header": {}})
    changed = corpus_prompts()
    changed[4]["prompt_ids"] = [3]
    with pytest.raises(DFlashLabError, match="another prompt 4"):
        write_corpus(target, changed, broken, **settings)
    with pytest.raises(DFlashLabError, match="no corpus at"):
        read_corpus(tmp_path / "missing.jsonl")


def test_self_written_prompts_are_distinct_and_ended_by_themselves(tmp_path):
    target = random_target(0)

    def decode(ids):
        return " ".join(str(i) for i in ids if i not in stop)

    stop = tuple(range(0, 61, 4))
    path = tmp_path / "draws.jsonl"
    prompts = self_written_prompts(
        target, [7, 9], path, 60, stop_token_ids=stop, decode=decode, batch_size=16
    )
    rows = read_corpus(path)[1]
    assert len(rows) == 60 and len({tuple(r["answer_ids"]) for r in rows}) > 20
    ended = {decode(r["answer_ids"]) for r in rows if r["answer_ids"][-1] in stop}
    assert set(prompts) == {text for text in ended if len(text.split()) >= 3}
    assert len(prompts) == len(set(prompts)) > 5


def test_time_limit_returns_early(tmp_path):
    target = random_target(0)
    path = tmp_path / "corpus.jsonl"
    done = write_corpus(
        target, corpus_prompts(), path, stop_token_ids=[], header={}, time_limit=-1.0
    )
    assert done == 0


# --- the trainer ------------------------------------------------------------------


def make_trainer(folder, steps, **settings):
    target = random_target(0)
    drafter = random_drafter(target, block_size=4)
    drafter.init_weights(torch.Generator().manual_seed(0))
    prompts = [[1 + i, 3, 5] for i in range(6)]
    texts = [p + generate_greedily(target, p, 20) for p in prompts]
    features = cache_features(
        target, texts, drafter.config.target_layer_ids, folder / "features.bin"
    )
    config = TrainConfig(
        steps=steps,
        batch_size=3,
        num_anchors=8,
        learning_rate=1e-2,
        bfloat16=False,
        log_every=10,
        **settings,
    )
    examples = [Example(text, 3) for text in texts]
    return Trainer(drafter, target, examples, features, config, folder), target, texts


def test_training_learns_and_ships_what_it_trained(tmp_path):
    trainer, target, texts = make_trainer(tmp_path, 150)
    exported = trainer.run(evaluate=lambda drafter: {"layers": len(drafter.layers)})
    lines = [
        json.loads(line)
        for line in (tmp_path / "metrics.jsonl").read_text("utf-8").splitlines()
    ]
    assert abs(lines[0]["loss"] - math.log(61)) < 2
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    assert lines[-1]["layers"] == 2 and lines[-1]["blocks"] == trainer.blocks_seen
    # The feature scale is folded in: the shipped drafter decodes what it memorised.
    result = speculative_generate(
        target, DFlash(exported.float()), texts[0][:3], max_new_tokens=20
    )
    assert result.output_ids == [texts[0][3:]]
    assert result.tau > 2
    assert (tmp_path / "drafter" / "model.safetensors").exists()


def test_training_is_reproducible(tmp_path):
    states = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        states.append(make_trainer(folder, 5)[0].run().state_dict())
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


def test_training_goes_on_from_trained_weights(tmp_path):
    first, target, _ = make_trainer(tmp_path, 60)
    trained = first.run().float()
    before = {k: v.clone() for k, v in trained.state_dict().items()}
    again = Trainer(
        trained,
        target,
        first.examples,
        first.features,
        first.config,
        tmp_path,
        fresh=False,
    )
    for name, tensor in again.export().state_dict().items():
        torch.testing.assert_close(tensor.float(), before[name], rtol=1e-2, atol=1e-6)


def test_schedule():
    trainer_rate = Trainer.learning_rate
    config = TrainConfig(steps=100, learning_rate=1.0, warmup_ratio=0.1)
    rates = [
        trainer_rate(type("T", (), {"config": config}), done / 100)
        for done in range(101)
    ]
    assert rates[5] == pytest.approx(0.5) and max(rates) == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5) and rates[100] == pytest.approx(0, abs=1e-9)


def test_a_wall_clock_budget_ends_training(tmp_path):
    trainer, _, _ = make_trainer(tmp_path, 10**6, minutes=0.01)
    trainer.run()
    assert 0 < trainer.steps_done < 10**6


def test_zero_steps_are_refused(tmp_path):
    with pytest.raises(DFlashLabError, match="steps 0"):
        make_trainer(tmp_path, 0)


def test_an_empty_corpus_is_refused(tmp_path):
    trainer, target, _ = make_trainer(tmp_path, 1)
    with pytest.raises(DFlashLabError, match="corpus is empty"):
        Trainer(trainer.drafter, target, [], trainer.features, trainer.config, tmp_path)


def test_feature_scale_ignores_rare_extremes(tmp_path):
    path = tmp_path / "f.bin"
    values = torch.randn(5000, 3, generator=torch.Generator().manual_seed(0))
    values[:, 1] *= 100
    values[::1000, 2] = 1e4
    path.write_bytes(values.bfloat16().view(torch.int16).numpy().tobytes())
    scale = FeatureCache(path, [5000], 3).feature_scale()
    torch.testing.assert_close(scale, torch.tensor([1.0, 0.01, 1.0]), rtol=0.15, atol=0)


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

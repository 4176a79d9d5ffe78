"""Anchors, blocks, masks, losses and the training pass against plain twins."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import replace

import pytest
import torch
from helpers import random_drafter, random_target, training_texts
from reference import decayed_loss, dpace_weights_plainly, generate_greedily
from torch.nn.attention.flex_attention import create_mask

from dflash_lab.conditioning.attention import attend
from dflash_lab.conditioning.masks import (
    anchor_block_mask,
    flex_block_mask,
    split_block_mask,
)
from dflash_lab.errors import DFlashLabError
from dflash_lab.speculative.proposer import DFlash
from dflash_lab.training.data.anchors import (
    anchor_candidates,
    make_blocks,
    select_anchors,
)
from dflash_lab.training.data.batch import build_batch
from dflash_lab.training.data.dataset import (
    BatchPlan,
    Example,
    anchor_scores,
    collate,
    load_examples,
)
from dflash_lab.training.data.features import OnlineFeatures
from dflash_lab.training.data.pipeline import Pipeline
from dflash_lab.training.losses import (
    decay_weights,
    default_gamma,
    dpace_weights,
    frozen_head_loss,
)
from dflash_lab.training.objective import HeadRows, Objective

# --- anchors ----------------------------------------------------------------------


def loss_masks(count=30, length=17):
    noise = torch.Generator().manual_seed(0)
    return torch.rand(count, length, generator=noise) < 0.6


def test_anchors_are_supervised_and_followed_by_supervised():
    mask = loss_masks()
    generator = torch.Generator().manual_seed(1)
    for number in (1, 4, 50):
        scores = torch.rand(mask.shape, generator=generator)
        anchors, valid = select_anchors(mask, number, scores)
        for b in range(len(mask)):
            allowed = [i for i in range(16) if mask[b, i] and mask[b, i + 1]]
            drawn = anchors[b][valid[b]].tolist()
            assert drawn == sorted(set(drawn)) and set(drawn) <= set(allowed)
            assert len(drawn) == min(number, len(allowed))


def test_anchors_are_redrawn_every_epoch_and_reach_every_candidate():
    mask = loss_masks(1)
    counts = torch.zeros(17)
    for epoch in range(600):
        scores = anchor_scores(seed=1, epoch=epoch, indices=[4], width=17)
        anchors, valid = select_anchors(mask, 2, scores)
        counts[anchors[valid]] += 1
    candidates = anchor_candidates(mask)[0]
    assert (counts[~candidates] == 0).all()
    expected = counts.sum() / candidates.sum()
    assert (counts[candidates] - expected).abs().max() < 5 * math.sqrt(expected)


def test_anchors_of_a_text_do_not_depend_on_its_batch():
    alone = anchor_scores(seed=3, epoch=2, indices=[7], width=12)
    among = anchor_scores(seed=3, epoch=2, indices=[1, 7, 2], width=30)
    assert torch.equal(alone[0], among[1, :12])
    other = anchor_scores(seed=3, epoch=3, indices=[7], width=12)
    assert not torch.equal(alone, other)


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


# --- the order of texts ------------------------------------------------------------


def test_every_text_is_seen_once_an_epoch_in_a_new_order():
    plan = BatchPlan([5 + i % 7 for i in range(23)], batch_size=4, seed=1)
    assert plan.steps_per_epoch == 6
    orders = []
    for epoch in range(3):
        batches = [plan.batch(6 * epoch + i) for i in range(6)]
        assert {e for e, _ in batches} == {epoch}
        seen = [i for _, batch in batches for i in batch]
        assert sorted(seen) == list(range(23))
        orders.append(seen)
    assert orders[0] != orders[1] != orders[2]
    again = BatchPlan([5 + i % 7 for i in range(23)], batch_size=4, seed=1)
    assert again.batch(13) == plan.batch(13)  # no earlier step is needed


def test_similar_lengths_share_a_batch():
    lengths = [int(x) for x in torch.randperm(400).tolist()]
    plan = BatchPlan(lengths, batch_size=10, seed=0)
    spread = []
    for step in range(40):
        picked = [lengths[i] for i in plan.batch(step)[1]]
        spread.append(max(picked) - min(picked))
    assert max(spread) < 60


def test_texts_without_an_anchor_are_dropped_and_long_ones_cut(tmp_path):
    from helpers import write_corpus_file

    texts = [Example([1, 2, 3, 4, 5], 2), Example([1, 2, 3], 2), Example([9] * 50, 4)]
    path = write_corpus_file(tmp_path / "c.jsonl", texts)
    examples, headers = load_examples([path], max_length=6)
    assert [len(e.input_ids) for e in examples] == [5, 6] and headers == [{}]
    with pytest.raises(DFlashLabError, match="two supervised tokens"):
        load_examples([path], max_length=3)
    with pytest.raises(DFlashLabError, match="no corpus is named"):
        load_examples([])
    with pytest.raises(DFlashLabError, match="no corpus at"):
        load_examples([tmp_path / "none.jsonl"])


# --- masks ------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_mask_backends_equal_the_boolean_one(causal, window):
    anchors = torch.tensor([[1, 2, 9, 0], [4, 7, 0, 0]])
    valid = torch.tensor([[True, True, True, False], [True, True, False, False]])
    options = {"causal": causal, "window": window, "valid": valid}
    mask = anchor_block_mask(anchors, 12, 5, **options)
    flex = flex_block_mask(anchors, 12, 5, **options)
    rows = 20
    dense = create_mask(flex.mask_mod, 2, 1, rows, 12 + rows, device="cpu")
    assert torch.equal(dense, mask)

    noise = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, rows, 16, generator=noise)
    k, v = (torch.randn(2, 2, 12 + rows, 16, generator=noise) for _ in range(2))
    expected = attend(q, k, v, mask)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # unfused on a CPU, which is meant here
        found = attend(q, k, v, flex)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    split = split_block_mask(anchors, 12, 5, **options)
    seen = valid.repeat_interleave(5, dim=1)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    twins = [x.clone().requires_grad_() for x in (q, k, v)]
    parts = attend(*inputs, split).transpose(1, 2)[seen]
    whole = attend(*twins, mask).transpose(1, 2)[seen]
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-5)
    weight = torch.randn(whole.shape, generator=noise)
    (parts * weight).sum().backward()
    (whole * weight).sum().backward()
    for one, two in zip(inputs, twins, strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-5)
    assert not expected[~seen[:, None].expand(-1, 4, -1)].any()


# --- losses -----------------------------------------------------------------------


def test_papers_decay():
    assert [default_gamma(k) for k in (8, 10, 16)] == [4.0, 5.0, 7.0]
    weights = decay_weights(5, 4.0)
    assert weights[0] == 0
    expected = [math.exp(-k / 4) for k in range(4)]
    torch.testing.assert_close(weights[1:], torch.tensor(expected))
    assert decay_weights(4, None).tolist() == [0, 1, 1, 1]


def test_dpace_weights_equal_their_plain_twin():
    noise = torch.Generator().manual_seed(0)
    losses = torch.rand(7, 5, generator=noise, dtype=torch.float64) * 3
    mask = torch.ones(7, 5, dtype=torch.bool)
    mask[1, 3:] = False
    mask[2] = False
    expected = dpace_weights_plainly(losses.tolist(), mask.tolist())
    found = dpace_weights(losses, mask)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("kind", ["ce", "kl", "dpace"])
def test_loss_and_gradient_equal_the_plain_twin(kind, cap):
    noise = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 4, 6, generator=noise, dtype=torch.float64)
    teacher = torch.randn(9, 4, 6, generator=noise, dtype=torch.float64)
    head = torch.randn(11, 6, generator=noise, dtype=torch.float64)
    labels = torch.randint(11, (9, 4), generator=noise)
    mask = torch.rand(9, 4, generator=noise) < 0.7
    decay = decay_weights(5, 4.0)[1:].double()

    def transform(logits):
        return logits if cap is None else cap * torch.tanh(logits / cap)

    fast = hidden.clone().requires_grad_()
    sums = frozen_head_loss(
        fast,
        head,
        labels,
        mask,
        decay,
        kind=kind,
        teacher=teacher if kind == "kl" else None,
        transform=transform,
        chunk=5,
    )
    (3 * sums.loss / sums.weight).backward()
    logits = transform(hidden @ head.T)
    assert sums.total.tolist() == mask.sum(0).tolist()
    assert sums.right.tolist() == ((logits.argmax(-1) == labels) & mask).sum(0).tolist()

    slow = hidden.clone().requires_grad_()
    log_probs = transform(slow @ head.T).log_softmax(-1)
    if kind == "kl":
        wanted = (teacher @ head.T).softmax(-1)
        losses = (wanted * (wanted.log() - log_probs)).sum(-1)
    else:
        losses = -log_probs.gather(-1, labels[..., None])[..., 0]
    weight = mask * decay
    if kind == "dpace":
        rows = dpace_weights_plainly(losses.tolist(), mask.tolist())
        weight = torch.tensor(rows, dtype=torch.float64)
    loss = (losses * weight).sum() / weight.sum()
    (3 * loss).backward()
    found = float((sums.loss / sums.weight).detach())
    assert found == pytest.approx(float(loss.detach()))
    torch.testing.assert_close(fast.grad, slow.grad, rtol=1e-6, atol=1e-9)
    if kind == "ce":
        plain = decayed_loss(logits.tolist(), labels.tolist(), mask.tolist(), 4.0)
        assert found == pytest.approx(plain, abs=1e-6)


def test_a_pass_without_labels_has_no_loss_and_no_gradient():
    hidden = torch.randn(3, 2, 6, requires_grad=True)
    none = torch.zeros(3, 2, dtype=torch.bool)
    labels = torch.zeros(3, 2, dtype=torch.long)
    sums = frozen_head_loss(hidden, torch.randn(5, 6), labels, none, torch.ones(2))
    sums.loss.backward()
    assert float(sums.loss.detach()) == 0 and float(sums.weight) == 0
    assert not hidden.grad.any()


# --- the training path is the decoding path ----------------------------------------


def training_case():
    target = random_target(0)
    drafter = random_drafter(target)
    ids = torch.tensor([[5, 9, 2, *generate_greedily(target, [5, 9, 2], 20)]])
    features, last = OnlineFeatures(target, (1, 2), True).batch([0], ids)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, 3:] = True
    scores = torch.full(ids.shape, -1.0)
    scores[0, [3, 4, 5, 11, 19]] = 0.5  # overlapping, and past the end
    batch = build_batch(
        drafter.config, ids, mask, features.float(), scores, 5, head_inputs=last
    )
    assert batch.blocks.anchor_positions.tolist() == [[3, 4, 5, 11, 19]]
    return target, Objective(drafter, target, HeadRows(target)), ids, batch


@torch.no_grad()
def test_training_path_equals_decoding_path():
    target, objective, ids, batch = training_case()
    trained, drafter = objective.hidden(batch), objective.drafter
    for n, anchor in enumerate(batch.blocks.anchor_positions[0].tolist()):
        session = DFlash(drafter).start(target, 1, 40)
        positions = torch.arange(anchor)[None]
        session.observe(batch.target_hidden[:, :anchor], positions, torch.tensor([0]))
        block = torch.full((1, 6), drafter.config.mask_token_id)
        block[0, 0] = ids[0, anchor]
        start = torch.tensor([anchor])
        decoded = drafter.draft(session.embed(block), start, session.cache)
        torch.testing.assert_close(trained[0, n], decoded[0, 1:], rtol=1e-4, atol=1e-4)
        logits = target.head(trained[0, n])
        expected = session.logits(decoded)[0, 1:]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)


@torch.no_grad()
def test_a_block_does_not_see_its_own_future_or_its_neighbours():
    _, objective, _, batch = training_case()
    before = objective.hidden(batch)
    for n, anchor in enumerate(batch.blocks.anchor_positions[0].tolist()):
        changed = batch.target_hidden.clone()
        changed[:, anchor:] += 1.0
        inputs = (batch.blocks.input_ids + 1) % 61
        inputs[:, n] = batch.blocks.input_ids[:, n]
        blocks = replace(batch.blocks, input_ids=inputs)
        after = objective.hidden(replace(batch, target_hidden=changed, blocks=blocks))
        assert torch.equal(before[0, n], after[0, n])
    # The features right before the anchor do matter, so the test can fail.
    changed = batch.target_hidden.clone()
    changed[:, 10] += 1.0
    after = objective.hidden(replace(batch, target_hidden=changed))
    assert not torch.equal(before[0, 3], after[0, 3])


@torch.no_grad()
def test_teacher_is_the_targets_own_law_of_each_label():
    target, _, ids, batch = training_case()
    logits = target.model(ids).logits
    for n, anchor in enumerate(batch.blocks.anchor_positions[0].tolist()):
        for k in range(1, 6):
            if not batch.blocks.label_mask[0, n, k]:
                continue
            taught = target.head(batch.teacher[0, n, k - 1].float())
            expected = logits[0, anchor + k - 1]
            torch.testing.assert_close(taught, expected, rtol=0.05, atol=0.3)
            assert int(expected.argmax()) == int(batch.blocks.labels[0, n, k])


def make_pipeline(target, drafter, **options):
    examples = training_texts(target)
    source = OnlineFeatures(target, drafter.config.target_layer_ids)
    settings = {"batch_size": 3, "num_anchors": 6, "seed": 5} | options
    return Pipeline(drafter.config, examples, source, **settings)


def test_scaled_features_are_folded_into_the_published_form():
    target = random_target(0)
    drafter = random_drafter(target)
    pipeline = make_pipeline(target, drafter)
    batch = pipeline.batch([0, 1], 0)
    scale = torch.linspace(0.2, 3.0, 64)
    scaled = Objective(drafter, target, HeadRows(target), scale)
    published = scaled.export(dtype=torch.float32)
    plain = Objective(published, target, HeadRows(target))
    with torch.no_grad():
        expected = scaled.hidden(batch)
        torch.testing.assert_close(plain.hidden(batch), expected, rtol=1e-4, atol=1e-4)
    # And the way back: training goes on from a published drafter.
    before = {k: v.clone() for k, v in drafter.state_dict().items()}
    again = Objective(random_drafter(target, seed=9), target, HeadRows(target), scale)
    again.start_from(published)
    for name, tensor in again.drafter.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=1e-5, atol=1e-6)


def test_feature_scale_ignores_rare_extremes():
    target = random_target(0)
    pipeline = make_pipeline(target, random_drafter(target))
    noise = torch.Generator().manual_seed(0)

    class Fixed:
        def batch(self, indices, ids):
            values = torch.randn(1, 50, 3, generator=noise)
            values[..., 1] *= 100
            if indices[0] == 0:
                values[0, 0, 2] = 1e5
            return values.bfloat16(), None

    pipeline.features = Fixed()
    expected = torch.tensor([1.0, 0.01, 1.0])
    torch.testing.assert_close(pipeline.feature_scale(), expected, rtol=0.2, atol=0)


# --- the head's rows ---------------------------------------------------------------


def test_head_rows_of_frequent_tokens():
    target = random_target(0)
    texts = [Example([1, 7, 7, 7, 9, 9, 4], 1), Example([60, 9, 7, 4, 4, 4, 4], 1)]
    rows = HeadRows(target, texts, limit=2, extra_negatives=5, seed=1)
    assert rows.kept.tolist() == [4, 7]  # 9 is rarer, 1 and 60 are prompt tokens
    found = rows.rows(step=3)
    assert found.shape == (7, 32)
    assert torch.equal(found[:2], target.head.weight[[4, 7]])
    assert torch.equal(found, rows.rows(step=3))
    assert not torch.equal(found, rows.rows(step=4))
    labels = torch.tensor([[4, 9], [7, 1]])
    places, mask = rows.labels(labels, torch.tensor([[True, True], [False, True]]))
    assert places[0, 0] == 0 and places[1, 0] == 1
    assert mask.tolist() == [[True, False], [False, False]]


def test_whole_head_by_default():
    target = random_target(0)
    rows = HeadRows(target)
    labels, mask = torch.tensor([[3]]), torch.tensor([[True]])
    assert rows.rows(0) is not None and rows.rows(0).shape == (61, 32)
    assert rows.labels(labels, mask)[0] is labels


# --- shares of a step --------------------------------------------------------------


@pytest.mark.parametrize("world,accumulation", [(1, 1), (1, 2), (2, 1), (2, 2), (5, 1)])
def test_processes_and_rounds_share_a_step_without_changing_it(world, accumulation):
    target = random_target(0)
    drafter = random_drafter(target)
    whole = make_pipeline(target, drafter)
    parts = make_pipeline(target, drafter, accumulation=accumulation)
    objective = Objective(drafter, target, HeadRows(target))
    for step in (0, 2, 4):  # the third batch of an epoch is a short one
        (batch,) = whole.step(step)
        loss, weight, *counts = objective(batch, step)
        shares = [parts.step(step, rank, world) for rank in range(world)]
        assert len({len(share) for share in shares}) == 1  # nobody waits in vain
        sums = [objective(b, step) for share in shares for b in share]
        torch.testing.assert_close(sum(s[0] for s in sums), loss)
        torch.testing.assert_close(sum(s[1] for s in sums), weight)
        assert torch.equal(sum(s[2] for s in sums), counts[0])
        assert torch.equal(sum(s[3] for s in sums), counts[1])


def test_collate_pads_behind_the_texts():
    texts = [Example([1, 2, 3], 1), Example([4, 5, 6, 7, 8], 3)]
    ids, mask = collate(texts, [1, 0])
    assert ids.tolist() == [[4, 5, 6, 7, 8], [1, 2, 3, 0, 0]]
    assert mask.int().tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 0, 0]]

"""Medusa-style heads: which row drafts which token, and text stays exact."""

from __future__ import annotations

import gc
import json
import math

import pytest
import torch
from helpers import random_target, training_texts
from reference import generate_greedily

from dflash_lab.baselines import medusa_proposer
from dflash_lab.baselines.medusa import MedusaConfig, MedusaHeads
from dflash_lab.baselines.medusa_proposer import Medusa
from dflash_lab.baselines.medusa_training import (
    MedusaTraining,
    heads_loss,
    train_medusa,
)
from dflash_lab.baselines.training_loop import Batch
from dflash_lab.errors import DFlashLabError
from dflash_lab.measure.methods import MethodSettings, make_method
from dflash_lab.pairs.pair import Pair, load_pair
from dflash_lab.speculative.generate import speculative_generate
from dflash_lab.speculative.proposer import Plain
from dflash_lab.speculative.sampling import Sampling
from dflash_lab.target.target import Target
from dflash_lab.training.data.dataset import collate
from dflash_lab.training.data.feature_store import cache_features
from dflash_lab.training.data.features import OnlineFeatures

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]


def random_heads(target, block_size=6, seed=0):
    heads = MedusaHeads(MedusaConfig.for_target(target, block_size))
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        heads.linear.weight.normal_(std=0.5, generator=noise)
        heads.linear.bias.normal_(generator=noise)
    return heads.eval()


def head_inputs(target, ids):
    """(1, S, D): what the target's head reads, by the model's own modules."""
    with torch.no_grad():
        return target.model.base_model(torch.tensor([ids])).last_hidden_state


def plain_logits(heads, target, row, k):
    """Head k of one row (D,), number by number."""
    width = heads.config.hidden_size
    weight = heads.linear.weight[(k - 1) * width : k * width].tolist()
    bias = heads.linear.bias[(k - 1) * width : k * width].tolist()
    row, mixed = row.tolist(), []
    for i in range(width):
        inner = bias[i] + sum(w * x for w, x in zip(weight[i], row, strict=True))
        mixed.append(row[i] + inner / (1 + math.exp(-inner)))
    table = target.head.weight.tolist()
    return [sum(w * x for w, x in zip(line, mixed, strict=True)) for line in table]


# --- heads --------------------------------------------------------------------------


@torch.no_grad()
def test_a_head_is_a_residual_block_before_the_targets_head(target):
    heads = random_heads(target, 4)
    hidden = head_inputs(target, [3, 17, 40])
    out = heads(hidden)
    assert out.shape == (1, 3, 3, target.hidden_size)
    logits = target.logits(out)
    assert logits.shape == (1, 3, 3, target.vocab_size)
    for k in (1, 2, 3):
        expected = torch.tensor(plain_logits(heads, target, hidden[0, 2], k))
        torch.testing.assert_close(logits[0, 2, k - 1], expected, rtol=1e-4, atol=1e-3)


def test_a_fresh_head_is_the_identity(target):
    heads = MedusaHeads(MedusaConfig.for_target(target, 3))
    hidden = torch.randn(2, target.hidden_size)
    assert torch.equal(heads(hidden), hidden[:, None].expand(-1, 2, -1))
    assert sum(p.numel() for p in heads.parameters()) == 2 * 32 * 33


# --- which row drafts which token -----------------------------------------------------


def observed_rows(target, heads, prompts, monkeypatch, **options):
    """(text, row, drafts) of every cycle of a generation."""
    seen = []
    real = medusa_proposer._MedusaSession.propose

    def spy(self, texts, num_drafts, *rest):
        made = real(self, texts, num_drafts, *rest)
        for b, text in enumerate(texts):
            drafts = made.tokens[b].tolist() if num_drafts else []
            seen.append((list(text), self.last[b].clone(), drafts))
        return made

    monkeypatch.setattr(medusa_proposer._MedusaSession, "propose", spy)
    result = speculative_generate(
        target, Medusa(heads), prompts, max_new_tokens=20, **options
    )
    return seen, result


@pytest.mark.parametrize("fused", [True, False])
def test_decoding_reads_the_row_before_the_known_token(fused, target, monkeypatch):
    """Through accepted and rejected drafts, in a batch whose rows run apart."""
    if not fused:
        target = Target(target.model)
    heads = random_heads(target)
    with torch.no_grad():  # some heads are right now and then, so that rows run apart
        heads.linear.weight[: 2 * 32].zero_()
        heads.linear.bias[: 2 * 32].zero_()
    seen, result = observed_rows(target, heads, PROMPTS, monkeypatch)
    lengths = {c.acceptance_length for c in result.trace.cycles}
    assert len(seen) > 20 and len(lengths) > 1
    for text, row, drafts in seen:
        assert any(text[: len(p)] == p for p in PROMPTS)
        # The text's last token is known, but the target has not read it.
        hidden = head_inputs(target, text)[0, len(text) - 2]
        torch.testing.assert_close(row, hidden, rtol=1e-4, atol=1e-4)
        for k, draft in enumerate(drafts, 1):
            with torch.no_grad():
                logits = plain_logits(heads, target, hidden, k)
            assert logits[draft] > max(logits) - 1e-3


def plain_loss(heads, target, ids, mask, hidden, anchors):
    """`heads_loss`, one draft at a time: row t, head k, token t + 1 + k."""
    total = weight = 0.0
    right, count = [0] * 3, [0] * 3
    for b, own in enumerate(anchors):
        for t in own:
            for k in (1, 2, 3):
                at = t + 1 + k
                if at >= ids.shape[1] or not mask[b, at]:
                    continue
                logits = torch.tensor(plain_logits(heads, target, hidden[b, t], k))
                label = int(ids[b, at])
                total -= 0.8 ** (k - 1) * logits.log_softmax(-1)[label].item()
                weight += 0.8 ** (k - 1)
                right[k - 1] += int(logits.argmax()) == label
                count[k - 1] += 1
    return total, weight, right, count


@torch.no_grad()
def test_training_pairs_rows_with_the_tokens_that_decoding_drafts(target):
    heads = random_heads(target, 4)
    examples = training_texts(target, count=3, length=6)
    ids, mask = collate(examples, range(3))
    mask[1, 7:] = False  # a text that ends early
    hidden = torch.cat([head_inputs(target, row.tolist()) for row in ids])
    scores = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0))
    batch = Batch(range(len(ids)), ids, mask, scores)
    sums = heads_loss(heads, target, batch, hidden, num_anchors=50)
    # Every row whose next token is an answer's, and known when the head drafts; the
    # first is the prompt's last row.
    places = [[2, 3, 4, 5, 6], [2, 3, 4], [2, 3, 4, 5, 6]]
    total, weight, right, count = plain_loss(heads, target, ids, mask, hidden, places)
    assert sums.loss.item() == pytest.approx(total, rel=1e-4)
    assert sums.weight.item() == pytest.approx(weight, rel=1e-5)
    assert sums.right.tolist() == right and sums.total.tolist() == count
    few = heads_loss(heads, target, batch, hidden, num_anchors=2)
    assert few.total[0] == 6


@torch.no_grad()
def test_logits_of_training_and_decoding_agree(target):
    heads = random_heads(target)
    text = training_texts(target, count=1, length=12)[0].input_ids
    features = OnlineFeatures(target, (1,), with_head_inputs=True)
    rows = features.batch([0], torch.tensor([text]))[1].float()
    trained = target.head(heads(rows))  # (1, S, K-1, V)
    for end in range(2, len(text)):
        session = Medusa(heads).start(target, 1, 32)
        positions = torch.arange(end)[None]
        target.forward(torch.tensor([text[:end]]), positions, target.new_cache(1, 32))
        session.observe(None, positions, torch.tensor([0]))
        decoded = session.logits(5)[0]
        # Features are kept in bfloat16, and these logits reach into the hundreds.
        scale = decoded.abs().max()
        assert (decoded - trained[0, end - 1]).abs().max() < 0.02 * scale


# --- decoding -------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
def test_any_heads_leave_the_text_as_it_is(fused, target):
    if not fused:
        target = Target(target.model)
    heads = random_heads(target)
    for size in (2, 6):
        found = speculative_generate(
            target, Medusa(heads, size), PROMPTS, max_new_tokens=20, details=True
        )
        for prompt, ids in zip(PROMPTS, found.output_ids, strict=True):
            assert ids == generate_greedily(target, prompt, 20)
        assert {len(c.draft_tokens) for c in found.trace.cycles} <= set(range(size))
        assert all(0 < p <= 1 for c in found.trace.cycles for p in c.draft_probs)
    for rule in ("match", "speculative"):
        sampling = Sampling(1.0, seed=3, rule=rule)
        options = {"max_new_tokens": 12, "sampling": sampling}
        alone = [
            speculative_generate(target, Medusa(heads), prompt, **options)
            for prompt in PROMPTS
        ]
        alone = [result.output_ids[0] for result in alone]
        together = speculative_generate(target, Medusa(heads), PROMPTS, **options)
        assert together.output_ids == alone
        if rule == "match":
            plain = speculative_generate(target, Plain(), PROMPTS, **options)
            assert plain.output_ids == alone


@pytest.mark.parametrize("fused", [True, False])
def test_a_generation_leaves_no_listener_behind(fused):
    target = random_target(3)
    target = target if fused else Target(target.model)
    heads = random_heads(target)
    speculative_generate(target, Medusa(heads), [1, 2], max_new_tokens=4)
    gc.collect()
    assert not target.model.base_model._forward_hooks
    assert not getattr(target, "_taps", [])


# --- files and errors -----------------------------------------------------------------


def test_heads_are_saved_and_loaded_and_kept_from_other_targets(target, tmp_path):
    heads = random_heads(target)
    heads.save_pretrained(tmp_path / "heads")
    names = sorted(path.name for path in (tmp_path / "heads").iterdir())
    assert names == ["config.json", "model.safetensors"]
    again = MedusaHeads.from_pretrained(tmp_path / "heads")
    assert again.config == heads.config
    for name, tensor in heads.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    half = MedusaHeads.from_pretrained(tmp_path / "heads", torch.bfloat16)
    assert half.dtype == torch.bfloat16
    with pytest.raises(DFlashLabError, match="this one has"):
        other = random_target(0, num_hidden_layers=6)
        speculative_generate(other, Medusa(heads), [1], max_new_tokens=3)
    for size in (1, 7):
        with pytest.raises(DFlashLabError, match=rf"block_size {size} .*2\.\.6"):
            Medusa(heads, size)
    with pytest.raises(DFlashLabError, match="block_size 1"):
        MedusaConfig.for_target(target, 1)


def test_folders_that_are_not_heads_are_refused(target, tmp_path):
    with pytest.raises(DFlashLabError, match="no Medusa-style heads"):
        MedusaHeads.from_pretrained(tmp_path / "nothing")
    heads = random_heads(target)
    heads.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text("utf-8"))
    for change, words in (
        ({"model_type": "qwen3"}, "no Medusa-style heads"),
        ({"block_size": 5}, "its config says"),
        ({"colour": 1}, "is damaged"),
    ):
        path.write_text(json.dumps(config | change), "utf-8")
        with pytest.raises(DFlashLabError, match=words):
            MedusaHeads.from_pretrained(tmp_path)
    path.write_text("{", "utf-8")
    with pytest.raises(DFlashLabError, match="is damaged"):
        MedusaHeads.from_pretrained(tmp_path)
    path.write_text(json.dumps(config), "utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(DFlashLabError, match="cannot be read"):
        MedusaHeads.from_pretrained(tmp_path)


def test_the_method_finds_its_folder_or_says_what_to_do(target, tmp_path):
    pair = Pair("nobody", target, None, None, ())
    with pytest.raises(DFlashLabError, match="no Medusa-style heads come with nobody"):
        make_method("medusa", pair, MethodSettings())
    random_heads(target).save_pretrained(tmp_path)
    method = make_method("medusa", pair, MethodSettings(9, medusa=str(tmp_path)))
    assert method([1, 2]).ids == generate_greedily(target, [1, 2], 9)


def test_the_shipped_heads_draft_for_the_tiny_pair():
    pair = load_pair("tiny", with_drafter=False, quiet=True)
    ids = pair.encode("Tell Mia about the fox.")
    answer = make_method("medusa", pair, MethodSettings(40))(ids)
    assert answer.ids == make_method("ar", pair, MethodSettings(40))(ids).ids
    assert answer.trace.header["block_size"] == 8 and answer.trace.tau > 2
    with pytest.raises(DFlashLabError, match=r"block_size 9 is outside 2\.\.8"):
        make_method("medusa", pair, MethodSettings(block_size=9))


# --- training -------------------------------------------------------------------------


@pytest.mark.slow
def test_heads_learn_and_draft_what_they_learnt(target, tmp_path):
    examples = training_texts(target)
    settings = MedusaTraining(
        block_size=5, num_anchors=24, learning_rate=0.03, steps=400
    )
    lines = []
    features = OnlineFeatures(target, (1,), with_head_inputs=True)
    heads = train_medusa(
        target, examples, features, settings, on_step=lines.append, quiet=True
    )
    assert lines[-1]["step"] == 400 and lines[-1]["loss"] < 0.2 * lines[0]["loss"]
    assert min(lines[-1]["accuracy"]) > 0.8
    text = examples[0]
    found = speculative_generate(
        target, Medusa(heads), text.input_ids[:3], max_new_tokens=24
    )
    # Chance is one in 61 a draft.
    assert found.output_ids == [text.input_ids[3:]] and found.tau > 3
    assert all(p.grad is None for p in target.model.parameters())
    # The same run from a store on the disk gives the same heads.
    texts = [example.input_ids for example in examples]
    store = cache_features(
        target, texts, (1,), tmp_path / "store", head_inputs=True, quiet=True
    )
    again = train_medusa(target, examples, store, settings, quiet=True)
    torch.testing.assert_close(
        again.linear.weight, heads.linear.weight, rtol=1e-2, atol=1e-2
    )


def test_training_says_what_it_cannot_do(target):
    for options, words in (
        ({}, "either steps or cpu_minutes"),
        ({"steps": 0}, "steps 0 must be above 0"),
        ({"steps": 5, "num_anchors": 0}, "num_anchors 0"),
        ({"cpu_minutes": -1.0}, r"cpu_minutes -1\.0 must be above 0"),
    ):
        with pytest.raises(DFlashLabError, match=words):
            MedusaTraining(**options).check()
    examples = training_texts(target, count=2)
    with pytest.raises(DFlashLabError, match="with_head_inputs=True"):
        bare = OnlineFeatures(target, (1,))
        train_medusa(target, examples, bare, MedusaTraining(steps=2))
    lines = []
    features = OnlineFeatures(target, (1,), with_head_inputs=True)
    settings = MedusaTraining(cpu_minutes=0.005)
    train_medusa(target, examples, features, settings, on_step=lines.append, quiet=True)
    assert 0 < len(lines) < 10**5

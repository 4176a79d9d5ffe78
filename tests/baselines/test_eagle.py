"""The EAGLE-3-style head: training unrolls what decoding does, and text stays exact."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import random_target, training_texts
from reference import generate_greedily

from dflash_lab.baselines.eagle import EagleConfig, EagleHead, embed
from dflash_lab.baselines.eagle_proposer import Eagle
from dflash_lab.baselines.eagle_training import (
    EagleTraining,
    start_head,
    train_eagle,
    unrolled_loss,
)
from dflash_lab.baselines.training_loop import Batch
from dflash_lab.errors import DFlashLabError
from dflash_lab.speculative.generate import speculative_generate
from dflash_lab.speculative.proposer import Plain
from dflash_lab.speculative.sampling import Sampling
from dflash_lab.training.data.dataset import Example, collate
from dflash_lab.training.data.features import OnlineFeatures


@pytest.fixture(scope="module")
def deep():
    return random_target(1, num_hidden_layers=8)


def random_head(target, draft_vocab_size=None, seed=0):
    torch.manual_seed(seed)
    head = EagleHead(EagleConfig.for_target(target.config, draft_vocab_size))
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
        if draft_vocab_size:
            head.draft_ids.copy_(torch.randperm(61)[:draft_vocab_size])
    return head.eval()


def test_the_taps_are_the_inputs_of_three_layers(deep):
    config = EagleConfig.for_target(deep.config)
    # Inputs of layers 2, 4 and 5 of 8.
    assert config.target_layer_ids == (1, 3, 4)
    with pytest.raises(DFlashLabError, match="too shallow"):
        EagleConfig.for_target(random_target(0).config)


@torch.inference_mode()
def test_training_unrolls_what_decoding_drafts(deep):
    """Drafting behind every place of a text, against the unrolled pass."""
    head = random_head(deep)
    ids = [3, 17, 40, 8, 22, 5, 31, 60, 2, 11]
    positions = torch.arange(len(ids))[None]
    with deep.tap(head.config.target_layer_ids) as tap:
        deep.forward(torch.tensor([ids]), positions, deep.new_cache(1, 16))
        features = tap.take()
    table = deep.embedding_table
    steps = head.unroll(features, embed(table, torch.tensor([ids]), head.dtype), 4)
    assert [step.shape[1] for step in steps] == [9, 8, 7, 6]
    for t in range(6):
        session = Eagle(head, 8).start(deep, 1, 32)
        session.observe(features[:, : t + 1], positions[:, : t + 1], torch.tensor([0]))
        hidden = session._catch_up(0, ids[: t + 2])
        torch.testing.assert_close(hidden[0, 0], steps[0][0, t])
        for k in range(2, 5):  # fed with the text's own tokens
            token = torch.tensor([[ids[t + k]]])
            hidden = session._feed(token, hidden, torch.tensor([[t + k - 1]]))
            torch.testing.assert_close(hidden[0, 0], steps[k - 1][0, t])


@torch.inference_mode()
def test_true_features_take_the_place_of_drafted_rows(deep):
    """After any drafting, the cache holds what a fresh session holds."""
    head = random_head(deep)
    prompt = [3, 17, 40]
    text = prompt + generate_greedily(deep, prompt, 12)
    positions = torch.arange(len(text))[None]
    with deep.tap(head.config.target_layer_ids) as tap:
        deep.forward(torch.tensor([text]), positions, deep.new_cache(1, 32))
        features = tap.take()
    used, fresh = (Eagle(head, 6).start(deep, 1, 40) for _ in range(2))
    start = 0
    for end in (3, 4, 8, 9, 13):
        row = torch.tensor([0])
        used.observe(features[:, start:end], positions[:, start:end], row)
        used.propose([text[: end + 1]], 5, Sampling(), torch.tensor([0]), False)
        start = end
    fresh.observe(features[:, :13], positions[:, :13], torch.tensor([0]))
    fresh.propose([text[:14]], 1, Sampling(), torch.tensor([0]), False)
    for one, two in zip(used.cache.read(0, 13), fresh.cache.read(0, 13), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("draft_vocab_size", [None, 20])
def test_any_head_leaves_the_text_as_it_is(deep, draft_vocab_size):
    head = random_head(deep, draft_vocab_size)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    for size in (2, 6):
        found = speculative_generate(
            deep, Eagle(head, size), prompts, max_new_tokens=20, details=True
        )
        for prompt, ids in zip(prompts, found.output_ids, strict=True):
            assert ids == generate_greedily(deep, prompt, 20)
        drafts = {t for c in found.trace.cycles for t in c.draft_tokens}
        assert drafts <= set(head.draft_ids.tolist())
    for rule in ("match", "speculative"):
        sampling = Sampling(1.0, seed=3, rule=rule)
        alone = [
            speculative_generate(
                deep, Eagle(head, 5), prompt, max_new_tokens=12, sampling=sampling
            ).output_ids[0]
            for prompt in prompts
        ]
        together = speculative_generate(
            deep, Eagle(head, 5), prompts, max_new_tokens=12, sampling=sampling
        )
        assert together.output_ids == alone
        if rule == "match":
            plain = speculative_generate(
                deep, Plain(), prompts, max_new_tokens=12, sampling=sampling
            )
            assert plain.output_ids == alone


def test_a_head_is_saved_and_loaded_and_kept_from_other_targets(deep, tmp_path):
    head = random_head(deep, 20)
    head.save_pretrained(tmp_path)
    again = EagleHead.from_pretrained(tmp_path)
    assert again.config == head.config
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    with pytest.raises(DFlashLabError, match="no EAGLE-style head"):
        EagleHead.from_pretrained(tmp_path / "nothing")
    with pytest.raises(DFlashLabError, match="this one has"):
        other = random_target(0, num_hidden_layers=9)
        speculative_generate(other, Eagle(head), [1], max_new_tokens=3)
    with pytest.raises(DFlashLabError, match="block_size 1"):
        Eagle(head, 1)


# --- training -----------------------------------------------------------------------


def plain_loss(head, target, ids, mask, hidden, places, place_of, unroll):
    """`unrolled_loss`, one draft at a time."""
    embedding = embed(target.embedding_table, ids, torch.float32)
    outputs = head.unroll(hidden, embedding, unroll)
    total = weight = 0.0
    for b, own in enumerate(places):
        for t in own:
            if t + 2 >= ids.shape[1] or not mask[b, t + 2]:
                continue
            for k in range(1, unroll + 1):
                at = t + k + 1
                if at >= ids.shape[1] or not mask[b, at]:
                    continue
                label = int(place_of[ids[b, at]])
                if label < 0:
                    continue
                logits = head.logits(outputs[k - 1][b : b + 1, t : t + 1])[0, 0]
                total -= 0.8 ** (k - 1) * logits.log_softmax(-1)[label].item()
                weight += 0.8 ** (k - 1)
    return total / weight


def test_the_loss_equals_its_plain_twin(deep):
    settings = EagleTraining(draft_vocab_size=30, unroll=4, places=5)
    examples = training_texts(deep, count=4, length=9)
    head, place_of = start_head(deep, examples, settings)
    ids, mask = collate(examples, range(4))
    mask[1, 8:] = False  # a text that ends early
    noise = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, ids.shape[1], 96, generator=noise)
    scores = torch.rand(4, ids.shape[1], generator=noise)
    batch = Batch(range(4), ids, mask, scores)
    loss, right, total = unrolled_loss(head, deep, batch, hidden, place_of, settings)
    first = torch.nn.functional.pad(mask[:, 2:], (0, 2))
    places = scores.masked_fill(~first, -1.0).topk(5, dim=1).indices.tolist()
    expected = plain_loss(head, deep, ids, mask, hidden, places, place_of, 4)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert (right <= total).all() and total[0] > 0


@pytest.mark.slow
def test_a_head_learns_and_drafts_what_it_learnt(deep):
    examples = training_texts(deep)
    taps = EagleConfig.for_target(deep.config).target_layer_ids
    lines = []
    head = train_eagle(
        deep,
        examples,
        OnlineFeatures(deep, taps),
        EagleTraining(
            draft_vocab_size=50, unroll=4, places=16, batch_size=4, steps=120
        ),
        on_step=lines.append,
        quiet=True,
    )
    assert lines[-1]["step"] == 120 and lines[-1]["loss"] < 0.3 * lines[0]["loss"]
    text = examples[0]
    found = speculative_generate(
        deep, Eagle(head, 5), text.input_ids[:3], max_new_tokens=24
    )
    assert found.output_ids == [text.input_ids[3:]] and found.tau > 3


def test_a_run_without_a_budget_is_refused_and_a_clock_ends_one(deep):
    examples = training_texts(deep)
    taps = EagleConfig.for_target(deep.config).target_layer_ids
    features = OnlineFeatures(deep, taps)
    with pytest.raises(DFlashLabError, match="either steps or cpu_minutes"):
        train_eagle(deep, examples, features, EagleTraining())
    lines = []
    settings = EagleTraining(cpu_minutes=0.01, unroll=2)
    train_eagle(deep, examples, features, settings, on_step=lines.append, quiet=True)
    assert 0 < len(lines) < 10**5


@pytest.mark.slow
def test_the_command_line_trains_a_head_that_the_bench_can_use(tmp_path, capsys):
    from helpers import write_corpus_file

    from dflash_lab import load_pair
    from dflash_lab.baselines.eagle_training import accuracy_by_draft, main
    from dflash_lab.measure.methods import MethodSettings, make_method

    pair = load_pair("tiny", with_drafter=False, quiet=True)
    plain = make_method("ar", pair, MethodSettings(16))
    examples = []
    for text in ["Tell Mia about the fox.", "Name a river."] * 6:
        ids = pair.encode(text)
        examples.append(Example(ids + plain(ids).ids, len(ids)))
    corpus = write_corpus_file(tmp_path / "corpus.jsonl", examples)
    out = tmp_path / "made"
    common = ["--pair", "tiny", "--corpus", str(corpus), "--out", str(out)]
    options = ["--draft-vocab-size", "40", "--batch-size", "4", "--bf16"]
    assert main([*common, "--steps", "40", *options]) == 0
    assert "40 steps, held-out accuracy [" in capsys.readouterr().out
    facts = json.loads((out / "training.json").read_text("utf-8"))
    assert facts["answers"] == 11 and facts["settings"]["draft_vocab_size"] == 40
    head = EagleHead.from_pretrained(out)
    assert head.lm_head.weight.shape[0] == 40
    # It has seen the text that was kept out: it must have it right more than by chance.
    accuracy = accuracy_by_draft(head.float(), pair.target, examples[-1:])
    assert len(accuracy) == 7 and accuracy[0] > 0.3
    ids = examples[0].input_ids[: examples[0].prompt_length]
    made = make_method("eagle", pair, MethodSettings(16, eagle=str(out)))
    assert made(ids).ids == plain(ids).ids
    assert main(common) == 2 and "not both" in capsys.readouterr().err
    assert main([*common, "--steps", "1", "--threads", "0"]) == 2


def test_a_missing_head_says_how_to_train_one(tmp_path, monkeypatch):
    from dflash_lab import load_pair
    from dflash_lab.measure import methods

    pair = load_pair("tiny", with_drafter=False, quiet=True)
    monkeypatch.setattr(methods, "data_root", lambda: tmp_path)
    with pytest.raises(DFlashLabError, match=r"python -m \S+eagle_training.*--eagle"):
        methods.make_method("eagle", pair, methods.MethodSettings())

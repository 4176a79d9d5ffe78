"""An assistant made from its target: it learns, is kept, and leaves the text alone."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import random_target, training_texts, write_corpus_file
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_lab.baselines.assistant import (
    build_assistant,
    copy_layers,
    evenly_spaced,
    is_assistant,
    load_assistant,
    own_modules,
    save_assistant,
)
from dflash_lab.baselines.assistant_training import (
    AssistantTraining,
    agreement,
    main,
    next_token_loss,
    train_assistant,
)
from dflash_lab.conditioning.taps import find_decoder_layers
from dflash_lab.errors import DFlashLabError
from dflash_lab.measure import methods
from dflash_lab.measure.methods import MethodSettings, make_method
from dflash_lab.pairs.pair import load_pair
from dflash_lab.target.fused import as_target
from dflash_lab.training.data.dataset import collate


@pytest.fixture(scope="module")
def deep():
    return random_target(1, num_hidden_layers=8)


@pytest.fixture(scope="module")
def pair():
    return load_pair("tiny", quiet=True)


def llama_target(**overrides):
    torch.manual_seed(0)
    fields = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }
    return as_target(LlamaForCausalLM(LlamaConfig(**{**fields, **overrides})))


def test_layers_are_spaced_from_end_to_end():
    assert evenly_spaced(2, 8) == (0, 7)
    assert evenly_spaced(3, 30) == (0, 14, 29)
    assert evenly_spaced(1, 8) == (4,)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_embedding_and_head_are_the_targets_own(deep, family):
    target = deep if family == "qwen3" else llama_target()
    model = build_assistant(target, 2)
    assert type(model) is type(target.model)
    assert model.get_input_embeddings().weight is target.embedding_table
    assert model.get_output_embeddings().weight is target.head.weight
    assert len(find_decoder_layers(model)) == model.config.num_hidden_layers == 2
    assert target.model.config.num_hidden_layers == target.num_layers  # untouched
    copy_layers(model, target, (0, target.num_layers - 1))
    for mine, number in ((0, 0), (1, target.num_layers - 1)):
        one = find_decoder_layers(model)[mine].state_dict()
        two = find_decoder_layers(target.model)[number].state_dict()
        assert all(torch.equal(one[name], two[name]) for name in two)


def test_the_loss_is_that_of_the_next_token(deep):
    examples = training_texts(deep, count=3, length=9)
    model = build_assistant(deep)
    ids, mask = collate(examples, range(3))
    mask[1, 6:] = False
    settings = AssistantTraining(places=4)
    sums = next_token_loss(model, deep, ids, mask, None, settings)
    logits = model(ids).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), ids[:, 1:], reduction="none"
    )
    expected = (losses * mask[:, 1:]).sum().item()
    assert sums.loss.item() == pytest.approx(expected, rel=1e-4)
    assert sums.weight.item() == mask.sum().item() == sums.total.sum().item()
    scores = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0))
    drawn = next_token_loss(model, deep, ids, mask, scores, settings)
    assert drawn.weight.item() == 4 + 3 + 4  # row 1 has three supervised tokens


@pytest.mark.slow
@pytest.mark.parametrize("start", ["target", "fresh"])
def test_an_assistant_learns_and_its_target_does_not(deep, start):
    examples = training_texts(deep)
    before = [p.detach().clone() for p in deep.model.parameters()]
    lines = []
    settings = AssistantTraining(start=start, places=16, batch_size=4, steps=120)
    model = train_assistant(deep, examples, settings, on_step=lines.append, quiet=True)
    assert lines[-1]["step"] == 120 and lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    untrained = agreement(build_assistant(deep), deep, examples)
    assert agreement(model, deep, examples) > max(0.6, untrained + 0.3)
    for one, two in zip(before, deep.model.parameters(), strict=True):
        assert torch.equal(one, two) and two.grad is None


def test_bad_budgets_and_starts_are_refused(deep):
    examples = training_texts(deep)
    for options, word in (
        ({}, "either steps or cpu_minutes"),
        ({"steps": 1, "start": "warm"}, "choose target or fresh"),
        ({"steps": 1, "places": 0}, "places 0 must be 1 or more"),
        ({"steps": 1, "num_hidden_layers": 8}, "take 1 to 7"),
    ):
        with pytest.raises(DFlashLabError, match=word):
            train_assistant(deep, examples, AssistantTraining(**options))
    lines = []
    settings = AssistantTraining(cpu_minutes=0.005, bf16=True)
    train_assistant(deep, examples, settings, on_step=lines.append, quiet=True)
    assert 0 < len(lines) < 10**5


def test_only_what_is_its_own_is_stored(deep, tmp_path):
    model = build_assistant(deep, 3, seed=5)
    save_assistant(model, tmp_path)
    assert is_assistant(tmp_path)
    again = load_assistant(tmp_path, deep)
    one, two = own_modules(model).state_dict(), own_modules(again).state_dict()
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not any("embed" in name or "head" in name for name in one)
    stored = sum(p.numel() for p in own_modules(model).parameters()) * 4
    assert (tmp_path / "model.safetensors").stat().st_size < stored + 5000
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_misfits_are_named(deep, tmp_path):
    save_assistant(build_assistant(deep), tmp_path)
    with pytest.raises(DFlashLabError, match="vocab_size is 67, was 61"):
        load_assistant(tmp_path, random_target(0, vocab_size=67))
    with pytest.raises(DFlashLabError, match="model_type is llama, was qwen3"):
        load_assistant(tmp_path, llama_target())
    with pytest.raises(DFlashLabError, match="no assistant of this project"):
        load_assistant(tmp_path / "nothing", deep)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(config | {"num_hidden_layers": 1}), encoding="utf-8")
    with pytest.raises(DFlashLabError, match="are not those of its config"):
        load_assistant(tmp_path, deep)
    del config["target"]
    path.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(DFlashLabError, match="is damaged"):
        load_assistant(tmp_path, deep)


def test_the_bench_method_works_without_an_option(pair):
    calls = []
    for text in ("Tell Mia about the fox.", "Sort the list: yarn, ladder, saddle."):
        ids = pair.encode(text)
        plain = make_method("hf_generate", pair, MethodSettings(40))(ids)
        method = make_method("hf_assisted", pair, MethodSettings(40))
        handle = pair.model.register_forward_pre_hook(lambda *_: calls.append(1))
        answer = method(ids)
        handle.remove()
        assert answer.ids == plain.ids
        # Fewer passes of the target than tokens: the assistant is of use.
        assert len(calls) < 0.5 * len(answer.ids)
        calls.clear()
    drawn = MethodSettings(20, temperature=0.8, seed=3)
    assert len(make_method("hf_assisted", pair, drawn)(ids).ids) > 0


def test_a_missing_assistant_says_how_to_train_one(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(methods, "data_root", lambda: tmp_path)
    with pytest.raises(DFlashLabError, match=r"assistant_training.*--assistant"):
        make_method("hf_assisted", pair, MethodSettings())


def test_the_command_line_trains_one(pair, tmp_path, capsys):
    from dflash_lab.training.data.dataset import Example

    prompts = ["Tell Mia about the fox.", "Name a river."] * 6
    plain = make_method("ar", pair, MethodSettings(16))
    examples = []
    for text in prompts:
        ids = pair.encode(text)
        examples.append(Example(ids + plain(ids).ids, len(ids)))
    corpus = write_corpus_file(tmp_path / "corpus.jsonl", examples)
    out = tmp_path / "made"
    common = ["--pair", "tiny", "--corpus", str(corpus), "--out", str(out)]
    assert main([*common, "--steps", "3", "--batch-size", "4"]) == 0
    assert "3 steps, held-out agreement 0." in capsys.readouterr().out
    facts = json.loads((out / "training.json").read_text("utf-8"))
    assert facts["steps"] == 3 and facts["answers"] == 11
    ids = pair.encode(prompts[0])
    made = make_method("hf_assisted", pair, MethodSettings(16, assistant=str(out)))
    assert made(ids).ids == plain(ids).ids
    assert main(common) == 2
    assert "either steps or cpu_minutes" in capsys.readouterr().err
    assert main([*common, "--steps", "3", "--threads", "0"]) == 2

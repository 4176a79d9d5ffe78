"""Exported folders: what each engine reads, what is refused, nothing half-written."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from helpers import random_drafter, random_target
from safetensors.torch import load_file, save_file

from dflash_lab.cli import export as export_command
from dflash_lab.drafter.config import DFlashConfig
from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.errors import DFlashLabError
from dflash_lab.interop import export as export_module
from dflash_lab.interop.engines import ENGINES
from dflash_lab.interop.export import FILES, export_drafter
from dflash_lab.interop.speculators_folder import read_speculators
from dflash_lab.interop.speculators_format import (
    config_from_speculators,
    config_to_speculators,
    is_speculators,
    same_meaning,
)

HUB_TARGET = "some/target-1b"
MIXED = {
    "layer_types": ("sliding_attention", "full_attention"),
    "sliding_window": 32,
}
SLIDING = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 32}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory, target):
    folder = tmp_path_factory.mktemp("target")
    target.model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory, drafter):
    folder = tmp_path_factory.mktemp("drafter")
    drafter.save_pretrained(folder)
    return folder


@pytest.fixture
def speculators(tmp_path, source):
    """A speculators folder, and a function that changes fields of its config."""
    folder = tmp_path / "speculators"
    export_drafter(source, folder, "speculators", HUB_TARGET)

    def change(**fields):
        path = folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8")) | fields
        path.write_text(json.dumps(config), encoding="utf-8")
        return folder

    return change


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def assert_same_bits(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), right[name].view(torch.uint8))


def saved(tmp_path, target, **overrides):
    """Folder of a random drafter with some settings."""
    folder = tmp_path / "source"
    random_drafter(target, **overrides).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_gets_the_same_bits(engine, tmp_path, source, drafter):
    made = export_drafter(source, tmp_path / "out", engine, HUB_TARGET)
    assert {p.name for p in made.folder.iterdir()} == set(FILES)
    assert_same_bits(
        load_file(made.folder / "model.safetensors"), dict(drafter.state_dict())
    )
    assert made.command in (made.folder / "README.md").read_text(encoding="utf-8")
    count = len(drafter.state_dict())
    assert f"{count} tensors" in made.check and "bit for bit" in made.check
    assert [p.name for p in tmp_path.iterdir()] == ["out"]  # no scratch left
    if engine != "speculators":
        again = DFlashDraftModel.from_pretrained(made.folder)
        assert again.config == drafter.config


def test_bfloat16_with_nan_and_negative_zero_survives(tmp_path, target):
    model = random_drafter(target).to(torch.bfloat16)
    with torch.no_grad():
        model.fc.weight[0, 0], model.fc.weight[0, 1] = float("nan"), -0.0
    model.save_pretrained(tmp_path / "source")
    made = export_drafter(
        tmp_path / "source", tmp_path / "out", "speculators", HUB_TARGET
    )
    assert read_json(made.folder / "config.json")["dtype"] == "bfloat16"
    assert_same_bits(
        load_file(made.folder / "model.safetensors"), dict(model.state_dict())
    )


def test_vllm_command_counts_drafted_tokens(tmp_path, source, drafter):
    out = tmp_path / "with space"
    words = shlex.split(export_drafter(source, out, "vllm", HUB_TARGET).command)
    assert words[:3] == ["vllm", "serve", HUB_TARGET]
    draft = json.loads(words[words.index("--speculative-config") + 1])
    assert draft == {
        "method": "dflash",
        "model": str(out),
        "num_speculative_tokens": drafter.config.block_size - 1,
    }


def test_sglang_command_counts_the_anchor(tmp_path, source, drafter):
    out = tmp_path / "out"
    words = shlex.split(export_drafter(source, out, "sglang", HUB_TARGET).command)
    flags = dict(zip(words[3::2], words[4::2], strict=True))
    assert flags["--model-path"] == HUB_TARGET
    assert flags["--speculative-algorithm"] == "DFLASH"
    assert flags["--speculative-draft-model-path"] == str(out)
    size = drafter.config.block_size
    assert flags["--speculative-num-draft-tokens"] == str(size)


def test_speculators_config_counts_layers_from_the_embedding(
    tmp_path, source, drafter, target_folder
):
    out = tmp_path / "out"
    made = export_drafter(source, out, "speculators", target_folder)
    assert shlex.split(made.command) == ["vllm", "serve", str(out)]
    config, ours = read_json(out / "config.json"), drafter.config
    assert config["speculators_model_type"] == "dflash"
    assert config["aux_hidden_state_layer_ids"] == [
        i + 1 for i in ours.target_layer_ids
    ]
    assert config["mask_token_id"] == ours.mask_token_id
    assert config["block_size"] == ours.block_size
    assert config["draft_vocab_size"] == ours.vocab_size
    assert config["sample_from_anchor"] is False
    own = config["speculators_config"]
    assert own["verifier"]["name_or_path"] == str(target_folder)
    assert own["verifier"]["architectures"] == ["Qwen3ForCausalLM"]
    (method,) = own["proposal_methods"]
    assert method["speculative_tokens"] == ours.block_size - 1
    layers = config["transformer_layer_config"]
    assert layers["model_type"] == "qwen3" and layers["head_dim"] == ours.head_dim
    assert "dflash_config" not in layers and "dflash_config" not in config


def test_speculators_and_back_drafts_the_same(speculators, tmp_path, drafter, target):
    back = tmp_path / "back"
    # The folder names its own target.
    made = export_drafter(speculators(), back, "vllm")
    assert shlex.split(made.command)[2] == HUB_TARGET
    again = DFlashDraftModel.from_pretrained(back)
    assert again.config == replace(drafter.config, num_target_layers=None)
    size, width = drafter.config.block_size, drafter.config.hidden_size
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(1, size, width, generator=generator)
    features = torch.randn(1, 4, 2 * width, generator=generator)
    positions = torch.arange(4 + size)[None]
    with torch.no_grad():
        assert torch.equal(
            again(block, features, positions), drafter(block, features, positions)
        )


@pytest.mark.parametrize(
    ("overrides", "flag"),
    [
        ({}, True),
        (SLIDING, False),
        (SLIDING | {"causal": True}, False),
        (SLIDING | {"causal": False}, True),
        (MIXED, False),
        (MIXED | {"causal": False}, True),
        ({"causal": False}, True),
    ],
)
def test_causality_survives_speculators(overrides, flag, target):
    config = random_drafter(target, **overrides).config
    written = config_to_speculators(config, HUB_TARGET, [], "float32")
    assert written["sliding_window_non_causal"] is flag
    again = config_from_speculators(json.loads(json.dumps(written)))
    assert same_meaning(again, config)
    for kind in set(config.layer_types):
        assert again.causal_in_block(kind) == config.causal_in_block(kind)
        assert again.window_of(kind) == config.window_of(kind)


def test_same_meaning_sees_causality_and_every_other_field(drafter):
    config = drafter.config
    assert same_meaning(config, replace(config, causal=False, num_target_layers=None))
    assert not same_meaning(config, replace(config, causal=True))
    assert not same_meaning(config, replace(config, target_layer_ids=(1, 3)))


def test_causal_full_attention_has_no_speculators_form(tmp_path, target):
    folder = saved(tmp_path, target, causal=True)
    with pytest.raises(DFlashLabError, match=r"causal inside the block.*--for vllm"):
        export_drafter(folder, tmp_path / "out", "speculators", HUB_TARGET)
    assert not (tmp_path / "out").exists()
    export_drafter(folder, tmp_path / "out", "vllm", HUB_TARGET)


def test_mixed_layers_need_vllms_newer_runner_and_a_warning(tmp_path, target):
    folder = saved(tmp_path, target, **MIXED)
    made = export_drafter(folder, tmp_path / "v", "vllm", HUB_TARGET)
    assert made.command.startswith("VLLM_USE_V2_MODEL_RUNNER=1 vllm serve")
    assert made.notes == ()
    made = export_drafter(folder, tmp_path / "s", "speculators", HUB_TARGET)
    (note,) = made.notes
    assert "sliding_window_non_causal" in note
    assert note in (tmp_path / "s" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"shift_label": True}, "shift_label"),
        ({"projector_type": "domino"}, "projector_type"),
        ({"draft_vocab_size": 32}, "draft_vocab_size=32"),
        ({"draft_vocab_size": None}, "draft_vocab_size"),
        ({"target_hidden_size": 128}, "target_hidden_size"),
        ({"output_multiplier": 0.5}, "output_multiplier"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"block_size": None}, "block_size"),
        ({"block_size": "six"}, "wrong type"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids"),
        ({"aux_hidden_state_layer_ids": [0, 2]}, "0 would be the embedding"),
        ({"transformer_layer_config": None}, "transformer_layer_config"),
        ({"speculators_config": "no"}, "wrong type"),
    ],
)
def test_other_speculators_are_refused_by_name(fields, words, speculators, tmp_path):
    folder = speculators(**fields)
    with pytest.raises(DFlashLabError, match=words):
        export_drafter(folder, tmp_path / "out", "dflash")
    assert not (tmp_path / "out").exists()


def layer_fields(folder, **fields):
    layers = read_json(folder / "config.json")["transformer_layer_config"]
    return {k: v for k, v in (layers | fields).items() if v is not ...}


def test_ambiguous_layer_fields_are_refused(speculators):
    folder = speculators()
    plain = read_json(folder / "config.json")
    for fields, words in (
        ({"rope_theta": ..., "rope_parameters": ...}, "rope_theta"),
        ({"is_causal": True}, "is_causal"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ):
        layers = layer_fields(folder, **fields)
        with pytest.raises(DFlashLabError, match=words):
            config_from_speculators(plain | {"transformer_layer_config": layers})
    sliding = layer_fields(folder, layer_types=["sliding_attention"] * 2)
    sliding |= {"sliding_window": 32, "use_sliding_window": True}
    del plain["sliding_window_non_causal"]
    assert config_from_speculators(plain).causal is None  # full: the flag is no matter
    with pytest.raises(DFlashLabError, match="sliding_window_non_causal"):
        config_from_speculators(plain | {"transformer_layer_config": sliding})


def test_a_full_block_of_drafts_shows_the_anchor_convention(speculators, drafter):
    config = read_json(speculators() / "config.json")
    size = drafter.config.block_size
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = size
    assert config_from_speculators(config).block_size == size  # it is said in words
    del config["sample_from_anchor"]
    with pytest.raises(DFlashLabError, match="speculative_tokens"):
        config_from_speculators(config)


def add_tensors(folder, **tensors):
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path, metadata={"format": "pt"})


def test_vocabulary_maps_are_refused(speculators):
    folder = speculators()
    add_tensors(folder, d2t=torch.zeros(61, dtype=torch.int64))
    with pytest.raises(DFlashLabError, match="d2t"):
        read_speculators(folder)


def test_unknown_tensors_are_refused(speculators):
    folder = speculators()
    add_tensors(folder, **{"markov_head.weight": torch.zeros(2, 2)})
    with pytest.raises(DFlashLabError, match=r"markov_head\.weight"):
        read_speculators(folder)


def test_copies_of_the_target_are_left_out_and_trained_ones_refused(
    speculators, target, target_folder, tmp_path, drafter
):
    folder = speculators()
    model = target.model
    copies = {
        "embed_tokens.weight": model.model.embed_tokens.weight.detach(),
        "lm_head.weight": model.lm_head.weight.detach(),
        "verifier_lm_head.weight": model.lm_head.weight.detach().clone(),
        "verifier_norm.weight": model.model.norm.weight.detach(),
    }
    add_tensors(folder, **copies)
    with pytest.raises(DFlashLabError, match="--target FOLDER"):
        read_speculators(folder)
    made = export_drafter(folder, tmp_path / "out", "sglang", target_folder)
    assert_same_bits(
        load_file(made.folder / "model.safetensors"), dict(drafter.state_dict())
    )
    for name in ("embed_tokens.weight", "lm_head.weight"):
        trained = copies[name].clone()
        trained[3, 5] += 1
        add_tensors(folder, **(copies | {name: trained}))
        with pytest.raises(DFlashLabError, match=f"{name}.*it was trained"):
            read_speculators(folder, target_folder)


def test_a_tied_head_is_the_embedding(speculators, tmp_path):
    tied = random_target(tie_word_embeddings=True).model
    tied.save_pretrained(tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    folder = speculators()
    add_tensors(folder, **{"lm_head.weight": tied.lm_head.weight.detach().clone()})
    assert read_speculators(folder, tmp_path / "tied").dtype == torch.float32


def test_float16_speculators_are_refused(speculators):
    folder = speculators()
    path = folder / "model.safetensors"
    save_file({k: v.half() for k, v in load_file(path).items()}, path)
    with pytest.raises(DFlashLabError, match="float16"):
        read_speculators(folder)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "speculators"])
def test_what_an_engine_ignores_is_refused(engine, tmp_path, target):
    folder = saved(tmp_path, target, input_embedding_scale=2.0)
    with pytest.raises(DFlashLabError, match=r"input_embedding_scale=2\.0"):
        export_drafter(folder, tmp_path / "out", engine, HUB_TARGET)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]
    export_drafter(folder, tmp_path / "out", "dflash", HUB_TARGET)


def test_logit_scales_are_noted_for_vllm_and_refused_for_speculators(tmp_path, target):
    folder = saved(tmp_path, target, final_logit_softcapping=20.0)
    (note,) = export_drafter(folder, tmp_path / "v", "vllm", HUB_TARGET).notes
    assert "final_logit_softcapping" in note
    with pytest.raises(DFlashLabError, match=r"final_logit_softcapping=20\.0"):
        export_drafter(folder, tmp_path / "s", "speculators", HUB_TARGET)


def test_sglang_gets_no_other_causality_than_its_own(tmp_path, target):
    folder = saved(tmp_path, target, **SLIDING, causal=False)
    with pytest.raises(DFlashLabError, match=r"is_causal=False.*sliding_attention"):
        export_drafter(folder, tmp_path / "out", "sglang", HUB_TARGET)
    # On full attention the same word says what SGLang does anyway.
    random_drafter(target, causal=False).save_pretrained(folder)
    export_drafter(folder, tmp_path / "out", "sglang", HUB_TARGET)


def test_sglang_needs_the_depth_and_takes_it_from_the_target(
    speculators, tmp_path, target_folder
):
    with pytest.raises(DFlashLabError, match="num_target_layers"):
        export_drafter(speculators(), tmp_path / "out", "sglang", HUB_TARGET)
    export_drafter(speculators(), tmp_path / "out", "sglang", target_folder)
    assert read_json(tmp_path / "out" / "config.json")["num_target_layers"] == 5


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"num_hidden_layers": 6}, "num_hidden_layers=5"),
        ({"vocab_size": 70}, "vocab_size=61"),
        ({"hidden_size": 64}, "hidden_size=32"),
    ],
)
def test_a_target_of_another_shape_is_refused(overrides, words, source, tmp_path):
    random_target(**overrides).model.config.save_pretrained(tmp_path / "other")
    with pytest.raises(DFlashLabError, match=words):
        export_drafter(source, tmp_path / "out", "vllm", tmp_path / "other")


def test_the_targets_last_layer_is_refused(tmp_path, target):
    folder = saved(tmp_path, target, target_layer_ids=(1, 4))
    with pytest.raises(DFlashLabError, match="target layer 4 is the last"):
        export_drafter(folder, tmp_path / "out", "speculators", HUB_TARGET)


@pytest.mark.parametrize("missing", [None, "/no/such/folder", "./nowhere"])
def test_a_missing_target_is_said(missing, source, tmp_path):
    with pytest.raises(DFlashLabError, match="--target"):
        export_drafter(source, tmp_path / "out", "vllm", missing)


def test_a_target_folder_without_config_is_refused(source, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DFlashLabError, match=r"config\.json"):
        export_drafter(source, tmp_path / "out", "vllm", tmp_path / "empty")


def test_an_earlier_export_is_replaced_and_nothing_else(source, tmp_path):
    out = tmp_path / "out"
    export_drafter(source, out, "vllm", HUB_TARGET)
    export_drafter(source, out, "speculators", HUB_TARGET)
    assert is_speculators(read_json(out / "config.json"))
    (out / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(DFlashLabError, match=r"notes\.txt"):
        export_drafter(source, out, "vllm", HUB_TARGET)
    assert (out / "notes.txt").read_text(encoding="utf-8") == "mine"
    assert is_speculators(read_json(out / "config.json"))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_foreign_folders_and_files_are_refused(source, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    export_drafter(source, other)  # empty is fine
    (other / "export.json").unlink()
    with pytest.raises(DFlashLabError, match="not just an earlier export"):
        export_drafter(source, other)
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(DFlashLabError, match="is a file"):
        export_drafter(source, tmp_path / "file")
    made = export_drafter(source, tmp_path / "new").folder
    with pytest.raises(DFlashLabError, match="the drafter itself"):
        export_drafter(made, made)


def test_a_failed_check_leaves_what_was_there(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    export_drafter(source, out, "vllm", HUB_TARGET)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    load = DFlashDraftModel.from_pretrained

    def flip_a_bit(folder, *args):
        model = load(folder, *args)
        if folder != source:
            model.norm.weight.data.view(torch.int32)[0] ^= 1
        return model

    monkeypatch.setattr(export_module.DFlashDraftModel, "from_pretrained", flip_a_bit)
    with pytest.raises(DFlashLabError, match=r"norm\.weight reads back"):
        export_drafter(source, out, "vllm", "another/target")
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_config_that_reads_back_otherwise_is_not_exported(
    source, tmp_path, monkeypatch
):
    write = DFlashConfig.to_dict

    def forget(self, dtype="bfloat16"):
        return write(self, dtype) | {"rms_norm_eps": 0.5}

    monkeypatch.setattr(DFlashConfig, "to_dict", forget)
    for engine in ("vllm", "speculators"):
        with pytest.raises(DFlashLabError, match=r"config\.json reads back"):
            export_drafter(source, tmp_path / "out", engine, HUB_TARGET)
    assert not list(tmp_path.iterdir())


def test_a_failed_second_rename_restores_the_first(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    export_drafter(source, out, "vllm", HUB_TARGET)
    rename = export_module.os.replace

    def fail(old, new):
        if new == out.resolve() and old.name == "new":
            raise OSError(28, "No space left on device")
        rename(old, new)

    monkeypatch.setattr(export_module.os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        export_drafter(source, out, "sglang", HUB_TARGET)
    assert read_json(out / "export.json")["for"] == "vllm"


def run_command(*words):
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    export_command.add(commands)
    arguments = parser.parse_args(["export", *map(str, words)])
    return arguments.run(arguments)


def test_the_command_prints_check_and_serve_line(source, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["--drafter", source, "--out", out, "--for", "vllm"]
    assert run_command(*words, "--target", HUB_TARGET) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].startswith("checked: ")
    assert lines[1].startswith(f"serve: vllm serve {HUB_TARGET} ")
    assert read_json(out / "export.json")["for"] == "vllm"


def test_the_command_writes_the_published_form_without_a_target(
    source, tmp_path, capsys
):
    assert run_command("--drafter", source, "--out", tmp_path / "out") == 0
    assert "--target TARGET" in capsys.readouterr().out
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "in place of `TARGET`" in card


def test_importing_the_command_is_light():
    code = "import sys, dflash_lab.cli.export; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_the_command_knows_every_engine_and_no_other(source, tmp_path, capsys):
    assert set(ENGINES) == set(export_command._ENGINES)
    with pytest.raises(SystemExit):
        run_command("--drafter", source, "--out", tmp_path / "o", "--for", "llama.cpp")
    capsys.readouterr()
    with pytest.raises(DFlashLabError, match=r"llama\.cpp"):
        export_drafter(source, tmp_path / "o", "llama.cpp")

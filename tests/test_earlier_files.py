"""Runs, checkpoints, feature stores and traces written before still load."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from helpers import TESTS, bare_pair, random_target
from safetensors.torch import load_file

from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.speculative.generate import speculative_generate
from dflash_lab.speculative.proposer import DFlash
from dflash_lab.speculative.trace import DecodeTrace
from dflash_lab.training.data.features import OfflineFeatures
from dflash_lab.training.run.config import load_config
from dflash_lab.training.run.runs import read_run
from dflash_lab.training.run.train import train

EARLIER = TESTS / "fixtures" / "earlier"


def test_a_run_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    shutil.copytree(EARLIER, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    before = read_run(tmp_path / "run")
    result = train(load_config("run/config.yaml"), resume=True, pair=bare_pair())
    assert result.finished
    after = read_run(tmp_path / "run")
    assert [line["step"] for line in before.metrics] == [2, 4]
    assert [line["step"] for line in after.metrics] == [2, 4, 6, 8]
    (folder,) = (tmp_path / "run" / "checkpoints").iterdir()
    found = load_file(folder / "model.safetensors")
    for name, tensor in load_file(EARLIER / "whole.safetensors").items():
        # Other processors round otherwise.
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)


def test_a_feature_store_loads():
    store = OfflineFeatures(EARLIER / "run" / "features")
    assert len(store) == 4 and store.width == 2 * 32


def test_a_drafter_decodes_as_its_trace_says():
    expected = json.loads((EARLIER / "expected.json").read_text("utf-8"))
    trace = DecodeTrace.from_jsonl(EARLIER / "trace.jsonl")
    assert trace.tau == expected["tau"]
    assert set(trace.to_frame()["prompt"]) == {0}
    drafter = DFlashDraftModel.from_pretrained(EARLIER / "drafter", torch.float32)
    found = speculative_generate(
        random_target(0), DFlash(drafter), [1, 3, 5], max_new_tokens=20
    )
    assert found.output_ids == expected["output_ids"]
    assert found.trace.acceptance_lengths == trace.acceptance_lengths

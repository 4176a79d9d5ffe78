"""`dflash-lab train` and `check`, on the tiny pair."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import ROOT

from dflash_lab.cli.main import main
from dflash_lab.training.run.metrics import read_metrics

pytest.importorskip("accelerate")
SMALL = [
    "corpus.num_prompts=24",
    "corpus.max_new_tokens=40",
    "data.num_anchors=4",
    "data.batch_size=8",
    "optimizer.steps=6",
    "log.every=2",
    "log.eval_every=3",
    "log.eval_prompts=1",
    "log.eval_tokens=16",
    "log.final_prompts=1",
]


def overrides(out: Path, *more: str) -> list[str]:
    return [x for s in (f"out={out}", *SMALL, *more) for x in ("--set", s)]


def train(out: Path, *more: str, extra: tuple[str, ...] = ()) -> int:
    config = str(ROOT / "configs" / "tiny.yaml")
    return main(["train", "--config", config, *overrides(out, *more), *extra])


@pytest.mark.slow
def test_train_from_nothing_but_the_target(tmp_path, capsys):
    out = tmp_path / "run"
    assert train(out) == 0
    shown = capsys.readouterr()
    assert f"drafter: {out / 'drafter'}" in shown.out and "tau pooled" in shown.out
    for part in ("loss", "acc", "predicted tau", "measured", "blocks/s", "min left"):
        assert part in shown.err
    lines = read_metrics(out / "metrics.jsonl")
    assert [line["step"] for line in lines] == [2, 3, 4, 6]
    assert lines[1]["measured_tau"] >= 1 and "measured_tau" not in lines[0]
    assert "ok " in (out / "checks.txt").read_text("utf-8")
    facts = json.loads((out / "drafter" / "training.json").read_text("utf-8"))
    assert facts["answers"] == 24 and facts["steps"] == 6
    header = facts["corpora"]["corpus.jsonl"]["header"]
    assert header["target"] == "tiny" and header["prompt_source"]["from"] == "generator"
    assert set(facts["held_out_tau"]) == {
        "tiny-math",
        "tiny-code",
        "tiny-chat",
        "tiny-rewrite",
        "pooled",
    }
    # What was trained is a drafter like any other.
    assert main(["check", "--target", "tiny", "--drafter", str(out / "drafter")]) == 1
    shown = capsys.readouterr().out
    assert "ok    training path = decoding path" in shown
    assert "FAIL  learned anything" in shown and "fix:" in shown
    # A finished run is not trained over.
    assert train(out) == 2
    assert "--resume" in capsys.readouterr().err


@pytest.mark.slow
def test_the_shipped_tiny_drafter_passes_every_check(capsys):
    assert main(["check", "--target", "tiny", "--limit", "4"]) == 0
    assert "FAIL" not in capsys.readouterr().out


def test_explain_needs_nothing(capsys):
    assert main(["check", "--explain"]) == 0
    assert "likely:" in capsys.readouterr().out
    assert main(["check"]) == 2
    assert "--target" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more,message",
    [
        (("optimizer.lr=1",), "unknown field optimizer.lr"),
        (("data.corpus=[none.jsonl]",), "none.jsonl"),
        (("pair=none",), "unknown pair"),
        (("drafter.block_size=1",), "block_size 1"),
        (("drafter.target_layer_ids=[1,7]",), "last of 8"),
        (("device=tpu",), "device 'tpu'"),
    ],
)
def test_mistakes_end_with_one_sentence(tmp_path, capsys, more, message):
    assert train(tmp_path / "run", *more) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_an_interrupted_run_says_how_to_go_on(tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "dflash_lab", "train"]
    command += ["--config", str(ROOT / "configs" / "tiny.yaml")]
    command += overrides(out, "optimizer.steps=100000", "log.eval_every=null")
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 240
    while not read_metrics(out / "metrics.jsonl"):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130 and "--resume" in error.splitlines()[-1]
    (checkpoint,) = (out / "checkpoints").iterdir()
    progress = json.loads((checkpoint / "progress.json").read_text("utf-8"))
    assert progress["step"] >= 2

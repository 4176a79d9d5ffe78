"""Training learns, resumes bit by bit, survives kills, and does not depend on the
number of processes."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import (
    TESTS,
    bare_pair,
    random_target,
    run,
    settings,
    training_texts,
    write_corpus_file,
)

from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.errors import DFlashLabError
from dflash_lab.pairs.pair import Pair
from dflash_lab.speculative.generate import speculative_generate
from dflash_lab.speculative.proposer import DFlash
from dflash_lab.training.objective import Objective
from dflash_lab.training.run.card import git_state
from dflash_lab.training.run.checkpoints import kept_drafters, latest_checkpoint
from dflash_lab.training.run.config import from_dict
from dflash_lab.training.run.metrics import MetricLog, predicted_tau, read_metrics
from dflash_lab.training.run.progress import Schedule
from dflash_lab.training.run.train import train
from dflash_lab.training.run.trainer import Trainer

pytest.importorskip("accelerate")


# Where a child process finds helpers and this file.
PATHS = [str(TESTS), str(Path(__file__).parent)]


def weights(folder: Path, step: int) -> dict:
    from safetensors.torch import load_file

    name = f"step-{step:08d}"
    return load_file(folder / "run" / "checkpoints" / name / "model.safetensors")


def assert_equal_states(one: dict, two: dict) -> None:
    assert one.keys() == two.keys() and one
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name


# --- learning ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["ce", "kl", "dpace"])
def test_training_learns_and_ships_what_it_trained(tmp_path, loss):
    steps = 300 if loss == "kl" else 150  # a random target's whole law takes longer
    optimizer = {"steps": steps, "learning_rate": 1e-2}
    result = run(tmp_path, objective={"loss": loss}, optimizer=optimizer)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert lines[-1]["step"] == steps
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    assert lines[-1]["accuracy"][0] > 0.6 > lines[0]["accuracy"][0]
    assert lines[-1]["predicted_tau"] == predicted_tau(lines[-1]["accuracy"])
    # The feature scale is folded in: the shipped drafter decodes what it memorised.
    text = training_texts(random_target(0))[0]
    shipped = DFlashDraftModel.from_pretrained(result.folder, torch.float32)
    decoded = speculative_generate(
        random_target(0), DFlash(shipped), text.input_ids[:3], max_new_tokens=24
    )
    assert decoded.output_ids == [text.input_ids[3:]] and decoded.tau > 2
    card = (result.folder / "README.md").read_text("utf-8")
    assert "CPU-hours" in card and f"| loss | {loss} |" in card
    facts = json.loads((result.folder / "training.json").read_text("utf-8"))
    assert facts["settings"]["optimizer"]["steps"] == steps
    assert facts["blocks_seen"] == lines[-1]["blocks"] and facts["git"] == git_state()
    assert len(facts["corpora"]["corpus.jsonl"]["sha256"]) == 64


def test_the_mask_of_head_rows_and_a_bf16_run_work(tmp_path):
    result = run(
        tmp_path,
        objective={"mixed_precision": "bf16", "head_tokens": 20, "extra_negatives": 8},
        data={"features": "online"},
        optimizer={"steps": 60},
    )
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert result.finished and lines[-1]["loss"] < lines[0]["loss"]


def test_a_drafter_without_features_ignores_them(tmp_path):
    result = run(tmp_path, drafter={"conditioning": "none"})
    state = result.drafter.state_dict()
    assert not state["fc.weight"].any() and state["norm.weight"].any()


@pytest.mark.slow
def test_input_fusion_trains_passes_its_checks_and_decodes(tmp_path):
    optimizer = {"steps": 150, "learning_rate": 1e-2}
    result = run(tmp_path, drafter={"conditioning": "input"}, optimizer=optimizer)
    checks = (tmp_path / "run" / "checks.txt").read_text("utf-8")
    assert checks and "FAIL" not in checks
    text = training_texts(random_target(0))[0]
    decoded = speculative_generate(
        random_target(0), DFlash(result.drafter), text.input_ids[:3], max_new_tokens=24
    )
    assert decoded.output_ids == [text.input_ids[3:]] and decoded.tau > 1.5


# --- stopping and going on -----------------------------------------------------------


def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(tmp_path, monkeypatch):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(whole)
    step = Trainer.step

    def stop_at_five(self, number):
        if number == 4:
            os.kill(os.getpid(), signal.SIGINT)  # caught, and obeyed behind this step
        return step(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", stop_at_five)
        stopped = run(broken)
    assert not stopped.finished and stopped.drafter is None
    assert latest_checkpoint(broken / "run").name == "step-00000005"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resumed = run(broken, resume=True)
    assert resumed.finished
    assert_equal_states(weights(whole, 12), weights(broken, 12))
    one, two = (read_metrics(f / "run" / "metrics.jsonl") for f in (whole, broken))
    assert [x["step"] for x in one] == [x["step"] for x in two] == [4, 8, 12]
    for name in ("blocks", "learning_rate"):
        assert [x[name] for x in one] == [x[name] for x in two]
    assert one[0]["loss"] == two[0]["loss"] and one[2]["loss"] == two[2]["loss"]


CHILD = """
import os, signal, sys
sys.path[:0] = {paths!r}
from pathlib import Path
from dflash_lab.training.run import checkpoints, trainer
from helpers import run
step, replace = trainer.Trainer.step, os.replace
where, when = {where!r}, {when}
def die(): os.kill(os.getpid(), signal.SIGKILL)
def new_step(self, number):
    if where == "step" and number == when: die()
    return step(self, number)
def new_replace(a, b):
    here = str(b).endswith(f"step-{{when:08d}}")
    if where == "rename" and here: die()
    replace(a, b)
    if where == "cleanup" and here: die()
trainer.Trainer.step = new_step
checkpoints.os.replace = new_replace
run(Path({folder!r}), log={{"every": 4, "save_minutes": 1e-9}})
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "where,when,left", [("step", 7, 7), ("rename", 6, 5), ("cleanup", 6, 6)]
)
def test_a_kill_loses_at_most_the_last_interval(tmp_path, where, when, left):
    run(tmp_path / "whole")
    folder = tmp_path / "killed"
    settings(folder)
    code = CHILD.format(
        paths=PATHS,
        where=where,
        when=when,
        folder=str(folder),
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
    assert latest_checkpoint(folder / "run").name == f"step-{left:08d}"
    assert run(folder, resume=True).finished
    assert_equal_states(weights(tmp_path / "whole", 12), weights(folder, 12))
    assert len(list((folder / "run" / "checkpoints").iterdir())) == 1


def test_a_full_disk_keeps_the_checkpoint_before_it(tmp_path, monkeypatch):
    changes = {"log": {"every": 4, "save_minutes": 1e-9}}
    calls = []
    real = DFlashDraftModel.save_pretrained

    def save(self, folder):
        calls.append(folder)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        real(self, folder)

    with monkeypatch.context() as patch:
        patch.setattr(DFlashDraftModel, "save_pretrained", save)
        with pytest.raises(OSError, match="No space left"):
            run(tmp_path, **changes)
    assert latest_checkpoint(tmp_path / "run").name == "step-00000002"
    assert run(tmp_path, resume=True, **changes).finished


def test_resuming_needs_the_same_run(tmp_path):
    run(tmp_path)
    with pytest.raises(DFlashLabError, match="holds a run"):
        run(tmp_path)
    with pytest.raises(DFlashLabError, match="other settings in optimizer"):
        run(tmp_path, resume=True, optimizer={"learning_rate": 1e-3})
    # Logging may change, and a finished run only ships once more.
    assert run(tmp_path, resume=True, log={"every": 2}).finished


def test_resuming_needs_the_same_texts(tmp_path):
    run(tmp_path)
    corpus = tmp_path / "corpus.jsonl"
    text = corpus.read_text("utf-8")
    corpus.write_text(text + text.splitlines()[-1] + "\n", encoding="utf-8")
    with pytest.raises(DFlashLabError, match=r"corpus\.jsonl has changed"):
        run(tmp_path, resume=True)
    corpus.write_text(text, encoding="utf-8")
    assert run(tmp_path, resume=True).finished


def test_drafters_are_kept_whenever_the_blocks_have_doubled(tmp_path, monkeypatch):
    monkeypatch.setattr("dflash_lab.training.run.checkpoints.FIRST_KEPT", 16)
    run(tmp_path, log={"every": 1, "keep_drafters": True})
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    marks, due = [], 16
    for line in lines:
        if line["blocks"] >= due:
            marks.append(line["blocks"])
            while due <= line["blocks"]:
                due *= 2
    kept = kept_drafters(tmp_path / "run")
    assert list(kept) == marks and len(marks) > 2
    first, last = (
        DFlashDraftModel.from_pretrained(kept[marks[i]], torch.float32).state_dict()
        for i in (0, -1)
    )
    assert any(not torch.equal(first[key], last[key]) for key in first)


def test_shown_slots_change_training_but_not_its_checks(tmp_path):
    plain = run(tmp_path / "plain").drafter.state_dict()
    shown = run(tmp_path / "shown", data={"reveal": 1.0}).drafter.state_dict()
    assert any(not torch.equal(plain[key], shown[key]) for key in plain)
    checks = [
        (tmp_path / name / "run" / "checks.txt").read_text("utf-8")
        for name in ("plain", "shown")
    ]
    assert checks[0] == checks[1] and "FAIL" not in checks[0]


def test_resume_without_a_checkpoint_starts(tmp_path):
    assert run(tmp_path, resume=True).finished


def test_a_wall_clock_budget_ends_training(tmp_path):
    result = run(tmp_path, optimizer={"steps": None, "minutes": 0.01})
    assert result.finished and 0 < result.facts["steps"] < 10**6


def test_training_goes_on_from_trained_weights(tmp_path):
    first = run(tmp_path / "first", optimizer={"steps": 100})
    start = {"init_from": str(first.folder)}
    second = run(
        tmp_path / "second",
        drafter=start,
        optimizer={"steps": 1, "learning_rate": 1e-9},
        log={"every": 1},
    )
    line = read_metrics(tmp_path / "second" / "run" / "metrics.jsonl")[0]
    last = read_metrics(tmp_path / "first" / "run" / "metrics.jsonl")[-1]
    assert line["loss"] < 1.5 * last["loss"]
    stages = second.facts["earlier_stages"]
    assert [s["steps"] for s in stages] == [100]
    before = first.drafter.state_dict()
    for name, tensor in second.drafter.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=2e-2, atol=1e-3)


# --- several processes -------------------------------------------------------------


WORKER = """
import os, sys
sys.path[:0] = {paths!r}
import torch
torch.set_num_threads(1)
from pathlib import Path
from helpers import run
from test_trainer import shard_weights, stop_behind
{prelude}
run(Path({folder!r}), resume=True, data={data!r})
# What gloo leaves running may abort an interpreter that tidies up.
os._exit(0)
"""


def launch(folder: Path, world: int, data: dict, prelude: str = "") -> None:
    settings(folder)
    code = WORKER.format(
        paths=PATHS,
        folder=str(folder),
        data=data,
        prelude=prelude,
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(world):
        env = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "ACCELERATE_USE_CPU": "true",
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", code], env=env, stderr=subprocess.PIPE
            )
        )
    for process in processes:
        error = process.communicate(timeout=300)[1]
        assert process.returncode == 0, error.decode()[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_two_processes_train_as_one(tmp_path, accumulation):
    run(tmp_path / "one")
    launch(tmp_path / "two", 2, {"accumulation": accumulation})
    one, two = weights(tmp_path / "one", 12), weights(tmp_path / "two", 12)
    assert one.keys() == two.keys()
    moved = 0.0
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-4)
        moved += float((tensor - tensor.mean()).abs().sum())
    assert moved > 0
    lines = [
        read_metrics(tmp_path / name / "run" / "metrics.jsonl")
        for name in ("one", "two")
    ]
    for a, b in zip(*lines, strict=True):
        assert a["blocks"] == b["blocks"] and a["accuracy"] == b["accuracy"]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


def shard_weights() -> None:
    """Make runs of this process shard weights, gradients and optimiser (FSDP2).

    `accelerate` offers that on accelerators only, but all of it works with gloo.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    from dflash_lab.training.run import train as module

    make = module.make_accelerator

    def sharding(config):
        accelerator = make(config)
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
        )
        return accelerator

    module.make_accelerator = sharding


def stop_behind(steps: int) -> None:
    """Make runs of this process stop with a checkpoint after so many steps."""
    step = Trainer.step

    def stopping(self, number):
        if number == steps - 1:
            self.stop()
        return step(self, number)

    Trainer.step = stopping


@pytest.mark.slow
def test_sharded_weights_train_as_whole_ones_and_resume(tmp_path):
    whole = run(tmp_path / "one").drafter.state_dict()
    launch(tmp_path / "two", 2, {}, "shard_weights()")
    launch(tmp_path / "broken", 2, {}, "shard_weights(); stop_behind(5)")
    checkpoints = tmp_path / "broken" / "run" / "checkpoints"
    assert [f.name for f in checkpoints.iterdir()] == ["step-00000005"]
    assert not (tmp_path / "broken" / "run" / "drafter").exists()
    launch(tmp_path / "broken", 2, {}, "shard_weights()")
    for name in ("two", "broken"):
        folder = tmp_path / name / "run" / "drafter"
        found = DFlashDraftModel.from_pretrained(folder, torch.float32).state_dict()
        assert found.keys() == whole.keys()
        for key, tensor in found.items():
            torch.testing.assert_close(tensor, whole[key], rtol=2e-2, atol=1e-3)
        shards = (tmp_path / name / "run" / "checkpoints").glob("*/pytorch_model_fsdp*")
        assert len(list(shards)) == 1
    lines = [
        read_metrics(tmp_path / name / "run" / "metrics.jsonl")
        for name in ("two", "broken")
    ]
    # A line is the mean of the steps since the last one, or since resuming.
    assert lines[0][-1]["loss"] == pytest.approx(lines[1][-1]["loss"], rel=1e-6)


def test_accumulation_does_not_change_the_result(tmp_path):
    run(tmp_path / "one")
    run(tmp_path / "three", data={"accumulation": 3})
    one, three = weights(tmp_path / "one", 12), weights(tmp_path / "three", 12)
    for name, tensor in one.items():
        torch.testing.assert_close(three[name], tensor, rtol=1e-3, atol=1e-4)


# --- bad input ---------------------------------------------------------------------


def test_a_corpus_of_another_target_is_refused(tmp_path):
    config = from_dict(settings(tmp_path))
    with pytest.raises(DFlashLabError, match="written by another target"):
        train(config, pair=bare_pair(seed=1))


def test_a_drafter_of_another_target_is_refused(tmp_path):
    first = run(tmp_path / "first", optimizer={"steps": 1})
    target = random_target(0, num_hidden_layers=6)
    corpus = write_corpus_file(tmp_path / "other.jsonl", training_texts(target), target)
    values = settings(tmp_path / "second", data={"corpus": [str(corpus)]})
    values["drafter"]["init_from"] = str(first.folder)
    pair = Pair("deep", target, None, None, ())
    with pytest.raises(DFlashLabError, match=r"5 layers.*has 6"):
        train(from_dict(values), pair=pair)


def test_a_target_without_spare_rows_asks_for_a_mask_id(tmp_path):
    values = settings(tmp_path)
    values["drafter"]["mask_token_id"] = None
    with pytest.raises(DFlashLabError, match=r"drafter\.mask_token_id"):
        train(from_dict(values), pair=bare_pair())


def test_flex_attention_is_refused_on_a_cpu(tmp_path):
    with pytest.raises(DFlashLabError, match="CUDA only"):
        run(tmp_path, objective={"attention": "flex"})


def test_a_tracker_that_is_unknown_or_missing_is_named(tmp_path, monkeypatch):
    with pytest.raises(DFlashLabError, match=r"'board' is unknown.*tensorboard"):
        run(tmp_path, log={"tracker": "board"})
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", list)
    with pytest.raises(DFlashLabError, match="pip install tensorboard"):
        run(tmp_path, log={"tracker": "tensorboard"})


def test_a_loss_that_is_not_a_number_stops_the_run(tmp_path, monkeypatch):
    """Before a weight moves, and before a checkpoint could replace the last one."""
    real = Objective.forward

    def forward(self, batch, step=0):
        sums = real(self, batch, step)
        return sums._replace(loss=sums.loss * math.nan) if step == 5 else sums

    monkeypatch.setattr(Objective, "forward", forward)
    always = {"every": 4, "save_minutes": 1e-9}
    with pytest.raises(DFlashLabError, match="loss is nan at step 6"):
        run(tmp_path, log=always)
    assert latest_checkpoint(tmp_path / "run").name == "step-00000005"
    assert all(w.isfinite().all() for w in weights(tmp_path, 5).values())
    monkeypatch.undo()
    assert run(tmp_path, resume=True, log=always).finished


def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path, monkeypatch):
    real = Trainer._normalise

    def normalise(self, factor):
        real(self, factor)
        if self.progress.step == 5:
            next(self.model.parameters()).grad[0] = math.inf

    monkeypatch.setattr(Trainer, "_normalise", normalise)
    with pytest.raises(DFlashLabError, match=r"gradient's norm is .* at step 6"):
        run(tmp_path, log={"save_minutes": 1e-9})
    assert latest_checkpoint(tmp_path / "run").name == "step-00000005"
    assert all(w.isfinite().all() for w in weights(tmp_path, 5).values())


# --- metrics -----------------------------------------------------------------------


def test_predicted_tau_by_hand():
    assert predicted_tau([0.5, 0.5, 0.0, 1.0]) == 1 + 0.5 + 0.25
    assert predicted_tau([]) == 1.0


def test_tensorboard_gets_the_metrics_of_every_line(tmp_path):
    run(tmp_path, log={"tracker": "tensorboard"})
    files = [f for f in (tmp_path / "run").rglob("*tfevents*") if f.stat().st_size]
    data = b"".join(f.read_bytes() for f in files)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    for name in ("predicted_tau", "blocks_per_second", "seconds_left"):
        assert data.count(name.encode()) == len(lines)


def test_metric_lines_behind_the_checkpoint_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricLog(path)
    for step in (10, 20, 30):
        log.write({"step": step})
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"step": 4')  # killed while writing
    MetricLog(path, resumed_step=20).write({"step": 30, "again": True})
    assert read_metrics(path) == [
        {"step": 10},
        {"step": 20},
        {"step": 30, "again": True},
    ]


def test_schedule(tmp_path):
    values = settings(tmp_path, optimizer={"learning_rate": 1.0, "warmup_ratio": 0.1})

    schedule = Schedule(from_dict(values).optimizer, steps_per_epoch=1)
    rates = [schedule.learning_rate(x / 100) for x in range(101)]
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:])[::-1]
    assert rates[10] == 1.0 and 0 < rates[0] < 0.1
    assert rates[55] == pytest.approx(0.5) and rates[100] == pytest.approx(0, abs=1e-9)


def test_layers_start_as_the_targets(tmp_path):
    from dflash_lab.training.run.first_drafter import make_drafter

    values = settings(tmp_path)
    values["drafter"]["init_layers"] = [3, 0]
    pair = bare_pair()
    drafter = make_drafter(from_dict(values), pair)
    own = pair.target.model.model
    for layer, number in zip(drafter.layers, (3, 0), strict=True):
        weight = layer.self_attn.q_proj.weight
        assert torch.equal(weight, own.layers[number].self_attn.q_proj.weight)
        assert weight is not own.layers[number].self_attn.q_proj.weight
    assert torch.equal(drafter.norm.weight, own.norm.weight)
    for wrong in ([3], [3, 5], [-1, 0]):
        values["drafter"]["init_layers"] = wrong
        with pytest.raises(DFlashLabError, match="init_layers"):
            make_drafter(from_dict(values), pair)


def test_the_processor_clock_ends_training(tmp_path):
    budget = {"steps": None, "minutes": 0.01, "clock": "cpu"}
    result = run(tmp_path, optimizer=budget)
    assert result.finished and 0 < result.facts["steps"] < 10**6


def test_a_compiled_pass_is_the_same_pass(tmp_path, monkeypatch):
    from dflash_lab.training import objective as module

    compiled = []

    def compile(forward, dynamic):
        compiled.append(dynamic)
        return forward

    monkeypatch.setattr(module.torch, "compile", compile)
    assert run(tmp_path, objective={"compile": True}).finished and compiled == [True]
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    with pytest.raises(DFlashLabError, match=r"C\+\+ compiler"):
        run(tmp_path / "none", objective={"compile": True})

"""`dflash-lab corpus`: killed, shared out among processes, asked for the impossible."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from helpers import ROOT

from dflash_lab.errors import DFlashLabError
from dflash_lab.training.corpus.corpus_file import (
    answers_on_disk,
    read_corpus,
    shards_of,
)

# A shell that runs pytest in the background lets its children ignore Ctrl-C.
DRIVER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from dflash_lab.cli.main import main
sys.exit(main())
"""
TINY = ["--pair", "tiny", "--prompts", "generator", "--threads", "1"]


def start_command(arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, "corpus", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# --- interrupted ------------------------------------------------------------------


@pytest.mark.slow
def test_sigkill_at_several_moments_and_one_resume(tmp_path, run_command):
    arguments = [*TINY, "--num-prompts", "90", "--max-new-tokens", "56"]
    arguments += ["--temperature", "0,0.8", "--batch-size", "4"]
    path, whole = tmp_path / "corpus.jsonl", tmp_path / "whole.jsonl"
    for lines in (1, 20, 50):  # the header alone, then more and more answers
        child = start_command([*arguments, "--out", path])
        deadline = time.monotonic() + 120
        while not path.exists() or path.read_bytes().count(b"\n") < lines:
            assert child.poll() is None, child.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.005)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        assert child.returncode == -signal.SIGKILL
        assert lines - 1 <= answers_on_disk(path) < 90
    run_command([*arguments, "--out", str(path)])
    run_command([*arguments, "--out", str(whole)])
    assert path.read_bytes() == whole.read_bytes()
    assert len(read_corpus(path)[1]) == 90


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_written_and_says_how_to_go_on(tmp_path):
    path = tmp_path / "corpus.jsonl"
    arguments = [*TINY, "--num-prompts", "2000", "--batch-size", "4", "--out", path]
    child = start_command(arguments)
    deadline = time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < 5:
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    output, errors = child.communicate(timeout=60)
    assert child.returncode == 130 and output == ""
    kept = len(read_corpus(path)[1])
    assert kept >= 4 and f"interrupted; {kept} answers are kept" in errors
    assert "same command again" in errors and "Traceback" not in errors


# --- several processes ------------------------------------------------------------


def start_processes(arguments, world):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return [
        start_command(
            arguments, RANK=str(rank), WORLD_SIZE=str(world), MASTER_PORT=port
        )
        for rank in range(world)
    ]


@pytest.mark.slow
def test_two_processes_write_what_one_writes(tmp_path, run_command):
    pytest.importorskip("accelerate")
    whole, path = tmp_path / "whole.jsonl", tmp_path / "corpus.jsonl"
    arguments = [*TINY, "--num-prompts", "40", "--temperature", "0,0.8"]
    arguments += ["--max-new-tokens", "48", "--batch-size", "4"]
    run_command([*arguments, "--out", str(whole)])
    # Killed with two shards half done, and gone on by one process...
    children = start_processes([*arguments, "--out", path], 2)
    deadline = time.monotonic() + 120
    while len(shards_of(path)) < 2 or answers_on_disk(path) < 6:
        assert time.monotonic() < deadline
        assert all(child.poll() is None for child in children)
        time.sleep(0.005)
    for child in children:
        child.kill()
        child.communicate()
    assert not path.exists() and len(shards_of(path)) == 2
    with pytest.raises(DFlashLabError, match="there is an unfinished one"):
        read_corpus(path)
    kept = {p.name: p.read_bytes() for p in shards_of(path)}
    run_command([*arguments, "--out", str(path)])
    assert path.read_bytes() == whole.read_bytes() and not shards_of(path)
    # ... or by two processes, after a kill between joining and deleting the shards.
    path.write_bytes(b"".join(whole.read_bytes().splitlines(keepends=True)[:8]))
    for name, content in kept.items():
        (tmp_path / name).write_bytes(content)
    outputs = [c.communicate() for c in start_processes([*arguments, "--out", path], 2)]
    assert path.read_bytes() == whole.read_bytes(), outputs
    assert not shards_of(path)
    assert [output.count("40 answers") for output, _ in outputs] == [1, 0]


@pytest.mark.slow
def test_a_process_that_fails_ends_the_others(tmp_path):
    pytest.importorskip("accelerate")
    path = tmp_path / "corpus.jsonl"
    shard = tmp_path / "corpus.2-of-3.jsonl"
    shard.write_text('{"corpus": {"target": "another"}}\n', encoding="utf-8")
    arguments = [*TINY, "--num-prompts", "4", "--out", path]
    errors = [c.communicate(timeout=120)[1] for c in start_processes(arguments, 2)]
    assert "2-of-3.jsonl was written with other settings" in errors[0]
    assert "another process of this run has ended early" in errors[1]
    assert not path.exists()


def test_a_launcher_that_makes_no_sense_is_refused(tmp_path, monkeypatch, run_command):
    arguments = [*TINY, "--out", str(tmp_path / "corpus.jsonl")]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(DFlashLabError, match="RANK=2"):
        run_command(arguments)
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(DFlashLabError, match="WORLD_SIZE='two'"):
        run_command(arguments)


# --- the command ------------------------------------------------------------------


def test_command_writes_a_header_that_names_everything(tmp_path, capsys, run_command):
    path = tmp_path / "new" / "corpus.jsonl"
    prompts = tmp_path / "prompts.jsonl"
    lines = '{"prompt": "Count to 3."}\n{"prompt": "Count to  3."}\n'
    prompts.write_text(lines, encoding="utf-8")
    arguments = ["--pair", "tiny", "--prompts", str(prompts), "--out", str(path)]
    arguments += ["--temperature", "0", "--temperature", "0.5,0.7", "--top-k", "9"]
    arguments += ["--max-new-tokens", "8", "--seed", "4", "--dtype", "bfloat16"]
    assert run_command(arguments) == 0
    header, rows = read_corpus(path)
    assert len(rows) == 1 and rows[0]["prompt"] == "Count to 3."
    assert "1 prompts; left out: 1 repeated" in capsys.readouterr().err
    expected = {"target": "tiny", "dtype": "bfloat16", "temperatures": [0.0, 0.5, 0.7]}
    expected |= {"top_p": 1.0, "top_k": 9, "seed": 4, "max_new_tokens": 8}
    assert expected.items() <= header.items()
    assert header["prompt_source"]["from"] == "prompts.jsonl"
    assert (
        len(header["chat_template_sha256"]) == len(header["target_fingerprint"]) == 64
    )
    assert {"torch", "transformers", "dflash_lab"} <= set(header["versions"])
    assert header["thinking"] is False and "revision" in header


def test_command_lets_the_target_write_prompts(tmp_path, run_command):
    path = tmp_path / "corpus.jsonl"
    arguments = ["--pair", "tiny", "--prompts", "self", "--num-prompts", "6"]
    arguments += ["--out", str(path), "--max-new-tokens", "8", "--threads", "1"]
    assert run_command(arguments) == 0
    rows = read_corpus(path)[1]
    assert len({row["prompt"] for row in rows}) == 6
    assert {row["kind"] for row in rows} == {"self"}
    assert (tmp_path / "corpus.jsonl.draws.jsonl").exists()


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["--temperature", "-1"], "temperature -1.0"),
        (["--temperature", "warm"], "'warm' is no list of numbers"),
        (["--temperature", ","], "no temperature"),
        (["--top-p", "0"], "top_p 0.0"),
        (["--top-k", "-1"], "top_k -1"),
        (["--seed", "-1"], "seed -1"),
        (["--num-prompts", "0"], "--num-prompts 0 must be 1"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0 must be 1"),
        (["--max-new-tokens", "1024"], "leaves no room for a prompt"),
        (["--max-prompt-tokens", "3", "--num-prompts", "2"], r"too long.*\(limit 3\)"),
        (["--batch-size", "0"], "--batch-size 0 must be 1"),
        (["--threads", "0"], "--threads 0 must be 1"),
        (["--time-limit", "0"], "--time-limit 0.0 must be above 0"),
        (["--time-limit", "nan"], "--time-limit nan must be above 0"),
        (["--model", "m"], "give --server too"),
        (["--prompts", "self", "--server", "http://x"], "needs the target itself"),
        (["--prompts", "nowhere.jsonl"], "cannot read prompts from nowhere"),
        (["--out", "."], "is a folder"),
        (["--out", "/dev/null/x/c.jsonl", "--num-prompts", "1"], "cannot make the"),
    ],
)
def test_bad_input_is_one_clear_error(tmp_path, arguments, problem, run_command):
    path = tmp_path / "corpus.jsonl"
    with pytest.raises(DFlashLabError, match=problem):
        run_command([*TINY, "--out", str(path), *arguments])
    assert not path.exists()


def test_importing_the_command_is_light():
    code = "import sys, dflash_lab.cli.corpus; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"

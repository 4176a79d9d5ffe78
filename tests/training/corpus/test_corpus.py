"""Corpora: the target's own answers, whatever interrupts, shares out or serves them."""

from __future__ import annotations

import argparse
import errno
import io
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from helpers import ROOT, TESTS, random_target
from reference import generate_greedily

from dflash_lab.cli import corpus as command
from dflash_lab.errors import DFlashLabError
from dflash_lab.files import data_root
from dflash_lab.pairs.pair import load_pair
from dflash_lab.pairs.prompts import load_prompts
from dflash_lab.training.corpus import answer_log, batch_writer
from dflash_lab.training.corpus.corpus import (
    read_corpus,
    self_written_prompts,
    write_corpus,
)
from dflash_lab.training.corpus.corpus_file import answers_on_disk, shards_of
from dflash_lab.training.corpus.prompt_sources import (
    choose_prompts,
    encode_messages,
    generated_prompts,
    held_out_test,
    held_out_texts,
    read_prompt_file,
    target_written_prompts,
    user_header,
)
from dflash_lab.training.corpus.server import (
    ChatServer,
    answer_ids,
    tokenizer_pair,
    write_corpus_from_server,
)
from dflash_lab.training.corpus.tiny_text import is_held_out

# A shell that runs pytest in the background lets its children ignore Ctrl-C.
DRIVER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import test_corpus
sys.exit(test_corpus.run_command(sys.argv[1:]))
"""
TINY_TARGET = data_root() / "checkpoints" / "tiny" / "target"
TINY = ["--pair", "tiny", "--prompts", "generator", "--threads", "1"]


def run_command(arguments):
    """What `dflash-lab corpus` does, without the other commands."""
    parser = argparse.ArgumentParser()
    command.add(parser.add_subparsers(required=True))
    parsed = parser.parse_args(["corpus", *arguments])
    return parsed.run(parsed)


def start_command(arguments, **environment):
    own = Path(__file__).resolve().parent
    path = os.pathsep.join(map(str, (own, TESTS, ROOT)))
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def tiny():
    return load_pair("tiny", with_drafter=False)


def corpus_prompts(count=9):
    return [{"prompt_ids": [1 + i, 2 + i % 3, *([7] * (i % 4))]} for i in range(count)]


SETTINGS = {
    "stop_token_ids": [],
    "header": {"target": "random"},
    "temperatures": (0.0, 0.8),
    "max_new_tokens": 6,
    "batch_size": 3,
}


def by_index(path):
    return sorted(read_corpus(path)[1], key=lambda row: row["index"])


# --- the answers ------------------------------------------------------------------


@pytest.mark.parametrize("prefill_tokens", [8192, 4])
def test_corpus_rows_are_the_targets_own_answers(tmp_path, monkeypatch, prefill_tokens):
    monkeypatch.setattr(batch_writer, "PREFILL_TOKENS", prefill_tokens)
    target = random_target(0)
    prompts = [*corpus_prompts(), {"prompt_ids": [5]}, {"prompt_ids": [6]}]
    texts = [generate_greedily(target, p["prompt_ids"], 12) for p in prompts]
    stop = [texts[0][4], texts[3][1]]
    path = tmp_path / "corpus.jsonl"
    done = write_corpus(
        target,
        prompts,
        path,
        stop_token_ids=stop,
        header={"target": "random"},
        max_new_tokens=12,
        batch_size=4,
    )
    header, rows = read_corpus(path)
    assert done == len(prompts) and header["target"] == "random"
    assert [row["index"] for row in rows] == list(range(len(prompts)))
    for row in rows:
        expected = generate_greedily(target, row["prompt_ids"], 12, stop)
        assert row["answer_ids"] == expected
        assert row["truncated"] is (expected[-1] not in stop)


def test_no_position_is_computed_twice(tmp_path, monkeypatch):
    target, caches, passes = random_target(0), [], []
    new_cache, forward = target.new_cache, target.forward

    def remember_cache(*arguments):
        caches.append(new_cache(*arguments))
        return caches[-1]

    def count_pass(ids, *arguments, **kwargs):
        passes.append(tuple(ids.shape))
        return forward(ids, *arguments, **kwargs)

    monkeypatch.setattr(target, "new_cache", remember_cache)
    monkeypatch.setattr(target, "forward", count_pass)
    monkeypatch.setattr(batch_writer, "PREFILL_TOKENS", 24)
    prompts = [{"prompt_ids": [i, 2, 3, 4, 5]} for i in range(8)]
    settings = {**SETTINGS, "max_new_tokens": 3, "batch_size": 8}
    write_corpus(target, prompts, tmp_path / "corpus.jsonl", **settings)
    # All context in passes of at most 24 tokens, then three tokens of every row.
    assert passes == [(6, 4), (2, 4), (8, 1), (8, 1), (8, 1)]
    assert caches[0].rows_written == 8 * (4 + 3)


def test_draws_belong_to_prompt_and_seed_and_not_to_the_batch(tmp_path):
    target, prompts = random_target(0), corpus_prompts()

    def rows(name, **changes):
        write_corpus(target, prompts, tmp_path / name, **{**SETTINGS, **changes})
        return [row["answer_ids"] for row in by_index(tmp_path / name)]

    first = rows("a.jsonl")
    assert rows("b.jsonl", batch_size=9) == first
    other = rows("c.jsonl", seed=1)
    assert other[::2] == first[::2] and other[1::2] != first[1::2]
    # Only the largest logit is left: greedy at any temperature.
    greedy = rows("d.jsonl", temperatures=(0.0,))
    assert rows("e.jsonl", temperatures=(0.8,), top_k=1) == greedy
    assert rows("f.jsonl", temperatures=(0.8,), top_p=1e-6) == greedy
    assert first[1::2] != greedy[1::2]


def test_time_limit_returns_early(tmp_path):
    target, path = random_target(0), tmp_path / "corpus.jsonl"
    done = write_corpus(target, corpus_prompts(), path, **SETTINGS, time_limit=-1.0)
    assert done == 0 and read_corpus(path)[1] == []


def test_damaged_weights_write_nothing(tmp_path):
    target = random_target(0)
    with torch.no_grad():
        target.head.weight[3] = torch.nan
    path = tmp_path / "corpus.jsonl"
    with pytest.raises(DFlashLabError, match="NaN"):
        write_corpus(target, corpus_prompts(), path, **SETTINGS)
    assert read_corpus(path)[1] == []


# --- resuming ---------------------------------------------------------------------


def test_corpus_resumes_where_it_was_killed(tmp_path):
    target = random_target(0)
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    write_corpus(target, corpus_prompts(), whole, **SETTINGS)
    lines = whole.read_text("utf-8").split("\n")
    # Killed while the fifth line was being written.
    broken.write_text("\n".join(lines[:4]) + "\n" + lines[4][:17], encoding="utf-8")
    assert len(read_corpus(broken)[1]) == 3
    write_corpus(target, corpus_prompts(), broken, **SETTINGS)
    assert broken.read_bytes() == whole.read_bytes()
    # Killed while the header was being written.
    broken.write_text(lines[0][:30], encoding="utf-8")
    write_corpus(target, corpus_prompts(), broken, **SETTINGS)
    assert broken.read_bytes() == whole.read_bytes()
    for change, name in (
        ({"header": {}}, "target was 'random'"),
        ({"temperatures": (0.0,)}, "temperatures was"),
        ({"top_p": 0.5}, "top_p was 1.0, is 0.5"),
        ({"top_k": 5}, "top_k was 0, is 5"),
        ({"seed": 3}, "seed was 0, is 3"),
        ({"max_new_tokens": 7}, "max_new_tokens was 6, is 7"),
    ):
        with pytest.raises(DFlashLabError, match=f"other settings .{name}"):
            write_corpus(target, corpus_prompts(), broken, **{**SETTINGS, **change})
    changed = corpus_prompts()
    changed[4]["prompt_ids"] = [3]
    with pytest.raises(DFlashLabError, match="another prompt 4"):
        write_corpus(target, changed, broken, **SETTINGS)
    with pytest.raises(DFlashLabError, match="no corpus at"):
        read_corpus(tmp_path / "missing.jsonl")
    broken.write_text("\n".join([lines[0], "{oops", *lines[2:]]), encoding="utf-8")
    with pytest.raises(DFlashLabError, match="line 2 is damaged"):
        read_corpus(broken)


def test_descriptive_fields_and_more_prompts_do_not_stop_a_resume(tmp_path):
    target, path = random_target(0), tmp_path / "corpus.jsonl"
    first = {"target": "random", "versions": {"torch": "1"}, "prompt_source": "a"}
    write_corpus(target, corpus_prompts(5), path, **{**SETTINGS, "header": first})
    before = path.read_bytes()
    again = {"target": "random", "versions": {"torch": "2"}, "prompt_source": "b"}
    settings = {**SETTINGS, "header": again}
    assert write_corpus(target, corpus_prompts(3), path, **settings) == 5
    assert path.read_bytes() == before  # nothing to do, nothing touched
    assert write_corpus(target, corpus_prompts(9), path, **settings) == 9
    whole = tmp_path / "whole.jsonl"
    write_corpus(target, corpus_prompts(9), whole, **settings)
    assert path.read_bytes() == whole.read_bytes()
    assert read_corpus(path)[0]["num_prompts"] == 9


def test_files_from_before_top_p_are_resumed(tmp_path):
    target, path = random_target(0), tmp_path / "corpus.jsonl"
    write_corpus(target, corpus_prompts(), path, **SETTINGS)
    whole = by_index(path)
    header, *lines = path.read_text("utf-8").splitlines(keepends=True)
    fields = json.loads(header)["corpus"]
    for name in ("top_p", "top_k", "seed", "num_prompts"):
        del fields[name]
    header = json.dumps({"corpus": fields}) + "\n"
    path.write_text(header + "".join(lines[:4]), encoding="utf-8")
    write_corpus(target, corpus_prompts(), path, **SETTINGS)
    assert by_index(path) == whole


class FullDisk(io.FileIO):
    """Takes so many bytes, then half a write, then none."""

    room = 0

    def write(self, data):
        if FullDisk.room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = super().write(bytes(data)[: FullDisk.room])
        FullDisk.room -= taken
        return taken


def test_a_full_disk_is_one_error_and_loses_nothing(tmp_path, monkeypatch):
    target = random_target(0)
    whole, path = tmp_path / "whole.jsonl", tmp_path / "corpus.jsonl"
    write_corpus(target, corpus_prompts(), whole, **SETTINGS)

    def open_on_full_disk(name, mode, buffering):
        return FullDisk(name, mode.replace("b", ""))

    with monkeypatch.context() as patch:
        patch.setattr(answer_log, "open", open_on_full_disk, raising=False)
        for room in (700, 500):
            FullDisk.room = room
            with pytest.raises(DFlashLabError, match=r"No space left.*are safe"):
                write_corpus(target, corpus_prompts(), path, **SETTINGS)
            assert path.read_bytes().endswith(b"}\n")
    written = by_index(path)
    assert 0 < len(written) < 9
    # Sorting at the end needs room too; what cannot be sorted is not lost.
    with monkeypatch.context() as patch:

        def full(descriptor):
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr("dflash_lab.training.corpus.corpus_file.os.fsync", full)
        with pytest.raises(DFlashLabError, match="all are safe"):
            write_corpus(target, corpus_prompts(), path, **SETTINGS)
    assert by_index(path) == by_index(whole)
    assert write_corpus(target, corpus_prompts(), path, **SETTINGS) == 9
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus.jsonl", "whole.jsonl"]


def test_sigkill_at_several_moments_and_one_resume(tmp_path):
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


def test_two_processes_write_what_one_writes(tmp_path):
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


def test_shards_of_other_settings_are_not_mixed_in(tmp_path):
    target, path = random_target(0), tmp_path / "corpus.jsonl"
    write_corpus(target, corpus_prompts(4), path, **SETTINGS)
    shard = tmp_path / "corpus.1-of-3.jsonl"
    path.rename(shard)
    with pytest.raises(DFlashLabError, match=r"1-of-3.*other settings .seed"):
        write_corpus(target, corpus_prompts(4), path, **SETTINGS, seed=2)
    assert shard.exists()


def test_a_launcher_that_makes_no_sense_is_refused(tmp_path, monkeypatch):
    arguments = [*TINY, "--out", str(tmp_path / "corpus.jsonl")]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(DFlashLabError, match="RANK=2"):
        run_command(arguments)
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(DFlashLabError, match="WORLD_SIZE='two'"):
        run_command(arguments)


# --- parquet ----------------------------------------------------------------------


def test_parquet_holds_what_json_lines_hold(tmp_path):
    pytest.importorskip("pyarrow")
    target = random_target(0)
    prompts = [*corpus_prompts(5), {"kind": "own", "prompt_ids": [4, 4]}]
    lines, table = tmp_path / "corpus.jsonl", tmp_path / "corpus.parquet"
    write_corpus(target, prompts, lines, **SETTINGS)
    assert write_corpus(target, prompts, table, **SETTINGS, time_limit=-1.0) == 0
    assert write_corpus(target, prompts[:3], table, **SETTINGS) == 3
    assert write_corpus(target, prompts, table, **SETTINGS) == 6
    assert read_corpus(table) == read_corpus(lines)
    assert [p.name for p in tmp_path.iterdir() if "parquet" in p.name] == [table.name]
    with pytest.raises(DFlashLabError, match="other settings"):
        write_corpus(target, prompts, table, **SETTINGS, seed=1)
    table.write_bytes(b"PAR1")
    with pytest.raises(DFlashLabError, match="cannot read"):
        read_corpus(table)


def test_parquet_without_pyarrow_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    path = tmp_path / "corpus.parquet"
    with pytest.raises(DFlashLabError, match="pip install pyarrow"):
        write_corpus(random_target(0), corpus_prompts(), path, **SETTINGS)
    with pytest.raises(DFlashLabError, match="pip install pyarrow"):
        run_command([*TINY, "--out", str(path)])
    assert not list(tmp_path.iterdir())


# --- prompts ----------------------------------------------------------------------


def prompt_file(folder, *rows):
    path = folder / "prompts.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_prompt_files_of_every_form(tmp_path, tiny):
    talk = [
        {"role": "system", "content": "Be brief.", "extra": 1},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Tell Mia about the fox."},
    ]
    path = prompt_file(
        tmp_path,
        {"prompt": "Copy the list: a,\u2028b.", "kind": "copy", "id": 7},
        "",
        {"turns": ["Count to 3.", "And to 4."]},
        {"messages": talk},
        {"messages": [{"role": "user", "content": "  Count to\n3. "}]},
    )
    found = read_prompt_file(path)
    rows, skipped = choose_prompts(found, tiny)
    assert skipped == Counter({"repeated": 1})  # but for white space
    assert [row.get("prompt") for row in rows] == [
        "Copy the list: a,\u2028b.",
        "Count to 3.",
        None,
    ]
    assert rows[0]["kind"] == "copy" and rows[0]["id"] == "7"
    assert rows[1]["kind"] == "prompts"
    assert [set(m) for m in rows[2]["messages"]] == [{"role", "content"}] * 4
    for row in rows[:2]:
        assert row["prompt_ids"] == tiny.encode(row["prompt"])
    text = tiny.tokenizer.decode(rows[2]["prompt_ids"])
    assert "Be brief." in text and text.endswith("Tell Mia about the fox.<|bot|>")
    assert len(choose_prompts(found, tiny, count=2)[0]) == 2


@pytest.mark.parametrize(
    "line, problem",
    [
        ("{oops", "not a prompt"),
        ('["a"]', "not a prompt"),
        ('{"text": "a"}', "not a prompt"),
        ('{"turns": "a b c"}', "not a prompt"),
        ('{"turns": []}', "not the user's"),
        ('{"prompt": " "}', "not text, or empty"),
        ('{"prompt": 3}', "not text, or empty"),
        ('{"prompt": "\\ud800"}', "surrogates not allowed"),
        ('{"messages": [{"role": "user"}]}', "not a prompt"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "role 'tool'"),
        (
            '{"messages": [{"role": "user", "content": "a"}, '
            '{"role": "assistant", "content": "b"}]}',
            "not the user's",
        ),
    ],
)
def test_a_bad_line_is_named_by_number(tmp_path, line, problem):
    path = prompt_file(tmp_path, {"prompt": "fine"}, line)
    with pytest.raises(DFlashLabError, match=f"line 2: .*{problem}"):
        read_prompt_file(path)


def test_files_without_prompts_are_refused(tmp_path):
    path = prompt_file(tmp_path, "", "")
    with pytest.raises(DFlashLabError, match="holds no prompt"):
        read_prompt_file(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(DFlashLabError, match="not UTF-8"):
        read_prompt_file(path)
    with pytest.raises(DFlashLabError, match="cannot read prompts from"):
        read_prompt_file(tmp_path / "generater")


def test_held_out_prompts_and_their_neighbours_are_left_out(tiny):
    tiny_test = held_out_test(tiny)
    held_out = load_prompts("tiny-chat")[0].turns[0]
    assert tiny_test(held_out) and tiny_test is is_held_out
    other = tokenizer_pair(None, TINY_TARGET)
    is_close = held_out_test(other)
    held_out = max(held_out_texts(), key=len)
    near = f"Please: {held_out} Thank you."
    candidates = [
        {"kind": "own", "prompt": "Why do cats purr when nobody is watching them?"},
        {"kind": "own", "prompt": near},
    ]
    rows, skipped = choose_prompts(candidates, other, is_close=is_close)
    assert len(rows) == 1 and skipped == Counter({"close to a held-out prompt": 1})
    with pytest.raises(DFlashLabError, match="no prompt is left: 1 close to a held"):
        choose_prompts(candidates[1:], other, is_close=is_close)


def test_prompts_that_are_too_long_are_counted_or_refused(tiny):
    short, long = {"kind": "a", "prompt": "Hi"}, {"kind": "a", "prompt": "Hello " * 20}
    rows, skipped = choose_prompts([long, short], tiny, max_prompt_tokens=8)
    assert [r["prompt"] for r in rows] == ["Hi"] and skipped == Counter({"too long": 1})
    with pytest.raises(DFlashLabError, match=r"1 too long \(limit 8\).*max-prompt"):
        choose_prompts([long], tiny, max_prompt_tokens=8)


def test_a_source_that_has_run_dry_ends(tiny):
    same = {"kind": "a", "prompt": "Hi"}
    rows, skipped = choose_prompts(itertools.repeat(same), tiny, count=2)
    assert len(rows) == 1 and skipped["repeated"] > 100
    # A file is read to its end, however much of it repeats.
    rows, _ = choose_prompts([same] * 11_000 + [{**same, "prompt": "Ho"}], tiny)
    assert [row["prompt"] for row in rows] == ["Hi", "Ho"]


@pytest.mark.parametrize("name", ["tiny", "other"])
def test_kinds_and_temperatures_do_not_go_together(tiny, name):
    pair = tiny if name == "tiny" else tokenizer_pair(None, TINY_TARGET)
    texts = list(itertools.islice(generated_prompts(pair, 0), 400))
    for number in (2, 3, 4, 5):
        met = Counter((i % number, text["kind"]) for i, text in enumerate(texts))
        assert len(met) == 4 * number and min(met.values()) > 200 // (4 * number)
    assert texts[:9] == list(itertools.islice(generated_prompts(pair, 0), 9))
    assert texts[:9] != list(itertools.islice(generated_prompts(pair, 1), 9))


def test_a_template_that_refuses_a_role_says_so(tiny):
    pair = tokenizer_pair("tiny")
    pair.tokenizer.chat_template = "{{ raise_exception('no system message') }}"
    talk = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(DFlashLabError, match="roles system, user: no system message"):
        encode_messages(pair, talk)
    pair.tokenizer.chat_template = None
    assert encode_messages(pair, talk) == pair.tokenizer.encode("a\nb")
    with pytest.raises(DFlashLabError, match="no chat template"):
        user_header(pair)


def test_self_written_prompts_are_distinct_and_ended_by_themselves(tmp_path):
    target = random_target(0)

    def decode(ids):
        return " ".join(str(i) for i in ids if i not in stop)

    stop = tuple(range(0, 61, 4))
    path = tmp_path / "draws.jsonl"
    settings = {"stop_token_ids": stop, "decode": decode, "batch_size": 16}
    prompts = self_written_prompts(target, [7, 9], path, 60, **settings)
    rows = read_corpus(path)[1]
    assert len(rows) == 60 and len({tuple(r["answer_ids"]) for r in rows}) > 20
    ended = {decode(r["answer_ids"]) for r in rows if r["answer_ids"][-1] in stop}
    assert set(prompts) == {text for text in ended if len(text.split()) >= 3}
    assert len(prompts) == len(set(prompts)) > 5
    # More draws add to them, and asking for fewer again changes nothing.
    more = self_written_prompts(target, [7, 9], path, 90, **settings)
    assert more[: len(prompts)] == prompts and len(more) > len(prompts)
    assert self_written_prompts(target, [7, 9], path, 60, **settings) == prompts


def test_the_target_writes_prompts_behind_its_chat_header(tmp_path, tiny):
    begin, ends = user_header(tiny)
    assert tiny.tokenizer.decode(begin) == "<|user|>"
    assert [tiny.tokenizer.decode(i) for i in ends] == ["<|end|>", "<|bot|>"]
    path = tmp_path / "draws.jsonl"
    rows, _ = target_written_prompts(
        tiny, path, 12, is_close=held_out_test(tiny), batch_size=32
    )
    assert len({row["prompt"] for row in rows}) == 12
    for row in rows:
        assert row["prompt_ids"] == tiny.encode(row["prompt"])
        assert "<|" not in row["prompt"] and not is_held_out(row["prompt"])
    with pytest.raises(DFlashLabError, match="fewer than 3 usable prompts"):
        target_written_prompts(
            tiny, tmp_path / "none.jsonl", 3, is_close=lambda text: len(text) > 5
        )


# --- a server ---------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    """Answers with the tiny target's greedy text, after some trouble."""

    def log_message(self, *arguments):
        pass

    def reply(self, code, value):
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        assert self.path == "/v1/models"
        self.reply(200, {"data": [{"id": name} for name in self.server.models]})

    def do_POST(self):
        assert self.path == "/v1/chat/completions"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            trouble = self.server.trouble.pop(0) if self.server.trouble else None
        if trouble:
            return self.reply(*trouble)
        text, reason = self.server.answers(body)
        choice = {"message": {"content": text}, "finish_reason": reason}
        return self.reply(200, {"choices": [choice]})


@pytest.fixture
def served(tiny, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.models, server.bodies, server.trouble = ["tiny-served"], [], []
    server.lock = threading.Lock()
    server.url = f"http://127.0.0.1:{server.server_port}"

    def answers(body):
        ids = encode_messages(tiny, body["messages"])
        with server.lock:
            made = generate_greedily(tiny.target, ids, body["max_tokens"], [0])
        return tiny.decode(made), "stop" if made[-1] == 0 else "length"

    server.answers = answers
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def serve_settings():
    return {"header": {"target": "tiny"}, "max_new_tokens": 40, "requests_at_once": 3}


def test_a_server_gives_the_ids_that_the_target_draws(tmp_path, tiny, served):
    pair = tokenizer_pair("tiny")
    assert pair.stop_token_ids == tiny.stop_token_ids and pair.target is None
    prompts, _ = choose_prompts(generated_prompts(pair, 0), pair, count=8)
    path, own = tmp_path / "corpus.jsonl", tmp_path / "own.jsonl"
    served.trouble = [(503, {"error": "busy"}), (429, b""), (500, b"")]
    server = ChatServer(served.url, backoff=0.01)
    assert server.model == "tiny-served"
    done, skipped = write_corpus_from_server(
        server, pair, prompts[:5], path, **serve_settings()
    )
    assert (done, skipped) == (5, {}) and len(served.bodies) == 5 + 3
    served.bodies.clear()
    write_corpus_from_server(server, pair, prompts, path, **serve_settings())
    asked = [body["messages"][0]["content"] for body in served.bodies]
    assert sorted(asked) == sorted(p["prompt"] for p in prompts[5:])  # only new ones
    assert served.bodies[0]["model"] == "tiny-served"
    assert "chat_template_kwargs" not in served.bodies[0]
    write_corpus(
        tiny.target, prompts, own, stop_token_ids=[0], header={}, max_new_tokens=40
    )
    # The same text, the same stop; the tokenizer may cut it otherwise than the target.
    for row, twin in zip(by_index(path), by_index(own), strict=True):
        assert tiny.decode(row["answer_ids"]) == tiny.decode(twin["answer_ids"])
        assert row["answer_ids"][-1:] == [0] or row["truncated"]
        assert row["truncated"] == twin["truncated"]
        assert row["prompt_ids"] == twin["prompt_ids"]
    with pytest.raises(DFlashLabError, match="server_model was 'tiny-served'"):
        write_corpus_from_server(
            ChatServer(served.url, "x"), pair, prompts, path, **serve_settings()
        )


def test_sampling_and_thinking_reach_the_server(tmp_path, served):
    pair = tokenizer_pair("tiny", thinking=True)
    pair.tokenizer.chat_template += "{# enable_thinking #}"
    prompts, _ = choose_prompts(generated_prompts(pair, 0), pair, count=4)
    served.answers = lambda body: ("ok", "stop")
    write_corpus_from_server(
        ChatServer(served.url + "/v1/"),
        pair,
        prompts,
        tmp_path / "corpus.jsonl",
        temperatures=(0.0, 0.7),
        top_p=0.9,
        top_k=20,
        seed=1,
        **serve_settings(),
    )
    bodies = {body["messages"][0]["content"]: body for body in served.bodies}
    bodies = [bodies[prompt["prompt"]] for prompt in prompts]
    assert [body["temperature"] for body in bodies] == [0.0, 0.7, 0.0, 0.7]
    assert all(
        (b["top_p"], b["top_k"], b["max_tokens"]) == (0.9, 20, 40) for b in bodies
    )
    assert bodies[0]["chat_template_kwargs"] == {"enable_thinking": True}
    assert "seed" not in bodies[0] and bodies[1]["seed"] != bodies[3]["seed"]
    rows = by_index(tmp_path / "corpus.jsonl")
    assert [row["temperature"] for row in rows] == [0.0, 0.7, 0.0, 0.7]


def test_answers_that_are_not_the_targets_own_are_counted(tmp_path, served):
    pair = tokenizer_pair("tiny")
    prompts, _ = choose_prompts(generated_prompts(pair, 0), pair, count=5)
    replies = dict(
        zip(
            (prompt["prompt"] for prompt in prompts),
            [
                ("fine", "stop"),
                ("cut", "length"),
                ("bad", "content_filter"),
                ("", "stop"),
                ("a<|end|>b", "stop"),
            ],
            strict=True,
        )
    )
    served.answers = lambda body: replies[body["messages"][0]["content"]]
    path = tmp_path / "corpus.jsonl"
    done, skipped = write_corpus_from_server(
        ChatServer(served.url), pair, prompts, path, **serve_settings()
    )
    assert done == 2 and skipped == {
        "ended by 'content_filter'": 1,
        "empty": 1,
        "not the same text after tokenisation": 1,
    }
    assert [row["truncated"] for row in by_index(path)] == [False, True]
    thought = {"content": "yes", "reasoning_content": "hm"}
    assert "thoughts" in answer_ids(pair, thought, "stop")[1]
    # A tokenizer that loses something.
    plain = pair.tokenizer.encode
    pair.tokenizer.encode = lambda text, **kwargs: plain(text, **kwargs)[:-1]
    assert "not the same" in answer_ids(pair, {"content": "fine"}, "stop")[1]


def test_trouble_with_a_server_is_one_error_each(tmp_path, served):
    pair = tokenizer_pair("tiny")
    prompts, _ = choose_prompts(generated_prompts(pair, 0), pair, count=6)
    path = tmp_path / "corpus.jsonl"
    arguments = (pair, prompts, path)
    # One at a time: no other request may take the trouble that is meant for the next.
    settings = {**serve_settings(), "requests_at_once": 1}
    patient = ChatServer(served.url, retries=1, backoff=0.01)
    served.trouble = [(503, b"loading")] * 20
    with pytest.raises(DFlashLabError, match=r"answered 503.*loading"):
        write_corpus_from_server(patient, *arguments, **settings)
    served.trouble = [(400, b"too long")]
    with pytest.raises(DFlashLabError, match=r"answered 400.*too long"):
        write_corpus_from_server(patient, *arguments, **settings)
    served.trouble = [(200, b"<html>")]
    with pytest.raises(DFlashLabError, match="not speak the OpenAI protocol"):
        write_corpus_from_server(patient, *arguments, **settings)
    served.trouble = [(200, {"choices": []})]
    with pytest.raises(DFlashLabError, match="not speak the OpenAI protocol"):
        write_corpus_from_server(patient, *arguments, **settings)
    done, _ = write_corpus_from_server(patient, *arguments, **settings)
    assert done == 6  # what came before each trouble was kept, the rest was asked
    served.models = ["a", "b"]
    with pytest.raises(DFlashLabError, match="serves 2 models"):
        ChatServer(served.url)
    with pytest.raises(DFlashLabError, match="no URL"):
        ChatServer("localhost:8000")


def test_no_server_there(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        path = str(tmp_path / "corpus.jsonl")
        with pytest.raises(DFlashLabError, match="cannot be reached"):
            run_command([*TINY, "--server", url, "--out", path])


# --- the command ------------------------------------------------------------------


def test_command_with_a_server_loads_no_weights(tmp_path, served, monkeypatch, capsys):
    monkeypatch.setattr("dflash_lab.pairs.pair.load_pair", None)
    path = tmp_path / "corpus.jsonl"
    arguments = [*TINY, "--num-prompts", "3", "--max-new-tokens", "20"]
    assert run_command([*arguments, "--server", served.url, "--out", str(path)]) == 0
    header, rows = read_corpus(path)
    assert header["server_model"] == "tiny-served" and len(rows) == 3
    assert "3 answers to 3 prompts" in capsys.readouterr().out


def test_command_writes_a_header_that_names_everything(tmp_path, capsys):
    path = tmp_path / "new" / "corpus.jsonl"
    prompts = prompt_file(
        tmp_path, {"prompt": "Count to 3."}, {"prompt": "Count to  3."}
    )
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


def test_command_lets_the_target_write_prompts(tmp_path):
    path = tmp_path / "corpus.jsonl"
    arguments = ["--pair", "tiny", "--prompts", "self", "--num-prompts", "6"]
    arguments += ["--out", str(path), "--max-new-tokens", "8", "--threads", "1"]
    assert run_command(arguments) == 0
    rows = by_index(path)
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
def test_bad_input_is_one_clear_error(tmp_path, arguments, problem):
    path = tmp_path / "corpus.jsonl"
    with pytest.raises(DFlashLabError, match=problem):
        run_command([*TINY, "--out", str(path), *arguments])
    assert not path.exists()


def test_sizes_are_checked_in_the_library_too(tmp_path):
    target, path = random_target(0), tmp_path / "corpus.jsonl"
    for change, problem in (
        ({"max_new_tokens": 0}, "max_new_tokens 0"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"max_new_tokens": 253}, "prompt 2 has 4 tokens.*256 positions"),
        ({"seed": 2**31}, "seed 2147483648"),
        ({"temperatures": ()}, "no temperature"),
    ):
        with pytest.raises(DFlashLabError, match=problem):
            write_corpus(target, corpus_prompts(), path, **{**SETTINGS, **change})
    with pytest.raises(DFlashLabError, match="prompt 0 is empty"):
        write_corpus(target, [{"prompt_ids": []}], path, **SETTINGS)
    assert not path.exists()


def test_importing_the_command_is_light():
    code = "import sys, dflash_lab.cli.corpus; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"

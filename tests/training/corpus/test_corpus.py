"""The target's own answers, whatever interrupts their writing."""

from __future__ import annotations

import errno
import io
import json
import sys

import pytest
import torch
from helpers import random_target
from reference import generate_greedily

from dflash_lab.errors import DFlashLabError
from dflash_lab.training.corpus import answer_log, batch_writer
from dflash_lab.training.corpus.corpus import write_corpus
from dflash_lab.training.corpus.corpus_file import (
    read_corpus,
)

TINY = ["--pair", "tiny", "--prompts", "generator", "--threads", "1"]


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


def test_shards_of_other_settings_are_not_mixed_in(tmp_path):
    target, path = random_target(0), tmp_path / "corpus.jsonl"
    write_corpus(target, corpus_prompts(4), path, **SETTINGS)
    shard = tmp_path / "corpus.1-of-3.jsonl"
    path.rename(shard)
    with pytest.raises(DFlashLabError, match=r"1-of-3.*other settings .seed"):
        write_corpus(target, corpus_prompts(4), path, **SETTINGS, seed=2)
    assert shard.exists()


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


def test_parquet_without_pyarrow_is_refused_before_any_work(
    tmp_path, monkeypatch, run_command
):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    path = tmp_path / "corpus.parquet"
    with pytest.raises(DFlashLabError, match="pip install pyarrow"):
        write_corpus(random_target(0), corpus_prompts(), path, **SETTINGS)
    with pytest.raises(DFlashLabError, match="pip install pyarrow"):
        run_command([*TINY, "--out", str(path)])
    assert not list(tmp_path.iterdir())

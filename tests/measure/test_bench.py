"""Bench runs: resumable, paired, honest about differences; packaged prompt sets."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import shutil
import subprocess
import zipfile
from dataclasses import replace

import pytest

from dflash_lab.cli.bench import level
from dflash_lab.cli.main import main
from dflash_lab.errors import DFlashLabError
from dflash_lab.measure.bench import (
    BenchSettings,
    read_records,
    run_bench,
    verdicts,
)
from dflash_lab.measure.bench_summary import compare, complete, summarize
from dflash_lab.measure.methods import METHODS, MethodSettings, make_method
from dflash_lab.pairs import hub_prompts, packaged_prompts, packaged_target
from dflash_lab.pairs.pair import load_pair
from dflash_lab.pairs.prompts import load_prompts
from dflash_lab.views.bench import (
    interval_figure,
    length_notices,
    notices,
    render_bench,
    slot_notices,
    tau_notices,
)


@pytest.fixture(scope="module")
def pair():
    return load_pair("tiny", quiet=True)


def settings(methods=("ar", "dflash"), **decode):
    decode = MethodSettings(**{"max_new_tokens": 12, **decode})
    return BenchSettings(methods, ("tiny-chat",), 2, decode)


def sets(count=2):
    return {"tiny-chat": load_prompts("tiny-chat", count)}


# --- methods ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["ar", "dflash", "ngram", "hf_generate", "hf_lookup", "hf_dflash"]
)
def test_every_method_gives_the_targets_own_answer(pair, name):
    assert name in METHODS
    ids = pair.encode("Tell Mia about the fox.")
    expected = make_method("ar", pair, MethodSettings(24))(ids)
    answer = make_method(name, pair, MethodSettings(24))(ids)
    assert answer.ids[:24] == expected.ids and answer.seconds > 0
    assert (answer.trace is None) == name.startswith("hf_")


def test_a_small_model_of_the_same_family_assists(pair, tmp_path):
    pair.model.save_pretrained(tmp_path)
    ids = pair.encode("Tell Mia about the fox.")
    method = make_method("hf_assisted", pair, MethodSettings(16, assistant=tmp_path))
    assert method(ids).ids == make_method("ar", pair, MethodSettings(16))(ids).ids


def test_methods_that_cannot_run_say_why(pair):
    for name, options, word in (
        ("eagel", {}, "choose among ar, dflash"),
        ("hf_assisted", {"assistant": "no/such/folder"}, "cannot load the assistant"),
        ("eagle", {"eagle": "no/such/folder"}, "no EAGLE-style head"),
        ("hf_dflash", {"block_size": 4}, "blocks as trained"),
    ):
        with pytest.raises(DFlashLabError, match=word):
            make_method(name, pair, MethodSettings(**options))
    bare = replace(pair, drafter=None)
    for name in ("dflash", "hf_dflash"):
        with pytest.raises(DFlashLabError, match="needs a drafter"):
            make_method(name, bare, MethodSettings())


# --- a run ------------------------------------------------------------------------


def test_a_run_goes_on_where_it_was(pair, tmp_path):
    whole = run_bench(pair, sets(), settings(), tmp_path, quiet=True)
    assert [(r["id"], r["method"]) for r in whole] == [
        ("tiny-chat-01", "ar"),
        ("tiny-chat-01", "dflash"),
        ("tiny-chat-02", "dflash"),
        ("tiny-chat-02", "ar"),
    ]
    lines = (tmp_path / "records.jsonl").read_bytes().splitlines(keepends=True)
    # Killed in the third line: two answers are kept, the rest is decoded again.
    (tmp_path / "records.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:40])
    again = run_bench(pair, sets(), settings(), tmp_path, quiet=True)
    assert [r["ids"] for r in again] == [r["ids"] for r in whole]
    assert [r["seconds"] for r in again[:2]] == [r["seconds"] for r in whole[:2]]
    assert read_records(tmp_path) == again
    with pytest.raises(DFlashLabError, match="another settings"):
        run_bench(pair, sets(), settings(temperature=1.0), tmp_path, quiet=True)


def test_an_interrupt_leaves_whole_answers_only(pair, tmp_path, monkeypatch):
    from dflash_lab.measure import bench

    real, calls = bench.make_method, []

    def interrupting(name, *arguments):
        method = real(name, *arguments)

        def decode(ids):
            calls.append(name)
            answer = method(ids)
            return replace(answer, interrupted=len(calls) == 5)

        return decode

    monkeypatch.setattr(bench, "make_method", interrupting)
    with pytest.raises(KeyboardInterrupt):
        run_bench(pair, sets(), settings(), tmp_path, quiet=True)
    assert len(read_records(tmp_path)) == 2  # behind two warm-ups


def test_summary_verdicts_and_comparison(pair, tmp_path):
    records = run_bench(pair, sets(), settings(), tmp_path, quiet=True)
    prompts = {
        ("tiny-chat", p.id): pair.encode(p.turns[0]) for p in sets()["tiny-chat"]
    }
    found = verdicts(pair, records, prompts)
    assert set(found.values()) == {"equal"} and len(found) == 4
    rows = {row["method"]: row for row in summarize(records, found)}
    plain, drafted = rows["ar"], rows["dflash"]
    assert plain["speedup"] == plain["predicted_speedup"] == plain["tau"] == 1.0
    assert drafted["equal"] == 2 and drafted["ties"] == drafted["differ"] == 0
    own = [r for r in records if r["method"] == "dflash"]
    cycles = sum(len(r["cycles"]) for r in own)
    assert drafted["tau"] == (sum(len(r["ids"]) for r in own) - 2) / cycles
    rate = sum(len(r["ids"]) for r in own) / sum(r["seconds"] for r in own)
    assert drafted["tokens_per_second"] == pytest.approx(rate)
    assert drafted["speedup_low"] <= drafted["speedup"] <= drafted["speedup_high"]
    # A wrong token is no tie.
    spoiled = [dict(r, ids=[*r["ids"][:-1], 5]) for r in own]
    plains = [r for r in records if r["method"] == "ar"]
    wrong = verdicts(pair, [*plains, *spoiled], prompts)
    assert wrong["tiny-chat", "tiny-chat-01", "dflash"] == "differs"
    # Twice as fast is twice as fast.
    faster = [dict(r, seconds=r["seconds"] / 2) for r in records]
    figures = compare(records, faster, "dflash")["tiny-chat"]
    assert figures["speed"].value == pytest.approx(2) and figures["speed"].excludes(1)
    assert figures["tau"].value == 1.0
    with pytest.raises(DFlashLabError, match="share no prompt"):
        compare(records, [], "dflash")
    with pytest.raises(DFlashLabError, match="every method"):
        complete([dict(records[0]), dict(records[1], id="other")])


def test_the_page_shows_every_row_and_says_who_loses():
    rows = [
        {
            "set": name,
            "method": method,
            "prompts": 3,
            "tokens_per_second": 10.0,
            "speedup": gain,
            "speedup_low": gain - 0.1,
            "speedup_high": gain + 0.1,
            "predicted_speedup": gain * 1.05,
        }
        for name in ("code", "chat", "all")
        for method, gain in (("ar", 1.0), ("dflash", 0.8 if name == "chat" else 1.4))
    ]
    said = notices(rows)
    assert "dflash on chat is slower than" in said[0]
    assert "dflash on all is faster than" in said[1] and "5.0%" in said[2]
    figure, alt = interval_figure(rows, "speedup", "speed-up", 1)
    assert "dflash on chat 0.80 (0.70 to 0.90)" in alt and figure.axes
    run = {
        "pair": "<tiny>",
        "dtype": "float32",
        "settings": {"decode": {"max_new_tokens": 3, "assistant": None}},
        "environment": {"torch": "2"},
        "git": "abc",
    }
    page = render_bench(run, rows, [(b"png", alt, "caption", said)])
    assert page.count("<tr>") == 1 + len(rows) and "&lt;tiny&gt;" in page
    assert "<script" not in page and "0.80 [0.70, 0.90]" in page
    with pytest.raises(DFlashLabError, match="no method has a tau"):
        interval_figure(rows, "tau", "tau", 1)


def test_costs_and_verdicts_share_columns_so_that_the_table_fits():
    row = {"set": "a", "method": "dflash", "draft_ms": 1.0, "verify_ms": 2.04}
    row |= {"other_ms": 0.5, "equal": 3, "ties": 0, "differ": 1}
    run = {"pair": "p", "dtype": "d", "settings": {"decode": {}}, "environment": {}}
    page = render_bench(run | {"git": None}, [row, {"set": "a", "method": "x"}], [])
    assert "1.0 + 2.0 + 0.5" in page and "3 equal, 1 DIFFER" in page


def test_what_to_notice_follows_from_the_numbers():
    def row(name, tau, width, method="dflash"):
        low, high = tau - width, tau + width
        return {"set": name, "method": method, "tau": tau, "tau_low": low} | {
            "tau_high": high
        }

    far = [row("code", 3.0, 0.2), row("chat", 2.0, 0.2), row("all", 9.0, 0.1)]
    assert tau_notices([*far, row("code", 1.0, 0, "ar")]) == [
        "dflash adds most on code (3.00) and least on chat (2.00); their intervals lie "
        "apart"
    ]
    near = [row("code", 3.0, 0.9), row("chat", 2.0, 0.9)]
    assert tau_notices(near)[0].endswith("their intervals overlap")
    assert tau_notices(far[:1]) == []
    assert slot_notices([0.9, 0.3, 0.25]) == [
        "90% of the cycles keep their first draft, 25% all of them",
        "slot 2 ends most cycles: 60% of all",
    ]
    assert length_notices([1, 1, 4, 2], 4) == [
        "50% of the cycles add the target's own token alone: their drafts were paid "
        "for in vain",
        "25% add 4, the most that K allows",
    ]


def test_the_level_of_a_run():
    rows = [
        {"set": "all", "method": "dflash", "equal": 3, "ties": 1, "differ": 0},
        {"set": "all", "method": "hf_lookup", "equal": 0, "ties": 0, "differ": 4},
    ]
    assert level(rows).endswith("up to 1 answers with certified ties")
    rows[0]["differ"] = 1
    assert level(rows).startswith("NOT lossless") and "dflash" in level(rows)
    assert level([{"set": "a", "method": "ar"}]) == "not compared"


def test_bench_and_compare_from_the_command_line(tmp_path, capsys):
    common = ["bench", "--pair", "tiny", "--prompts", "tiny-chat,tiny-code"]
    common += ["--limit", "1", "--max-new-tokens", "10", "--methods", "ar,dflash,ngram"]
    for name in ("one", "two"):
        assert main([*common, "--out", str(tmp_path / name)]) == 0
    text = capsys.readouterr().out
    assert "all            dflash" in text and "report.html" in text
    assert "outputs: L2: equal to ordinary plain decoding, token for token" in text
    with open(tmp_path / "one" / "summary.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 9 and {row["differ"] for row in rows} == {"0"}
    for name in ("report.html", "speedup.png", "tau.png", "run.json", "verdicts.json"):
        assert (tmp_path / "one" / name).stat().st_size > 0
    assert main(["compare", str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    assert "all              tau    1.00" in capsys.readouterr().out
    assert main([*common, "--limit", "0", "--out", str(tmp_path)]) == 2
    assert main(["compare", str(tmp_path), str(tmp_path / "two")]) == 2
    assert "holds no bench run" in capsys.readouterr().err


# --- packaged prompt sets ---------------------------------------------------------


def fake_wheel(folder, source, rows):
    """A wheel that holds the rows where the real one has its data."""
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    data = gzip.compress(text, mtime=0) if source.member.endswith(".gz") else text
    path = folder / "some.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(source.member, data)
    return path, hashlib.sha256(data).hexdigest()


ROWS = {
    "humaneval": {"task_id": "HumanEval/7", "prompt": "def f():\n"},
    "mt-bench": {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
    "gsm8k-100": {"id": "g1", "prompt": "How many?", "expected": "3"},
}


@pytest.mark.parametrize("name", sorted(ROWS))
def test_packaged_sets_are_checked_converted_and_cached(name, tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_LAB_CACHE", str(tmp_path / "cache"))
    source = packaged_prompts.SETS[name]
    wheel, digest = fake_wheel(tmp_path, source, [ROWS[name]])
    calls = []

    def download(command, **options):
        calls.append(command)
        shutil.copy(wheel, command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr(packaged_target.subprocess, "run", download)
    with pytest.raises(DFlashLabError, match="another index"):
        load_prompts(name)
    good = replace(source, sha256=digest)
    monkeypatch.setitem(packaged_prompts.SETS, name, good)
    for _ in range(2):
        (prompt,) = load_prompts(name)
    assert len(calls) == 2 and f"{source.package}=={source.version}" in calls[0]
    if name == "mt-bench":
        assert prompt.turns == ("a", "b") and prompt.kind == "writing"
    elif name == "humaneval":
        assert (
            prompt.id == "HumanEval-7" and "```python\ndef f():\n```" in prompt.turns[0]
        )
    else:
        assert prompt.turns[0].startswith("How many?\nPlease reason step by step")
    failed = subprocess.CompletedProcess([], 1, stderr="no network\n")
    monkeypatch.setattr(packaged_target.subprocess, "run", lambda *a, **o: failed)
    assert load_prompts(name)[0] == prompt  # from the cache
    monkeypatch.setenv("DFLASH_LAB_CACHE", str(tmp_path / "other"))
    with pytest.raises(DFlashLabError, match="no network"):
        load_prompts(name)


# --- sets of the Hub ----------------------------------------------------------------

HUB_ROWS = {
    "hub:gsm8k": ("main/test-0.parquet", {"question": "How many?", "answer": "3"}),
    "hub:math500": ("test.jsonl", {"problem": "What is 1 + 1?"}),
    "hub:humaneval": ("openai_humaneval/test-0.parquet", {"prompt": "def f():\n"}),
    "hub:mbpp": ("full/test-0.parquet", {"text": "Add.", "test_list": ["assert 1"]}),
    "hub:mt-bench": ("raw/question.jsonl", {"turns": ["a", "b"]}),
    "hub:alpaca": ("data/train-0.parquet", {"instruction": "Say", "input": "hello"}),
}


@pytest.mark.parametrize("name", sorted(HUB_ROWS))
def test_sets_of_the_hub_are_read_from_folders_of_their_form(
    name, tmp_path, monkeypatch
):
    from pyarrow import Table, parquet

    where, row = HUB_ROWS[name]
    path = tmp_path / where
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(Table.from_pylist([row, row]), path)
    else:
        path.write_text((json.dumps(row) + "\n") * 2, encoding="utf-8")
    asked = []

    def download(repository, repo_type, allow_patterns):
        asked.append((repository, repo_type, tuple(allow_patterns)))
        return str(tmp_path)

    monkeypatch.setattr(hub_prompts, "snapshot_download", download)
    source = hub_prompts.SETS[name]
    prompts = load_prompts(name)
    assert asked == [(source.repository, "dataset", source.patterns)]
    assert len(prompts) == 2 and len(load_prompts(name, 1)) == 1
    label = name.removeprefix("hub:")
    assert prompts[1].id == f"{label}-1" and prompts[0].kind == source.kind
    text = "\n".join(prompts[0].turns)
    for value in row.values():
        for piece in value if isinstance(value, list) else [value]:
            assert piece.strip() in text or piece == "3"
    if source.kind == "math":
        assert text.endswith("put your final answer within \\boxed{}.")
    path.unlink()
    with pytest.raises(DFlashLabError, match="layout has changed"):
        load_prompts(name)


def test_an_unreachable_hub_is_one_clear_error(monkeypatch):
    def download(*arguments, **options):
        raise OSError("no network")

    monkeypatch.setattr(hub_prompts, "snapshot_download", download)
    with pytest.raises(DFlashLabError, match="neither cached nor reachable"):
        load_prompts("hub:gsm8k")

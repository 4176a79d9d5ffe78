"""Prompts: read, generated or written by the target; held-out ones are left out."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest

from dflash_lab.errors import DFlashLabError
from dflash_lab.files import data_root
from dflash_lab.pairs.prompts import load_prompts, read_prompt_file
from dflash_lab.training.corpus import prompt_sources
from dflash_lab.training.corpus.corpus_file import (
    read_corpus,
    write_rows,
)
from dflash_lab.training.corpus.prompt_sources import (
    choose_prompts,
    generated_prompts,
    held_out_test,
    held_out_texts,
    target_written_prompts,
    user_header,
)
from dflash_lab.training.corpus.served_answers import tokenizer_pair
from dflash_lab.training.corpus.tiny_text import is_held_out

TINY_TARGET = data_root() / "checkpoints" / "tiny" / "target"


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
        pair.encode_messages(talk)
    pair.tokenizer.chat_template = None
    assert pair.encode_messages(talk) == pair.tokenizer.encode("a\nb")
    with pytest.raises(DFlashLabError, match="no chat template"):
        user_header(pair)


def test_the_target_writes_prompts_behind_its_chat_header(tmp_path, tiny):
    begin, ends = user_header(tiny)
    assert tiny.tokenizer.decode(begin) == "<|user|>"
    assert [tiny.tokenizer.decode(i) for i in ends] == ["<|end|>", "<|bot|>"]
    path = tmp_path / "draws.jsonl"

    def prompts(count):
        rows, _ = target_written_prompts(
            tiny, path, count, is_close=held_out_test(tiny), batch_size=32
        )
        return rows

    rows = prompts(12)
    for row in rows:
        assert row["prompt_ids"] == tiny.encode(row["prompt"])
        assert "<|" not in row["prompt"] and not is_held_out(row["prompt"])
    # The first draws that ended by themselves, each once.
    draws = read_corpus(path)[1]
    assert len({tuple(draw["answer_ids"]) for draw in draws}) > 20
    assert all(draw["prompt_ids"] == begin for draw in draws)
    ended = [d["answer_ids"] for d in draws if d["answer_ids"][-1] in ends]
    texts = dict.fromkeys(tiny.decode(ids).strip() for ids in ended)
    good = [t for t in texts if len(t.split()) >= 3 and not is_held_out(t)]
    assert [row["prompt"] for row in rows] == good[:12]
    # More draws add to them, and asking for fewer again changes nothing.
    more = prompts(30)
    assert more[:12] == rows and len(more) == 30
    assert prompts(12) == rows
    with pytest.raises(DFlashLabError, match="fewer than 3 usable prompts"):
        target_written_prompts(
            tiny, tmp_path / "none.jsonl", 3, is_close=lambda text: len(text) > 5
        )


def test_short_and_unfinished_draws_are_no_prompts(tmp_path, monkeypatch):
    drawn = [([9, 8, 0], False), ([9, 8, 7, 0], False), ([9, 8, 7, 6], True)]

    def write(target, prompts, path, **settings):
        rows = [
            {"index": i, "answer_ids": ids, "truncated": truncated}
            for i, (ids, truncated) in enumerate(drawn)
        ]
        write_rows(path, {}, rows)

    monkeypatch.setattr(prompt_sources, "write_corpus", write)
    pair = tokenizer_pair("tiny")
    monkeypatch.setattr(pair, "decode", lambda ids: " ".join(str(i) for i in ids if i))
    path = tmp_path / "draws.jsonl"
    rows, _ = target_written_prompts(pair, path, 1, is_close=lambda text: False)
    assert [row["prompt"] for row in rows] == ["9 8 7"]

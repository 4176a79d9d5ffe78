"""Traces: there and back, one row per slot, and honest headers."""

from __future__ import annotations

import pytest

from dflash_lab.errors import DFlashLabError
from dflash_lab.measure.acceptance import acceptance_per_position, pooled_tau
from dflash_lab.speculative.generate import speculative_generate
from dflash_lab.speculative.proposer import DFlash, Plain
from dflash_lab.speculative.trace import CycleRecord, DecodeTrace


@pytest.fixture(scope="module")
def trace(target, drafter):
    prompts = [[1, 2], [3]]
    return speculative_generate(
        target, DFlash(drafter), prompts, max_new_tokens=12, details=True
    ).trace


def test_jsonl_there_and_back(trace, tmp_path):
    path = tmp_path / "deep" / "trace.jsonl"
    trace.to_jsonl(path)
    again = DecodeTrace.from_jsonl(path)
    assert again == trace
    assert [p.name for p in path.parent.iterdir()] == ["trace.jsonl"]


def test_header_says_what_ran(trace):
    header = trace.header
    assert header["proposer"] == "dflash" and header["block_size"] == 6
    assert header["prompt_lengths"] == [2, 1] and header["seeds"] == [0, 0]
    assert header["dtype"] == "float32"
    assert {"torch", "transformers", "dflash_lab"} <= set(header["environment"])


def test_frames(trace, target):
    frame = trace.to_frame()
    drafted = sum(len(c.draft_tokens) for c in trace.cycles)
    assert len(frame) == drafted
    assert set(frame["slot"]) == {1, 2, 3, 4, 5}
    cycles = trace.cycles_frame()
    assert len(cycles) == len(trace.cycles)
    assert cycles["acceptance_length"].mean() == pytest.approx(trace.tau)
    kept = frame.groupby(["prompt", "cycle"])["accepted"].sum()
    lengths = cycles.set_index(["prompt", "cycle"])["acceptance_length"]
    assert (lengths.loc[kept.index] - kept == 1).all()  # the bonus token
    plain = speculative_generate(target, Plain(), [1], max_new_tokens=4).trace
    assert plain.to_frame().empty and plain.tau == 1.0


@pytest.mark.parametrize("text", ["", "{}\n", "[]\n", '{"format": "other"}\n', "x\n"])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "x.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DFlashLabError, match=r"x\.jsonl"):
        DecodeTrace.from_jsonl(path)
    with pytest.raises(DFlashLabError, match="cannot read"):
        DecodeTrace.from_jsonl(tmp_path / "missing.jsonl")


def test_worked_example_of_the_documentation():
    """Three cycles of block 4, as in docs/metrics.md."""

    def cycle(number, flags):
        return CycleRecord(0, number, 0, sum(flags) + 1, [0] * 3, [0] * 4, flags)

    flags = ([True, True, False], [False, False, False], [True, True, True])
    trace = DecodeTrace({"num_prompts": 1}, [cycle(i, f) for i, f in enumerate(flags)])
    assert trace.acceptance_lengths == [[3, 1, 4]]
    assert trace.tau == pytest.approx(8 / 3)
    rates, drafted = acceptance_per_position([trace])
    assert rates == pytest.approx([2 / 3, 2 / 3, 1 / 3]) and drafted == [3, 3, 3]
    assert 1 + sum(rates) == pytest.approx(trace.tau)
    assert pooled_tau([trace, trace]) == pytest.approx(8 / 3)

"""Definitions of acceptance against their slow twins; intervals; the cost model."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_lab.errors import DFlashLabError
from dflash_lab.measure.acceptance import (
    acceptance_summary,
    cut_at,
    expected_length,
    length_histogram,
    slot_counts,
    slot_frame,
)
from dflash_lab.measure.intervals import paired_ratio_interval, ratio_interval
from dflash_lab.measure.slices import (
    acceptance_by,
    acceptance_by_token,
    calibration,
    reached_slots,
    token_class,
)
from dflash_lab.measure.speedup import (
    Costs,
    best_block_size,
    costs_from_traces,
    measure_costs,
    tau_of_smaller_block,
)
from dflash_lab.speculative.generate import speculative_generate
from dflash_lab.speculative.proposer import DFlash, Plain
from dflash_lab.speculative.trace import CycleRecord, DecodeTrace


@st.composite
def traces(draw):
    """Traces as the loop makes them: right drafts until one is wrong, perhaps a cut."""
    prompts = draw(st.integers(1, 4))
    trace = DecodeTrace({"num_prompts": prompts, "block_size": 6})
    for prompt in range(prompts):
        start = 5
        count = draw(st.integers(0, 6))
        for number in range(count):
            drafts = draw(st.lists(st.integers(0, 2), min_size=0, max_size=5))
            choices = draw(
                st.lists(
                    st.integers(0, 2),
                    min_size=len(drafts) + 1,
                    max_size=len(drafts) + 1,
                )
            )
            kept, _ = reference.accept(drafts + [-9], choices)
            kept = min(kept, len(drafts))
            length = kept + 1
            last = number == count - 1
            if last and kept and draw(st.booleans()):
                kept = length = draw(st.integers(1, kept))  # a stop token cut it
            trace.cycles.append(
                CycleRecord(
                    prompt,
                    number,
                    start,
                    length,
                    drafts,
                    choices,
                    [j < kept for j in range(len(drafts))],
                    draft_probs=[0.1 + 0.2 * d for d in drafts],
                    target_entropy=[float(d) for d in drafts],
                )
            )
            start += length
    return trace


def same(one, two):
    return one == two or (math.isnan(one) and math.isnan(two))


@given(st.lists(traces(), min_size=1, max_size=3))
@settings(max_examples=150, deadline=None)
def test_every_rate_equals_its_slow_twin(several):
    cycles = [cycle for trace in several for cycle in trace.cycles]
    frame = slot_frame(several)
    for row in frame.to_dict("records"):
        twin = reference.slot_rates(cycles, row["slot"])
        for name in ("marginal", "conditional", "survival"):
            assert same(row[name], twin[name]), (name, row)
    summary = acceptance_summary(several)
    for name, value in reference.acceptance_numbers(several).items():
        assert summary[name] == pytest.approx(value, nan_ok=True), name
    histogram = length_histogram(several)
    assert sum(histogram.values()) == len(cycles)
    assert sum(k * n for k, n in histogram.items()) == summary["tokens"]


@given(traces())
@settings(max_examples=100, deadline=None)
def test_invariants(trace):
    frame = slot_frame([trace])
    summary = acceptance_summary([trace])
    if not trace.cycles:
        assert math.isnan(summary["tau"])
        return
    assert summary["tokens"] == sum(map(sum, trace.acceptance_lengths))
    assert 1 <= summary["tau"] <= 6
    without = summary["tau_without_bonus"]
    assert summary["tau"] - 1 - 1e-9 <= without <= summary["tau"]
    full = [c for c in trace.cycles if len(c.draft_tokens) == 5 and cut_at(c) == 5]
    if full and len(full) == len(trace.cycles):
        assert list(frame["survival"]) == sorted(frame["survival"], reverse=True)
        conditional = [0.0 if math.isnan(x) else x for x in frame["conditional"]]
        assert expected_length(conditional) == pytest.approx(summary["tau"])
        assert 1 + frame["survival"].sum() == pytest.approx(summary["tau"])
    for counts in slot_counts(trace.cycles):
        assert counts["passed"] <= counts["reached"] <= counts["judged"]
        assert counts["judged"] <= counts["drafted"] >= counts["survived"]


def worked_example():
    """The example of docs/metrics.md: three cycles of block 4."""
    rows = (
        ([1, 2, 3], [1, 2, 9, 9], 3),
        ([1, 2, 3], [9, 2, 9, 9], 1),
        ([1, 2, 3], [1, 2, 3, 4], 4),
    )
    trace = DecodeTrace({"num_prompts": 1, "block_size": 4})
    for number, (drafts, choices, length) in enumerate(rows):
        accepted = [j < length - 1 for j in range(3)]
        trace.cycles.append(
            CycleRecord(0, number, 0, length, drafts, choices, accepted)
        )
    return trace


def test_the_worked_example_of_the_documentation():
    frame = slot_frame([worked_example()])
    assert list(frame["marginal"]) == pytest.approx([2 / 3, 1, 1 / 3])
    assert list(frame["conditional"]) == pytest.approx([2 / 3, 1, 1 / 2])
    assert list(frame["survival"]) == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    summary = acceptance_summary([worked_example()])
    assert summary["tau"] == pytest.approx(8 / 3)
    assert summary["tau_without_bonus"] == pytest.approx(5 / 3)
    assert summary["draft_acceptance_rate"] == pytest.approx(5 / 9)
    estimate = 1 + 2 / 3 + 2 / 3 + 2 / 3 * 1 / 3
    assert summary["product_of_marginals"] == pytest.approx(estimate)


def test_a_cut_block_hides_what_is_behind():
    cut = CycleRecord(0, 0, 0, 1, [1, 2, 3], [1, 2, 9, 9], [True, False, False])
    assert cut_at(cut) == 1
    counts = slot_counts([cut])
    assert [row["judged"] for row in counts] == [1, 0, 0]
    assert [row["reached"] for row in counts] == [1, 0, 0]
    assert [row["survived"] for row in counts] == [1, 0, 0]


# --- slices -----------------------------------------------------------------------


@pytest.mark.slow
@given(traces())
@settings(max_examples=60, deadline=None)
def test_reached_slots_are_those_behind_accepted_ones(trace):
    frame = trace.to_frame()
    rows = reached_slots(frame)
    expected = []
    for cycle in trace.cycles:
        for j in range(len(cycle.draft_tokens)):
            if all(cycle.accepted[:j]):
                expected.append((cycle.prompt, cycle.cycle, j + 1, cycle.accepted[j]))
    if frame.empty:
        assert rows.empty
        return
    names = ["prompt", "cycle", "slot", "accepted"]
    assert [tuple(row) for row in rows[names].to_numpy().tolist()] == expected
    firsts = {}
    for row in rows.to_dict("records"):
        firsts.setdefault(row["prompt"], row["start"])
        assert row["place"] == row["start"] - firsts[row["prompt"]] + row["slot"]
    by_slot = acceptance_by(frame, "slot")
    for row in by_slot.to_dict("records"):
        mine = [flag for _, _, slot, flag in expected if slot == row["slot"]]
        assert (row["reached"], row["accepted"]) == (len(mine), sum(mine))
    assert acceptance_by(frame, "target_entropy", 2)["reached"].sum() == len(expected)
    found = calibration(frame, 4)
    assert found["reached"].sum() == len(expected)
    error = (found["rate"] - found["draft_prob"]).abs() * found["reached"]
    assert found.attrs["error"] == pytest.approx(error.sum() / len(expected))
    classes = acceptance_by_token(frame, lambda token: "zero" if token == 0 else "more")
    assert classes["reached"].sum() == len(expected)


def test_a_calibrated_drafter_has_no_error():
    rows = []
    for number, (p, right) in enumerate([(0.75, 3), (0.25, 1)]):
        for i in range(4):
            rows.append(
                {
                    "prompt": number,
                    "cycle": i,
                    "start": i,
                    "slot": 1,
                    "accepted": i < right,
                    "draft_prob": p,
                }
            )
    assert calibration(pd.DataFrame(rows), 2).attrs["error"] == pytest.approx(0)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (" the", "word start"),
        ("ing", "word part"),
        (" \n", "space"),
        ("42", "digit"),
        ("),", "punctuation"),
        ("x1", "other"),
    ],
)
def test_token_classes(text, kind):
    assert token_class(text) == kind


# --- intervals --------------------------------------------------------------------


def test_an_interval_covers_the_truth_about_as_often_as_it_says():
    """Ratios of sums over prompts whose true ratio is 3."""
    noise = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        cycles = noise.integers(5, 30, size=40)
        tokens = cycles * noise.normal(3, 0.5, size=40)
        hits += not ratio_interval(tokens, cycles, seed=trial).excludes(3.0)
    assert 0.90 <= hits / 200 <= 0.99


def test_pairing_takes_the_difficulty_of_prompts_out():
    noise = np.random.default_rng(0)
    difficulty = noise.uniform(1, 6, size=30)
    cycles = np.full(30, 20.0)
    base, better = cycles * difficulty, cycles * difficulty * 1.1
    paired = paired_ratio_interval(better, cycles, base, cycles)
    assert paired.value == pytest.approx(1.1)
    assert paired.excludes(1.0) and paired.high - paired.low < 1e-9
    alone = [ratio_interval(x, cycles) for x in (base, better)]
    assert alone[0].high > alone[1].low  # apart they cannot be told
    difference = paired_ratio_interval(better, cycles, base, cycles, difference=True)
    assert difference.value == pytest.approx(0.1 * difficulty.mean())


def test_intervals_are_repeatable_and_refuse_nonsense():
    one = ratio_interval([1, 2, 3], [1, 1, 1], seed=3)
    assert one == ratio_interval([1, 2, 3], [1, 1, 1], seed=3)
    assert one.low < one.value == 2 < one.high
    assert str(one).startswith("2.00 [")
    for wrong in (([], []), ([1], [1, 2]), ([1], [0]), ([1], [-1])):
        with pytest.raises(DFlashLabError):
            ratio_interval(*wrong)
    with pytest.raises(DFlashLabError, match="cannot be paired"):
        paired_ratio_interval([1], [1], [1, 2], [1, 1])
    with pytest.raises(DFlashLabError, match="level"):
        ratio_interval([1], [1], level=2)


# --- the cost model -----------------------------------------------------------------


def test_the_cost_model_by_hand():
    costs = Costs(8, plain_ms=10, draft_ms=4, verify_ms=14, other_ms=2)
    assert costs.cycle_ms == 20 and costs.break_even_tau == 2
    assert costs.speedup(2) == 1 and costs.speedup(5) == 2.5
    cheap = Costs(4, plain_ms=10, draft_ms=2, verify_ms=11, other_ms=2)
    found = best_block_size({8: costs, 4: cheap}, {8: 3.0, 4: 2.4, 16: 9.0})
    assert found == (4, pytest.approx(1.6))
    assert best_block_size({8: costs, 4: cheap}, {8: 5.0, 4: 2.4})[0] == 8
    assert tau_of_smaller_block([0.5, 0.25, 0.1], 3) == 1.75
    with pytest.raises(DFlashLabError, match="no block size"):
        best_block_size({8: costs}, {4: 2.0})


def test_costs_come_from_cycles_and_explain_a_run(target, drafter):
    prompt = [3, 5, 8]
    drafted = speculative_generate(target, DFlash(drafter), prompt, max_new_tokens=60)
    plain = speculative_generate(target, Plain(), prompt, max_new_tokens=60)
    costs = costs_from_traces([drafted.trace], [plain.trace])
    assert costs.block_size == 6
    cycles = drafted.trace.cycles
    spent = sum(c.draft_ms + c.verify_ms + c.other_ms for c in cycles)
    assert costs.cycle_ms == pytest.approx(spent / len(cycles))
    # The model says what the cycles took, exactly: time of plain over time of drafted.
    tokens = sum(c.acceptance_length for c in cycles)
    assert costs.speedup(drafted.tau) == pytest.approx(costs.plain_ms * tokens / spent)
    with pytest.raises(DFlashLabError, match="at least one cycle"):
        costs_from_traces([drafted.trace], [])


def test_measured_costs_are_positive_and_leave_the_target_as_it_was(target, drafter):
    costs = measure_costs(target, drafter, [3, 6], context=20, rounds=2)
    assert sorted(costs) == [3, 6]
    for size, found in costs.items():
        assert found.block_size == size
        assert min(found.plain_ms, found.draft_ms, found.verify_ms, found.other_ms) > 0
    assert costs[3].plain_ms == costs[6].plain_ms
    assert not target._taps
    with pytest.raises(DFlashLabError, match="rounds 0"):
        measure_costs(target, drafter, [3], rounds=0)

"""What "acceptance" means: every definition in use, on the same cycles.

For slot j of a cycle there are three questions, with three answers:

* marginal: is the draft what the target would choose behind the drafts before it?
* conditional: is it, where all drafts before it were accepted?
* survival: did it become text?

A block that a stop rule cuts says nothing about the slots behind the cut, so these are
left out of marginal and conditional. `docs/metrics.md` has each definition with an
example by hand, and who uses it under which name.

Leaves out: intervals (`intervals.py`) and times (`speedup.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dflash_lab.speculative.trace import CycleRecord, DecodeTrace


def acceptance_per_position(
    traces: Iterable[DecodeTrace],
) -> tuple[list[float], list[int]]:
    """Survival per slot, pooled over the cycles of all traces.

    Args:
        traces: of runs with the same block size.

    Returns:
        Survival of slots 1..K-1, each over the cycles that drafted that slot; and how
        many cycles those were.
    """
    table = slot_counts(cycle for trace in traces for cycle in trace.cycles)
    rates = [row["survived"] / row["drafted"] for row in table]
    return rates, [row["drafted"] for row in table]


def pooled_tau(traces: Iterable[DecodeTrace]) -> float:
    """Mean acceptance length over the cycles of all traces, bonus token counted."""
    lengths = [c.acceptance_length for trace in traces for c in trace.cycles]
    return sum(lengths) / len(lengths) if lengths else float("nan")


def slot_counts(cycles: Iterable[CycleRecord]) -> list[dict[str, int]]:
    """Counts per slot, from which all three rates follow.

    Returns:
        For slots 1..K-1: `drafted` cycles with a draft there; `survived` drafts that
        became text; `judged` drafts whose slot no cut hides; `matched` of these that
        equal the target's choice; `reached` judged drafts behind accepted ones only;
        `passed` of these that were accepted.
    """
    table: list[dict[str, int]] = []
    names = ("drafted", "survived", "judged", "matched", "reached", "passed")
    for cycle in cycles:
        matches = slot_matches(cycle)
        cut = cut_at(cycle)
        for j, accepted in enumerate(cycle.accepted):
            if j == len(table):
                table.append(dict.fromkeys(names, 0))
            row = table[j]
            row["drafted"] += 1
            row["survived"] += accepted
            if j >= cut:
                continue
            match = matches[j]
            if match is not None:
                row["judged"] += 1
                row["matched"] += match
            if all(cycle.accepted[:j]):
                row["reached"] += 1
                row["passed"] += accepted
    return table


def slot_matches(cycle: CycleRecord) -> list[bool | None]:
    """Whether each draft equals the target's choice; None where it made none."""
    pairs = zip(cycle.draft_tokens, cycle.target_tokens, strict=False)
    return [None if choice < 0 else draft == choice for draft, choice in pairs]


def cut_at(cycle: CycleRecord) -> int:
    """Slots in front of the place where a stop rule cut the block; G if it did not.

    A cut shows in a cycle whose text is only accepted drafts: without one there would
    be a token of the target's own behind them.
    """
    kept = sum(cycle.accepted)
    is_cut = cycle.acceptance_length == kept and kept > 0
    return kept if is_cut else len(cycle.accepted)


def slot_frame(traces: Iterable[DecodeTrace]):
    """pandas DataFrame with one row per slot.

    Columns: slot, drafted, judged, reached (cycles behind each rate), marginal,
    conditional, survival.
    """
    import pandas as pd

    table = slot_counts(cycle for trace in traces for cycle in trace.cycles)
    rows = [
        {
            "slot": j + 1,
            "drafted": row["drafted"],
            "judged": row["judged"],
            "reached": row["reached"],
            "marginal": _ratio(row["matched"], row["judged"]),
            "conditional": _ratio(row["passed"], row["reached"]),
            "survival": _ratio(row["survived"], row["drafted"]),
        }
        for j, row in enumerate(table)
    ]
    return pd.DataFrame(rows)


def expected_length(rates: Sequence[float]) -> float:
    """1 + r1 + r1 r2 + ..., the acceptance length if slots failed independently.

    With conditional rates it is the measured tau of uncut, full blocks. With marginal
    rates it is an estimate whose distance from tau shows how dependent slots are.
    """
    total = product = 1.0
    for rate in rates:
        product *= rate
        total += product
    return total


def length_histogram(traces: Iterable[DecodeTrace]) -> dict[int, int]:
    """Cycles of each acceptance length, 1..K."""
    counts: dict[int, int] = {}
    for trace in traces:
        for cycle in trace.cycles:
            length = cycle.acceptance_length
            counts[length] = counts.get(length, 0) + 1
    return dict(sorted(counts.items()))


def acceptance_summary(traces: Sequence[DecodeTrace]) -> dict:
    """The one-number definitions, side by side.

    Returns:
        `tau` (pooled over cycles, bonus counted), `tau_without_bonus`,
        `tau_per_prompt` (mean over prompts of their means), `draft_acceptance_rate`
        (accepted over drafted tokens), `product_of_marginals`, `cycles`, `tokens`.
    """
    cycles = [cycle for trace in traces for cycle in trace.cycles]
    means = [
        sum(lengths) / len(lengths)
        for trace in traces
        for lengths in trace.acceptance_lengths
        if lengths
    ]
    counts = slot_counts(cycles)
    marginal = [_ratio(row["matched"], row["judged"]) for row in counts]
    tokens = sum(cycle.acceptance_length for cycle in cycles)
    accepted = sum(sum(cycle.accepted) for cycle in cycles)
    drafted = sum(len(cycle.draft_tokens) for cycle in cycles)
    return {
        "tau": _ratio(tokens, len(cycles)),
        "tau_without_bonus": _ratio(accepted, len(cycles)),
        "tau_per_prompt": _ratio(sum(means), len(means)),
        "draft_acceptance_rate": _ratio(accepted, drafted),
        "product_of_marginals": expected_length(marginal),
        "cycles": len(cycles),
        "tokens": tokens,
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")

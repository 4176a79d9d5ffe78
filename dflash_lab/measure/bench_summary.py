"""From records of a bench run to tables: with intervals, and prediction beside measure.

One row for each method and prompt set, and one for all sets together. Tau and speed
are ratios of sums over prompts, their intervals come from resampling prompts, and a
method is compared with plain decoding on the same prompts. Beside the measured speed-up
stands the one that the cost model gives from the mean costs of a cycle, with the
prefill that both share.

Leaves out: decoding (`bench.py`), pictures (`views/bench.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_lab.errors import DFlashLabError
from dflash_lab.measure.acceptance import acceptance_summary
from dflash_lab.measure.bench import trace_of
from dflash_lab.measure.intervals import (
    Interval,
    paired_ratio_interval,
    ratio_interval,
)

ALL = "all"


def summarize(records: Sequence[dict], verdicts: dict | None = None) -> list[dict]:
    """Rows of `summary.csv`.

    Args:
        records: of a run; every prompt must have every method.
        verdicts: of `bench.verdicts`; None if outputs were not compared.

    Returns:
        For each set and method: `prompts`, `tokens`, `tau` with bounds,
        `tokens_per_second`, `speedup` over `ar` with bounds, `predicted_speedup`,
        `draft_ms`, `verify_ms`, `other_ms`, `prefill_share`, `equal`, `ties`,
        `differ`.
    """
    records = complete(records)
    groups = list(dict.fromkeys(r["set"] for r in records))
    methods = list(dict.fromkeys(r["method"] for r in records))
    rows = []
    for group in [*groups, *([ALL] if len(groups) > 1 else [])]:
        mine = [r for r in records if group in (ALL, r["set"])]
        base = [r for r in mine if r["method"] == "ar"]
        for method in methods:
            own = [r for r in mine if r["method"] == method]
            rows.append(_row(group, method, own, base, verdicts))
    return rows


def complete(records: Sequence[dict]) -> list[dict]:
    """Records of prompts that every method has answered, in one order.

    Raises:
        DFlashLabError: no such prompt.
    """
    methods = {r["method"] for r in records}
    answered: dict[tuple, set] = {}
    for r in records:
        answered.setdefault((r["set"], r["id"]), set()).add(r["method"])
    whole = [r for r in records if answered[r["set"], r["id"]] == methods]
    if not whole:
        raise DFlashLabError("no prompt was answered by every method yet; go on first")
    order = {key: place for place, key in enumerate(answered)}
    return sorted(whole, key=lambda r: order[r["set"], r["id"]])


def _row(group: str, method: str, own: list, base: list, verdicts) -> dict:
    tokens = [len(r["ids"]) for r in own]
    seconds = [r["seconds"] for r in own]
    row = {
        "set": group,
        "method": method,
        "prompts": len(own),
        "tokens": sum(tokens),
        "tokens_per_second": sum(tokens) / sum(seconds),
    }
    traces = [trace for trace in map(trace_of, own) if trace is not None]
    if traces and any(trace.cycles for trace in traces):
        summary = acceptance_summary(traces)
        cycles = [len(trace.cycles) for trace in traces]
        added = [sum(c.acceptance_length for c in t.cycles) for t in traces]
        row |= _bounds("tau", ratio_interval(added, cycles))
        row["tau_per_prompt"] = summary["tau_per_prompt"]
        row["cycles"] = summary["cycles"]
        for part in ("draft", "verify", "other"):
            times = [getattr(c, f"{part}_ms") for t in traces for c in t.cycles]
            row[f"{part}_ms"] = sum(times) / len(times)
        row["prefill_share"] = sum(r["first_token"] for r in own) / sum(seconds)
    if base:
        plain_tokens = [len(r["ids"]) for r in base]
        plain_seconds = [r["seconds"] for r in base]
        found = paired_ratio_interval(tokens, seconds, plain_tokens, plain_seconds)
        row |= _bounds("speedup", found)
        row["predicted_speedup"] = predicted_speedup(own, base)
    if verdicts is not None:
        said = [verdicts.get((r["set"], r["id"], method)) for r in own]
        row["equal"] = said.count("equal")
        row["ties"] = said.count("tie")
        row["differ"] = said.count("differs")
    return row


def predicted_speedup(own: Sequence[dict], base: Sequence[dict]) -> float | None:
    """What the cost model gives: mean costs, tau, and the shared prefill.

    A method's time for n tokens is its time to the first one and (n - 1) / tau cycles
    at their mean cost; plain decoding's has cycles of one token. None without traces.
    """
    times = []
    for records in (own, base):
        traces = [trace_of(r) for r in records]
        cycles = [c for t in traces if t is not None for c in t.cycles]
        if None in traces or not cycles:
            return None
        cost = sum(c.draft_ms + c.verify_ms + c.other_ms for c in cycles) / len(cycles)
        tau = sum(c.acceptance_length for c in cycles) / len(cycles)
        tokens = sum(len(r["ids"]) for r in records)
        prefill = sum(r["first_token"] for r in records)
        rest = (tokens - len(records)) / tau * cost / 1e3
        times.append((prefill + rest) / tokens)
    return times[1] / times[0]


def compare(
    one: Sequence[dict], two: Sequence[dict], method: str
) -> dict[str, dict[str, Interval]]:
    """A method in two runs, on the prompts that both have.

    Returns:
        For each set: `tau` and `speed` of the second run over the first, paired by
        prompt. Tau is left out where a run has no trace.

    Raises:
        DFlashLabError: no prompt in common.
    """
    both = [
        {(r["set"], r["id"]): r for r in run if r["method"] == method}
        for run in (one, two)
    ]
    keys = [key for key in both[0] if key in both[1]]
    if not keys:
        raise DFlashLabError(f"the runs share no prompt answered by {method}")
    found: dict[str, dict[str, Interval]] = {}
    groups = list(dict.fromkeys(key[0] for key in keys))
    for group in [*groups, *([ALL] if len(groups) > 1 else [])]:
        mine = [key for key in keys if group in (ALL, key[0])]
        a, b = ([run[key] for key in mine] for run in both)
        found[group] = {"speed": paired_ratio_interval(*_speed(b), *_speed(a))}
        if all("cycles" in r for r in [*a, *b]):
            found[group]["tau"] = paired_ratio_interval(*_taus(b), *_taus(a))
    return found


def _bounds(name: str, interval: Interval) -> dict[str, float]:
    return {
        name: interval.value,
        f"{name}_low": interval.low,
        f"{name}_high": interval.high,
    }


def _speed(records: Sequence[dict]) -> tuple[list[int], list[float]]:
    return [len(r["ids"]) for r in records], [r["seconds"] for r in records]


def _taus(records: Sequence[dict]) -> tuple[list[int], list[int]]:
    added = [sum(c["acceptance_length"] for c in r["cycles"]) for r in records]
    return added, [len(r["cycles"]) for r in records]

"""Acceptance per position: how far into the block drafts hold.

Survival at slot j is the share of cycles whose draft at slot j became text. A draft
counts only if all before it did, so survival falls with j where all cycles draft
equally many tokens; its sum over the slots is tau - 1 if besides no block is cut.

Leaves out: other definitions of acceptance, and intervals.
"""

from __future__ import annotations

from collections.abc import Iterable

from dflash_lab.trace import DecodeTrace


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
    accepted: list[int] = []
    drafted: list[int] = []
    for trace in traces:
        for cycle in trace.cycles:
            for slot, flag in enumerate(cycle.accepted):
                if slot == len(drafted):
                    drafted.append(0)
                    accepted.append(0)
                drafted[slot] += 1
                accepted[slot] += flag
    rates = [a / d for a, d in zip(accepted, drafted, strict=True)]
    return rates, drafted


def pooled_tau(traces: Iterable[DecodeTrace]) -> float:
    """Mean acceptance length over the cycles of all traces, bonus token counted."""
    lengths = [c.acceptance_length for trace in traces for c in trace.cycles]
    return sum(lengths) / len(lengths) if lengths else float("nan")

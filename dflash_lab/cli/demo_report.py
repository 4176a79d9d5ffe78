"""The files of a demo: summary, trace, figures and one HTML page.

Leaves out: decoding (`demo_run.py`) and how figures and page look (`views/`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from dflash_lab.cli.demo_run import TurnResult
from dflash_lab.files import write_text_atomically
from dflash_lab.pairs.pair import Pair
from dflash_lab.speculative.trace import DecodeTrace


def write_outputs(
    pair: Pair,
    results: Sequence[TurnResult],
    summary: dict,
    traces: Sequence[DecodeTrace],
    folder: Path,
) -> Path:
    """Write `summary.json`, `trace.jsonl`, the figures and `report.html`.

    Returns:
        Path of the report.
    """
    from dflash_lab.views.report import render_report
    from dflash_lab.views.tokens import token_states

    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(summary, indent=2) + "\n"
    write_text_atomically(folder / "summary.json", text)
    merged = merge_traces(traces, [result.id for result in results])
    merged.to_jsonl(folder / "trace.jsonl")
    report = {
        "title": f"DFlash decoding, pair {pair.name}",
        "pair": pair.name,
        "dtype": summary["dtype"],
        "machine": summary["environment"],
        "summary": summary,
        "decode": pair.need_tokenizer().decode,
        "figures": _write_figures(results, summary, folder),
        "prompts": [
            {
                "id": r.id,
                "kind": r.kind,
                "text": r.text,
                "pairs": token_states(r.dflash.cycles, 0, r.dflash.ids),
                "cycles": r.dflash.cycles.cycles,
                "tau": r.dflash.cycles.tau,
                "equal": r.equal,
                "lossless": r.lossless,
            }
            for r in results
        ],
    }
    path = folder / "report.html"
    write_text_atomically(path, render_report(report))
    return path


def _write_figures(
    results: Sequence[TurnResult], summary: dict, folder: Path
) -> list[tuple[bytes, str, str, list[str]]]:
    """Write the figures; each with its alt text, its caption and what to notice."""
    from dflash_lab.views.curves import (
        acceptance_figure,
        figure_png,
        length_histogram,
        time_figure,
    )

    rates = summary["acceptance_per_position"]
    if not rates:  # answers of one token have no cycle
        return []
    lengths = [n for r in results for n in r.dflash.cycles.acceptance_lengths[0]]
    shown = []
    for name, (figure, alt) in {
        "acceptance": acceptance_figure(rates, summary["drafted_per_position"]),
        "lengths": length_histogram(lengths, summary["block_size"]),
        "time": time_figure(_time_rows(summary)),
    }.items():
        picture = figure_png(figure)
        (folder / f"{name}.png").write_bytes(picture)
        shown.append((picture, alt, *_caption(name, summary)))
    return shown


def _time_rows(summary: dict) -> list[dict]:
    tau = summary["tau"]
    split = {n: summary[n] / tau for n in ("draft_ms", "verify_ms", "other_ms")}
    plain = {"draft_ms": 0.0, "verify_ms": summary["plain_ms"], "other_ms": 0.0}
    return [{"name": "plain", **plain}, {"name": "dflash", **split}]


def _caption(name: str, summary: dict) -> tuple[str, list[str]]:
    rates = summary["acceptance_per_position"]
    tau, size = summary["tau"], summary["block_size"]
    cycle = summary["draft_ms"] + summary["verify_ms"] + summary["other_ms"]
    if name == "acceptance":
        return "Acceptance per position", [
            f"The first draft of a block becomes text in {rates[0]:.0%} of the cycles, "
            f"the last in {rates[-1]:.0%}.",
            "A draft counts only if all drafts before it did, so acceptance falls "
            "along the block.",
        ]
    if name == "lengths":
        return "Acceptance length", [
            f"On average a cycle adds tau = {tau:.2f} tokens, of at most {size}.",
            "Length 1 means that no draft was right: the target's own token alone.",
        ]
    return "Where the time goes, per emitted token", [
        f"A DFlash cycle takes {cycle:.1f} ms and adds {tau:.2f} tokens, so "
        f"{cycle / tau:.1f} ms a token against {summary['plain_ms']:.1f} ms plainly.",
        f"Drafting is {summary['draft_ms'] / cycle:.0%} of a cycle, everything besides "
        f"the two models {summary['other_ms'] / cycle:.1%}. Prefill is not shown here, "
        "but it is part of the tokens per second above.",
    ]


def merge_traces(traces: Sequence[DecodeTrace], ids: Sequence[str]) -> DecodeTrace:
    """One trace of many single-prompt generations, prompts renumbered."""
    header = dict(traces[0].header)
    header["num_prompts"] = len(traces)
    header["prompt_ids"] = list(ids)
    header["prompt_lengths"] = [t.header["prompt_lengths"][0] for t in traces]
    header["seeds"] = [t.header["seeds"][0] for t in traces]
    merged = DecodeTrace(header)
    for number, trace in enumerate(traces):
        for cycle in trace.cycles:
            cycle.prompt = number
            merged.cycles.append(cycle)
    return merged

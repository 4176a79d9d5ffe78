"""The figures of a demo: speeds, acceptance, and in which sense it is lossless.

Leaves out: decoding (`demo_run.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_lab.cli.demo_run import TurnResult
from dflash_lab.files import environment
from dflash_lab.measure.acceptance import acceptance_per_position, pooled_tau
from dflash_lab.measure.methods import Answer
from dflash_lab.pairs.pair import Pair


def summarize(pair: Pair, results: Sequence[TurnResult]) -> dict:
    """The figures of `summary.json`; times are wall clock, prefill included."""
    traces = [result.dflash.cycles for result in results]
    cycles = [cycle for trace in traces for cycle in trace.cycles]
    plain_cycles = [c for r in results for c in r.plain.cycles.cycles]

    def rate(answers: Sequence[Answer]) -> float:
        return sum(len(a.ids) for a in answers) / sum(a.seconds for a in answers)

    def mean_ms(name: str) -> float:
        return sum(getattr(c, name) for c in cycles) / max(1, len(cycles))

    dflash = rate([r.dflash for r in results])
    plain = rate([r.plain for r in results])
    generate = rate([r.generate for r in results])
    per_position, drafted = acceptance_per_position(traces)
    ties = [tie for result in results for tie in result.ties]
    plain_ms = sum(c.draft_ms + c.verify_ms + c.other_ms for c in plain_cycles)
    return {
        "pair": pair.name,
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "prompts": len(results),
        "equal": all(r.equal for r in results),
        "ties": sum(tie.certified for tie in ties),
        "largest_tie_gap": max((t.gap for t in ties if t.certified), default=0.0),
        "lossless": all(r.lossless for r in results),
        "equal_to_generate": sum(r.generate.ids == r.plain.ids for r in results),
        "level": _level(results),
        "tau": pooled_tau(traces) if cycles else None,
        "speedup": dflash / plain,
        "speedup_vs_generate": dflash / generate,
        "tokens_per_second": dflash,
        "plain_tokens_per_second": plain,
        "generate_tokens_per_second": generate,
        "acceptance_per_position": per_position,
        "drafted_per_position": drafted,
        "draft_ms": mean_ms("draft_ms"),
        "verify_ms": mean_ms("verify_ms"),
        "other_ms": mean_ms("other_ms"),
        "plain_ms": plain_ms / max(1, len(plain_cycles)),
        "block_size": traces[0].header["block_size"],
        "num_cycles": len(cycles),
        "num_tokens": sum(len(r.dflash.ids) for r in results),
        "environment": environment(),
    }


def _level(results: Sequence[TurnResult]) -> str:
    strict = all(result.twin is not None for result in results)
    if strict and all(result.equal for result in results):
        return "L1: bit for bit plain decoding in the same kernel shape"
    if all(result.equal for result in results):
        return "L2: equal to ordinary plain decoding, token for token"
    if all(result.lossless for result in results):
        ties = sum(len(result.ties) for result in results)
        return f"L2: equal to ordinary plain decoding up to {ties} certified ties"
    wrong = [result.id for result in results if not result.lossless]
    return f"NOT lossless: rounding does not explain the text of {', '.join(wrong)}"

"""The demo: decode real prompts plainly and with a drafter, and compare.

Every prompt is decoded by plain decoding (our loop), by DFlash and by
`model.generate`, one after the other in one process, so that a busy machine slows all
three alike. Outputs are compared token by token; where they differ, each difference is
certified as a tie or counts as a failure. With `strict` every pass has one shape, and
the output must be bit for bit that of plain decoding in the same shape.

Leaves out: files (`demo_report.py`), intervals and other baselines; this shows, it does
not benchmark.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

from dflash_lab.files import environment
from dflash_lab.measure.acceptance import acceptance_per_position, pooled_tau
from dflash_lab.pairs.pair import Pair
from dflash_lab.pairs.prompts import Prompt
from dflash_lab.speculative.certify import Tie, explain
from dflash_lab.speculative.generate import GenerationResult, speculative_generate
from dflash_lab.speculative.proposer import DFlash, Plain
from dflash_lab.speculative.trace import DecodeTrace

METHODS = ("plain", "dflash", "generate")


@dataclass
class TurnResult:
    """One answer, decoded by every method.

    Attributes:
        id, kind, text: of the prompt; `text` is the last user message.
        prompt_ids: what the target was given.
        plain, dflash: results of our loop.
        generate_ids, generate_seconds: of `model.generate`.
        ties: the ties behind a difference from plain decoding.
        twin: plain decoding in the kernel shape of DFlash; None unless strict.
        complete: the DFlash answer ends where an answer may end: with its first stop
            token, or at the length limit.
    """

    id: str
    kind: str
    text: str
    prompt_ids: list[int]
    plain: GenerationResult
    dflash: GenerationResult
    generate_ids: list[int]
    generate_seconds: float
    ties: list[Tie] = field(default_factory=list)
    twin: GenerationResult | None = None
    complete: bool = True

    @property
    def equal(self) -> bool:
        """Token for token the same as plain decoding by our loop (or its twin)."""
        plain = self.plain if self.twin is None else self.twin
        return self.dflash.output_ids == plain.output_ids

    @property
    def lossless(self) -> bool:
        """Equal, or complete and different only at certified ties."""
        tied = bool(self.ties) and all(tie.certified for tie in self.ties)
        return self.equal or (self.complete and tied)


def run_demo(
    pair: Pair,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    block_size: int | None = None,
    strict: bool = False,
    quiet: bool = False,
) -> list[TurnResult]:
    """Decode every prompt by every method; greedy.

    Args:
        pair: target, drafter and tokenizer.
        prompts: conversations; each user message is one answer, and the answer joins
            the conversation.
        max_new_tokens: per answer.
        block_size: of the drafter; the trained one if None.
        strict: decode DFlash in passes of one shape, and its plain twin too.
        quiet: no progress bar.
    """
    proposer = DFlash(pair.drafter, block_size)
    _warm_up(pair, proposer, prompts[0])
    results: list[TurnResult] = []
    turns = sum(len(prompt.turns) for prompt in prompts)
    with tqdm(total=turns, desc="demo", unit="answer", disable=quiet) as progress:
        for prompt in prompts:
            conversation: list[str] = []
            for number, message in enumerate(prompt.turns):
                conversation.append(message)
                ids = pair.encode(conversation)
                name = (
                    prompt.id if len(prompt.turns) == 1 else f"{prompt.id}.{number + 1}"
                )
                # The order changes from answer to answer, so that no method always
                # meets a warm cache or a throttled processor.
                shift = len(results) % len(METHODS)
                order = METHODS[shift:] + METHODS[:shift]
                made = {
                    m: _decode(pair, proposer, m, ids, max_new_tokens, strict)
                    for m in order
                }
                result = TurnResult(
                    name,
                    prompt.kind,
                    message,
                    ids,
                    made["plain"],
                    made["dflash"],
                    *made["generate"],
                )
                if strict:
                    result.twin = _decode(
                        pair, proposer, "twin", ids, max_new_tokens, True
                    )
                elif not result.equal:
                    output = result.dflash.output_ids[0]
                    plain = result.plain.output_ids[0]
                    result.ties = explain(pair.target, ids, output, plain)
                    result.complete = _is_complete(pair, ids, output, max_new_tokens)
                results.append(result)
                conversation.append(pair.decode(result.plain.output_ids[0]))
                progress.update()
    return results


def _is_complete(pair: Pair, ids: list[int], output: list[int], limit: int) -> bool:
    stops = [i for i, token in enumerate(output) if token in pair.stop_token_ids]
    if pair.target.max_positions is not None:
        limit = min(limit, pair.target.max_positions - len(ids))
    end = stops[0] + 1 if stops else limit
    return len(output) == end


def _warm_up(pair: Pair, proposer: DFlash, prompt: Prompt) -> None:
    ids = pair.encode(prompt.turns[0])
    for method in METHODS:
        _decode(pair, proposer, method, ids, 8, False)


def _decode(
    pair: Pair, proposer: DFlash, method: str, ids: list[int], limit: int, strict: bool
):
    if method == "generate":
        return _generate(pair, ids, limit)
    proposers = {
        "plain": Plain(),
        "dflash": proposer,
        "twin": Plain(proposer.kernel_rows),
    }
    result = speculative_generate(
        pair.target,
        proposers[method],
        ids,
        max_new_tokens=limit,
        stop_token_ids=pair.stop_token_ids,
        strict=strict and method != "plain",
    )
    if result.stop_reasons[0] == "interrupted":
        raise KeyboardInterrupt  # half an answer must not enter the figures
    return result


def _generate(pair: Pair, ids: list[int], limit: int) -> tuple[list[int], float]:
    inputs = torch.tensor([ids], device=pair.target.device)
    stop = list(pair.stop_token_ids) or None
    started = time.perf_counter()
    with torch.inference_mode():
        output = pair.model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=limit,
            do_sample=False,
            repetition_penalty=1.0,  # our loop applies none either
            eos_token_id=stop,
            pad_token_id=stop[0] if stop else 0,
        )
    if pair.target.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return output[0, len(ids) :].tolist(), seconds


def trace_details(
    pair: Pair, results: Sequence[TurnResult], block_size: int | None, limit: int
) -> list[DecodeTrace]:
    """Decode once more with probabilities in the trace; not part of any timing."""
    proposer = DFlash(pair.drafter, block_size)
    return [
        speculative_generate(
            pair.target,
            proposer,
            result.prompt_ids,
            max_new_tokens=limit,
            stop_token_ids=pair.stop_token_ids,
            details=True,
        ).trace
        for result in results
    ]


def summarize(pair: Pair, results: Sequence[TurnResult]) -> dict:
    """The figures of `summary.json`; times are wall clock, prefill included."""
    traces = [result.dflash.trace for result in results]
    cycles = [cycle for trace in traces for cycle in trace.cycles]
    plain_cycles = [c for r in results for c in r.plain.trace.cycles]

    def rate(tokens: int, seconds: float) -> float:
        return tokens / seconds

    def tokens(method: str) -> int:
        return sum(len(getattr(r, method).output_ids[0]) for r in results)

    def mean_ms(name: str) -> float:
        return sum(getattr(c, name) for c in cycles) / max(1, len(cycles))

    dflash = rate(tokens("dflash"), sum(r.dflash.seconds for r in results))
    plain = rate(tokens("plain"), sum(r.plain.seconds for r in results))
    generated = sum(len(r.generate_ids) for r in results)
    generate = rate(generated, sum(r.generate_seconds for r in results))
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
        "equal_to_generate": sum(
            r.generate_ids == r.plain.output_ids[0] for r in results
        ),
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
        "num_tokens": tokens("dflash"),
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

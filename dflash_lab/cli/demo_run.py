"""The demo's decoding: every prompt plainly, with a drafter, and by `generate`.

The three take turns in one process, so that a busy machine slows all alike. Outputs are
compared token by token; where they differ, each difference is certified as a tie or
counts as a failure. With `strict` every pass has one shape, and the output must be bit
for bit that of plain decoding in the same shape.

Leaves out: files (`demo_report.py`), intervals and other baselines; this shows, it does
not benchmark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tqdm import tqdm

from dflash_lab.measure.methods import (
    Answer,
    Method,
    MethodSettings,
    generate_method,
    loop_method,
)
from dflash_lab.pairs.pair import Pair
from dflash_lab.pairs.prompts import Prompt
from dflash_lab.speculative.certify import Tie, explain
from dflash_lab.speculative.generate import speculative_generate
from dflash_lab.speculative.proposer import DFlash, Plain
from dflash_lab.speculative.trace import DecodeTrace


@dataclass
class TurnResult:
    """One answer, decoded by every method.

    Attributes:
        id, kind, text: of the prompt; `text` is the last user message.
        prompt_ids: what the target was given.
        plain, dflash: answers of our loop.
        generate: that of `model.generate`.
        ties: the ties behind a difference from plain decoding.
        twin: plain decoding in the kernel shape of DFlash; None unless strict.
        complete: the DFlash answer ends where an answer may end: with its first stop
            token, or at the length limit.
    """

    id: str
    kind: str
    text: str
    prompt_ids: list[int]
    plain: Answer
    dflash: Answer
    generate: Answer
    ties: list[Tie] = field(default_factory=list)
    twin: Answer | None = None
    complete: bool = True

    @property
    def equal(self) -> bool:
        """Token for token the same as plain decoding by our loop (or its twin)."""
        return self.dflash.ids == (self.twin or self.plain).ids

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
) -> list[TurnResult]:
    """Decode every prompt by every method; greedy.

    Args:
        pair: target, drafter and tokenizer.
        prompts: conversations; each user message is one answer, and the answer joins
            the conversation.
        max_new_tokens: per answer.
        block_size: of the drafter; the trained one if None.
        strict: decode DFlash in passes of one shape, and its plain twin too.
    """
    methods = _methods(pair, max_new_tokens, block_size, strict)
    for method in _methods(pair, 8, block_size, False).values():  # warm up
        _decode(method, pair.encode(prompts[0].turns[0]))
    results: list[TurnResult] = []
    turns = sum(len(prompt.turns) for prompt in prompts)
    with tqdm(total=turns, desc="demo", unit="answer") as progress:
        for prompt in prompts:
            conversation: list[str] = []
            for number, message in enumerate(prompt.turns, 1):
                conversation.append(message)
                ids = pair.encode(conversation)
                # The order changes from answer to answer, so that no method always
                # meets a warm cache or a throttled processor.
                shift = len(results) % len(methods)
                order = [*methods][shift:] + [*methods][:shift]
                made = {name: _decode(methods[name], ids) for name in order}
                alone = len(prompt.turns) == 1
                name = prompt.id if alone else f"{prompt.id}.{number}"
                result = TurnResult(
                    name,
                    prompt.kind,
                    message,
                    ids,
                    made["plain"],
                    made["dflash"],
                    made["generate"],
                    twin=made.get("twin"),
                )
                if not strict and not result.equal:
                    _explain(pair, result, max_new_tokens)
                results.append(result)
                conversation.append(pair.decode(result.plain.ids))
                progress.update()
    return results


def _methods(
    pair: Pair, limit: int, block_size: int | None, strict: bool
) -> dict[str, Method]:
    settings = MethodSettings(max_new_tokens=limit)
    proposer = DFlash(pair.drafter, block_size)
    methods = {
        "plain": loop_method(pair, Plain(), settings),
        "dflash": loop_method(pair, proposer, settings, strict=strict),
        "generate": generate_method(pair, settings),
    }
    if strict:
        twin = Plain(proposer.kernel_rows)
        methods["twin"] = loop_method(pair, twin, settings, strict=True)
    return methods


def _decode(method: Method, ids: list[int]) -> Answer:
    answer = method(ids)
    if answer.interrupted:
        raise KeyboardInterrupt  # half an answer must not enter the figures
    return answer


def _explain(pair: Pair, result: TurnResult, limit: int) -> None:
    """Find out why an answer differs, and whether it is all there."""
    ids, output = result.prompt_ids, result.dflash.ids
    result.ties = explain(pair.target, ids, output, result.plain.ids)
    stops = [i for i, token in enumerate(output) if token in pair.stop_token_ids]
    if pair.target.max_positions is not None:
        limit = min(limit, pair.target.max_positions - len(ids))
    result.complete = len(output) == (stops[0] + 1 if stops else limit)


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

"""Speculative generation: one door for every proposer, rule and loop.

With the proposer `Plain` the same code is plain autoregressive decoding, so a baseline
and a drafted run differ in the drafts alone.

Leaves out: the two loops, which give the same: `static_loop.py` with fixed shapes,
which most generations use, and `host_loop.py`, which serves everything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from dflash_lab.errors import DFlashLabError
from dflash_lab.files import environment
from dflash_lab.speculative.generation import (
    GenerationResult,
    Request,
    as_prompts,
    new_row,
)
from dflash_lab.speculative.host_loop import HostLoop
from dflash_lab.speculative.proposer import Proposer
from dflash_lab.speculative.sampling import Sampling
from dflash_lab.speculative.static_loop import can_run
from dflash_lab.speculative.static_run import StaticRun
from dflash_lab.speculative.stopping import StopRules
from dflash_lab.speculative.trace import DecodeTrace
from dflash_lab.target.fused import as_target
from dflash_lab.target.target import Target


def speculative_generate(
    target,
    proposer: Proposer,
    input_ids,
    *,
    max_new_tokens: int = 128,
    sampling: Sampling | None = None,
    seeds: Sequence[int] | None = None,
    stop_token_ids: Sequence[int] = (),
    stop_strings: Sequence[str] = (),
    tokenizer=None,
    on_tokens: Callable[[int, list[int]], None] | None = None,
    details: bool = False,
    loop: str = "auto",
    strict: bool = False,
    compile: bool = False,
    logits_processor: Sequence[Callable] = (),
    stopping_criteria: Sequence[Callable] = (),
    output_scores: bool = False,
) -> GenerationResult:
    """Generate text that is the target's own, with drafts by `proposer`.

    Args:
        target: a `Target`, a `Pair`, or a `transformers` causal LM.
        proposer: who drafts; `Plain()` for plain decoding.
        input_ids: one prompt (list of ids or 1-D tensor) or several (list of lists, or
            a tensor (B, P)). Each row gets exactly what it would get alone.
        max_new_tokens: most tokens per prompt.
        sampling: greedy if None.
        seeds: one per prompt; `sampling.seed` for all if None.
        stop_token_ids, stop_strings, tokenizer: see `StopRules`.
        on_tokens: called as `on_tokens(prompt_index, new_ids)` whenever tokens become
            text; the calls together give exactly `output_ids`.
        details: record probabilities, entropies and margins in the trace. Costs a
            softmax over the vocabulary per slot, outside the recorded times.
        loop: `static` (`static_loop.py`), `host` (`host_loop.py`), or `auto`: static
            where proposer and rules allow it. Both give the same.
        strict: every pass in one shape, so that the output is bit for bit that of
            `Plain(kernel_rows=K)`, in any dtype; slower at long capacities.
        compile: on a CPU, fuse the cycle with torch.compile: half a minute once, then
            up to twice as fast for small targets; a GPU replays graphs anyway.
        logits_processor: `transformers` processors, applied slot by slot in the light
            of the drafts before it; they must not keep a state between calls.
        stopping_criteria: `transformers` criteria, asked after every token.
        output_scores: keep the logits of every token in the result.

    Returns:
        Ids, reasons, trace and times. After Ctrl-C, what was generated so far, with
        the stop reason `interrupted`.

    Raises:
        DFlashLabError: empty prompt, ids outside the vocabulary, a prompt beyond the
            position limit, `max_new_tokens` < 1, NaN logits, a static loop asked
            for what only the host loop does.
    """
    target = _as_target(target)
    sampling = sampling or Sampling()
    prompts = as_prompts(input_ids, target, max_new_tokens)
    seeds = _seeds(seeds, sampling, len(prompts))
    request = Request(
        target,
        proposer,
        [new_row(i, p, max_new_tokens, target) for i, p in enumerate(prompts)],
        sampling,
        seeds,
        StopRules(stop_token_ids, stop_strings, tokenizer, stopping_criteria),
        DecodeTrace(_header(target, proposer, prompts, sampling, seeds)),
        on_tokens,
        details,
        logits_processor,
        output_scores,
    )
    static = _choose_loop(loop, strict or compile, can_run(request))
    request.trace.header |= {"loop": "static" if static else "host", "strict": strict}
    with torch.inference_mode(), target.tap(proposer.target_layer_ids) as tap:
        run = (
            StaticRun(request, tap, strict, compile)
            if static
            else HostLoop(request, tap)
        )
        started = time.perf_counter()
        first_token = run.run()
        ended = time.perf_counter()
    return GenerationResult.of(request, ended - started, first_token - started)


def _seeds(asked: Sequence[int] | None, sampling: Sampling, count: int) -> list[int]:
    seeds = [sampling.seed] * count if asked is None else list(asked)
    if len(seeds) != count:
        raise DFlashLabError(f"{len(seeds)} seeds for {count} prompts")
    for seed in seeds:
        replace(sampling, seed=seed)  # refuses a seed out of range
    return seeds


def _choose_loop(asked: str, strict: bool, possible: bool) -> bool:
    if asked not in ("auto", "host", "static"):
        raise DFlashLabError(f"loop {asked!r} is unknown; choose auto, host or static")
    if (asked == "static" or strict) and (not possible or asked == "host"):
        raise DFlashLabError(
            "the static loop, strict and compile take DFlash or Plain, greedy decoding "
            "or the rule 'match', stop tokens and a length limit; for stop strings, "
            "processors, criteria, scores, details, other proposers and rules use "
            "loop='host' without strict or compile"
        )
    return possible and asked != "host"


def _as_target(target) -> Target:
    if isinstance(target, Target):
        return target
    inner = getattr(target, "target", None)  # a Pair
    return inner if isinstance(inner, Target) else as_target(target)


def _header(target, proposer, prompts, sampling: Sampling, seeds) -> dict:
    return {
        "proposer": proposer.name,
        "block_size": proposer.block_size,
        "target_layer_ids": list(proposer.target_layer_ids),
        "num_prompts": len(prompts),
        "prompt_lengths": [len(prompt) for prompt in prompts],
        "sampling": {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "rule": sampling.rule,
        },
        "seeds": list(seeds),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "environment": environment(),
    }

"""The speculative loop: propose, verify, accept, commit; one loop for every proposer.

State of a row is its text, whose last token (the anchor) is known but not yet in any
cache. A cycle drafts behind the anchor, verifies anchor and drafts in one target pass,
keeps the accepted prefix and one token of the target's own, and hands the tapped
features of what was kept to the proposer. Rejected drafts need no undoing, because
caches are written by position. With the proposer `Plain` the same code is plain
autoregressive decoding.

Leaves out: graph capture and static shapes; this is the eager reference loop.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dflash_lab.acceptance import Verdict, accept_matching, accept_speculatively
from dflash_lab.errors import DFlashLabError
from dflash_lab.fused import as_target
from dflash_lab.generation import GenerationResult, Row, as_prompts, new_row
from dflash_lab.proposers import DraftSession, Proposal, Proposer
from dflash_lab.sampling import (
    STREAM_COIN,
    STREAM_TARGET,
    Sampling,
    check_finite,
    gumbel_noise,
    pick_tokens,
    uniform_noise,
    warped_log_probs,
)
from dflash_lab.stopping import StopRules
from dflash_lab.target import Target
from dflash_lab.trace import CycleRecord, DecodeTrace, environment


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

    Returns:
        Ids, reasons, trace and times. After Ctrl-C, what was generated so far, with
        the stop reason `interrupted`.

    Raises:
        DFlashLabError: empty prompt, ids outside the vocabulary, a prompt beyond the
            position limit, `max_new_tokens` < 1, NaN logits.
    """
    target = _as_target(target)
    sampling = sampling or Sampling()
    prompts = as_prompts(input_ids, target, max_new_tokens)
    seeds = [sampling.seed] * len(prompts) if seeds is None else list(seeds)
    if len(seeds) != len(prompts):
        raise DFlashLabError(f"{len(seeds)} seeds for {len(prompts)} prompts")
    for seed in seeds:
        replace(sampling, seed=seed)  # refuses a seed out of range
    rules = StopRules(stop_token_ids, stop_strings, tokenizer)
    rows = [new_row(i, p, max_new_tokens, target) for i, p in enumerate(prompts)]
    trace = DecodeTrace(_header(target, proposer, prompts, sampling, seeds))
    with torch.inference_mode(), target.tap(proposer.target_layer_ids) as tap:
        loop = _Loop(target, proposer, rows, sampling, seeds, rules, tap, trace)
        loop.on_tokens, loop.details = on_tokens, details
        started = time.perf_counter()
        first_token = loop.run()
        seconds = time.perf_counter() - started
    return GenerationResult(
        output_ids=[row.output for row in rows],
        stop_reasons=[row.stop_reason for row in rows],
        trace=trace,
        seconds=seconds,
        time_to_first_token=first_token - started,
    )


class _Loop:
    """One generation; `rows` are all prompts, `active` those still decoding."""

    def __init__(self, target, proposer, rows, sampling, seeds, rules, tap, trace):
        self.target: Target = target
        self.block_size: int = proposer.block_size
        self.rows: list[Row] = rows
        self.active: list[Row] = list(rows)
        self.sampling: Sampling = sampling
        self.seeds = torch.tensor(seeds)
        self.rules: StopRules = rules
        self.tap = tap
        self.trace: DecodeTrace = trace
        self.on_tokens = None
        self.details = False
        # A block may look K-1 positions past the last token that becomes text.
        capacity = max(len(row.prompt) + row.budget for row in rows) + self.block_size
        self.cache = target.new_cache(len(rows), capacity)
        self.session: DraftSession = proposer.start(target, len(rows), capacity)

    def run(self) -> float:
        """Decode until no row is active; returns the time of the first token."""
        first_token = time.perf_counter()
        try:
            for place, row in enumerate(self.rows):
                self._prefill(place, row)
                if place == 0:
                    first_token = time.perf_counter()
            self._drop_finished()
            while self.active:
                self._cycle()
                self._drop_finished()
        except KeyboardInterrupt:
            for row in self.rows:
                row.stop_reason = row.stop_reason or "interrupted"
        return first_token

    def _prefill(self, place: int, row: Row) -> None:
        """One pass over the prompt alone: what a row gets never depends on others."""
        length = len(row.prompt)
        positions = torch.arange(length)[None]
        which = torch.tensor([place])
        logits = self.target.forward(
            torch.tensor([row.prompt]), positions, self.cache, which, logits_to_keep=1
        )
        token = pick_tokens(
            logits, torch.tensor([[length]]), self.sampling, self.seeds[which]
        )
        self.session.observe(self.tap.take(), positions, which)
        self.cache.lengths[place] = length
        self._commit(row, [int(token)])

    def _cycle(self) -> None:
        clock = [self._now()]
        rows = self.active
        most = min(self.block_size, max(row.remaining for row in rows)) - 1
        texts = [row.text for row in rows]
        proposal = self.session.propose(
            texts, most, self.sampling, self.seeds, self.details
        )
        # A row near its limit takes fewer drafts, so that nothing overshoots.
        limit = torch.tensor([row.remaining - 1 for row in rows])
        num_drafts = torch.minimum(proposal.num_drafts, limit)
        clock.append(self._now())

        anchors = torch.tensor([[text[-1]] for text in texts]).to(
            proposal.tokens.device
        )
        block = torch.cat([anchors, proposal.tokens], dim=1)  # (B, T)
        start = torch.tensor([len(text) - 1 for text in texts])
        positions = start[:, None] + torch.arange(block.shape[1])
        logits = self.target.forward(block, positions, self.cache)
        verdict = self._judge(logits, proposal, num_drafts, positions + 1)
        # Reading the verdict waits for the device, so this is when verifying ends.
        accepted = verdict.accepted.tolist()
        next_token = verdict.next_token.tolist()
        clock.append(self._now())

        drafts = proposal.tokens.tolist()
        kept = [
            self._commit(row, drafts[b][: accepted[b]] + [next_token[b]])
            for b, row in enumerate(rows)
        ]
        self.cache.lengths = start + torch.tensor(accepted) + 1
        self._observe(start, accepted)
        clock.append(self._now())
        self._record(start, proposal, num_drafts, verdict, kept, clock, logits)

    def _judge(
        self, logits: Tensor, proposal: Proposal, num_drafts: Tensor, positions: Tensor
    ) -> Verdict:
        drafts = proposal.tokens.to(logits.device)
        if self.sampling.rule == "match" or self.sampling.greedy:
            picks = pick_tokens(logits, positions, self.sampling, self.seeds)
            return accept_matching(drafts, picks, num_drafts)
        check_finite(logits)
        seeds = self.seeds.to(logits.device)
        positions = positions.to(logits.device)
        log_probs = warped_log_probs(logits, self.sampling)
        coins = uniform_noise(seeds, positions[:, :-1], 1, STREAM_COIN)[..., 0]
        # The replacement's noise is keyed by the block, not by its place in it: only
        # one replacement is drawn per cycle.
        noise = gumbel_noise(seeds, positions[:, :1], logits.shape[-1], STREAM_TARGET)
        return accept_speculatively(
            drafts, proposal.log_probs, log_probs, coins, noise[:, 0], num_drafts
        )

    def _observe(self, start: Tensor, accepted: list[int]) -> None:
        """Hand over the features of anchor and accepted drafts, each token once."""
        hidden = self.tap.take()
        count = torch.tensor(accepted) + 1
        if len(accepted) == 1:
            positions = (start[0] + torch.arange(int(count[0])))[None]
            rows, hidden = torch.tensor([0]), _prefix(hidden, int(count[0]))
        else:
            # Rows keep different numbers of tokens: flatten to one token per row.
            rows = torch.arange(len(accepted)).repeat_interleave(count)
            offset = torch.cat([torch.arange(n) for n in count.tolist()])
            positions = (start[rows] + offset)[:, None]
            if hidden is not None:
                hidden = hidden[rows, offset][:, None]
        self.session.observe(hidden, positions, rows)

    def _commit(self, row: Row, tokens: list[int]) -> int:
        """Append tokens until a stop rule fires; returns how many became text."""
        before = len(row.output)
        for token in tokens:
            row.output.append(token)
            reason = self.rules.reason(row.prompt, row.output, row.budget)
            if reason:
                limited = reason == "length" and row.capped
                row.stop_reason = "position_limit" if limited else reason
                break
        added = row.output[before:]
        if self.on_tokens:
            self.on_tokens(row.index, added)
        return len(added)

    def _drop_finished(self) -> None:
        going = [b for b, row in enumerate(self.active) if row.stop_reason is None]
        if len(going) < len(self.active):
            self.active = [self.active[b] for b in going]
            if going:
                rows = torch.tensor(going)
                self.seeds = self.seeds[rows]
                self.cache.keep_rows(rows)
                self.session.keep_rows(rows)

    def _record(
        self, start, proposal, num_drafts, verdict, kept, clock, logits
    ) -> None:
        drafts, picks = proposal.tokens.tolist(), verdict.target_tokens.tolist()
        share = 1e3 / len(self.active)
        draft_s, verify_s, other_s = (
            after - before for before, after in itertools.pairwise(clock)
        )
        details = _slot_details(logits, proposal) if self.details else {}
        for b, row in enumerate(self.active):
            count = int(num_drafts[b])
            added = min(int(verdict.accepted[b]), kept[b])
            self.trace.cycles.append(
                CycleRecord(
                    prompt=row.index,
                    cycle=row.cycle,
                    start=int(start[b]),
                    acceptance_length=kept[b],
                    draft_tokens=drafts[b][:count],
                    target_tokens=picks[b][: count + 1],
                    accepted=[j < added for j in range(count)],
                    draft_ms=draft_s * share,
                    verify_ms=verify_s * share,
                    other_ms=other_s * share,
                    **{name: values[b][:count] for name, values in details.items()},
                )
            )
            row.cycle += 1

    def _now(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()


def _prefix(hidden: Tensor | None, count: int) -> Tensor | None:
    return None if hidden is None else hidden[:, :count]


def _slot_details(logits: Tensor, proposal: Proposal) -> dict[str, list[list[float]]]:
    """Probability of each draft, entropy and margin of the target at its slot."""
    drafts = proposal.tokens.to(logits.device)
    log_probs = logits[:, :-1].float().log_softmax(dim=-1)
    top = logits[:, :-1].float().topk(2, dim=-1).values
    details = {
        "target_probs": log_probs.gather(-1, drafts[..., None])[..., 0].exp(),
        "target_entropy": -(log_probs.exp() * log_probs.clamp(min=-1e4)).sum(dim=-1),
        "target_margin": top[..., 0] - top[..., 1],
    }
    if proposal.confidence is not None:
        details["draft_probs"] = proposal.confidence
    return {name: values.tolist() for name, values in details.items()}


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

"""The host loop: propose, verify, accept, commit, with every verdict read at once.

State of a row is its text, whose last token (the anchor) is known but not yet in any
cache. A cycle drafts behind the anchor, verifies anchor and drafts in one target pass,
keeps the accepted prefix and one token of the target's own, and hands the tapped
features of what was kept to the proposer. Rejected drafts need no undoing, because
caches are written by position. It serves every proposer and every rule, and is the
reference for the static loop.

Leaves out: what a user calls (`generate.py`); fixed shapes (`static_loop.py`).
"""

from __future__ import annotations

import itertools
import time

import torch
from torch import Tensor

from dflash_lab.conditioning.masks import block_position_ids
from dflash_lab.conditioning.taps import FeatureTap
from dflash_lab.speculative.acceptance import (
    Verdict,
    accept_matching,
    accept_speculatively,
)
from dflash_lab.speculative.generation import (
    Request,
    Row,
    drafts_that_fit,
    longest_text,
)
from dflash_lab.speculative.proposer import DraftSession, Proposal
from dflash_lab.speculative.sampling import (
    STREAM_COIN,
    STREAM_TARGET,
    check_finite,
    gumbel_noise,
    sample_tokens,
    uniform_noise,
    warped_log_probs,
)
from dflash_lab.speculative.trace import CycleRecord


class HostLoop:
    """One generation; `rows` are all prompts, `active` those still decoding.

    Args:
        request: any.
        tap: listens to the target.
    """

    def __init__(self, request: Request, tap: FeatureTap):
        self.request, self.tap = request, tap
        self.target, self.sampling = request.target, request.sampling
        self.block_size = request.proposer.block_size
        self.rows, self.active = request.rows, list(request.rows)
        self.seeds = torch.tensor(request.seeds)
        # A block may look K-1 positions past the last token that becomes text.
        capacity = longest_text(self.rows) + self.block_size
        self.cache = self.target.new_cache(len(self.rows), capacity)
        self.session: DraftSession = request.proposer.start(
            self.target, len(self.rows), capacity
        )

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
        scores = self._process(logits, [row.prompt], [[]], [0])
        token = sample_tokens(
            scores, torch.tensor([[length]]), self.sampling, self.seeds[which]
        )
        self.session.observe(self.tap.take(), positions, which)
        self.cache.lengths[place] = length
        self._commit(row, [int(token)])
        self._keep_scores(row, 1, logits[0], scores[0])

    def _cycle(self) -> None:
        clock = [self._now()]
        rows = self.active
        remaining = torch.tensor([row.remaining for row in rows])
        limit = drafts_that_fit(remaining, self.block_size)
        texts = [row.text for row in rows]
        proposal = self.session.propose(
            texts, int(limit.max()), self.sampling, self.seeds, self.request.details
        )
        num_drafts = torch.minimum(proposal.num_drafts, limit)
        clock.append(self._now())

        anchors = torch.tensor([[text[-1]] for text in texts]).to(
            proposal.tokens.device
        )
        block = torch.cat([anchors, proposal.tokens], dim=1)  # (B, T)
        start = torch.tensor([len(text) - 1 for text in texts])
        positions = block_position_ids(start[:, None], block.shape[1])
        logits = self.target.forward(block, positions, self.cache)
        drafts = proposal.tokens.tolist()
        scores = self._process(logits, texts, drafts, num_drafts.tolist())
        verdict = self._judge(scores, proposal, num_drafts, positions + 1)
        # Reading the verdict waits for the device, so this is when verifying ends.
        accepted = verdict.accepted.tolist()
        next_token = verdict.next_token.tolist()
        clock.append(self._now())

        kept = [
            self._commit(row, drafts[b][: accepted[b]] + [next_token[b]])
            for b, row in enumerate(rows)
        ]
        for b, row in enumerate(rows):
            self._keep_scores(row, kept[b], logits[b], scores[b])
        self.cache.lengths = start + torch.tensor(accepted) + 1
        clock.append(self._now())
        self._observe(start, accepted)
        clock.append(self._now())
        self._record(start, proposal, num_drafts, verdict, kept, clock, logits)

    def _process(self, logits: Tensor, texts, drafts, counts) -> Tensor:
        """Logits after the processors, each row in the light of what is before it.

        A processor sees the text and the drafts before a slot, as it would in plain
        decoding if these drafts were right; if they are not, the slot does not count.
        """
        if not self.request.processors:
            return logits
        wide = logits if logits.dtype == torch.float64 else logits.float()
        scores = wide.clone()
        for b, text in enumerate(texts):
            for j in range(counts[b] + 1):
                ids = torch.tensor([[*text, *drafts[b][:j]]], device=scores.device)
                for processor in self.request.processors:
                    scores[b, j] = processor(ids, scores[b, j : j + 1])[0]
        return scores

    def _keep_scores(self, row: Row, count: int, logits: Tensor, scores: Tensor):
        if self.request.keep_scores:
            row.logits += [x.clone() for x in logits[:count]]
            row.scores += [x.clone() for x in scores[:count]]

    def _judge(
        self, logits: Tensor, proposal: Proposal, num_drafts: Tensor, positions: Tensor
    ) -> Verdict:
        drafts = proposal.tokens.to(logits.device)
        if self.sampling.rule == "match" or self.sampling.greedy:
            choices = sample_tokens(logits, positions, self.sampling, self.seeds)
            return accept_matching(drafts, choices, num_drafts)
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
            row.stop_reason = row.reason(self.request.rules)
            if row.stop_reason:
                break
        added = row.output[before:]
        if self.request.on_tokens:
            self.request.on_tokens(row.index, added)
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
        drafts, choices = proposal.tokens.tolist(), verdict.target_tokens.tolist()
        share = 1e3 / len(self.active)
        draft_s, verify_s, other_s, observe_s = (
            after - before for before, after in itertools.pairwise(clock)
        )
        details = _slot_details(logits, proposal) if self.request.details else {}
        for b, row in enumerate(self.active):
            count = int(num_drafts[b])
            added = min(int(verdict.accepted[b]), kept[b])
            self.request.trace.cycles.append(
                CycleRecord(
                    prompt=row.index,
                    cycle=row.cycle,
                    start=int(start[b]),
                    acceptance_length=kept[b],
                    draft_tokens=drafts[b][:count],
                    target_tokens=choices[b][: count + 1],
                    accepted=[j < added for j in range(count)],
                    draft_ms=(draft_s + observe_s) * share,
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

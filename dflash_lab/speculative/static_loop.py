"""The speculative loop with everything on the device and every shape fixed.

All state is tensors that are allocated once: the text, where its last token stands, who
is done, and both caches. A cycle drafts, verifies, accepts, stops and keeps books
without asking any tensor for its value, so the host may run ahead of a GPU, or replay
the cycle as a captured graph (`graphs.py`). Rows that are done are frozen. The host
learns from a report per cycle what became text.

It gives what the host loop gives (`host_loop.py`), for the proposers and rules that
can be stated this way: DFlash or nobody, matching acceptance, stop tokens and length.

Leaves out: stop strings, other proposers, probabilities in the trace; the host loop
serves these.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from dflash_lab.conditioning.masks import block_position_ids
from dflash_lab.speculative.acceptance import accept_matching
from dflash_lab.speculative.generation import (
    Request,
    Row,
    drafts_that_fit,
    longest_text,
)
from dflash_lab.speculative.proposer import DFlash, Plain
from dflash_lab.speculative.sampling import (
    Sampling,
    most_likely,
    sample_tokens,
    sample_tokens_unchecked,
)
from dflash_lab.target.fused import FusedDrafter, FusedTarget
from dflash_lab.target.target import Target

# Columns of a report before the drafts and the choices.
START, ACCEPTED, KEPT, BROKEN, DRAFTED = range(5)
COLUMNS = 5
BROKEN_TARGET, BROKEN_DRAFTER = 1, 2
NO_TOKEN = -1  # fills the list of stop tokens, so that it is never empty


class StaticLoop:
    """State and cycle of one generation.

    Args:
        target: the target.
        proposer: `DFlash` or `Plain`.
        rows: the prompts and their budgets.
        sampling: greedy, or sampled under the rule `match`.
        seeds: one per row.
        stop_token_ids: the first of these ends a row.
        granularity: passes read a multiple of so many positions; None for the whole
            capacity, always.
        capacity_step: the capacity is a multiple of this.

    Attributes:
        text: (B, M) int64 by position; what lies behind a row's anchor is junk.
        anchor: (B,) int64, position of each row's last token.
        last: (B,) int64, position of the last token that a row may have.
        done: (B,) bool.
        report: (B, 5 + 2K - 1) int64: anchor before the cycle, accepted drafts, tokens
            kept, whose logits held NaN, real drafts, then K-1 drafts and K choices.
    """

    def __init__(
        self,
        target: Target,
        proposer: DFlash | Plain,
        rows: Sequence[Row],
        sampling: Sampling,
        seeds: Sequence[int],
        stop_token_ids: Collection[int],
        tap,
        granularity: int | None = 64,
        capacity_step: int = 64,
    ):
        device = target.device
        self.target, self.sampling, self.tap = target, sampling, tap
        self.granularity = granularity
        self.block_size = proposer.kernel_rows
        batch = len(rows)
        # A frozen or a last cycle still writes a whole block behind its anchor.
        needed = longest_text(rows) + self.block_size + 1
        self.capacity = _rounded(needed, capacity_step)
        self.cache = target.new_cache(batch, self.capacity)
        self.session = None
        if isinstance(proposer, DFlash):
            self.session = proposer.start(target, batch, self.capacity)
        self.text = torch.zeros(batch, self.capacity, dtype=torch.long, device=device)
        self.anchor = torch.zeros(batch, dtype=torch.long, device=device)
        self.last = torch.zeros(batch, dtype=torch.long, device=device)
        self.done = torch.zeros(batch, dtype=torch.bool, device=device)
        self.seeds = torch.tensor(seeds, device=device)
        ids = list(stop_token_ids) or [NO_TOKEN]
        self.stop_ids = torch.tensor(ids, device=device)
        self.offset = torch.arange(self.block_size, device=device)
        mask_id = self.session.drafter.config.mask_token_id if self.session else 0
        self.masks = torch.full((batch, self.block_size - 1), mask_id, device=device)
        columns = COLUMNS + 2 * self.block_size - 1
        self.report = torch.zeros(batch, columns, dtype=torch.long, device=device)

    def state(self) -> dict[str, Tensor]:
        """The tensors that a cycle changes, caches left out."""
        return {
            name: getattr(self, name) for name in ("text", "anchor", "done", "report")
        }

    # --- before the cycles --------------------------------------------------------

    def prefill(self, place: int, row: Row, chunk: int | None = None) -> None:
        """Run a prompt through the target, alone, and choose the first token.

        Args:
            place: row of the batch.
            row: its prompt.
            chunk: rows of each pass, the last one filled up with junk; the whole
                prompt at once if None.
        """
        device, length = self.target.device, len(row.prompt)
        which = torch.tensor([place])
        size = chunk or length
        logits = torch.empty(0)
        for start in range(0, length, size):
            ids = row.prompt[start : start + size]
            kept = torch.tensor([len(ids) - 1])
            ids = ids + [row.prompt[-1]] * (size - len(ids))
            positions = start + torch.arange(size)[None]
            logits = self._prefill_pass(ids, positions, which, kept, chunk is not None)
        position = torch.tensor([[length]], device=device)
        token = sample_tokens(logits, position, self.sampling, self.seeds[which])
        self.text[place, :length] = torch.tensor(row.prompt, device=device)
        self.text[place, length] = token[0, 0]
        self.anchor[place] = length
        self.last[place] = length + row.budget - 1

    def _prefill_pass(self, ids, positions, which, kept, static: bool) -> Tensor:
        caches = [self.cache] + ([self.session.cache] if self.session else [])
        for cache in caches if static else []:
            cache.static_span = self.capacity
            positions = positions.to(self.target.device)
            which = which.to(self.target.device)
        logits = self.target.forward(
            torch.tensor([ids]), positions, self.cache, which, kept
        )
        if self.session is not None:
            hidden = self.tap.take()
            self.session.passes.append_context(
                hidden, positions, self.session.cache, which
            )
        return logits

    def set_span(self, furthest: int) -> int:
        """Let passes read enough positions for blocks that start up to `furthest`."""
        span = self.capacity
        if self.granularity is not None:
            span = min(span, _rounded(furthest + self.block_size, self.granularity))
        self.cache.static_span = span
        if self.session is not None:
            self.session.cache.static_span = span
        return span

    # --- one cycle ----------------------------------------------------------------

    def cycle(self) -> None:
        """Draft, verify, accept, commit, for all rows."""
        drafts, broken = self.draft()
        logits = self.verify(drafts)
        self.observe()
        self.settle(drafts, broken, logits)

    def draft(self) -> tuple[Tensor, Tensor]:
        """(B, K-1) drafts behind the anchors, and (B,) whether NaN chose them.

        Without a drafter the drafts are junk.
        """
        if self.session is None:
            return self.masks, torch.zeros_like(self.done)
        anchors = self.text.gather(1, self.anchor[:, None])
        block = torch.cat([anchors, self.masks], dim=1)
        hidden = self.session.passes.draft(
            self.session.embed(block), self.anchor, self.session.cache
        )
        logits = self.session.logits(hidden[:, 1:])
        return most_likely(logits), _any_nan(logits)

    def positions(self) -> Tensor:
        """(B, K) positions of the blocks' rows."""
        return block_position_ids(self.anchor[:, None], self.block_size)

    def verify(self, drafts: Tensor) -> Tensor:
        """(B, K, V) logits of the target for anchor and drafts."""
        anchors = self.text.gather(1, self.anchor[:, None])
        block = torch.cat([anchors, drafts], dim=1)
        return self.target.forward(block, self.positions(), self.cache)

    def observe(self) -> None:
        """Project the features of the verified rows into the drafter's cache.

        Those of rejected rows lie at positions that no block sees before they are
        written again.
        """
        if self.session is not None:
            self.session.passes.append_context(
                self.tap.take(), self.positions(), self.session.cache
            )

    def settle(self, drafts: Tensor, broken: Tensor, logits: Tensor) -> None:
        """Accept, stop, append to the text, and report."""
        places = self.positions() + 1  # of the choices
        choices = sample_tokens_unchecked(logits, places, self.sampling, self.seeds)
        limit = drafts_that_fit(self.last - self.anchor, self.block_size)
        if self.session is None:
            limit = torch.zeros_like(limit)
        accepted = accept_matching(drafts, choices, limit).accepted
        emitted = self.offset <= accepted[:, None]
        stops = emitted & (choices[..., None] == self.stop_ids).any(dim=-1)
        # Tokens up to and with the first stop token; K + 1 if there is none.
        size = self.block_size
        until_stop = (size + 1 - stops * (size - self.offset)).amin(dim=1)
        kept = torch.minimum(accepted + 1, until_stop)
        # Not torch.where: its scalars are tensors of the host, which no graph takes.
        kept = kept.masked_fill(self.done, 0)
        # Every choice is written; what is not kept is junk and written again.
        old = self.text.gather(1, places)
        self.text.scatter_(1, places, torch.where(self.done[:, None], old, choices))
        start = self.anchor.clone()
        self.anchor.add_(kept)
        self.done.logical_or_(stops.any(dim=1) | (self.anchor >= self.last))
        broken = broken * BROKEN_DRAFTER
        broken = broken.masked_fill(_any_nan(logits), BROKEN_TARGET)
        columns = (start, accepted, kept, broken, limit)
        head = torch.stack([column.long() for column in columns], dim=1)
        self.report.copy_(torch.cat([head, drafts, choices], dim=1))


def can_run(request: Request) -> bool:
    """Whether a generation can be stated as a static loop."""
    target, proposer, sampling = request.target, request.proposer, request.sampling
    # On a GPU the cycle is captured, which needs passes that wait for nothing.
    fused = isinstance(target, FusedTarget) and isinstance(
        getattr(proposer, "passes", None), (FusedDrafter, type(None))
    )
    return (
        type(proposer) in (DFlash, Plain)
        and (fused or target.device.type == "cpu")
        and (sampling.greedy or sampling.rule == "match")
        and request.is_plain_text
    )


def _any_nan(logits: Tensor) -> Tensor:
    return logits.amax(dim=-1).isnan().any(dim=-1)


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

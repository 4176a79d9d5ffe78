"""From reports of a static loop to text and trace.

Leaves out: the loop itself (`static_loop.py`) and how cycles run (`graphs.py`).
"""

from __future__ import annotations

import time

from dflash_lab.conditioning.taps import FeatureTap
from dflash_lab.speculative.generation import Request, Row
from dflash_lab.speculative.graphs import CycleReport, check_compiler, make_cycles
from dflash_lab.speculative.proposer import DFlash, Plain
from dflash_lab.speculative.sampling import nan_error
from dflash_lab.speculative.static_loop import (
    ACCEPTED,
    BROKEN,
    BROKEN_TARGET,
    COLUMNS,
    DRAFTED,
    KEPT,
    START,
    StaticLoop,
)
from dflash_lab.speculative.trace import CycleRecord

# Passes read a multiple of so many positions: each size is a graph of its own on a
# GPU, while on a CPU a finer step wastes less attention.
GRANULARITY = {"cuda": 512}
FINE = 64
# Capacities are compiled for; so that few are met, they are multiples of this.
COMPILED = 256


class StaticRun:
    """One generation by a static loop.

    Args:
        request: one that `can_run`.
        tap: listens to the target.
        strict: passes of one shape throughout, over the whole capacity, the prompt in
            chunks of K rows, so that a token does not depend on who drafted.
        compile: on a CPU, fuse the cycle with torch.compile.
    """

    def __init__(self, request: Request, tap: FeatureTap, strict: bool, compile: bool):
        assert isinstance(request.proposer, (DFlash, Plain))
        if compile:
            check_compiler()
        step = GRANULARITY.get(request.target.device.type, FINE)
        self.loop = StaticLoop(
            request.target,
            request.proposer,
            request.rows,
            request.sampling,
            request.seeds,
            request.rules.stop_token_ids,
            tap,
            None if strict or compile else step,
            COMPILED if compile else FINE,
        )
        self.compile = compile
        self.rows, self.rules, self.trace = request.rows, request.rules, request.trace
        self.on_tokens = request.on_tokens
        self.chunk = self.loop.block_size if strict else None

    def run(self) -> float:
        """Decode until every row is done; returns the time of the first token."""
        first_token = time.perf_counter()
        try:
            for place, row in enumerate(self.rows):
                self.loop.prefill(place, row, self.chunk)
                self._commit(row, [int(self.loop.text[place, len(row.prompt)])])
                self.loop.done[place] = row.stop_reason is not None
                if place == 0:
                    first_token = time.perf_counter()
            self._run_cycles()
        except KeyboardInterrupt:
            for row in self.rows:
                row.stop_reason = row.stop_reason or "interrupted"
        return first_token

    def _run_cycles(self) -> None:
        cycles = make_cycles(self.loop, self.compile)
        while any(row.stop_reason is None for row in self.rows):
            furthest = max(len(row.text) for row in self.rows) - 1
            # Cycles that are not yet read may have added a block each.
            furthest += cycles.lag * self.loop.block_size
            report = cycles.step(self.loop.set_span(furthest))
            if report is not None:
                self._take(report)

    def _take(self, report: CycleReport) -> None:
        size = self.loop.block_size
        going = [row.stop_reason is None for row in self.rows]
        share = 1e3 / max(1, sum(going))
        for row, values in zip(self.rows, report.rows, strict=True):
            if row.stop_reason is not None:
                continue
            if values[BROKEN]:
                whose = "target" if values[BROKEN] == BROKEN_TARGET else "drafter"
                raise nan_error(whose, self.loop.target.dtype)
            drafts = values[COLUMNS : COLUMNS + size - 1]
            choices = values[COLUMNS + size - 1 :]
            count, kept = values[DRAFTED], values[KEPT]
            added = min(values[ACCEPTED], kept)
            self._commit(row, choices[:kept])
            self.trace.cycles.append(
                CycleRecord(
                    prompt=row.index,
                    cycle=row.cycle,
                    start=values[START],
                    acceptance_length=kept,
                    draft_tokens=drafts[:count],
                    target_tokens=choices[: count + 1],
                    accepted=[j < added for j in range(count)],
                    draft_ms=report.draft * share,
                    verify_ms=report.verify * share,
                    other_ms=report.other * share,
                )
            )
            row.cycle += 1

    def _commit(self, row: Row, tokens: list[int]) -> None:
        """Append tokens that the loop kept; it ended at the first stop token."""
        row.output += tokens
        row.stop_reason = row.reason(self.rules)
        if self.on_tokens:
            self.on_tokens(row.index, tokens)

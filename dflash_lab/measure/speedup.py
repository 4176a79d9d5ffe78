"""When drafting pays: what a cycle costs, and the speed-up that follows.

A cycle that takes T_draft + T_verify(K) + T_other and adds tau tokens costs
L = (T_draft + T_verify(K) + T_other) / tau a token; plain decoding costs T(1). The
speed-up is T(1) / L, and drafting pays from the tau at which it is 1 (paper section 3).
Costs are measured apart from any text, in turns, so that a busy machine slows all
alike; tau comes from decoding. Prefill is in neither.

Leaves out: acceptance (`acceptance.py`) and batches of many prompts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.errors import DFlashLabError
from dflash_lab.speculative.generation import new_row
from dflash_lab.speculative.graphs import EagerCycles
from dflash_lab.speculative.proposer import DFlash, Plain
from dflash_lab.speculative.sampling import Sampling
from dflash_lab.speculative.static_loop import StaticLoop
from dflash_lab.speculative.trace import DecodeTrace
from dflash_lab.target.target import Target


@dataclass(frozen=True)
class Costs:
    """Milliseconds of one cycle, and of one token of plain decoding.

    Attributes:
        block_size: K.
        plain_ms: a token of plain decoding, everything included.
        draft_ms: the drafter, its share of the head, and new context rows.
        verify_ms: the target's pass over K rows.
        other_ms: the rest of a cycle.
    """

    block_size: int
    plain_ms: float
    draft_ms: float
    verify_ms: float
    other_ms: float

    @property
    def cycle_ms(self) -> float:
        """A whole cycle."""
        return self.draft_ms + self.verify_ms + self.other_ms

    @property
    def break_even_tau(self) -> float:
        """Acceptance length at which a cycle is worth its time."""
        return self.cycle_ms / self.plain_ms

    def speedup(self, tau: float) -> float:
        """Speed-up over plain decoding at an acceptance length, prefill left out."""
        return tau / self.break_even_tau


def costs_from_traces(
    traces: Sequence[DecodeTrace], plain_traces: Sequence[DecodeTrace]
) -> Costs:
    """Mean costs as they were in two runs.

    Args:
        traces: of drafted runs with one block size.
        plain_traces: of plain runs.

    Raises:
        DFlashLabError: no cycle on either side.
    """
    cycles = [c for trace in traces for c in trace.cycles]
    plain = [c for trace in plain_traces for c in trace.cycles]
    if not cycles or not plain:
        raise DFlashLabError("both runs need at least one cycle; decode more tokens")

    def mean(rows, *names):
        return sum(getattr(c, n) for c in rows for n in names) / len(rows)

    return Costs(
        traces[0].header["block_size"],
        mean(plain, "draft_ms", "verify_ms", "other_ms"),
        mean(cycles, "draft_ms"),
        mean(cycles, "verify_ms"),
        mean(cycles, "other_ms"),
    )


def measure_costs(
    target: Target,
    drafter: DFlashDraftModel,
    block_sizes: Iterable[int],
    context: int = 128,
    rounds: int = 15,
) -> dict[int, Costs]:
    """Median costs of cycles behind a context, one block size after the other in turns.

    Args:
        target: the target.
        drafter: its drafter.
        block_sizes: K of each, at most the trained one.
        context: tokens before the block; attention grows with it.
        rounds: turns.

    Raises:
        DFlashLabError: a block size or a context out of range.
    """
    if rounds < 1 or context < 1:
        raise DFlashLabError(f"rounds {rounds} and context {context} must be 1 or more")
    proposers: list[DFlash | Plain] = [Plain()]
    proposers += [DFlash(drafter, size) for size in block_sizes]
    ids = [(7 * i) % target.vocab_size for i in range(context)]
    times: list[list[tuple[float, ...]]] = [[] for _ in proposers]
    with torch.inference_mode():
        loops, taps = [], []
        for proposer in proposers:
            taps.append(target.tap(proposer.target_layer_ids))
            row = new_row(0, ids, 2 * max(p.kernel_rows for p in proposers), target)
            loop = StaticLoop(
                target, proposer, [row], Sampling(), [0], (), taps[-1], 64
            )
            loop.prefill(0, row)
            loops.append(loop)
            # Only the tap that listens is asked, so the others are off meanwhile.
            taps[-1].close()
        for turn in range(rounds + 2):
            for i, loop in enumerate(loops):
                with target.tap(proposers[i].target_layer_ids) as tap:
                    loop.tap = tap
                    loop.anchor.fill_(context)
                    loop.done.fill_(False)
                    report = EagerCycles(loop).step(loop.set_span(context))
                if turn >= 2:  # the first two warm up
                    times[i].append((report.draft, report.verify, report.other))
    medians = [
        [1e3 * statistics.median(p) for p in zip(*t, strict=True)] for t in times
    ]
    plain = sum(medians[0])
    return {
        proposer.block_size: Costs(proposer.block_size, plain, *parts)
        for proposer, parts in zip(proposers[1:], medians[1:], strict=True)
    }


def best_block_size(
    costs: dict[int, Costs], taus: dict[int, float]
) -> tuple[int, float]:
    """The block size with the largest speed-up, and that speed-up.

    Args:
        costs: by block size.
        taus: acceptance length by block size.

    Raises:
        DFlashLabError: no block size is in both.
    """
    both = sorted(costs.keys() & taus.keys())
    if not both:
        raise DFlashLabError("no block size has both costs and an acceptance length")
    best = max(both, key=lambda size: costs[size].speedup(taus[size]))
    return best, costs[best].speedup(taus[best])


def tau_of_smaller_block(survival: Sequence[float], block_size: int) -> float:
    """Acceptance length of a smaller block, if its drafts were those of the larger one.

    Args:
        survival: of slots 1..K-1 of the larger block.
        block_size: of the smaller one.
    """
    return 1 + sum(survival[: block_size - 1])

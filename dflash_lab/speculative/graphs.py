"""Running cycles of a `StaticLoop`: as they are, compiled, or as captured CUDA graphs.

A graph replays a whole cycle with one call, and the host reads what became of it one
cycle late, from pinned memory, so it never keeps the device waiting. Noise is a hash of
positions (`sampling.py`), so replays need no generator whose state moves on.

Leaves out: what the reports mean (`static_run.py`).
"""

from __future__ import annotations

import functools
import itertools
import shutil
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from dflash_lab.errors import DFlashLabError
from dflash_lab.speculative.static_loop import StaticLoop

RECOMPILE_LIMIT = 200
WARM_UP = 2  # eager cycles before a capture: libraries allocate on first use


@dataclass(frozen=True)
class CycleReport:
    """What one cycle did.

    Attributes:
        rows: the report, as lists.
        draft, verify, other: seconds; all in `other` where parts cannot be told apart.
    """

    rows: list[list[int]]
    draft: float
    verify: float
    other: float


class EagerCycles:
    """Cycles that run when they are asked for."""

    lag = 0  # reports that are still on their way

    def __init__(self, loop: StaticLoop):
        self.loop = loop

    def step(self, span: int) -> CycleReport:
        """Run a cycle and say what it did."""
        loop, clock = self.loop, [self._now()]
        drafts, broken = loop.draft()
        clock.append(self._now())
        logits = loop.verify(drafts)
        clock.append(self._now())
        loop.observe()
        clock.append(self._now())
        loop.settle(drafts, broken, logits)
        rows = loop.report.tolist()
        clock.append(self._now())
        draft, verify, observe, settle = (
            after - before for before, after in itertools.pairwise(clock)
        )
        return CycleReport(rows, draft + observe, verify, settle)

    def _now(self) -> float:
        if self.loop.target.device.type == "cuda":
            torch.cuda.synchronize(self.loop.target.device)
        return time.perf_counter()


class CompiledCycles(EagerCycles):
    """Cycles fused by torch.compile, which takes half a minute once per process.

    Loops of the same target, drafter and capacity share what was compiled.
    """

    def step(self, span: int) -> CycleReport:
        """Run a cycle and say what it did."""
        started = self._now()
        # Each capacity, batch size and pair is compiled once; torch's own limit of
        # eight is meant for what never settles.
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
            _compiled_cycle()(self.loop)
        rows = self.loop.report.tolist()
        return CycleReport(rows, 0.0, 0.0, self._now() - started)


@functools.cache
def _compiled_cycle():
    return torch.compile(StaticLoop.cycle, fullgraph=True, dynamic=False)


class GraphedCycles:
    """Cycles replayed as CUDA graphs, one graph for each span that passes read."""

    lag = 1

    def __init__(self, loop: StaticLoop):
        self.loop = loop
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None  # of the graphs' memory, which they share
        shape, kind = loop.report.shape, loop.report.dtype
        pinned = [torch.empty(shape, dtype=kind, pin_memory=True) for _ in range(2)]
        self._slots = [(slot, torch.cuda.Event()) for slot in pinned]
        self._waiting: deque[int] = deque()
        self._count = 0
        self._last_read = time.perf_counter()

    def step(self, span: int) -> CycleReport | None:
        """Start a cycle and say what the one before it did; None for the first."""
        if span not in self.graphs:
            self.graphs[span] = self._capture()
            self._last_read = time.perf_counter()
        self.graphs[span].replay()
        slot = self._count % 2
        report, event = self._slots[slot]
        report.copy_(self.loop.report, non_blocking=True)
        event.record()
        self._count += 1
        self._waiting.append(slot)
        return self._read() if len(self._waiting) > self.lag else None

    def _read(self) -> CycleReport:
        report, event = self._slots[self._waiting.popleft()]
        event.synchronize()
        now = time.perf_counter()
        seconds, self._last_read = now - self._last_read, now
        return CycleReport(report.tolist(), 0.0, 0.0, seconds)

    def _capture(self) -> torch.cuda.CUDAGraph:
        loop = self.loop
        before = {name: tensor.clone() for name, tensor in loop.state().items()}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                loop.cycle()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            loop.cycle()
        self._pool = self._pool or graph.pool()
        # The cycles of the warm-up are taken back; what they left in the caches lies
        # at positions that are written again.
        for name, tensor in before.items():
            getattr(loop, name).copy_(tensor)
        return graph


def make_cycles(loop: StaticLoop, compile: bool = False) -> EagerCycles | GraphedCycles:
    """The fastest way to run a loop on its device.

    Args:
        loop: filled with prompts.
        compile: on a CPU, fuse the cycle first.
    """
    if loop.target.device.type == "cuda":
        return GraphedCycles(loop)
    return CompiledCycles(loop) if compile else EagerCycles(loop)


def check_compiler() -> None:
    """Refuse to compile where there is no C++ compiler.

    Raises:
        DFlashLabError: naming the way out.
    """
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise DFlashLabError(
            "compiling the cycle needs a C++ compiler on a CPU; install g++, or leave "
            "compile out"
        )

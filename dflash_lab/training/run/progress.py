"""How far a run has come, and the drafters it leaves on the way.

Leaves out: checkpoints from which a run goes on (`checkpoints.py`).
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

# The first drafter that is kept; each later one has seen at least twice as many blocks.
FIRST_KEPT = 4096


@dataclass
class Progress:
    """How far a run has come; saved with each checkpoint.

    Attributes:
        step: optimiser steps done.
        blocks: blocks seen, over all processes.
        seconds: wall clock of the loop, measurements of tau on the way included.
        cpu_seconds: processor time of the same, over all processes.
        tau: the last measured ones, by prompt set.
    """

    step: int = 0
    blocks: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    tau: dict[str, float] | None = None


class Stopwatch:
    """Adds the time since it was made to a run's progress.

    Args:
        progress: of the run, with the time before.
        processes: that take part; their processor time is taken to be alike.
    """

    def __init__(self, progress: Progress, processes: int):
        self.progress, self.processes = progress, processes
        self._before = progress.seconds, progress.cpu_seconds
        self._started = time.monotonic(), time.process_time()

    def read(self) -> None:
        """Bring the progress up to now."""
        seconds = time.monotonic() - self._started[0]
        cpu_seconds = (time.process_time() - self._started[1]) * self.processes
        self.progress.seconds = self._before[0] + seconds
        self.progress.cpu_seconds = self._before[1] + cpu_seconds


def passed_doubling(before: int, after: int) -> bool:
    """Whether a step from `before` to `after` blocks passes FIRST_KEPT * 2**n."""
    mark = FIRST_KEPT
    while mark <= before:
        mark *= 2
    return after >= mark


def kept_drafters(out: str | Path) -> dict[int, Path]:
    """Blocks seen and folder of each drafter that a run kept, fewest blocks first."""
    folders = (Path(out) / "kept").glob("blocks-*")
    found = {f: re.fullmatch(r"blocks-(\d+)", f.name) for f in folders}
    pairs = sorted((int(m.group(1)), f) for f, m in found.items() if m)
    return dict(pairs)

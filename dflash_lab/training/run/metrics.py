"""What a run reports: metric lines, a progress line, and tau predicted from accuracy.

Leaves out: measuring tau by decoding (`evaluate.py`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from dflash_lab.files import write_text_atomically


class StepSums(NamedTuple):
    """One step, over all processes.

    Attributes:
        loss: weighted mean of the losses, scalar.
        right: (K-1,), right argmax drafts of each slot.
        total: (K-1,), labels of each slot.
        blocks: how many blocks, scalar.
    """

    loss: Tensor
    right: Tensor
    total: Tensor
    blocks: Tensor


def predicted_tau(accuracy: Sequence[float]) -> float:
    """1 + the sum over slots of the product of accuracies up to them.

    This is tau if the slots were right independently of each other. They are not (easy
    places are easy for all slots), so the measured tau differs.

    Args:
        accuracy: of slots 1..K-1, marginal, 0..1.
    """
    total, product = 1.0, 1.0
    for rate in accuracy:
        product *= rate
        total += product
    return total


class MetricLog:
    """JSON Lines of metrics, one object per line, each with its step.

    Args:
        path: the file.
        resumed_step: lines of later steps, written by a run that was stopped behind
            its last checkpoint, are dropped; all lines if 0.
    """

    def __init__(self, path: Path, resumed_step: int = 0):
        self.path = Path(path)
        kept = [line for line in read_metrics(path) if line["step"] <= resumed_step]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        write_text_atomically(self.path, text)

    def write(self, line: dict) -> None:
        """Append a line; it is on the disk when the call returns."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read_metrics(path: Path) -> list[dict]:
    """Lines of a metrics file; a half-written last line is left out."""
    path = Path(path)
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def progress_line(line: dict) -> str:
    """The part of a metric line that stands behind the progress bar."""
    accuracy = line["accuracy"]
    slots = "/".join(f"{rate:.2f}" for rate in accuracy[:4])
    parts = [
        f"loss {line['loss']:.3f}",
        f"acc {slots}" + ("/.." if len(accuracy) > 4 else ""),
        f"predicted tau {line['predicted_tau']:.2f}",
    ]
    if line.get("measured_tau") is not None:
        parts.append(f"measured {line['measured_tau']:.2f}")
    parts.append(f"{line['blocks_per_second']:.0f} blocks/s")
    if line.get("seconds_left") is not None and math.isfinite(line["seconds_left"]):
        parts.append(f"{line['seconds_left'] / 60:.1f} min left")
    return ", ".join(parts)

"""What a run leaves on the disk: checkpoints to go on from, and drafters to keep.

A checkpoint is a whole folder, renamed into place; the one before it is deleted
afterwards, so a kill at any moment leaves one.

Leaves out: metric lines (`metrics.py`), and the finished drafter's card (`card.py`).
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.training.run.progress import Progress

if TYPE_CHECKING:
    from accelerate import Accelerator

# The first drafter that is kept; each later one has seen at least twice as many blocks.
FIRST_KEPT = 4096


@dataclass
class Checkpoints:
    """Saves a run, in all of its processes together.

    Args:
        out: the run's folder.
        accelerator: holds the model and the optimiser.
        export: gives the drafter in its published form, in the first process.
        minutes: between two checkpoints.
    """

    out: Path
    accelerator: Accelerator
    export: Callable[[], DFlashDraftModel | None]
    minutes: float
    _saved: float = field(default_factory=time.monotonic, init=False)

    @property
    def due(self) -> bool:
        """Whether the last checkpoint is old enough."""
        return time.monotonic() - self._saved > 60 * self.minutes

    def save(self, progress: Progress) -> None:
        """Leave a checkpoint: model, optimiser and progress, whole or not at all."""
        folder, name = self.out / "checkpoints", f"step-{progress.step:08d}"
        scratch = folder / f".{name}.partial"
        main = self.accelerator.is_main_process
        if main:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        self.accelerator.save_state(str(scratch))
        self.accelerator.wait_for_everyone()
        exported = self.export()
        self._saved = time.monotonic()
        if exported is None:
            return
        exported.save_pretrained(scratch / "drafter")
        (scratch / "progress.json").write_text(
            json.dumps(asdict(progress)), encoding="utf-8"
        )
        shutil.rmtree(folder / name, ignore_errors=True)
        os.replace(scratch, folder / name)
        for old in folder.iterdir():
            if old.name != name:
                shutil.rmtree(old, ignore_errors=True)

    def load(self) -> Progress | None:
        """Put model and optimiser back to the last checkpoint; None without one."""
        folder = latest_checkpoint(self.out)
        if folder is None:
            return None
        self.accelerator.load_state(str(folder))
        text = (folder / "progress.json").read_text(encoding="utf-8")
        return Progress(**json.loads(text))

    def keep_drafter(self, before: int, after: int) -> None:
        """Leave the drafter in `kept/` if a step doubled the number of blocks."""
        mark = FIRST_KEPT * 2 ** (before // FIRST_KEPT).bit_length()  # the next one
        exported = self.export() if after >= mark else None
        if exported is not None:
            exported.save_pretrained(self.out / "kept" / f"blocks-{after:09d}")


def kept_drafters(out: str | Path) -> dict[int, Path]:
    """Blocks seen and folder of each drafter that a run kept, fewest blocks first."""
    folders = (Path(out) / "kept").glob("blocks-*")
    return dict(sorted((int(f.name.removeprefix("blocks-")), f) for f in folders))


def latest_checkpoint(out: Path) -> Path | None:
    """The last whole checkpoint of a run's folder, None if there is none."""
    folders = sorted((Path(out) / "checkpoints").glob("step-*"))
    return folders[-1] if folders else None

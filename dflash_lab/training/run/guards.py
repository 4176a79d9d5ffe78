"""What a run must agree with before it starts: its target, and its own past.

Leaves out: checks of tensors (`training/parity.py`).
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from dflash_lab.errors import DFlashLabError
from dflash_lab.pairs.pair import Pair
from dflash_lab.training.run.checkpoints import latest_checkpoint
from dflash_lab.training.run.config import TrainConfig, load_config


def check_texts_fit(pair: Pair, headers: list[dict]) -> None:
    """A drafter's texts must be its own target's.

    Raises:
        DFlashLabError: another target wrote one of them.
    """
    own = pair.target.fingerprint()
    for header in headers:
        wrote = header.get("target_fingerprint")
        if wrote is not None and wrote != own:
            raise DFlashLabError(
                f"the corpus was written by another target ({header.get('target')}) "
                f"than {pair.name}; a drafter learns what its own target writes: write "
                "the corpus anew, or name its target"
            )


def check_same_run(config: TrainConfig, out: Path) -> None:
    """A resumed run must have the same settings, but for its logging.

    Raises:
        DFlashLabError: a section that differs.
    """
    path = out / "config.yaml"
    if latest_checkpoint(out) is None or not path.is_file():
        return
    before, now = asdict(load_config(path)), asdict(config)
    for name in ("log", "out", "device"):
        before.pop(name), now.pop(name)
    for section in now:
        if before[section] != now[section]:
            raise DFlashLabError(
                f"the run in {out} has other settings in {section}: "
                f"{before[section]!r}, now {now[section]!r}; resume with the same "
                "ones, or choose another folder with out"
            )


def check_same_texts(out: Path, facts: dict) -> None:
    """A resumed run must have the same texts: their order hangs on their number.

    Raises:
        DFlashLabError: a corpus that has changed.
    """
    path = out / "corpora.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for name, note in before.items():
        if note["sha256"] != facts["corpora"].get(name, {}).get("sha256"):
            raise DFlashLabError(
                f"{name} has changed since the run in {out} began; put it back, or "
                "train on the new texts with another folder as out (drafter.init_from "
                "goes on from the old weights)"
            )

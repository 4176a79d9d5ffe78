"""Training runs that are on the disk: settings, metric lines and results of each.

    runs = find_runs("runs")
    runs[0].settings["drafter.block_size"], runs[0].metrics[-1]["loss"]

A run is the folder that `dflash-lab train` writes, finished or not, or a published
drafter that has its `metrics.jsonl` beside it.

Leaves out: pictures (`views/runs.py`), and training.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dflash_lab.errors import DFlashLabError
from dflash_lab.training.run.config import load_config
from dflash_lab.training.run.metrics import read_metrics

# Where files lay says nothing about a run.
PLACES = ("out", "data.corpus", "data.feature_folder")


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: of its folder, below the folder that was searched.
        folder: of the run.
        settings: flat, `drafter.block_size` and the like, without `PLACES`.
        metrics: its metric lines.
        facts: of its card (`training.json`); empty while it is not finished.
    """

    name: str
    folder: Path
    settings: dict
    metrics: list[dict]
    facts: dict


def flat(settings: dict) -> dict:
    """Nested settings with dotted names, without `PLACES`."""
    found = {}
    for key, value in settings.items():
        parts = value if isinstance(value, dict) else {None: value}
        for inner, setting in parts.items():
            full = key if inner is None else f"{key}.{inner}"
            if full not in PLACES:
                found[full] = setting
    return found


def read_run(folder: str | Path, name: str | None = None) -> Run:
    """The run in a folder.

    Raises:
        DFlashLabError: there is none.
    """
    folder = Path(folder)
    cards = [p for p in (folder, folder / "drafter") if (p / "training.json").is_file()]
    facts = {}
    if cards:
        facts = json.loads((cards[0] / "training.json").read_text(encoding="utf-8"))
    if "settings" in facts:
        settings = facts["settings"]
    elif (folder / "config.yaml").is_file():
        settings = asdict(load_config(folder / "config.yaml"))
    else:
        raise DFlashLabError(
            f"{folder} is no training run: it has neither config.yaml nor a "
            "training.json with settings"
        )
    metrics = read_metrics(folder / "metrics.jsonl")
    return Run(name or folder.name, folder, flat(settings), metrics, facts)


def find_runs(root: str | Path) -> list[Run]:
    """All runs below a folder that have metrics, by name.

    Raises:
        DFlashLabError: no folder, or no run with metrics in it.
    """
    root = Path(root)
    if not root.is_dir():
        raise DFlashLabError(f"{root} is no folder; name the one that holds your runs")
    runs = []
    for path in sorted(root.rglob("metrics.jsonl")):
        folder = path.parent
        name = folder.relative_to(root).as_posix() if folder != root else root.name
        try:
            run = read_run(folder, name)
        except DFlashLabError:
            continue  # metrics of something else
        if run.metrics:
            runs.append(run)
    if not runs:
        raise DFlashLabError(
            f"{root} holds no run with metrics yet; train with out below it"
        )
    return runs


def differing(runs: Sequence[Run]) -> list[str]:
    """Names of the settings in which the runs are not all alike."""
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    shown = [[json.dumps(run.settings.get(name)) for run in runs] for name in names]
    return [n for n, values in zip(names, shown, strict=True) if len(set(values)) > 1]

"""Training runs side by side: what differs, how they learnt, where they ended.

    frame = runs_frame(find_runs("runs"))
    runs_view(find_runs("runs"), ["base", "layers-2"], "accuracy of slot 1")

Leaves out: reading runs (`training/run/runs.py`), and measuring drafters (`measure/`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dflash_lab.errors import DFlashLabError
from dflash_lab.training.run.runs import Run, differing
from dflash_lab.views.curves import Drawing
from dflash_lab.views.diffusion import lines_figure
from dflash_lab.views.view import View, figure_view, stacked, table_view

if TYPE_CHECKING:
    from pandas import DataFrame

AT_MOST = 5  # lines in a figure that can be told apart
QUANTITIES = {
    "measured tau": lambda line: line.get("measured_tau"),
    "predicted tau": lambda line: line["predicted_tau"],
    "loss": lambda line: line["loss"],
    "accuracy of slot 1": lambda line: line["accuracy"][0],
    "accuracy of the last slot": lambda line: line["accuracy"][-1],
}
AXES = {
    "steps": lambda line: line["step"],
    "blocks seen": lambda line: line["blocks"],
    "CPU-minutes": lambda line: line["cpu_seconds"] / 60,
}


def runs_frame(runs: Sequence[Run]) -> DataFrame:
    """A row for each run.

    Columns: `run`, `steps`, `blocks`, `cpu_minutes`, `predicted_tau`, `measured_tau`
    (the last one of its metrics), `held_out_tau` (of its card, pooled), and each
    setting in which the runs are not all alike.
    """
    import pandas as pd

    names = differing(runs)
    rows = []
    for run in runs:
        last = run.metrics[-1]
        measured = [m for m in map(QUANTITIES["measured tau"], run.metrics) if m]
        row = {
            "run": run.name,
            "steps": last["step"],
            "blocks": last["blocks"],
            "cpu_minutes": last["cpu_seconds"] / 60,
            "predicted_tau": last["predicted_tau"],
            "measured_tau": measured[-1] if measured else float("nan"),
            "held_out_tau": run.facts.get("held_out_tau", {}).get(
                "pooled", float("nan")
            ),
        }
        rows.append(row | {name: run.settings.get(name) for name in names})
    return pd.DataFrame(rows)


def curves_figure(runs: Sequence[Run], quantity: str, axis: str = "steps") -> Drawing:
    """A line for each run.

    Args:
        runs: at most `AT_MOST`.
        quantity: of `QUANTITIES`.
        axis: of `AXES`.

    Returns:
        The figure and its alt text.

    Raises:
        DFlashLabError: an unknown quantity or axis, or no run that has the quantity.
    """
    if quantity not in QUANTITIES or axis not in AXES:
        raise DFlashLabError(
            f"cannot draw {quantity!r} against {axis!r}; choose from "
            f"{', '.join(QUANTITIES)} against {', '.join(AXES)}"
        )
    series = {}
    for run in runs[:AT_MOST]:
        pairs = [(AXES[axis](m), QUANTITIES[quantity](m)) for m in run.metrics]
        points = [(x, y) for x, y in pairs if y is not None]
        if points:
            series[run.name] = points
    if not series:
        raise DFlashLabError(f"none of these runs has {quantity} among its metrics")
    return lines_figure(series, x=axis, y=quantity, headline="Runs side by side")


def runs_view(
    runs: Sequence[Run], chosen: Sequence[str], quantity: str, axis: str = "steps"
) -> View:
    """Curves of the chosen runs, and a table of results and of what differs.

    Args:
        runs: to choose from.
        chosen: names; of more than `AT_MOST`, the first are shown.
        quantity: of `QUANTITIES`.
        axis: of `AXES`.

    Raises:
        DFlashLabError: a name that no run has; see also `curves_figure`.
    """
    by_name = {run.name: run for run in runs}
    unknown = [name for name in chosen if name not in by_name]
    if unknown or not chosen:
        raise DFlashLabError(
            f"runs {list(chosen)}; choose among {', '.join(by_name)}, at least one"
        )
    picked = [by_name[name] for name in chosen][:AT_MOST]
    left = len(chosen) - len(picked)
    note = f"; {left} more chosen, not shown" if left else ""
    frame = runs_frame(picked)
    table = table_view(
        list(frame.columns),
        [[_shown(value) for value in row] for row in frame.itertuples(index=False)],
        f"Results, and the settings that differ{note}",
    )
    return stacked(figure_view(curves_figure(picked, quantity, axis)), table)


def _shown(value: object) -> float | int | str:
    if isinstance(value, float):
        return "-" if value != value else value
    return value if isinstance(value, (int, str)) else json.dumps(value)

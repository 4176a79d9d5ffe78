"""Choose runs and what to draw of them.

Leaves out: reading runs (`training/run/runs.py`), their pictures (`views/runs.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_lab.training.run.runs import Run
from dflash_lab.views.runs import AT_MOST, AXES, QUANTITIES, runs_view
from dflash_lab.views.view import View
from dflash_lab.views.widgets.shell import choice, shell


def run_browser(runs: Sequence[Run], chosen: Sequence[str] = ()):
    """A list of runs, the quantity, and what it is drawn against.

    Args:
        runs: of `find_runs`.
        chosen: names that are shown first; the first few if none are given.
    """
    from ipywidgets import SelectMultiple

    names = [run.name for run in runs]
    controls = {
        "chosen": SelectMultiple(
            options=names,
            value=tuple(chosen) or tuple(names[:2]),
            rows=min(len(names), 8),
            description="runs",
            tooltip=f"Ctrl or Shift chooses several; up to {AT_MOST} are drawn",
        ),
        "quantity": choice(list(QUANTITIES), "draw", "accuracy of slot 1"),
        "axis": choice(list(AXES), "against"),
    }

    def show(chosen: Sequence[str], quantity: str, axis: str) -> View:
        return runs_view(runs, chosen or names[:1], quantity, axis)

    return shell(controls, show)

"""Watch a training run while it runs, and stop it.

    monitor = training_monitor(functools.partial(train, config, pair=pair))
    monitor                       # shows itself; the run goes on behind it
    result = await monitor.wait() # in the next cell: waits for the end

Leaves out: the run (`training/run/background.py`), its pictures (`views/training.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from dflash_lab.training.run.background import BackgroundRun
from dflash_lab.views.training import run_view
from dflash_lab.views.widgets.shell import shell


def training_monitor(train: Callable, *, redraw_seconds: float = 2.0):
    """Start a run; its curves grow as it runs, a button stops it with a checkpoint.

    Args:
        train: as for `BackgroundRun`.
        redraw_seconds: between two pictures, at least.

    Returns:
        A box with `run`, `wait()` and `result()`, see `BackgroundRun`.
    """
    from ipywidgets import Button

    button = Button(description="stop", icon="stop")
    button.tooltip = "end the run behind the current step, with a checkpoint"
    run = BackgroundRun(train)
    box = shell({}, lambda: run_view(run.lines, run.state), [button])
    drawn = time.monotonic()

    def changed() -> None:
        nonlocal drawn
        ended = run.state not in ("running", "stopping")
        if ended:
            button.description, button.disabled = run.state, True
        if ended or time.monotonic() - drawn >= redraw_seconds:
            box.redraw()
            drawn = time.monotonic()

    def stop(_) -> None:
        button.description, button.disabled = "stopping", True
        run.stop()

    button.on_click(stop)
    run.on_change = changed
    box.button, box.run = button, run
    box.result, box.wait = run.result, run.wait
    run.start()
    box.redraw()
    return box

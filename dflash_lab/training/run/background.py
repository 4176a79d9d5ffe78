"""A training run in a thread of its own, to be watched and stopped.

    run = BackgroundRun(functools.partial(train, config, pair=pair)).start()
    run.lines, run.state           # so far
    result = run.result()          # waits; an interrupt stops the run with a checkpoint
    result = await run.wait()      # in a notebook: buttons go on working meanwhile

Leaves out: pictures and buttons (`views/widgets/training_monitor.py`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from dflash_lab.errors import DFlashLabError


class BackgroundRun:
    """Calls `train` in a thread and keeps what it reports.

    Args:
        train: takes `on_line`, `should_stop` and `quiet`, as `training.run.train`; what
            it returns has `finished`.
        on_change: called without arguments behind each new line and at the end, in the
            run's thread.

    Attributes:
        lines: metric lines so far.
        state: `waiting`, `running`, `stopping`, and in the end `finished`, `stopped` or
            `failed`.
    """

    def __init__(self, train: Callable, on_change: Callable[[], None] | None = None):
        self.lines: list[dict] = []
        self.state = "waiting"
        self.on_change = on_change or (lambda: None)
        self._train = train
        self._stop = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None
        # A kernel that is shut down must not wait; checkpoints are whole at any time.
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> BackgroundRun:
        """Begin; returns the run itself.

        Raises:
            DFlashLabError: it has begun before.
        """
        if self.state != "waiting":
            raise DFlashLabError(f"the run is {self.state}; make another to train anew")
        self.state = "running"
        self._thread.start()
        return self

    def stop(self) -> None:
        """Ask for an end behind the current step; a checkpoint is left."""
        if self.state == "running":
            self.state = "stopping"
        self._stop.set()

    def result(self):
        """What `train` returned, when it has.

        An interrupt (Ctrl-C, the kernel's stop button) ends the run with a checkpoint,
        and its result is returned; a second one is raised.

        Raises:
            DFlashLabError: the run has not been started.
            Exception: what `train` raised.
        """
        if self.state == "waiting":
            raise DFlashLabError("the run has not begun; call start()")
        try:
            self._thread.join()
        except KeyboardInterrupt:
            self.stop()
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result

    async def wait(self):
        """As `result`, for a notebook's cell: `result = await run.wait()`.

        While a cell awaits, its kernel takes messages of widgets, so that a stop button
        is heard; while a cell is busy, most kernels do not.
        """
        if self.state != "waiting":
            try:
                while self._thread.is_alive():
                    await asyncio.sleep(0.1)
            except asyncio.CancelledError:  # what an interrupt does to an awaiting cell
                self.stop()
        return self.result()

    def _work(self) -> None:
        try:
            self._result = self._train(
                on_line=self._take, should_stop=self._stop.is_set, quiet=True
            )
            self.state = "finished" if self._result.finished else "stopped"
        except BaseException as error:  # raised again where the result is asked for
            self._error = error
            self.state = "failed"
        self.on_change()

    def _take(self, line: dict) -> None:
        self.lines.append(line)
        self.on_change()

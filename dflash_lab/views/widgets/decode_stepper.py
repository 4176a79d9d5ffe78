"""Step through a generation, cycle by cycle.

Leaves out: the pictures (`views/stepper.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from dflash_lab.speculative.generation import GenerationResult
from dflash_lab.views.stepper import cycle_view, cycles_of
from dflash_lab.views.view import View
from dflash_lab.views.widgets.shell import shell, steps


def decode_stepper(result: GenerationResult, decode: Callable, prompt: int = 0):
    """A slider and a play button over the cycles of one prompt.

    Args:
        result: of `speculative_generate`.
        decode: turns a list of ids into text.
        prompt: which of the prompts.
    """
    last = len(cycles_of(result.trace, prompt)) - 1

    def show(cycle: int, play: int) -> View:
        ids = result.output_ids[prompt]
        return cycle_view(result.trace, ids, cycle, decode, prompt)

    return shell(steps("cycle", last, start=0, milliseconds=1500), show)

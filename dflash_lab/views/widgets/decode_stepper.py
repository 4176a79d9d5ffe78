"""Step through a generation, cycle by cycle.

Leaves out: the pictures (`viz/stepper.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from dflash_lab.speculative.generation import GenerationResult
from dflash_lab.views.stepper import cycle_view, cycles_of
from dflash_lab.views.widgets.shell import shell


def decode_stepper(result: GenerationResult, decode: Callable, prompt: int = 0):
    """A slider and a play button over the cycles of one prompt.

    Args:
        result: of `speculative_generate`.
        decode: turns a list of ids into text.
        prompt: which of the prompts.
    """
    from ipywidgets import IntSlider, Play, jslink

    last = len(cycles_of(result.trace, prompt)) - 1
    cycle = IntSlider(value=0, min=0, max=last, description="cycle")
    play = Play(value=0, min=0, max=last, interval=1500, description="play")
    jslink((play, "value"), (cycle, "value"))

    def show(cycle: int, play: int = 0):
        ids = result.output_ids[prompt]
        return cycle_view(result.trace, ids, cycle, decode, prompt)

    return shell({"play": play, "cycle": cycle}, show)

"""Play a denoising: masks fill in, step by step.

Leaves out: the pictures (`viz/diffusion.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from dflash_lab.diffusion.samplers import SampleHistory
from dflash_lab.views.diffusion import film_strip
from dflash_lab.views.widgets.shell import shell


def denoise_player(history: SampleHistory, mask: int, decode: Callable):
    """A play button and a slider over the steps, and a choice of the text.

    Args:
        history: of a sampler.
        mask: the mask token.
        decode: turns a list of ids into text.
    """
    from ipywidgets import BoundedIntText, IntSlider, Play, jslink

    last = len(history.frames) - 1
    step = IntSlider(value=last, min=0, max=last, description="step")
    play = Play(value=last, min=0, max=last, interval=500, description="play")
    jslink((play, "value"), (step, "value"))
    text = BoundedIntText(value=0, min=0, max=len(history.ids) - 1, description="text")

    def show(step: int, text: int, play: int = 0):
        # The state before comes along, so that what is new can be marked.
        frames = history.frames[max(0, step - 1) : step + 1]
        return film_strip(frames, mask, decode, row=text)

    return shell({"play": play, "step": step, "text": text}, show)

"""Play a denoising: masks fill in, step by step.

Leaves out: the pictures (`views/diffusion.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from dflash_lab.diffusion.samplers import SampleHistory
from dflash_lab.views.diffusion import film_strip
from dflash_lab.views.view import View
from dflash_lab.views.widgets.shell import shell, steps


def denoise_player(history: SampleHistory, mask: int, decode: Callable):
    """A play button and a slider over the steps, and a choice of the text.

    Args:
        history: of a sampler.
        mask: the mask token.
        decode: turns a list of ids into text.
    """
    from ipywidgets import BoundedIntText

    last = len(history.frames) - 1
    text = BoundedIntText(value=0, min=0, max=len(history.ids) - 1, description="text")

    def show(step: int, text: int, play: int) -> View:
        # The state before comes along, so that what is new can be marked.
        frames = history.frames[max(0, step - 1) : step + 1]
        return film_strip(frames, mask, decode, row=text)

    controls = steps("step", last, start=last, milliseconds=500)
    return shell(controls | {"text": text}, show)

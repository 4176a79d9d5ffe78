"""What all widgets share: controls above, one view beneath.

    box = shell({"step": IntSlider(...)}, lambda step: film(step))

Leaves out: controls and views of a certain widget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dflash_lab.errors import DFlashLabError
from dflash_lab.views.view import View

if TYPE_CHECKING:
    from ipywidgets import IntSlider, Play, ToggleButtons, VBox


def shell(controls: Mapping, show: Callable[..., View], buttons: Sequence = ()) -> VBox:
    """Controls that redraw a view when they move.

    Args:
        controls: name to an ipywidget with a `value`.
        show: called with the values by name.
        buttons: shown behind the controls; what they do is the caller's.

    Returns:
        A box; its `controls` and `view` are there for tests and for other code. Its
        plain text is that of the view.

    Raises:
        DFlashLabError: ipywidgets is not installed.
    """
    try:
        from ipywidgets import HTML, HBox, VBox
    except ImportError:
        raise DFlashLabError(
            "widgets need ipywidgets; pip install 'dflash-lab[lab]', or show the view "
            "itself"
        ) from None

    class Shell(VBox):
        def redraw(self, *_):
            values = {name: control.value for name, control in self.controls.items()}
            self.view = show(**values)
            self.pane.value = self.view.html

        def __repr__(self) -> str:
            return str(self.view)

        def _repr_mimebundle_(self, **kwargs):
            bundle = super()._repr_mimebundle_(**kwargs)
            # Where no widget can run (a page, a printed notebook) the view stands in.
            bundle |= {"text/html": self.view.html, "text/plain": self.view.text}
            return bundle

    pane = HTML()
    # Buttons and sliders side by side, breaking into lines where the page is narrow.
    bar = HBox([*controls.values(), *buttons], layout={"flex_flow": "row wrap"})
    box = Shell([bar, pane])
    box.controls, box.pane = dict(controls), pane
    for control in controls.values():
        control.observe(box.redraw, names="value")
    box.redraw()
    return box


def steps(
    name: str, last: int, *, start: int, milliseconds: int
) -> dict[str, Play | IntSlider]:
    """Controls for what happens in steps: a play button and the slider that it moves.

    Args:
        name: of the slider; the button is `play`, and a view need not look at it.
        last: number of the last step, from 0.
        start: the step shown at first.
        milliseconds: between two steps while it plays.
    """
    from ipywidgets import IntSlider, Play, jslink

    slider = IntSlider(start, 0, last, description=name)
    play = Play(start, 0, last, interval=milliseconds, description="play")
    jslink((play, "value"), (slider, "value"))
    return {"play": play, name: slider}


def choice(
    options: Sequence[str], description: str, value: str | None = None
) -> ToggleButtons:
    """One of a few options, as a row of buttons.

    JupyterLab keeps the arrow keys for itself, so that a drop-down list cannot be
    moved by keyboard there; buttons can (Tab, then Space).

    Args:
        options: shown in a row.
        description: before them.
        value: chosen at first; the first option if None.
    """
    from ipywidgets import ToggleButtons

    return ToggleButtons(
        options=options,
        value=value or options[0],
        description=description,
        style={"button_width": "auto"},
        layout={"width": "auto"},
    )

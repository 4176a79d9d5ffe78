"""Pictures of denoising: film strip, player, and curves of the study.

The film strip shows every state beneath the one before, without any script; the player
shows one at a time behind a slider and has the film strip folded up beneath it.

Leaves out: sampling and judging (`dflash_lab.diffusion`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from dflash_lab.errors import DFlashLabError
from dflash_lab.views.curves import Drawing, new_figure, title
from dflash_lab.views.render import render
from dflash_lab.views.style import OKABE_ITO
from dflash_lab.views.tokens import Decode
from dflash_lab.views.view import View

_numbers = itertools.count(1)
# A colour, a mark and a dash each, so that none of them tells a line alone.
_LINES = tuple(
    {"color": OKABE_ITO[colour], "marker": mark, "linestyle": dash}
    for colour, mark, dash in (
        ("blue", "o", "-"),
        ("vermillion", "s", "--"),
        ("green", "^", "-."),
        ("purple", "D", ":"),
        ("orange", "v", (0, (5, 1))),
    )
)


def frame_text(state: Sequence[int], mask: int, decode: Decode) -> str:
    """One state as a line of plain text, `_` for a mask."""
    return "".join("_" if t == mask else decode([t]) for t in state).replace("\n", "⏎")


def _rows(frames: Sequence, row: int, at_most: int) -> list[list[int]]:
    states = [frame[row].tolist() for frame in frames]
    if len(states) <= at_most:
        return states
    last = len(states) - 1
    return [states[round(i * last / (at_most - 1))] for i in range(at_most)]


def film_strip(
    frames: Sequence, mask: int, decode: Decode, *, row: int = 0, at_most: int = 12
) -> View:
    """All states of one text, one beneath the other.

    Args:
        frames: of a `SampleHistory`, (B, S) each.
        mask: the mask token.
        decode: turns a list of ids into text.
        row: which text.
        at_most: states shown; evenly chosen if there are more.
    """
    return _view("views/denoise.html", _rows(frames, row, at_most), mask, decode)


def player(
    frames: Sequence, mask: int, decode: Decode, *, row: int = 0, at_most: int = 40
) -> View:
    """A slider over the states of one text; the film strip stands folded beneath.

    Arguments are those of `film_strip`. The slider is an ordinary one, so the arrow
    keys move it; without scripts the finished text and the film strip are there.
    """
    states = _rows(frames, row, at_most)
    folded = {"name": f"dfl-player-{next(_numbers)}", "folded": _rows(frames, row, 12)}
    return _view("views/player.html", states, mask, decode, **folded)


def _view(template: str, states: list, mask: int, decode: Decode, **more) -> View:
    html = render(template, states=states, mask=mask, decode=decode, **more)
    return View(html, "\n".join(frame_text(state, mask, decode) for state in states))


def lines_figure(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x: str,
    y: str,
    headline: str,
    note: str = "",
    log_x: bool = False,
    ticks: Sequence[float] | None = None,
) -> Drawing:
    """Lines with marks, one for each series; each has its own colour, mark and dash.

    Args:
        series: name to points (x, y).
        x: label of the axis.
        y: label of the axis.
        headline: of the figure.
        note: right of the headline.
        log_x: whether x is logarithmic, base 2.
        ticks: places of the marks on x.

    Returns:
        The figure and its alt text.

    Raises:
        DFlashLabError: no series, more than there are marks for, or one without points.
    """
    if not series or len(series) > len(_LINES) or not all(series.values()):
        raise DFlashLabError(
            f"{len(series)} series; give 1 to {len(_LINES)}, each with points"
        )
    figure, axes = new_figure(6.6, 3.6)
    for (name, points), look in zip(series.items(), _LINES, strict=False):
        marked = look if len(points) <= 40 else look | {"marker": None}
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, markersize=5, label=name, **marked)
    if log_x:
        axes.set_xscale("log", base=2)
    if ticks is not None:
        axes.set_xticks(list(ticks), [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    axes.set(xlabel=x, ylabel=y)
    title(axes, headline, note)
    axes.legend(frameon=False, fontsize=9)
    told = "; ".join(f"{name} {_ends(points)}" for name, points in series.items())
    return figure, f"Lines of {y} against {x}: {told}."


def _ends(points: Sequence[tuple[float, float]]) -> str:
    (x, y), (last_x, last_y) = points[0], points[-1]
    begin = f"from {y:.3g} at {x:g} to " if len(points) > 1 else ""
    return f"{begin}{last_y:.3g} at {last_x:g}"

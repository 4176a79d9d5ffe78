"""Pictures of denoising: film strip, player, and curves of the study.

The film strip shows every state beneath the one before, without any script; the player
shows one at a time behind a slider and has the film strip folded up beneath it.

Leaves out: sampling and judging (`dflash_lab.diffusion`).
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Callable, Mapping, Sequence

from dflash_lab.errors import DFlashLabError
from dflash_lab.views.curves import new_figure, title
from dflash_lab.views.style import OKABE_ITO
from dflash_lab.views.view import View, framed

Decode = Callable[[list[int]], str]

_numbers = itertools.count(1)
_LINES = (
    (OKABE_ITO["blue"], "o", "-"),
    (OKABE_ITO["vermillion"], "s", "--"),
    (OKABE_ITO["green"], "^", "-."),
    (OKABE_ITO["purple"], "D", ":"),
    (OKABE_ITO["orange"], "v", (0, (5, 1))),
)


def frame_html(
    state: Sequence[int], before: Sequence[int] | None, mask: int, decode: Decode
) -> str:
    """One state: masks as grey boxes, tokens new since `before` underlined."""
    parts = []
    for place, token in enumerate(state):
        if token == mask:
            parts.append('<span class="dfl-mask" title="masked">▒▒</span>')
            continue
        fresh = before is not None and before[place] != token
        text = html.escape(decode([token])) or "∅"
        text = text.replace("\n", "↵<br>")
        if fresh:
            parts.append(
                f'<span class="dfl-new" title="new in this step">{text}</span>'
            )
        else:
            parts.append(f"<span>{text}</span>")
    return f'<div class="dfl-frame">{"".join(parts)}</div>'


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
    states = _rows(frames, row, at_most)
    body = _strip(states, mask, decode)
    text = "\n".join(frame_text(state, mask, decode) for state in states)
    return View(framed(f"<style>{_CSS}</style>{body}"), text)


def _strip(states: Sequence[Sequence[int]], mask: int, decode: Decode) -> str:
    rows = []
    for number, state in enumerate(states):
        before = states[number - 1] if number else None
        left = sum(token == mask for token in state)
        rows.append(
            f'<tr><th scope="row">{left} masked</th>'
            f"<td>{frame_html(state, before, mask, decode)}</td></tr>"
        )
    return f'<table class="dfl-strip"><tbody>{"".join(rows)}</tbody></table>'


def player(
    frames: Sequence, mask: int, decode: Decode, *, row: int = 0, at_most: int = 40
) -> View:
    """A slider over the states of one text; the film strip stands folded beneath.

    Arguments are those of `film_strip`. The slider is an ordinary one, so the arrow
    keys move it; without scripts the finished text and the film strip are there.
    """
    states = _rows(frames, row, at_most)
    name = f"dfl-player-{next(_numbers)}"
    shown = "".join(
        f'<div class="dfl-state"{"" if n == len(states) - 1 else " hidden"}>'
        f"{frame_html(state, states[n - 1] if n else None, mask, decode)}</div>"
        for n, state in enumerate(states)
    )
    last = len(states) - 1
    script = (
        f"(()=>{{const p=document.getElementById('{name}'),"
        "s=p.querySelector('input'),o=p.querySelector('output');"
        "p.querySelector('label').hidden=false;"
        "s.addEventListener('input',()=>{o.textContent='step '+s.value;"
        "p.querySelectorAll('.dfl-state').forEach((e,i)=>"
        "{e.hidden=i!==Number(s.value)})})})()"
    )
    body = (
        f'<style>{_CSS}</style><div id="{name}">'
        f'<label hidden>step of denoising <input type="range" min="0" max="{last}" '
        f'value="{last}"> <output>step {last}</output></label>{shown}'
        f"<details><summary>all steps</summary>"
        f"{_strip(_rows(frames, row, 12), mask, decode)}</details></div>"
        f"<script>{script}</script>"
    )
    text = "\n".join(frame_text(state, mask, decode) for state in states)
    return View(framed(body), text)


def lines_figure(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x: str,
    y: str,
    headline: str,
    note: str = "",
    log_x: bool = False,
    ticks: Sequence[float] | None = None,
):
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
    told = []
    for (name, points), (colour, mark, dash) in zip(
        series.items(), _LINES, strict=False
    ):
        xs, ys = zip(*points, strict=True)
        many = len(points) > 40
        axes.plot(
            xs,
            ys,
            color=colour,
            linestyle=dash,
            marker=None if many else mark,
            markersize=5,
            label=name,
        )
        first, last = points[0], points[-1]
        ends = f"from {first[1]:.3g} at {first[0]:g} to " if len(points) > 1 else ""
        told.append(f"{name} {ends}{last[1]:.3g} at {last[0]:g}")
    if log_x:
        axes.set_xscale("log", base=2)
    if ticks is not None:
        axes.set_xticks(list(ticks), [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    title(axes, headline, note)
    axes.legend(frameon=False, fontsize=9)
    return figure, f"Lines of {y} against {x}: {'; '.join(told)}."


_CSS = """\
.dfl-view .dfl-frame{font-family:ui-monospace,"SF Mono",Menlo,Consolas,
  "DejaVu Sans Mono",monospace;white-space:pre-wrap;overflow-wrap:anywhere;
  line-height:1.7;min-height:1.7em}
.dfl-view .dfl-mask{color:var(--dfl-grey);letter-spacing:-.05em;margin:0 1px}
.dfl-view .dfl-new{border-bottom:2px solid var(--dfl-accepted);font-weight:600}
.dfl-view .dfl-strip{border-collapse:collapse;color:var(--dfl-ink)}
.dfl-view .dfl-strip :is(th,td){text-align:left!important}
.dfl-view .dfl-strip th{white-space:nowrap;font-weight:400;color:var(--dfl-muted);
  vertical-align:top;font-size:.85rem}
.dfl-view input[type=range]{width:min(22rem,60vw);vertical-align:middle}
.dfl-view summary{cursor:pointer;color:var(--dfl-muted)}"""

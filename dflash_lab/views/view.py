"""What a notebook cell shows: HTML where there is a page, plain text elsewhere.

A view is complete without scripts; what scripts add (a player's buttons) is comfort.
Every view knows its text, which is also what a screen reader and a test read.

Leaves out: what is in a view; that is made by the other modules here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from urllib.parse import quote

from dflash_lab.views.curves import Drawing, figure_svg
from dflash_lab.views.render import render


@dataclass(frozen=True)
class View:
    """A piece of output.

    Attributes:
        html: self-contained, without `<html>` around it.
        text: the same for readers without a page.
    """

    html: str
    text: str

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return {"text/html": self.html, "text/plain": self.text}

    def __str__(self) -> str:
        return self.text


def figure_view(made: Drawing, notice: Sequence[str] = ()) -> View:
    """A figure with its alt text printed beneath, and what to notice.

    Args:
        made: (figure, alt text), as all functions that make figures return.
        notice: sentences.
    """
    figure, alt = made
    # Percent-encoded text, not inline SVG: front ends drop that from untrusted pages.
    drawing = " ".join(figure_svg(figure).replace('"', "'").split())
    svg = quote(drawing, safe=" =:/'(),;.-")
    lines = [alt, *(f"* {point}" for point in notice)]
    html = render("views/figure.html", alt=alt, svg=svg, notice=notice)
    return View(html, "\n".join(lines))


def stacked(*views: View) -> View:
    """Views beneath each other, as one."""
    return View(
        "".join(view.html for view in views), "\n\n".join(view.text for view in views)
    )


def table_view(
    columns: Sequence[str], rows: Sequence[Sequence], caption: str = ""
) -> View:
    """A small table; numbers stand right, floats have two digits behind the point."""

    cells = [[(_shown(value), _is_number(value)) for value in row] for row in rows]
    # A heading stands on the side of its column's numbers.
    numeric = [all(x for _, x in c) for c in zip(*cells, strict=True)]
    lines = [list(columns), *([text for text, _ in row] for row in cells)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = [
        "  ".join(t.ljust(w) for t, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    html = render(
        "views/table.html",
        columns=list(zip_longest(columns, numeric, fillvalue=False)),
        rows=cells,
        caption=caption,
    )
    return View(html, "\n".join([caption, *texts] if caption else texts))


def _shown(value) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)

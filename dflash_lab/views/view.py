"""What a notebook cell shows: HTML where there is a page, plain text elsewhere.

A view is complete without scripts; what scripts add (a player's buttons) is comfort.
Every view knows its text, which is also what a screen reader and a test read.

Leaves out: what is in a view; that is made by the other modules here.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from dflash_lab.views.curves import figure_svg
from dflash_lab.views.style import token_css


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


def framed(body: str) -> str:
    """HTML with the styles it needs; pages with many views repeat them harmlessly."""
    return (
        f'<div class="dfl-view"><style>{token_css(".dfl-view")}\n{_CSS}</style>'
        f"{body}</div>"
    )


def figure_view(made: tuple, notice: Sequence[str] = ()) -> View:
    """A figure with its alt text printed beneath, and what to notice.

    Args:
        made: (figure, alt text), as all functions that make figures return.
        notice: sentences.
    """
    figure, alt = made
    # Percent-encoded text, not inline SVG: front ends drop that from untrusted pages.
    drawing = figure_svg(figure).replace('"', "'")
    data = quote(" ".join(drawing.split()), safe=" =:/'(),;.-")
    points = "".join(f"<li>{html.escape(point)}</li>" for point in notice)
    what = f"<b>What to notice</b><ul>{points}</ul>" if points else ""
    body = (
        f'<figure style="margin:0"><img alt="{html.escape(alt, quote=True)}" '
        f'src="data:image/svg+xml,{data}" style="max-width:100%;width:46rem">'
        f'<figcaption class="dfl-small">{html.escape(alt)}</figcaption></figure>{what}'
    )
    lines = [alt, *(f"* {point}" for point in notice)]
    return View(framed(body), "\n".join(lines))


def stacked(*views: View) -> View:
    """Views beneath each other, as one."""
    return View(
        "".join(view.html for view in views), "\n\n".join(view.text for view in views)
    )


def table_view(
    columns: Sequence[str], rows: Sequence[Sequence], caption: str = ""
) -> View:
    """A small table; numbers stand right, floats have two digits behind the point."""

    def shown(value) -> str:
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    def cell(value) -> str:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        side = ' class="dfl-n"' if number else ""
        return f"<td{side}>{html.escape(shown(value))}</td>"

    # A heading stands on the side of its column's numbers.
    numeric = [
        bool(rows) and all("dfl-n" in cell(row[i]) for row in rows)
        for i in range(len(columns))
    ]
    head = "".join(
        f'<th scope="col"{side}>{html.escape(name)}</th>'
        for name, side in zip(
            columns, (' class="dfl-n"' if x else "" for x in numeric), strict=True
        )
    )
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    table = (
        # A wide table scrolls by itself; the page beneath it must not.
        '<div style="overflow-x:auto"><table class="dfl-table">'
        f"{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
    texts = [list(columns)] + [[shown(value) for value in row] for row in rows]
    widths = [max(len(line[i]) for line in texts) for i in range(len(columns))]
    lines = [
        "  ".join(t.ljust(w) for t, w in zip(line, widths, strict=True)).rstrip()
        for line in texts
    ]
    return View(
        framed(table),
        "\n".join([caption, *lines] if caption else lines),
    )


_CSS = """\
.dfl-view{color:var(--dfl-ink);background:var(--dfl-page);padding:.5rem .7rem;
  border-radius:6px;font-size:.95rem;line-height:1.5;max-width:60rem}
.dfl-view .dfl-small{color:var(--dfl-muted);font-size:.87rem;max-width:46rem}
.dfl-view ul{margin:.2rem 0 .2rem 1.2rem;padding:0}
.dfl-view table{width:auto}
.dfl-view .dfl-table{border-collapse:collapse;color:var(--dfl-ink);
  font-variant-numeric:tabular-nums}
.dfl-view caption{text-align:left;color:var(--dfl-muted);padding:.2rem 0}
.dfl-view :is(th,td){text-align:left!important;padding:.2rem .9rem .2rem 0;
  border-bottom:1px solid var(--dfl-rule);background:none}
.dfl-view .dfl-n{text-align:right!important}
.dfl-view img{border-radius:6px}
[data-jp-theme-light="false"] .dfl-view img{filter:brightness(.88)}"""

"""Figures of acceptance and time: data in, a matplotlib Figure and its alt text out.

The figures are `matplotlib.figure.Figure` objects that no pyplot state knows about, so
nothing pops up and nothing leaks. Every figure comes with a sentence or two that say
the same to somebody who cannot see it.

Leaves out: confidence intervals and anything else to be computed first (`measure/`).
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dflash_lab.errors import DFlashLabError
from dflash_lab.views.render import count
from dflash_lab.views.style import OKABE_ITO, THEMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A figure, and what it says in words.
Drawing = tuple["Figure", str]

DPI = 120
_INK = THEMES["light"]["ink"]
_MUTED = THEMES["light"]["muted"]
_PARTS = (
    ("draft_ms", "draft", OKABE_ITO["orange"], "////"),
    ("verify_ms", "verify", OKABE_ITO["sky blue"], ""),
    ("other_ms", "other", "#C9CBCD", "...."),
)


def acceptance_figure(
    acceptance_per_position: Sequence[float], drafted: Sequence[int]
) -> Drawing:
    """How far drafts survive: one bar per slot of the block.

    Args:
        acceptance_per_position: for slots 1..G, the share (0 to 1) of the cycles that
            drafted this slot in which its draft became text.
        drafted: for each slot, how many cycles drafted it.

    Returns:
        The figure and its alt text.

    Raises:
        DFlashLabError: no slots, or lists of different lengths.
    """
    shares = [float(share) for share in acceptance_per_position]
    if not shares or len(shares) != len(drafted):
        raise DFlashLabError(
            f"{len(shares)} acceptance shares and {len(drafted)} draft counts; give "
            "one of each for every drafted slot"
        )
    figure, axes = new_figure(6.2, 3.4)
    slots = range(1, len(shares) + 1)
    axes.bar(slots, shares, 0.72, color=OKABE_ITO["green"])
    if len(shares) <= 16:
        for slot, share in zip(slots, shares, strict=True):
            _note(axes, f"{share:.0%}", (slot, share), (0, 3), ha="center")
        axes.set_xticks(list(slots))
    axes.set_ylim(0, 1.08)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
    axes.set_xlabel("slot in the block (1 = first drafted token)")
    axes.set_ylabel("drafts that became text (%)")
    cycles = count(max(drafted), "cycle")
    if min(drafted) < max(drafted):
        cycles = f"{min(drafted)} to {count(max(drafted), 'cycle')} per slot"
    title(axes, "How far into the block do drafts survive?", cycles)
    named = zip(slots, shares, strict=True)
    listing = ", ".join(f"slot {slot} {share:.0%}" for slot, share in named)
    return figure, (
        "Bar chart of the share of cycles in which each slot's draft became text, over "
        f"{cycles}: {listing}."
    )


def time_figure(rows: Sequence[Mapping]) -> Drawing:
    """Where the time of one emitted token goes: one stacked bar per method.

    Args:
        rows: one mapping per method with `name` and, in milliseconds per emitted token,
            `draft_ms`, `verify_ms` and `other_ms`. First row on top.

    Returns:
        The figure and its alt text.

    Raises:
        DFlashLabError: no rows.
    """
    if not rows:
        raise DFlashLabError("no methods to compare; give one row per method")
    figure, axes = new_figure(6.2, 1.7 + 0.5 * len(rows))
    places = range(len(rows))
    left = [0.0] * len(rows)
    for key, label, colour, hatch in _PARTS:
        widths = [float(row[key]) for row in rows]
        look: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": "white"}
        axes.barh(places, widths, 0.6, left, label=label, linewidth=0.8, **look)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, total in zip(places, left, strict=True):
        _note(axes, f"{total:.1f} ms", (total, place), (5, 0), va="center")
    axes.set_yticks(list(places), [_literal(row["name"]) for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, max(left) * 1.15 or 1)
    axes.set_xlabel("time per emitted token (ms)")
    title(axes, "Where does the time of one token go?", "")
    figure.legend(
        loc="outside lower right", ncols=3, frameon=False, fontsize=9, handlelength=1.6
    )
    sentences = [
        f"{row['name']} {total:.1f} ms ("
        + ", ".join(f"{label} {float(row[key]):.1f}" for key, label, *_ in _PARTS)
        + ")"
        for row, total in zip(rows, left, strict=True)
    ]
    return figure, (
        f"Stacked bars of the milliseconds per emitted token: {'; '.join(sentences)}."
    )


def length_histogram(acceptance_lengths: Sequence[int], block_size: int) -> Drawing:
    """How many tokens the cycles added: one bar for each length from 1 to block size.

    Args:
        acceptance_lengths: tokens of each cycle, bonus token counted.
        block_size: the most a cycle can add.

    Returns:
        The figure and its alt text.

    Raises:
        DFlashLabError: no cycles, or a length outside 1..block_size.
    """
    lengths = [int(length) for length in acceptance_lengths]
    if not lengths:
        raise DFlashLabError("no cycles to count; decode at least two tokens first")
    if min(lengths) < 1 or max(lengths) > block_size:
        wrong = min(lengths) if min(lengths) < 1 else max(lengths)
        raise DFlashLabError(
            f"acceptance length {wrong} is outside 1..{block_size}; pass the block "
            "size that the cycles were decoded with"
        )
    counts = Counter(lengths)
    sizes = range(1, block_size + 1)
    tau = sum(lengths) / len(lengths)
    figure, axes = new_figure(6.2, 3.4)
    heights = [counts[size] for size in sizes]
    axes.bar(sizes, heights, 0.72, color=OKABE_ITO["sky blue"])
    _mark_mean(axes, tau, to_the_left=tau > (block_size + 1) / 2)
    axes.set_ylim(0, max(heights) * 1.25)
    axes.locator_params(axis="y", integer=True)
    if block_size <= 16:
        axes.set_xticks(list(sizes))
    axes.set(
        xlabel="tokens added by a cycle (bonus token counted)", ylabel="cycles (count)"
    )
    cycles = count(len(lengths), "cycle")
    title(axes, "How many tokens does a cycle add?", cycles)
    listing = ", ".join(
        f"{count(size, 'token')} {counts[size]}" for size in sizes if counts[size]
    )
    return figure, (
        f"Histogram of the tokens added per cycle, over {cycles}: {listing}. "
        f"The mean, tau, is {tau:.2f}."
    )


def figure_png(figure: Figure) -> bytes:
    """The figure as PNG; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    # The default metadata names the matplotlib version.
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def figure_svg(figure: Figure) -> str:
    """The figure as SVG text; the same figure gives the same text."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "dflash_lab"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    # The document type would name an address, and an image needs none.
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty figure in the style of all others; sizes in inches."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    figure = Figure(figsize=(width, height), dpi=DPI, layout=layout)
    figure.set_facecolor("white")
    axes = figure.add_subplot()
    style_axes(axes)
    return figure, axes


def style_axes(axes: Axes) -> None:
    """Lines, ticks and labels as in all figures."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_MUTED)
    axes.tick_params(colors=_MUTED, labelcolor=_INK, labelsize=9)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set(color=_INK, size=9.5)


def title(axes: Axes, text: str, note: str) -> None:
    """A headline on the left and a remark on the right."""
    axes.set_title(text, loc="left", fontsize=11, color=_INK, pad=10)
    if note:
        axes.set_title(note, loc="right", fontsize=9, color=_MUTED, pad=10)


def _note(axes: Axes, text: str, at: tuple, shift: tuple, **place) -> None:
    """Small text beside a point, `shift` (in points) away from it."""
    place |= {"textcoords": "offset points", "fontsize": 9, "color": _INK}
    axes.annotate(text, at, xytext=shift, **place)


def _mark_mean(axes: Axes, tau: float, to_the_left: bool) -> None:
    """A line at tau with its name over the bars, on the side with more room."""
    axes.axvline(tau, color=OKABE_ITO["vermillion"], linewidth=1.8, linestyle="--")
    _note(
        axes,
        f"mean \N{GREEK SMALL LETTER TAU} = {tau:.2f}",
        (tau, 1),
        (-6 if to_the_left else 6, -4),
        xycoords=("data", "axes fraction"),
        ha="right" if to_the_left else "left",
        va="top",
    )


def _literal(name: str) -> str:
    """A name for matplotlib, which reads a pair of dollars as mathematics."""
    return str(name).replace("$", r"\$")

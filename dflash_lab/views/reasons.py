"""Why drafts are lost: one stacked bar per slot.

Leaves out: the reasons themselves (`measure/explain.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_lab.errors import DFlashLabError
from dflash_lab.views.curves import Drawing, new_figure, title
from dflash_lab.views.style import OKABE_ITO

if TYPE_CHECKING:
    import pandas as pd

# From what a sibling would save to what no list of candidates would.
_COLOURS = ("green", "sky blue", "blue", "orange", "vermillion")
_HATCHES = ("", "", "////", "", "....", "xxxx")


def reasons_figure(by_slot: pd.DataFrame) -> Drawing:
    """Shares of the reasons among the lost drafts of each slot.

    Args:
        by_slot: of `measure.explain.reasons_by_slot`.

    Returns:
        The figure and its alt text.

    Raises:
        DFlashLabError: an empty table.
    """
    if by_slot.empty:
        raise DFlashLabError("no lost drafts to draw")
    figure, axes = new_figure(6.8, 3.8)
    slots = [str(slot) for slot in by_slot.index]
    bottom = [0.0] * len(slots)
    colours = [OKABE_ITO[name] for name in _COLOURS] + ["#C9CBCD"]
    for name, colour, hatch in zip(by_slot.columns, colours, _HATCHES, strict=True):
        shares = by_slot[name].tolist()
        axes.bar(
            slots,
            shares,
            0.72,
            bottom,
            label=name,
            color=colour,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.8,
        )
        bottom = [a + b for a, b in zip(bottom, shares, strict=True)]
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
    axes.set_xlabel("slot in the block (1 = first drafted token)")
    axes.set_ylabel("lost drafts")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, reverse=True)
    title(axes, "Where did the right token stand?", "rank in its slot")
    first = ", ".join(f"{name} {by_slot[name].iloc[0]:.0%}" for name in by_slot)
    return figure, (
        "Stacked bars, one for each slot: where the right token of a lost draft stood "
        f"among the drafter's candidates. Slot {slots[0]}: {first}."
    )

"""Drafters beside a base: differences of tau with intervals, and a table of standings.

Leaves out: decoding and arithmetic (`measure/race.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dflash_lab.errors import DFlashLabError
from dflash_lab.measure.intervals import Interval
from dflash_lab.measure.race import Standing
from dflash_lab.views.curves import Drawing, new_figure, title
from dflash_lab.views.style import OKABE_ITO
from dflash_lab.views.view import View, table_view


def differences_figure(
    differences: Mapping[str, Interval], base: str, noise: float | None = None
) -> Drawing:
    """A line for each drafter: its tau minus the base's, with the interval.

    Args:
        differences: of `race.tau_differences`.
        base: what they are compared with.
        noise: half width of a grey band, such as what another seed changes.

    Returns:
        The figure and its alt text. Filled marks lie outside zero and the band.

    Raises:
        DFlashLabError: nothing to show.
    """
    if not differences:
        raise DFlashLabError(f"no drafter is compared with {base}; race two at least")
    figure, axes = new_figure(6.6, 0.9 + 0.3 * len(differences))
    edge = noise or 0.0
    if noise:
        axes.axvspan(-noise, noise, color="0.88", zorder=0)
    axes.axvline(0, color="0.5", lw=1)
    told = []
    for place, (name, found) in enumerate(differences.items()):
        sure = found.low > edge or found.high < -edge
        colour = OKABE_ITO["blue" if found.value > 0 else "vermillion"]
        axes.plot([found.low, found.high], [place, place], color=colour, lw=2)
        axes.plot(
            found.value,
            place,
            marker="o" if found.value > 0 else "s",
            color=colour,
            markerfacecolor=colour if sure else "white",
            ms=6,
        )
        told.append(f"{name} {found}")
    axes.set_yticks(range(len(differences)), list(differences))
    axes.invert_yaxis()
    axes.set_xlabel(f"tau minus that of {base}")
    note = f"grey: ±{noise:.2f}, another seed" if noise else ""
    title(axes, "One change at a time", note)
    band = f" The grey band is ±{noise:.2f}." if noise else ""
    return figure, f"Tau minus that of {base}: {'; '.join(told)}.{band}"


def standings_view(standings: Sequence[Standing], caption: str = "") -> View:
    """A table: tau and speed-up with intervals, milliseconds, equal texts.

    Args:
        standings: of `race.standings`.
        caption: above the table.
    """
    return table_view(
        ["proposer", "tau", "draft ms", "cycle ms", "speed-up", "equal texts"],
        [
            [
                s.name,
                str(s.tau),
                s.draft_ms,
                s.cycle_ms,
                str(s.speedup),
                f"{s.equal} of {s.prompts}",
            ]
            for s in standings
        ],
        caption,
    )

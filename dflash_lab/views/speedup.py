"""When drafting pays, as a picture: speed-up against acceptance length.

Leaves out: measuring costs (`measure/speedup.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from dflash_lab.measure.speedup import Costs
from dflash_lab.views.curves import Drawing
from dflash_lab.views.diffusion import lines_figure
from dflash_lab.views.view import View, figure_view, table_view


def speedup_figure(costs: Mapping[int, Costs], tau: float | None = None) -> Drawing:
    """Speed-up against tau for each block size, with the break-even line.

    Args:
        costs: by block size, at most five.
        tau: an acceptance length to mark.

    Returns:
        The figure and its alt text.
    """
    series = {
        f"K = {size}": [(1.0, cost.speedup(1.0)), (float(size), cost.speedup(size))]
        for size, cost in costs.items()
    }
    made = lines_figure(
        series,
        x="tau, tokens per cycle",
        y="speed-up over plain decoding",
        headline="From which tau on does a cycle pay?",
    )
    axes = made[0].axes[0]
    axes.axhline(1.0, color="#7C8186", linewidth=1)
    if tau is not None:
        axes.axvline(tau, color="#7C8186", linewidth=1, linestyle=":")
    evens = ", ".join(
        f"K = {size} from tau {cost.break_even_tau:.2f}" for size, cost in costs.items()
    )
    return made[0], f"{made[1]} Drafting pays with {evens}."


def calculator_view(
    tau: float, block_size: int, draft: float, verify: float, other: float = 0.0
) -> View:
    """The speed-up that follows from costs in units of one plain token.

    Args:
        tau: acceptance length, at most K.
        block_size: K.
        draft: a block's draft, in plain tokens.
        verify: a pass over K rows, in plain tokens.
        other: the rest of a cycle, in plain tokens.
    """
    cost = Costs(block_size, 1.0, draft, verify, other)
    tau = min(tau, float(block_size))
    gain = cost.speedup(tau)
    verdict = "pays" if gain > 1 else "does not pay"
    rows = [
        ["a cycle takes, in plain tokens", cost.cycle_ms],
        ["and adds (tau)", tau],
        ["speed-up", gain],
        ["break-even tau", cost.break_even_tau],
        ["most that K allows", cost.speedup(block_size)],
    ]
    table = table_view(["", "value"], rows, f"Drafting {verdict}.")
    figure = figure_view(speedup_figure({block_size: cost}, tau))
    return View(table.html + figure.html, f"{table.text}\n{figure.text}")

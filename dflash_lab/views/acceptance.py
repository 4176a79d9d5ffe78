"""All definitions of acceptance on the same cycles: one figure, one table.

Leaves out: computing them (`measure/acceptance.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_lab.errors import DFlashLabError
from dflash_lab.measure.acceptance import acceptance_summary, slot_frame
from dflash_lab.speculative.trace import DecodeTrace
from dflash_lab.views.curves import Drawing
from dflash_lab.views.diffusion import lines_figure
from dflash_lab.views.view import View, figure_view, table_view

RATES = {
    "marginal": "right behind the drafts before it",
    "conditional": "right where all before it were accepted",
    "survival": "became text",
}
SUMMARY = {
    "tau": "tokens per cycle, bonus token counted, pooled over cycles",
    "tau_without_bonus": "accepted drafts per cycle",
    "tau_per_prompt": "mean over prompts of each prompt's mean",
    "draft_acceptance_rate": "accepted drafts over drafted tokens",
    "product_of_marginals": "what tau would be if slots failed independently",
}


def rates_figure(
    traces: Sequence[DecodeTrace], rates: Sequence[str] = tuple(RATES)
) -> Drawing:
    """Acceptance per slot by each of the asked definitions.

    Args:
        traces: of runs with one block size.
        rates: of `RATES`.

    Returns:
        The figure and its alt text.

    Raises:
        DFlashLabError: no rate, or an unknown one.
    """
    unknown = [rate for rate in rates if rate not in RATES]
    if unknown or not rates:
        raise DFlashLabError(f"rates {list(rates)}; choose from {', '.join(RATES)}")
    frame = slot_frame(traces)
    slots = frame["slot"].tolist()
    series = {
        f"{rate}: {RATES[rate]}": [
            (slot, share)
            for slot, share in zip(slots, frame[rate].tolist(), strict=True)
            if share == share  # a slot that was never reached has no rate
        ]
        for rate in rates
    }
    made = lines_figure(
        series,
        x="slot in the block",
        y="share",
        headline="Three meanings of acceptance",
        note=f"{int(frame['drafted'].max())} cycles",
        ticks=slots,
    )
    made[0].axes[0].set_ylim(0, 1.03)
    return made


def summary_view(traces: Sequence[DecodeTrace]) -> View:
    """The one-number definitions beside what they mean."""
    found = acceptance_summary(traces)
    rows = [[name, float(found[name]), what] for name, what in SUMMARY.items()]
    caption = f"{found['cycles']} cycles, {found['tokens']} tokens"
    return table_view(["definition", "value", "what it says"], rows, caption)


def acceptance_view(
    traces: Sequence[DecodeTrace], rates: Sequence[str] = tuple(RATES)
) -> View:
    """Figure and table together."""
    parts = [figure_view(rates_figure(traces, rates)), summary_view(traces)]
    return View("".join(p.html for p in parts), "\n".join(p.text for p in parts))

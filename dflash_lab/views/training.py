"""A training run as a picture: accuracy per slot, and tau predicted and measured.

Leaves out: reading live processes; a run's metric lines are all that is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dflash_lab.errors import DFlashLabError
from dflash_lab.views.curves import Drawing
from dflash_lab.views.diffusion import lines_figure
from dflash_lab.views.render import render
from dflash_lab.views.view import View, figure_view, stacked

STATES = {
    "waiting": "The run has not begun.",
    "running": "The run goes on.",
    "stopping": "The run ends behind its current step.",
    "finished": "The run is done.",
    "stopped": "The run was stopped; with resume=True it goes on from its checkpoint.",
    "failed": "The run has failed; its result() says why.",
}


def _points(lines: Sequence[Mapping], key: str) -> list[tuple[float, float]]:
    return [(line["step"], line[key]) for line in lines if line.get(key) is not None]


def accuracy_figure(
    lines: Sequence[Mapping], slots: Sequence[int] | None = None
) -> Drawing:
    """Accuracy of some slots against steps.

    Args:
        lines: of a run's metrics, see `training.metrics.read_metrics`.
        slots: at most five, counted from 1; first, last and some between if None.

    Returns:
        The figure and its alt text.

    Raises:
        DFlashLabError: no lines yet.
    """
    if not lines:
        raise DFlashLabError("the run has no metrics yet; wait for its first line")
    last = len(lines[0]["accuracy"])
    slots = slots or sorted({1, 2, (last + 1) // 2, last})
    series = {
        f"slot {slot}": [(line["step"], line["accuracy"][slot - 1]) for line in lines]
        for slot in slots
    }
    made = lines_figure(
        series,
        x="training step",
        y="accuracy on training blocks",
        headline="Near slots are learnt first",
    )
    made[0].axes[0].set_ylim(0, 1)
    return made


def tau_figure(lines: Sequence[Mapping]) -> Drawing:
    """Tau predicted from the accuracies, and measured by decoding, against steps.

    Args:
        lines: as for `accuracy_figure`.

    Returns:
        The figure and its alt text.
    """
    if not lines:
        raise DFlashLabError("the run has no metrics yet; wait for its first line")
    series = {"predicted from training accuracy": _points(lines, "predicted_tau")}
    measured = _points(lines, "measured_tau")
    if measured:
        series["measured on held-out prompts"] = measured
    return lines_figure(
        series, x="training step", y="tau", headline="Does it decode as it trains?"
    )


def status_sentence(lines: Sequence[Mapping], state: str) -> str:
    """Where a run stands, in words.

    Args:
        lines: of a run's metrics; none yet is allowed.
        state: of `STATES`.
    """
    if not lines:
        waiting = " Curves appear with its first line of metrics."
        return STATES[state] + (waiting if state == "running" else "")
    last = lines[-1]
    parts = [f"step {last['step']}", f"loss {last['loss']:.3f}"]
    measured = _points(lines, "measured_tau")
    if measured:
        parts.append(f"tau {measured[-1][1]:.2f} measured at step {measured[-1][0]}")
    parts.append(f"{last['blocks_per_second']:.0f} blocks/s")
    if state == "running":
        parts.append(f"{last['seconds_left'] / 60:.1f} minutes left")
    return f"{STATES[state]} {', '.join(parts)}."


def run_view(lines: Sequence[Mapping], state: str) -> View:
    """A run while it runs, or behind it: where it stands, accuracy per slot, tau.

    Args:
        lines: of a run's metrics; none yet is allowed.
        state: of `STATES`.
    """
    sentence = status_sentence(lines, state)
    head = View(render("views/view.html", sentence=sentence), sentence)
    if not lines:
        return head
    figures = (accuracy_figure(lines), tau_figure(lines))
    return stacked(head, *map(figure_view, figures))

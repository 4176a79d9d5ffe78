"""The bug clinic's board: every patient's accuracies, and its scores under other rules.

Leaves out: examining (`clinic/patients.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_lab.clinic.patients import Symptoms
from dflash_lab.errors import DFlashLabError
from dflash_lab.views.curves import Drawing, style_axes
from dflash_lab.views.style import OKABE_ITO
from dflash_lab.views.view import View, table_view

_ACROSS = 3


def board_figure(patients: Sequence[Symptoms]) -> Drawing:
    """Small multiples: accuracy by slot, in training and when decoding.

    Args:
        patients: at most twelve, of one block size.

    Returns:
        The figure and its alt text.

    Raises:
        DFlashLabError: no patient, or too many.
    """
    from matplotlib.figure import Figure

    if not 1 <= len(patients) <= 12:
        raise DFlashLabError(
            f"{len(patients)} patients; the board has room for 1 to 12"
        )
    rows = -(-len(patients) // _ACROSS)
    figure = Figure(figsize=(7.2, 0.5 + 1.75 * rows), dpi=150, layout="constrained")
    figure.set_facecolor("white")
    grid = figure.subplots(rows, _ACROSS, sharex=True, sharey=True, squeeze=False)
    told = []
    for axes, patient in zip(grid.flat, patients, strict=False):
        slots = range(1, len(patient.training) + 1)
        style_axes(axes)
        for name, values, colour, look in (
            ("in training", patient.training, "orange", "s--"),
            ("when decoding", patient.decoding, "blue", "o-"),
        ):
            axes.plot(slots, values, look, color=OKABE_ITO[colour], ms=4, label=name)
        axes.set_ylim(-0.03, 1.03)
        axes.set_xticks(list(slots))
        axes.set_title(
            f"{patient.name}: tau {patient.tau:.2f}", loc="left", fontsize=10
        )
        told.append(
            f"{patient.name}: slot 1 {patient.training[0]:.2f} in training and "
            f"{patient.decoding[0]:.2f} when decoding, tau {patient.tau:.2f}"
        )
    for axes in grid.flat[len(patients) :]:
        axes.set_visible(False)
    figure.supxlabel("slot", fontsize=9.5)
    figure.supylabel("accuracy", fontsize=9.5)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper right", ncols=2, frameon=False, fontsize=9
    )
    return figure, f"Accuracy by slot of {len(patients)} drafters. {'; '.join(told)}."


def rules_view(patients: Sequence[Symptoms]) -> View:
    """Tokens a cycle from a random place: as decoded, and under every other rule.

    Args:
        patients: of one target.
    """
    rules = list(dict.fromkeys(rule for p in patients for rule in p.under))
    rows = [
        [p.name, p.score, *(p.under.get(rule, float("nan")) for rule in rules)]
        for p in patients
    ]
    return table_view(
        ["drafter", "as decoded", *(rule.replace("_", " ") for rule in rules)],
        rows,
        "tokens a cycle from a random place, if the drafter were given ...",
    )

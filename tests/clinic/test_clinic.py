"""The clinic: every bug is seen before training, and shows in a finished drafter."""

from __future__ import annotations

import dataclasses

import pytest

from dflash_lab import load_pair, load_prompts
from dflash_lab.clinic.patients import (
    HEALTHY,
    PATIENTS,
    Symptoms,
    checks_before_training,
    examine_patient,
)
from dflash_lab.errors import DFlashLabError
from dflash_lab.measure.intervals import Interval
from dflash_lab.training.data.faults import FAULTS

pytest.importorskip("matplotlib")

from dflash_lab.views.ablations import differences_figure
from dflash_lab.views.clinic import board_figure, rules_view


@pytest.fixture(scope="module")
def pair():
    return load_pair("tiny", with_drafter=False, quiet=True)


@pytest.fixture(scope="module")
def prompts(pair):
    return [
        pair.encode(prompt.turns[0])
        for name in ("tiny-chat", "tiny-math")
        for prompt in load_prompts(name, 2)
    ]


def failed(checks) -> set[str]:
    return {check.name for check in checks if check.passed is False}


def test_every_patient_is_a_known_fault():
    members = [f"fault-{name}".replace("_", "-") for name in FAULTS]
    assert sorted(PATIENTS.values()) == sorted(members)


def test_sound_code_passes_every_check(pair):
    assert failed(checks_before_training(None, pair)) == set()


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_every_fault_is_seen_before_the_first_step(pair, fault):
    assert failed(checks_before_training(fault, pair)), fault


def test_a_patient_shows_what_its_training_hid(pair, prompts):
    healthy = examine_patient(HEALTHY, pair, prompts, 48)
    letter = next(k for k, v in PATIENTS.items() if v == "fault-label-shift")
    patient = examine_patient(letter, pair, prompts, 48)
    assert patient.training[0] > 0.7 and patient.decoding[0] < 0.3
    assert healthy.decoding[0] > 0.7 and healthy.tau > 3 > 1.5 > patient.tau
    # Under the rule of its training it drafts well; a sound one does not.
    assert patient.under["label_shift"] > 2 * patient.score
    assert healthy.under["label_shift"] < healthy.score
    assert healthy.under["features_zeroed"] < 0.6 * healthy.score
    with pytest.raises(DFlashLabError, match="no patient 'Z'; there are A, B"):
        examine_patient("Z", pair, prompts)


def symptoms(name: str, **changes) -> Symptoms:
    made = Symptoms(name, (0.9, 0.5), (0.8, 0.4), 2.25, 2.0, {"label_shift": 1.5})
    return dataclasses.replace(made, **changes)


def test_the_board_has_a_panel_for_each_patient():
    figure, alt = board_figure([symptoms("A"), symptoms("B", tau=1.0)])
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in shown] == [
        "A: tau 2.25",
        "B: tau 1.00",
    ]
    assert "B: slot 1 0.90 in training and 0.80 when decoding, tau 1.00" in alt
    for count in (0, 13):
        with pytest.raises(DFlashLabError, match=f"{count} patients"):
            board_figure([symptoms("A")] * count)


def test_scores_under_other_rules_stand_beside_the_own_one():
    other = symptoms("B", under={"label_shift": 3.0, "layers_before": 0.5})
    lines = rules_view([symptoms("A"), other]).text.splitlines()
    assert any(line.split()[:3] == ["A", "2.00", "1.50"] for line in lines)
    assert any(line.split()[:4] == ["B", "2.00", "3.00", "0.50"] for line in lines)


def test_differences_are_filled_where_they_beat_the_noise():
    found = {
        "more": Interval(1.0, 0.5, 1.5),
        "less": Interval(-1.0, -1.5, -0.5),
        "same": Interval(0.1, -0.1, 0.3),
        "noisy": Interval(0.3, 0.2, 0.4),
    }
    figure, alt = differences_figure(found, "base", 0.25)
    marks = [x for x in figure.axes[0].lines if x.get_marker() in ("o", "s")]
    filled = [mark.get_markerfacecolor() != "white" for mark in marks]
    assert filled == [True, True, False, False]
    assert [mark.get_marker() for mark in marks] == ["o", "s", "o", "o"]
    assert "more 1.00 [0.50, 1.50]" in alt and "±0.25" in alt
    with pytest.raises(DFlashLabError, match="no drafter is compared with base"):
        differences_figure({}, "base")

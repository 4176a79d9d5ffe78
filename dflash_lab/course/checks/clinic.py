"""Checks of lesson 08, the bug clinic.

Leaves out: models; rules on small lists, and the names of the patients' faults.
"""

from __future__ import annotations

from collections.abc import Callable

from dflash_lab.clinic.patients import PATIENTS
from dflash_lab.course.checks.core import (
    CheckFailed,
    call,
    passed,
    tried_on,
    try_cases,
)
from dflash_lab.training.data.faults import FAULTS

# What to look at again, by fault; the name itself would spoil the game.
_HINTS = {
    "label_shift": "the fault under whose rule it gives nearly 4 tokens a cycle",
    "context_leak": "the fault that makes training perfect: look under whose rule it "
    "gives all 8 tokens",
    "phantom_anchor": "a fault that shows at slots 1 and 7, and under whose rule it "
    "gives more than as decoded",
    "causal_block": "the fault that hardly shows in a drafter of one layer",
    "fixed_blocks": "a fault of the anchors: it has learnt its own texts too well, and "
    "no rule helps",
    "layer_ids_off_by_one": "the fault that one of the last two columns repairs",
    "wrong_rope": "the fault that hides the features' places",
    "off_policy_text": "a fault of the texts: training and decoding agree, on less",
}


_TEXT = [5, 7, 7, 2, 9, 4, 1, 3]


@tried_on(
    [
        ([7, 7, 2], _TEXT, 0, 0),
        ([7, 2, 9], _TEXT, 0, 1),
        ([2, 9, 1], _TEXT, 2, 0),
        ([1, 3, 8], _TEXT, 4, 1),
        ([9, 4], _TEXT, 3, -1),
        ([3, 5, 7], _TEXT, 0, -2),
    ]
)
def check_shifted(drafts: list[int], text: list[int], anchor: int, shift: int) -> int:
    """`shifted(drafts, text, anchor, shift)`: drafts that fit the text so shifted."""
    count = 0
    for slot, draft in enumerate(drafts, start=1):
        place = anchor + slot + shift
        count += 0 <= place < len(text) and text[place] == draft
    return count


@tried_on(
    [
        ([True, True, True, False, False], 3),
        ([True, True, True, True, False], 3),
        ([True, False, False, False, True, True], 1),
        ([False, False, False], 2),
    ],
    what="leak",
)
def check_first_leak(sees: list[bool], anchor: int) -> int | None:
    """`first_leak(sees, anchor)`: first context place that a block must not see."""
    for place in range(anchor, len(sees)):
        if sees[place]:
            return place
    return None


def check_first_difference(first_difference: Callable) -> None:
    """`first_difference(training, decoding, tolerance)`: first slot that differs."""
    base = [[1.0, -2.0], [0.5, 0.25], [3.0, 4.0]]
    late = [[1.0, -2.0], [0.5, 0.25], [3.0, 4.5]]
    lower = [[1.0, -2.0], [0.5, -0.75], [3.0, 9.0]]
    spread = [[1.0, -2.0], [1.25, 1.0], [3.0, 4.0]]
    tiny = [[1.00001, -2.0], [0.5, 0.25], [3.0, 4.0]]
    cases = (
        (base, base, 1e-3, None),
        (base, late, 1e-3, 2),
        (base, lower, 1e-3, 1),
        (base, tiny, 1e-3, None),
        (late, base, 1.0, None),
        (base, spread, 1.0, None),
    )
    names = "training decoding tolerance"
    try_cases(first_difference, names, cases, what="row")


def check_suspect(suspect: Callable) -> None:
    """`suspect(as_decoded, under, margin)`: the rule that helps most, if enough."""
    cases = (
        (1.0, {"leak": 8.0, "shift": 1.1}, 0.5, "leak"),
        (4.5, {"leak": 4.1, "shift": 4.6}, 0.5, None),
        (2.4, {"leak": 2.2, "before": 4.2, "after": 3.1}, 0.5, "before"),
        (1.0, {"leak": 1.2, "shift": 1.6}, 0.5, "shift"),
        (2.5, {"leak": 2.2, "after": 3.1, "before": 4.2}, 0.5, "before"),
        (2.0, {"leak": 2.5, "shift": 1.0}, 0.5, None),
    )
    try_cases(suspect, "as_decoded under margin", cases, what="suspect")


def check_diagnose(diagnose: Callable) -> None:
    """`diagnose(patient)`: the fault's name for each letter, as in the table."""
    for letter, member in PATIENTS.items():
        fault = member.removeprefix("fault-").replace("-", "_")
        found = call(diagnose, letter, case=f"patient {letter}")
        if found not in FAULTS:
            raise CheckFailed(
                f"patient {letter}: expected one of the eight names "
                f"({', '.join(FAULTS)}), got {found!r}"
            )
        if found != fault:
            raise CheckFailed(
                f"patient {letter}: expected {_HINTS[fault]}, got {found!r}"
            )
    passed(diagnose, len(PATIENTS))

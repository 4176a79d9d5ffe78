"""What all checks share: calling the reader's function, comparing, saying what is off.

Leaves out: what is right; each lesson's module knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


class CheckFailed(AssertionError):
    """What the reader wrote is not right yet; the message says where."""


def call(function: Callable, *arguments, case: str):
    """The reader's result, with arguments that he may change without harm.

    Raises:
        CheckFailed: the blank is still there, or the call fails.
    """
    copies = [list(a) if isinstance(a, list) else a for a in arguments]
    try:
        return function(*copies)
    except NotImplementedError as blank:
        raise CheckFailed(f"{name(function)} is still blank ({blank})") from None
    except Exception as error:
        raise CheckFailed(
            f"{case}: {name(function)} raised {type(error).__name__}: {error}"
        ) from error


def same_number(found, expected: float, case: str, close: float = 1e-6) -> None:
    """Compare a number.

    Raises:
        CheckFailed: no number, or another one.
    """
    try:
        value = float(found)
    except (TypeError, ValueError):
        raise CheckFailed(
            f"{case}: expected the number {expected:g}, got {_shown(found)}"
        ) from None
    if not math.isclose(value, expected, rel_tol=close, abs_tol=close):
        raise CheckFailed(f"{case}: expected {expected:g}, got {value:g}")


def same_list(
    found, expected: Sequence, case: str, what: str = "position", first: int = 0
) -> None:
    """Compare a list, position by position.

    Args:
        found: the reader's.
        expected: what is right.
        case: what was asked.
        what: a position is called.
        first: number of the first position.

    Raises:
        CheckFailed: no list, another length, or the first position that differs.
    """
    if hasattr(found, "tolist"):
        found = found.tolist()
    if not isinstance(found, (list, tuple)):
        raise CheckFailed(
            f"{case}: expected a list such as {_shown(list(expected))}, got "
            f"{_shown(found)}"
        )
    if len(found) != len(expected):
        raise CheckFailed(
            f"{case}: expected {len(expected)} entries, {_shown(list(expected))}, got "
            f"{len(found)}: {_shown(list(found))}"
        )
    for place, (mine, right) in enumerate(zip(found, expected, strict=True)):
        # A single answer has no number that the reader would know.
        number = f" {place + first}" if len(expected) > 1 else ""
        where = f"{case}, {what}{number}"
        if isinstance(right, (list, tuple)):
            same_list(mine, right, f"{case}, row {place}", "column")
        elif isinstance(right, float):
            same_number(mine, right, where)
        elif mine != right or (isinstance(right, bool) and not _is_truth(mine)):
            raise CheckFailed(f"{where}: expected {right!r}, got {_shown(mine)}")


def passed(function: Callable, cases: int) -> None:
    """Say that it is right."""
    print(f"✓ {name(function)}: right in {cases} cases")


def name(function: Callable) -> str:
    """What the reader called it."""
    return getattr(function, "__name__", "your function")


def _is_truth(value) -> bool:
    return value is True or value is False or type(value).__name__ in ("bool_", "bool")


def _shown(value) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."

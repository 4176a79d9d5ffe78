"""What all checks share: calling the reader's function, comparing, saying what is off.

Leaves out: what is right; each lesson's module knows.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Sequence


class CheckFailed(AssertionError):
    """What the reader wrote is not right yet; the message says where."""


def tried_on(
    cases: Sequence[Sequence], **options
) -> Callable[[Callable], Callable[[Callable], None]]:
    """Make a check of a function that finds what is right in a slow way of its own.

        @tried_on([(8, 3), (36, 5)], what="feature")
        def check_layer_ids(num_layers, n):
            ...  # returns what is right

        check_layer_ids(layer_ids)  # compares the reader's function with it

    Args:
        cases: the arguments of each call.
        options: of `try_cases`.
    """

    def make(right: Callable) -> Callable[[Callable], None]:
        names = " ".join(inspect.signature(right).parameters)

        def check(function: Callable) -> None:
            answered = [(*case, right(*copy.deepcopy(case))) for case in cases]
            try_cases(function, names, answered, **options)

        check.__name__, check.__module__ = right.__name__, right.__module__
        check.__qualname__, check.__doc__ = right.__qualname__, right.__doc__
        return check

    return make


def try_cases(
    function: Callable,
    names: str,
    cases: Sequence[Sequence],
    *,
    what: str = "",
    first: int = 0,
    say: Callable[..., str] | None = None,
) -> None:
    """Compare the reader's function with what is right, and say if it is.

    Args:
        function: the reader's.
        names: of its arguments, as messages call them.
        cases: the arguments of each call, and the answer behind them.
        what: an entry of the answer is called. An answer that is no list is compared
            as a number if this is empty.
        first: number of a list's first entry.
        say: a case in words, if names and values would be hard to read.

    Raises:
        CheckFailed: the first case that is not right.
    """
    for *arguments, expected in cases:
        pairs = zip(names.split(), arguments, strict=True)
        case = ", ".join(f"{name}={value!r}" for name, value in pairs)
        if say is not None:
            case = say(*arguments)
        found = call(function, *arguments, case=case)
        if isinstance(expected, list):
            same_list(found, expected, case, what or "position", first)
        elif what:  # a single answer, which need not be a number
            same_list([found], [expected], case, what)
        else:
            same_number(found, expected, case)
    passed(function, len(cases))


def call(function: Callable, *arguments, case: str):
    """The reader's result, with arguments that he may change without harm.

    Raises:
        CheckFailed: the blank is still there, or the call fails.
    """
    try:
        return function(*copy.deepcopy(arguments))
    except NotImplementedError as blank:
        raise CheckFailed(f"{_name(function)} is still blank ({blank})") from None
    except Exception as error:
        raise CheckFailed(
            f"{case}: {_name(function)} raised {type(error).__name__}: {error}"
        ) from error


def same_number(found, expected: float, case: str) -> None:
    """Compare a number, to a millionth.

    Raises:
        CheckFailed: no number, or another one.
    """
    try:
        value = float(found)
    except (TypeError, ValueError):
        raise CheckFailed(
            f"{case}: expected the number {expected:g}, got {_shown(found)}"
        ) from None
    if not math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-6):
        raise CheckFailed(f"{case}: expected {expected:g}, got {value:g}")


def same_list(
    found,
    expected: Sequence,
    case: str,
    what: str = "position",
    first: int = 0,
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
    if not isinstance(found, (list, tuple, range)):
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
        mine = mine.tolist() if hasattr(mine, "tolist") else mine
        # A single answer has no number that the reader would know.
        number = f" {place + first}" if len(expected) > 1 else ""
        where = f"{case}, {what}{number}"
        if isinstance(right, (list, tuple)):
            same_list(mine, right, f"{case}, row {place}", "column")
        elif isinstance(right, float):
            same_number(mine, right, where)
        elif mine != right or (isinstance(right, bool) and type(mine) is not bool):
            raise CheckFailed(f"{where}: expected {right!r}, got {_shown(mine)}")


def leading(truths: Iterable[bool]) -> int:
    """How many are true before the first that is not."""
    count = 0
    for true in truths:
        if not true:
            break
        count += 1
    return count


def passed(function: Callable, cases: int) -> None:
    """Say that it is right."""
    print(f"✓ {_name(function)}: right in {cases} cases")


def _name(function: Callable) -> str:
    return getattr(function, "__name__", "your function")


def _shown(value) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."

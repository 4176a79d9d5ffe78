"""The outcome of a check, and what a failed one says: cause and fix.

Leaves out: the checks (`parity.py` before training, `clinic/diagnosis.py` of a
    drafter).
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_lab.errors import DFlashLabError
from dflash_lab.training.data.faults import FAULTS


@dataclass(frozen=True)
class Check:
    """Outcome of one check.

    Attributes:
        name: what was compared.
        passed: whether it holds.
        measured: what was found, with the limit.
        cause: suspected cause if it fails.
        fix: what to change then.
    """

    name: str
    passed: bool
    measured: str
    cause: str = ""
    fix: str = ""

    def __str__(self) -> str:
        text = f"{'ok  ' if self.passed else 'FAIL'}  {self.name}: {self.measured}"
        if not self.passed:
            text += f"\n      cause: {self.cause}\n      fix: {self.fix}"
        return text


def require(checks: list[Check]) -> None:
    """Refuse to go on with failed checks.

    Raises:
        DFlashLabError: naming each failure, its cause and the fix.
    """
    failed = [c for c in checks if not c.passed]
    if failed:
        raise DFlashLabError(
            "training would not match decoding:\n" + "\n".join(str(c) for c in failed)
        )


def fault_check(name: str, measured: str, fault: str, passed: bool) -> Check:
    """A check whose failure means one of the known faults (see `data/faults.py`)."""
    return Check(name, passed, measured, FAULTS[fault].what, FAULTS[fault].fix)

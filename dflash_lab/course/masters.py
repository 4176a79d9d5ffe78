"""A lesson's master: its cells, and what of them the lesson and the exercises show.

A master is a Python file in percent format, `notebooks/masters/NN_name.py`. Cells begin
with `# %%` or `# %% [markdown]`, with tags behind (`# %% tags: slide`).

* Between `# BEGIN SOLUTION` and `# END SOLUTION` stands what the reader is to write.
  The lesson shows it; the exercises `raise NotImplementedError("about 3 lines")`.
* A markdown cell tagged `answer` is a question's answer; the exercises ask for one.
* A cell tagged `lesson` is in the lesson only.
* `{{time}}` in the first cell becomes the measured running time.

Leaves out: what the lessons say; notebooks and their outputs (`lessons.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dflash_lab.errors import DFlashLabError

MAX_CODE_LINES = 15
_BEGIN, _END = "# BEGIN SOLUTION", "# END SOLUTION"
_HEADER = re.compile(r"^# %%( \[markdown\])?(?: tags: (.+))?$\n?", re.MULTILINE)
_SOLUTION = re.compile(rf"^( *){_BEGIN}\n(.*?)\n *{_END}$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Cell:
    """A cell of a master.

    Attributes:
        kind: `code` or `markdown`.
        source: without comment marks, solution marks included.
        tags: of the header line.
    """

    kind: str
    source: str
    tags: tuple[str, ...] = field(default=())


def read_master(path: Path) -> list[Cell]:
    """The cells of a master.

    Raises:
        DFlashLabError: text before the first cell, unpaired solution marks, or a code
            cell that is too long to be read at a glance.
    """
    before, *parts = _HEADER.split(path.read_text(encoding="utf-8"))
    if before.strip():
        raise DFlashLabError(f"{path.name}: begin with a line '# %%'")
    cells = []
    for mark, tags, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        if mark:
            body = re.sub(r"^# ?", "", body, flags=re.MULTILINE)
        kind = "markdown" if mark else "code"
        cells.append(Cell(kind, body.strip("\n"), tuple((tags or "").split())))
        _check(path, cells[-1])
    return cells


def _check(path: Path, cell: Cell) -> None:
    begins, ends = cell.source.count(_BEGIN), cell.source.count(_END)
    if begins != ends:
        raise DFlashLabError(
            f"{path.name}: {begins} '{_BEGIN}' and {ends} '{_END}' in one cell; pair "
            "them"
        )
    lines = _solved(cell.source).splitlines()
    if cell.kind == "code" and len(lines) > MAX_CODE_LINES:
        raise DFlashLabError(
            f"{path.name}: a code cell of {len(lines)} lines begins {lines[0]!r}; the "
            f"limit is {MAX_CODE_LINES}, move code into the library"
        )


def _solved(source: str) -> str:
    return _SOLUTION.sub(r"\2", source)


def _blank(source: str) -> str:
    def shown(solution: re.Match) -> str:
        count = sum(bool(line.strip()) for line in solution[2].splitlines())
        lines = "1 line" if count == 1 else f"{count} lines"
        return f'{solution[1]}raise NotImplementedError("about {lines}")'

    return _SOLUTION.sub(shown, source)


def solutions(cells: Sequence[Cell]) -> list[str]:
    """Every text that exercises must not contain: solution blocks and answers."""
    found = []
    for cell in cells:
        if cell.kind == "code":
            found += [solution[2] for solution in _SOLUTION.finditer(cell.source)]
        elif "answer" in cell.tags:
            found.append(cell.source)
    return found


def lesson_cells(cells: Sequence[Cell], seconds: float | None = None) -> list[Cell]:
    """Cells of the lesson: everything, solved."""
    shown = []
    for cell in cells:
        source = _solved(cell.source) if cell.kind == "code" else cell.source
        if "answer" in cell.tags:
            source = f"<details><summary>An answer</summary>\n\n{source}\n\n</details>"
        shown.append(_timed(cell, source, seconds))
    return shown


def exercise_cells(cells: Sequence[Cell], seconds: float | None = None) -> list[Cell]:
    """Cells of the exercises: blanks in place of solutions."""
    shown = []
    for cell in cells:
        if "lesson" in cell.tags:
            continue
        source = _blank(cell.source) if cell.kind == "code" else cell.source
        if "answer" in cell.tags:
            source = "*Your answer:*"
        shown.append(_timed(cell, source, seconds))
    return shown


def _timed(cell: Cell, source: str, seconds: float | None) -> Cell:
    return replace(cell, source=source.replace("{{time}}", spoken_time(seconds)))


def spoken_time(seconds: float | None) -> str:
    """A running time for a header: rounded, and never below what was measured."""
    if seconds is None:
        return "not measured yet"
    if seconds < 60:
        return f"{int(-(-seconds // 10)) * 10} seconds"
    minutes = -(-seconds // 30) / 2
    return "1 minute" if minutes == 1 else f"{minutes:g} minutes"

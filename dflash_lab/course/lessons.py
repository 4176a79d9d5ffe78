"""From one master to two notebooks: the lesson with its outputs, the exercises without.

The way goes in one direction only: nobody edits the built notebooks.

Leaves out: what a master is (`masters.py`), and the command line (`cli/lessons.py`).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dflash_lab.course.masters import Cell, exercise_cells, lesson_cells, read_master
from dflash_lab.errors import DFlashLabError
from dflash_lab.files import write_text_atomically

if TYPE_CHECKING:
    from nbformat import NotebookNode

T = TypeVar("T")
MAX_BYTES = 400_000
_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
# What must not be in a notebook that is committed.
_UNWANTED = {
    "widget metadata": r'"widgets"\s*:',
    # Figures are text (SVG), so that a difference can be read and searched.
    "binary data": r";base64,|\"image/png\"",
    "an error output": r'"output_type"\s*:\s*"error"',
    "an absolute path": r"(?<![\w.:/])/(?:home|root|work|tmp|Users)/[\w.]",
}


def is_fast() -> bool:
    """Whether lessons shrink their work, to test mechanics: `DFLASH_LAB_FAST=1`."""
    return os.environ.get("DFLASH_LAB_FAST", "") not in ("", "0")


def pick(full: T, fast: T) -> T:
    """`full`, or `fast` in fast mode."""
    return fast if is_fast() else full


def to_notebook(cells: Sequence[Cell], seconds: float | None = None) -> NotebookNode:
    """An `nbformat` notebook without outputs; the same cells give the same bytes."""
    import nbformat

    notebook = nbformat.v4.new_notebook()
    notebook.metadata = {
        "kernelspec": dict(_KERNEL),
        "language_info": {"name": "python"},
    }
    if seconds is not None:
        notebook.metadata["dflash_lab"] = {"seconds": round(seconds, 1)}
    for number, cell in enumerate(cells):
        make = getattr(nbformat.v4, f"new_{cell.kind}_cell")
        made = make(cell.source, id=f"cell-{number:03d}")
        if cell.tags:
            made.metadata["tags"] = list(cell.tags)
        if "slide" in cell.tags:
            made.metadata["slideshow"] = {"slide_type": "slide"}
        notebook.cells.append(made)
    return notebook


def execute(notebook: NotebookNode, folder: Path, timeout: int = 1200) -> float:
    """Run all cells in a fresh kernel and keep the outputs; returns seconds.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell that fails.
    """
    from nbclient import NotebookClient

    started = time.monotonic()
    NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    ).execute()
    return time.monotonic() - started


def clean(notebook: NotebookNode) -> None:
    """Drop what must not be kept: widget state, times, progress bars, widget views."""
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if _is_kept(output)]


def _is_kept(output: NotebookNode) -> bool:
    if "data" in output:
        output.data.pop("application/vnd.jupyter.widget-view+json", None)
        return bool(output.data)
    return output.output_type != "stream" or output.name != "stderr"


def problems(text: str) -> list[str]:
    """What a notebook that is committed must not have.

    Args:
        text: of the file.
    """
    size = len(text.encode("utf-8"))
    found = [f"{size} bytes; the limit is {MAX_BYTES}"] if size > MAX_BYTES else []
    for what, pattern in _UNWANTED.items():
        if match := re.search(pattern, text):
            found.append(f"{what}: {text[match.start() : match.end() + 40]!r}")
    return found


def build(
    master: Path, out: Path, *, run: bool = True, timeout: int = 1200
) -> tuple[Path, Path]:
    """Write the lesson and the exercises of a master.

    Args:
        master: `notebooks/masters/NN_name.py`.
        out: `notebooks/`; exercises go into its folder `exercises`.
        run: execute the lesson. Without, outputs and time of the existing lesson are
            kept where the code is the same.
        timeout: seconds that one cell may take.

    Returns:
        Paths of lesson and exercises.

    Raises:
        DFlashLabError: an executed lesson that must not be committed.
    """
    import nbformat

    cells = read_master(master)
    lesson_path = out / f"{master.stem}.ipynb"
    exercise_path = out / "exercises" / f"{master.stem}.ipynb"
    lesson = to_notebook(lesson_cells(cells))
    if run:
        seconds: float | None = execute(lesson, out, timeout)
        clean(lesson)
    else:
        seconds = _keep_outputs(lesson, lesson_path)
    final = to_notebook(lesson_cells(cells, seconds), seconds)
    for made, executed in zip(final.cells, lesson.cells, strict=True):
        _take_outputs(made, executed)
    text = nbformat.writes(final) + "\n"
    wrong = problems(text)
    if wrong:
        raise DFlashLabError(f"{lesson_path.name} must not be kept: {'; '.join(wrong)}")
    write_text_atomically(lesson_path, text)
    exercises = to_notebook(exercise_cells(cells, seconds), seconds)
    write_text_atomically(exercise_path, nbformat.writes(exercises) + "\n")
    return lesson_path, exercise_path


def _keep_outputs(lesson: NotebookNode, path: Path) -> float | None:
    """Outputs of the lesson that stands there already, and its time."""
    import nbformat

    if not path.exists():
        return None
    old = nbformat.read(path, as_version=4)
    executed = {c.source: c for c in old.cells if c.cell_type == "code"}
    for cell in lesson.cells:
        if cell.source in executed:
            _take_outputs(cell, executed[cell.source])
    return old.metadata.get("dflash_lab", {}).get("seconds")


def _take_outputs(cell: NotebookNode, executed: NotebookNode) -> None:
    if cell.cell_type == "code":
        cell.outputs = executed.outputs
        cell.execution_count = executed.execution_count

"""From one master to two notebooks: the lesson with its outputs, the exercises without.

A master is a Python file in percent format, `notebooks/masters/NN_name.py`. Cells begin
with `# %%` or `# %% [markdown]`, with tags behind (`# %% tags: slide`). The way goes in
one direction only: nobody edits the built notebooks.

* Between `# BEGIN SOLUTION` and `# END SOLUTION` stands what the reader is to write.
  The lesson shows it; the exercises `raise NotImplementedError("about 3 lines")`.
* A markdown cell tagged `answer` is a question's answer; the exercises ask for one.
* A cell tagged `lesson` is in the lesson only.
* `{{time}}` in the first cell becomes the measured running time.

Leaves out: what the lessons say, and the command line (`commands/lessons.py`).
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from dflash_lab.errors import DFlashLabError

MAX_BYTES = 400_000
MAX_CODE_LINES = 15
_BEGIN, _END = "# BEGIN SOLUTION", "# END SOLUTION"
_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def is_fast() -> bool:
    """Whether lessons shrink their work, to test mechanics: `DFLASH_LAB_FAST=1`."""
    return os.environ.get("DFLASH_LAB_FAST", "") not in ("", "0")


def pick(full, fast):
    """`full`, or `fast` in fast mode."""
    return fast if is_fast() else full


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
    cells: list[Cell] = []
    kind, tags, lines = None, (), []

    def close() -> None:
        if kind is None:
            if any(line.strip() for line in lines):
                raise DFlashLabError(f"{path.name}: begin with a line '# %%'")
            return
        cells.append(Cell(kind, _source(kind, lines), tags))

    for line in path.read_text(encoding="utf-8").splitlines():
        header = re.fullmatch(r"# %%( \[markdown\])?( tags: (.+))?", line)
        if header:
            close()
            kind = "markdown" if header.group(1) else "code"
            tags = tuple((header.group(3) or "").split())
            lines = []
        else:
            lines.append(line)
    close()
    for cell in cells:
        _check(path, cell)
    return cells


def _source(kind: str, lines: list[str]) -> str:
    if kind == "markdown":
        lines = [re.sub(r"^# ?", "", line) for line in lines]
    return "\n".join(lines).strip("\n")


def _check(path: Path, cell: Cell) -> None:
    begins, ends = cell.source.count(_BEGIN), cell.source.count(_END)
    if begins != ends:
        raise DFlashLabError(
            f"{path.name}: {begins} '{_BEGIN}' and {ends} '{_END}' in one cell; pair "
            "them"
        )
    lines = without_marks(cell.source).splitlines()
    if cell.kind == "code" and len(lines) > MAX_CODE_LINES:
        raise DFlashLabError(
            f"{path.name}: a code cell of {len(lines)} lines begins {lines[0]!r}; the "
            f"limit is {MAX_CODE_LINES}, move code into the library"
        )


def without_marks(source: str) -> str:
    """A code cell as the lesson shows it."""
    lines = source.splitlines()
    return "\n".join(x for x in lines if x.strip() not in (_BEGIN, _END))


def without_solution(source: str) -> str:
    """A code cell as the exercises show it."""
    shown: list[str] = []
    hidden: list[str] | None = None
    for line in source.splitlines():
        if line.strip() == _BEGIN:
            hidden, indent = [], line[: len(line) - len(line.lstrip())]
        elif line.strip() == _END:
            count = sum(bool(x.strip()) for x in hidden)
            lines = "1 line" if count == 1 else f"{count} lines"
            shown.append(f'{indent}raise NotImplementedError("about {lines}")')
            hidden = None
        elif hidden is not None:
            hidden.append(line)
        else:
            shown.append(line)
    return "\n".join(shown)


def solutions(cells: list[Cell]) -> list[str]:
    """Every text that exercises must not contain: solution blocks and answers."""
    found = []
    for cell in cells:
        if cell.kind == "code":
            found += re.findall(rf"{_BEGIN}\n(.*?)\n *{_END}", cell.source, re.DOTALL)
        elif "answer" in cell.tags:
            found.append(cell.source)
    return found


def lesson_cells(cells: list[Cell], seconds: float | None = None) -> list[Cell]:
    """Cells of the lesson: everything, solved."""
    shown = []
    for cell in cells:
        source = without_marks(cell.source) if cell.kind == "code" else cell.source
        if "answer" in cell.tags:
            source = f"<details><summary>An answer</summary>\n\n{source}\n\n</details>"
        shown.append(Cell(cell.kind, _with_time(source, seconds), cell.tags))
    return shown


def exercise_cells(cells: list[Cell], seconds: float | None = None) -> list[Cell]:
    """Cells of the exercises: blanks in place of solutions."""
    shown = []
    for cell in cells:
        if "lesson" in cell.tags:
            continue
        source = without_solution(cell.source) if cell.kind == "code" else cell.source
        if "answer" in cell.tags:
            source = "*Your answer:*"
        shown.append(Cell(cell.kind, _with_time(source, seconds), cell.tags))
    return shown


def _with_time(source: str, seconds: float | None) -> str:
    return source.replace("{{time}}", spoken_time(seconds))


def spoken_time(seconds: float | None) -> str:
    """A running time for a header: rounded, and never below what was measured."""
    if seconds is None:
        return "not measured yet"
    if seconds < 60:
        return f"{int(-(-seconds // 10)) * 10} seconds"
    minutes = -(-seconds // 30) / 2
    return "1 minute" if minutes == 1 else f"{minutes:g} minutes"


def to_notebook(cells: list[Cell], seconds: float | None = None):
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


def execute(notebook, folder: Path, timeout: int = 1200) -> float:
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


def clean(notebook) -> None:
    """Drop what must not be kept: widget state, times, progress bars, widget views."""
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        kept = []
        for output in cell.outputs:
            if output.output_type == "stream" and output.name == "stderr":
                continue
            if "data" in output:
                view = "application/vnd.jupyter.widget-view+json"
                output.data.pop(view, None)
                if not output.data:
                    continue
            kept.append(output)
        cell.outputs = kept


def problems(text: str) -> list[str]:
    """What a notebook that is committed must not have.

    Args:
        text: of the file.
    """
    found = []
    if len(text.encode("utf-8")) > MAX_BYTES:
        found.append(f"{len(text.encode('utf-8'))} bytes; the limit is {MAX_BYTES}")
    for what, pattern in (
        ("widget metadata", r'"widgets"\s*:'),
        # Figures are text (SVG), so that a difference can be read and searched.
        ("binary data", r";base64,|\"image/png\""),
        ("an error output", r'"output_type"\s*:\s*"error"'),
        ("an absolute path", r"(?<![\w.:/])/(?:home|root|work|tmp|Users)/[\w.]"),
    ):
        match = re.search(pattern, text)
        if match:
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
    seconds = None
    if run:
        lesson = to_notebook(lesson_cells(cells))
        seconds = execute(lesson, out, timeout)
        clean(lesson)
    else:
        lesson = to_notebook(lesson_cells(cells))
        seconds = _keep_outputs(lesson, lesson_path)
    final = to_notebook(lesson_cells(cells, seconds), seconds)
    for made, executed in zip(final.cells, lesson.cells, strict=True):
        if made.cell_type == "code":
            made.outputs, made.execution_count = (
                executed.outputs,
                executed.execution_count,
            )
    text = nbformat.writes(final) + "\n"
    wrong = problems(text)
    if wrong:
        raise DFlashLabError(f"{lesson_path.name} must not be kept: {'; '.join(wrong)}")
    _write(lesson_path, text)
    exercises = to_notebook(exercise_cells(cells, seconds), seconds)
    _write(exercise_path, nbformat.writes(exercises) + "\n")
    return lesson_path, exercise_path


def _keep_outputs(lesson, path: Path) -> float | None:
    import nbformat

    if not path.exists():
        return None
    old = nbformat.read(path, as_version=4)
    outputs = {c.source: c for c in old.cells if c.cell_type == "code"}
    for cell in lesson.cells:
        if cell.cell_type == "code" and cell.source in outputs:
            cell.outputs = outputs[cell.source].outputs
            cell.execution_count = outputs[cell.source].execution_count
    return old.metadata.get("dflash_lab", {}).get("seconds")


def _write(path: Path, text: str) -> None:
    from dflash_lab.files import write_text_atomically

    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, text)

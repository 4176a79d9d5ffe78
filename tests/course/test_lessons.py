"""Masters become lessons and exercises; what is committed is what the masters say."""

from __future__ import annotations

import importlib
import json
import re

import pytest
from helpers import ROOT

from dflash_lab.cli.lessons import working_copy
from dflash_lab.cli.main import main
from dflash_lab.course.lessons import (
    MAX_BYTES,
    build,
    is_fast,
    pick,
    problems,
    to_notebook,
)
from dflash_lab.course.masters import (
    Cell,
    exercise_cells,
    lesson_cells,
    read_master,
    solutions,
    spoken_time,
)
from dflash_lab.errors import DFlashLabError
from dflash_lab.files import shipped_folder

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")

NOTEBOOKS = ROOT / "notebooks"
MASTERS = sorted((NOTEBOOKS / "masters").glob("[0-9][0-9]_*.py"))

MASTER = """\
# %% [markdown] tags: slide
# # A lesson
#
# Time: {{time}}.

# %%
import sys

print("progress", file=sys.stderr)

# %%
def double(x):
    # a hint
    # BEGIN SOLUTION
    twice = x + x
    return twice
    # END SOLUTION


print(double(4))

# %% [markdown] tags: answer
# Because it is added to itself.

# %% tags: lesson
secret = double(5)
secret
"""


@pytest.fixture
def master(tmp_path):
    path = tmp_path / "masters" / "01_first.py"
    path.parent.mkdir()
    path.write_text(MASTER, encoding="utf-8")
    return path


def test_a_master_is_read_cell_by_cell(master):
    cells = read_master(master)
    assert [c.kind for c in cells] == ["markdown", "code", "code", "markdown", "code"]
    assert cells[0] == Cell("markdown", "# A lesson\n\nTime: {{time}}.", ("slide",))
    assert cells[4].source == "secret = double(5)\nsecret"
    found = solutions(cells)
    assert found == [
        "    twice = x + x\n    return twice",
        "Because it is added to itself.",
    ]


def test_lesson_and_exercises_differ_in_what_they_give_away(master):
    cells = read_master(master)
    lesson, exercises = lesson_cells(cells, 61.0), exercise_cells(cells, 61.0)
    assert lesson[0].source == "# A lesson\n\nTime: 1.5 minutes."
    assert "SOLUTION" not in lesson[2].source and "twice = x + x" in lesson[2].source
    assert exercises[2].source == (
        "def double(x):\n    # a hint\n"
        '    raise NotImplementedError("about 2 lines")\n\n\nprint(double(4))'
    )
    assert "<details>" in lesson[3].source
    assert exercises[3].source == "*Your answer:*"
    assert len(exercises) == len(lesson) - 1


@pytest.mark.parametrize(
    "seconds,spoken",
    [
        (None, "not measured yet"),
        (0.4, "10 seconds"),
        (41, "50 seconds"),
        (60, "1 minute"),
        (61, "1.5 minutes"),
        (151, "3 minutes"),
    ],
)
def test_times_are_rounded_up(seconds, spoken):
    assert spoken_time(seconds) == spoken


def test_building_executes_keeps_outputs_and_is_repeatable(master, tmp_path):
    lesson_path, exercise_path = build(master, tmp_path)
    lesson = nbformat.read(lesson_path, as_version=4)
    nbformat.validate(lesson)
    code = [c for c in lesson.cells if c.cell_type == "code"]
    assert code[0].outputs == []  # progress bars are not kept
    assert code[1].outputs[0].text == "8\n"
    assert code[2].outputs[0].data["text/plain"] == "10"
    assert "10 seconds" in lesson.cells[0].source
    assert lesson.cells[0].metadata["slideshow"] == {"slide_type": "slide"}
    exercises = nbformat.read(exercise_path, as_version=4)
    text = exercise_path.read_text(encoding="utf-8")
    assert all(not c.get("outputs") for c in exercises.cells)
    for solution in solutions(read_master(master)):
        assert json.dumps(solution)[1:-1] not in text
    first = lesson_path.read_bytes(), exercise_path.read_bytes()
    build(master, tmp_path, run=False)
    assert (lesson_path.read_bytes(), exercise_path.read_bytes()) == first


def test_an_output_is_dropped_when_its_cell_changes(master, tmp_path):
    lesson_path, _ = build(master, tmp_path)
    text = MASTER.replace("double(4)", "double(6)")
    master.write_text(text, encoding="utf-8")
    build(master, tmp_path, run=False)
    lesson = nbformat.read(lesson_path, as_version=4)
    code = [c for c in lesson.cells if c.cell_type == "code"]
    assert code[1].outputs == [] and code[2].outputs != []


@pytest.mark.parametrize(
    "text,message",
    [
        ("import os\n# %%\n", "begin with a line"),
        ("# %%\n# BEGIN SOLUTION\nx = 1\n", "pair them"),
        ("# %%\n" + "x = 1\n" * 16, "a code cell of 16 lines"),
    ],
)
def test_bad_masters_are_refused(tmp_path, text, message):
    path = tmp_path / "01_bad.py"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DFlashLabError, match=message):
        read_master(path)


def test_a_lesson_that_fails_or_leaks_is_not_written(tmp_path):
    path = tmp_path / "01_bad.py"
    path.write_text("# %%\nprint('/home/me/file')\n", encoding="utf-8")
    with pytest.raises(DFlashLabError, match="an absolute path"):
        build(path, tmp_path)
    path.write_text("# %%\n1 / 0\n", encoding="utf-8")
    with pytest.raises(Exception, match="ZeroDivisionError"):
        build(path, tmp_path)
    assert not (tmp_path / "01_bad.ipynb").exists()


def test_what_must_not_be_committed_is_found():
    assert problems('{"metadata": {}}') == []
    assert "limit" in problems("x" * (MAX_BYTES + 1))[0]
    assert "widget" in problems('{"widgets": {}}')[0]
    assert "binary" in problems('src="data:image/png;base64,AAAA"')[0]
    assert "error" in problems('{"output_type": "error"}')[0]
    assert "path" in problems("ready in /home/me/.cache/x")[0]
    assert problems("https://example.org/home/page") == []


def test_fast_mode_picks_the_small_value(monkeypatch):
    monkeypatch.delenv("DFLASH_LAB_FAST", raising=False)
    assert not is_fast() and pick(300, 3) == 300
    monkeypatch.setenv("DFLASH_LAB_FAST", "1")
    assert is_fast() and pick(300, 3) == 3


# --- the shipped lessons --------------------------------------------------------------


@pytest.mark.parametrize("path", MASTERS, ids=lambda p: p.stem)
def test_committed_notebooks_equal_a_fresh_build(path):
    cells = read_master(path)
    lesson = nbformat.read(NOTEBOOKS / f"{path.stem}.ipynb", as_version=4)
    seconds = lesson.metadata["dflash_lab"]["seconds"]
    assert 0 < seconds <= 600
    fresh = to_notebook(lesson_cells(cells, seconds), seconds)
    assert [c.source for c in lesson.cells] == [c.source for c in fresh.cells]
    # Executed from top to bottom, and nothing failed.
    numbers = [c.execution_count for c in lesson.cells if c.cell_type == "code"]
    assert numbers == list(range(1, len(numbers) + 1))
    text = (NOTEBOOKS / f"{path.stem}.ipynb").read_text(encoding="utf-8")
    assert problems(text) == []
    written = (NOTEBOOKS / "exercises" / f"{path.stem}.ipynb").read_text("utf-8")
    fresh = nbformat.writes(to_notebook(exercise_cells(cells, seconds), seconds))
    assert written == fresh + "\n"


@pytest.mark.parametrize("path", MASTERS, ids=lambda p: p.stem)
def test_exercises_give_nothing_away(path):
    text = (NOTEBOOKS / "exercises" / f"{path.stem}.ipynb").read_text("utf-8")
    for solution in solutions(read_master(path)):
        for line in solution.splitlines():
            if len(line.strip()) > 25:
                assert json.dumps(line.strip())[1:-1] not in text, line


@pytest.mark.parametrize("path", MASTERS, ids=lambda p: p.stem)
def test_every_lesson_asks_enough(path):
    cells = read_master(path)
    checks = sum("check_" in c.source for c in cells if c.kind == "code")
    words = sum("answer" in c.tags for c in cells)
    assert words >= 1, "one question to answer in words"
    if path.stem[:2] != "00":
        assert 4 <= checks <= 7, f"{checks} exercises"
    assert "{{time}}" in cells[0].source


def test_no_notebook_is_without_a_master():
    built = {p.stem for p in NOTEBOOKS.glob("*.ipynb")}
    built |= {p.stem for p in (NOTEBOOKS / "exercises").glob("*.ipynb")}
    assert built == {p.stem for p in MASTERS}


# --- the glossary ---------------------------------------------------------------------


def glossary_names():
    text = (NOTEBOOKS.parent / "docs" / "glossary.md").read_text("utf-8")
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ")]
    return [re.search(r"`(.+?)`", row[3]).group(1) for row in rows[1:]]


@pytest.mark.parametrize("name", sorted(set(glossary_names())))
def test_every_code_name_of_the_glossary_exists(name):
    if not name.startswith("dflash_lab."):
        # A parameter or attribute: it stands in the code as a name of its own.
        sources = (NOTEBOOKS.parent / "dflash_lab").rglob("*.py")
        assert any(re.search(rf"\b{name}\b", p.read_text("utf-8")) for p in sources)
        return
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        module, attribute = name.rsplit(".", 1)
        assert hasattr(importlib.import_module(module), attribute)


# --- the commands ---------------------------------------------------------------------


def test_a_working_copy_keeps_what_the_reader_wrote(tmp_path):
    shipped = shipped_folder("notebooks")
    folder = working_copy(shipped, tmp_path / "mine")
    copied = sorted(p.relative_to(folder) for p in folder.rglob("*.ipynb"))
    assert copied == sorted(p.relative_to(shipped) for p in shipped.rglob("*.ipynb"))
    assert len(copied) == 2 * len(MASTERS)
    mine = folder / copied[0]
    mine.write_text("my answers", encoding="utf-8")
    working_copy(shipped, folder)
    assert mine.read_text(encoding="utf-8") == "my answers"


def test_lab_opens_jupyterlab_on_the_copy(tmp_path, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr("subprocess.call", lambda command: calls.append(command) or 0)
    folder = tmp_path / "mine"
    assert main(["lab", "--no-browser", "--folder", str(folder)]) == 0
    assert calls[0][1:] == ["-m", "jupyterlab", str(folder), "--no-browser"]
    assert str(folder) in capsys.readouterr().out
    assert (folder / "exercises").is_dir()


def test_lessons_builds_what_is_asked_for(master, tmp_path, capsys):
    assert main(["lessons", "01", "--no-run", "--notebooks", str(tmp_path)]) == 0
    assert (tmp_path / "exercises" / "01_first.ipynb").exists()
    assert main(["lessons", "09", "--notebooks", str(tmp_path)]) == 2
    assert "no master for 09" in capsys.readouterr().err


@pytest.mark.slow
def test_the_site_shows_every_lesson_and_fetches_nothing(tmp_path):
    assert (
        main(["lessons", "--site", str(tmp_path), "--notebooks", str(NOTEBOOKS)]) == 0
    )
    index = (tmp_path / "index.html").read_text("utf-8")
    for master in MASTERS:
        assert f'href="{master.stem}.html"' in index
        page = (tmp_path / f"{master.stem}.html").read_text("utf-8")
        assert not re.search(r"<(?:script|link|img)[^>]*(?:src|href)=.https?:", page)
        # Every view's own text is there without any script.
        without = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
        assert "What to notice" in without and "<h2" in without
        notebook = nbformat.read(NOTEBOOKS / f"{master.stem}.ipynb", as_version=4)
        shown = [
            output
            for cell in notebook.cells
            if cell.cell_type == "code"
            for output in cell.outputs
            if "text/html" in output.get("data", {})
        ]
        assert without.count('class="dfl-view"') >= len(shown)


def test_slides_show_pictures_and_questions_but_no_code_and_no_answers(tmp_path):
    assert (
        main(["lessons", "--slides", str(tmp_path), "--notebooks", str(NOTEBOOKS)]) == 0
    )
    index = (tmp_path / "index.html").read_text("utf-8")
    for master in MASTERS:
        cells = read_master(master)
        count = sum("slide" in cell.tags for cell in cells)
        assert f'href="{master.stem}.html"' in index and count >= 3
        page = (tmp_path / f"{master.stem}.html").read_text("utf-8")
        assert page.count("<section id=") == count
        assert f"{count} of {count}" in page and "What to notice" in page
        assert not re.search(r"<(?:script|link|img)[^>]*(?:src|href)=.https?:", page)
        for text in solutions(cells):
            assert text.strip() not in page
        notebook = nbformat.read(NOTEBOOKS / f"{master.stem}.ipynb", as_version=4)
        pictures = [
            output["data"]["text/html"]
            for cell in notebook.cells
            if cell.cell_type == "code"
            for output in cell.outputs
            if "text/html" in output.get("data", {})
        ]
        assert all(picture in page for picture in pictures)

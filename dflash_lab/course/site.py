"""A static site of the lessons: readable without Python, without scripts, offline.

Leaves out: themes; the pages follow the reader's light or dark setting.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_lab.files import write_text_atomically
from dflash_lab.views.render import render

if TYPE_CHECKING:
    from nbformat import NotebookNode


@dataclass(frozen=True)
class Lesson:
    """An executed lesson.

    Attributes:
        name: of its file, without the ending.
        notebook: its cells.
    """

    name: str
    notebook: NotebookNode

    @property
    def title(self) -> str:
        """Its first heading."""
        return self._in_header(r"^# (.+)$")

    @property
    def time(self) -> str:
        """The measured time that its header states."""
        return self._in_header(r"Time on two cores: (.+?)\.")

    def _in_header(self, pattern: str) -> str:
        found = re.search(pattern, self.notebook.cells[0].source, re.MULTILINE)
        return found.group(1) if found else ""


def read_lessons(notebooks: Path) -> list[Lesson]:
    """The lessons of a folder, in order."""
    import nbformat

    paths = sorted(notebooks.glob("[0-9][0-9]_*.ipynb"))
    return [Lesson(path.stem, nbformat.read(path, as_version=4)) for path in paths]


def write_pages(
    out: Path, entries: Sequence[tuple[str, str, str, str]], **index: str
) -> list[Path]:
    """Write the pages of lessons, and an index of them.

    Args:
        out: folder of the pages.
        entries: of each lesson the name of its page, title, a note, and the page.
        index: `title`, `heading` and `about` of the index.

    Returns:
        The pages, the index first.
    """
    pages = {"index": render("course/index.html", entries=entries, **index)}
    pages |= {name: page for name, _, _, page in entries}
    for name, page in pages.items():
        write_text_atomically(out / f"{name}.html", page)
    return [out / f"{name}.html" for name in pages]


def build_site(notebooks: Path, out: Path) -> list[Path]:
    """Write a page for each lesson, and an index.

    Args:
        notebooks: folder of the executed lessons.
        out: folder of the pages.

    Returns:
        The pages, the index first.
    """
    lessons = read_lessons(notebooks)
    around = zip([None, *lessons], lessons, [*lessons[1:], None], strict=False)
    return write_pages(
        out,
        [
            (lesson.name, lesson.title, lesson.time, _page(before, lesson, after))
            for before, lesson, after in around
        ],
        title="dflash_lab lessons",
        heading="From noise on words to a drafter of one's own",
        about="Lessons on discrete diffusion, speculative decoding and DFlash, "
        "executed. Times are those of running a lesson on two cores.",
    )


def _page(before: Lesson | None, lesson: Lesson, after: Lesson | None) -> str:
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(template_name="basic")
    # Without a template of nbconvert's own nothing is fetched from elsewhere.
    exporter.mathjax_url = exporter.require_js_url = exporter.jquery_url = ""
    body, _ = exporter.from_notebook_node(lesson.notebook)
    return render(
        "course/lesson.html", title=lesson.title, body=body, before=before, after=after
    )

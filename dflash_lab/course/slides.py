"""Slides of the lessons: static pages, one screen after another.

A cell tagged `slide` begins a slide. On it stand the cell's text, the questions asked
before a run, the pictures of the cells behind it, and what to notice. Code and answers
are left to the notebook beside it. A page needs no script: it scrolls from slide to
slide (space or Page Down) and prints one slide to a sheet.

Leaves out: the pages with everything (`site.py`).
"""

from __future__ import annotations

from pathlib import Path

from dflash_lab.course.site import read_lessons, write_pages
from dflash_lab.views.render import render

_SHOWN = ("**What to notice.**", "**Before you run")


def slides_of(notebook) -> list[str]:
    """HTML of each slide of an executed lesson."""
    from nbconvert.filters.markdown_mistune import markdown2html_mistune

    slides: list[str] = []
    for cell in notebook.cells:
        begins = "slide" in cell.metadata.get("tags", [])
        if begins:
            slides.append("")
        if not slides:
            continue
        if cell.cell_type == "code":
            made = [output.get("data", {}).get("text/html") for output in cell.outputs]
            slides[-1] += "".join(filter(None, made))
        elif begins or cell.source.startswith(_SHOWN):
            slides[-1] += markdown2html_mistune(cell.source)
    return slides


def build_slides(notebooks: Path, out: Path) -> list[Path]:
    """Write a page of slides for each lesson, and an index.

    Args:
        notebooks: folder of the executed lessons.
        out: folder of the pages.

    Returns:
        The pages, the index first.
    """
    entries = []
    for lesson in read_lessons(notebooks):
        slides = slides_of(lesson.notebook)
        page = render("course/slides.html", title=lesson.title, slides=slides)
        entries.append((lesson.name, lesson.title, f"{len(slides)} slides", page))
    return write_pages(
        out,
        entries,
        title="dflash_lab slides",
        heading="Slides",
        about="Space or Page Down goes on, Shift and Space goes back. "
        "Printed, each slide has its own sheet.",
    )

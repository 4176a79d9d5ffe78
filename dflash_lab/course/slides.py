"""Slides of the lessons: static pages, one screen after another.

A cell tagged `slide` begins a slide. On it stand the cell's text, the questions asked
before a run, the pictures of the cells behind it, and what to notice. Code and answers
are left to the notebook beside it. A page needs no script: it scrolls from slide to
slide (space or Page Down) and prints one slide to a sheet.

Leaves out: the pages with everything (`site.py`).
"""

from __future__ import annotations

import html
from pathlib import Path

from dflash_lab.course.site import first_heading, page_html
from dflash_lab.files import write_text_atomically

_SHOWN = ("**What to notice.**", "**Before you run")


def slides_of(notebook) -> list[str]:
    """HTML of each slide of an executed lesson."""
    from nbconvert.filters.markdown_mistune import markdown2html_mistune

    slides: list[list[str]] = []
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if "slide" in tags:
            slides.append([])
        if not slides:
            continue
        if cell.cell_type == "code":
            slides[-1] += _pictures(cell)
        elif "slide" in tags or cell.source.startswith(_SHOWN):
            slides[-1].append(markdown2html_mistune(cell.source))
    return ["".join(parts) for parts in slides]


def _pictures(cell) -> list[str]:
    found = [output.get("data", {}).get("text/html") for output in cell.outputs]
    return [text for text in found if text]


def build_slides(notebooks: Path, out: Path) -> list[Path]:
    """Write a page of slides for each lesson, and an index.

    Args:
        notebooks: folder of the executed lessons.
        out: folder of the pages.

    Returns:
        The pages, the index first.
    """
    import nbformat

    out.mkdir(parents=True, exist_ok=True)
    pages, entries = [out / "index.html"], []
    for path in sorted(notebooks.glob("[0-9][0-9]_*.ipynb")):
        lesson = nbformat.read(path, as_version=4)
        title, slides = first_heading(lesson), slides_of(lesson)
        body = "".join(
            f'<section id="slide-{number}">{slide}<p class="foot">'
            f"{html.escape(title)} · {number} of {len(slides)}</p></section>"
            for number, slide in enumerate(slides, 1)
        )
        page = out / f"{path.stem}.html"
        write_text_atomically(page, page_html(title, body, _CSS))
        pages.append(page)
        entries.append(
            f'<li><a href="{page.name}">{html.escape(title)}</a> '
            f'<span class="muted">{len(slides)} slides</span></li>'
        )
    index = (
        "<h1>Slides</h1><p>Space or Page Down goes on, Shift and Space goes back. "
        "Printed, each slide has its own sheet.</p>"
        f"<ul>{''.join(entries)}</ul>"
    )
    write_text_atomically(pages[0], page_html("dflash_lab slides", index))
    return pages


_CSS = """\
html{scroll-snap-type:y proximity;scroll-padding:0}
main{max-width:72rem;padding-top:0;padding-bottom:0}
section{min-height:100vh;scroll-snap-align:start;display:flex;flex-direction:column;
  justify-content:center;padding:1.5rem 0;font-size:1.3rem;
  border-bottom:1px solid var(--dfl-rule)}
section>*{max-width:100%} section p,section ul{max-width:60rem}
section h1{font-size:2.6rem} section h2{font-size:2rem;margin-top:0}
section .dfl-view{font-size:1.05rem} section .dfl-view img{max-height:70vh;width:auto}
section .foot{margin-top:auto;padding-top:1rem;font-size:.85rem;color:var(--dfl-muted)}
@media print{@page{size:landscape} section{break-after:page;min-height:0;border:0}}"""

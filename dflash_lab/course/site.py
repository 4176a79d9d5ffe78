"""A static site of the lessons: readable without Python, without scripts, offline.

Leaves out: themes; the pages follow the reader's light or dark setting.
"""

from __future__ import annotations

import html
import re
from pathlib import Path

from dflash_lab.files import write_text_atomically
from dflash_lab.views.style import page_css


def first_heading(notebook) -> str:
    """The title of a lesson."""
    return re.search(r"^# (.+)$", notebook.cells[0].source, re.MULTILINE).group(1)


def time_needed(notebook) -> str:
    """The measured time that its header states."""
    found = re.search(r"Time on two cores: (.+?)\.", notebook.cells[0].source)
    return found.group(1) if found else ""


def render_lesson(notebook, links: str) -> str:
    """One lesson as a page of its own.

    Args:
        notebook: executed.
        links: HTML of the way to the other pages.
    """
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(template_name="basic")
    # Without a template of nbconvert's own nothing is fetched from elsewhere.
    exporter.mathjax_url = exporter.require_js_url = exporter.jquery_url = ""
    body, _ = exporter.from_notebook_node(notebook)
    return page_html(
        first_heading(notebook), f"<nav>{links}</nav>{body}<nav>{links}</nav>"
    )


def build_site(notebooks: Path, out: Path) -> list[Path]:
    """Write a page for each lesson, and an index.

    Args:
        notebooks: folder of the executed lessons.
        out: folder of the pages.

    Returns:
        The pages, the index first.
    """
    import nbformat

    paths = sorted(notebooks.glob("[0-9][0-9]_*.ipynb"))
    lessons = [nbformat.read(path, as_version=4) for path in paths]
    out.mkdir(parents=True, exist_ok=True)
    entries = []
    pages = [out / "index.html"]
    for number, (path, lesson) in enumerate(zip(paths, lessons, strict=True)):
        around = ['<a href="index.html">all lessons</a>']
        for step, word in ((-1, "before"), (1, "next")):
            if 0 <= number + step < len(paths):
                other = paths[number + step]
                title = html.escape(first_heading(lessons[number + step]))
                around.append(f'{word}: <a href="{other.stem}.html">{title}</a>')
        page = out / f"{path.stem}.html"
        write_text_atomically(page, render_lesson(lesson, " · ".join(around)))
        pages.append(page)
        entries.append(
            f'<li><a href="{page.name}">{html.escape(first_heading(lesson))}</a> '
            f'<span class="muted">{html.escape(time_needed(lesson))}</span></li>'
        )
    index = (
        "<h1>From noise on words to a drafter of one's own</h1>"
        "<p>Lessons on discrete diffusion, speculative decoding and DFlash, executed. "
        "Times are those of running a lesson on two cores.</p>"
        f"<ul>{''.join(entries)}</ul>"
    )
    write_text_atomically(pages[0], page_html("dflash_lab lessons", index))
    return pages


def page_html(title: str, body: str, css: str = "") -> str:
    """A whole page in the project's style, for both colour schemes.

    Args:
        title: of the page.
        body: HTML of its `<main>`.
        css: rules in addition.
    """
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{page_css()}\n{_CSS}\n{css}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


_CSS = """\
main{max-width:56rem} nav{font-size:.9rem;color:var(--dfl-muted);margin:1rem 0}
a{color:inherit} h1,h2,h3{overflow-wrap:anywhere}
.anchor-link,.jp-InputPrompt,.jp-OutputPrompt,.prompt.input_prompt,
.prompt.output_prompt,.input_prompt,.output_prompt{display:none}
.highlight{border:1px solid var(--dfl-rule);border-radius:6px;
  background:var(--dfl-card);padding:.2rem .8rem;overflow-x:auto}
pre{font-size:.86rem;line-height:1.5;overflow-x:auto;margin:.5rem 0}
code{font-size:.9em;overflow-wrap:anywhere}
.highlight .k,.highlight .kn,.highlight .ow{font-weight:600}
.highlight .c1,.highlight .sd{color:var(--dfl-muted);font-style:italic}
blockquote{border-left:3px solid var(--dfl-rule);margin-left:0;padding-left:1rem}
.dfl-view table{width:auto}
details{max-width:75ch} td,th{padding:.3rem 1rem .3rem 0}"""

"""The files of a bench run: table, figures and one HTML page.

Leaves out: measuring (`measure/bench.py`), and how figures and page look (`views/`).
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_lab.files import write_text_atomically
from dflash_lab.measure.acceptance import acceptance_per_position
from dflash_lab.measure.bench import read_run, trace_of
from dflash_lab.views.bench import (
    interval_figure,
    length_notices,
    notices,
    render_bench,
    slot_notices,
    tau_notices,
)
from dflash_lab.views.curves import acceptance_figure, figure_png, length_histogram

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    # Name of its file, figure, text in its place, caption, what to notice.
    Shown = tuple[str, Figure, str, str, list[str]]


def write_outputs(out: Path, rows: list[dict], records: list[dict]) -> Path:
    """Write `summary.csv`, figures and `report.html`; gives the report's path."""
    text = io.StringIO()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text_atomically(out / "summary.csv", text.getvalue())
    shown = []
    for name, figure, alt, caption, notice in _compared(rows) + _drafted(records):
        picture = figure_png(figure)
        (out / f"{name}.png").write_bytes(picture)
        shown.append((picture, alt, caption, notice))
    page = render_bench(read_run(out), rows, shown)
    write_text_atomically(out / "report.html", page)
    return out / "report.html"


def _compared(rows: list[dict]) -> list[Shown]:
    """Speed-up and tau of all methods but plain decoding, where they were measured."""
    made: list[Shown] = []
    compared = [row for row in rows if row["method"] != "ar"]
    if any(row.get("speedup") for row in compared):
        figure = interval_figure(compared, "speedup", "speed-up over plain decoding", 1)
        caption = "Who is faster, and how sure is it?"
        made.append(("speedup", *figure, caption, notices(rows)))
    if any(row.get("tau") and row["tau"] > 1 for row in compared):
        figure = interval_figure(compared, "tau", "tau (tokens per cycle)", 1)
        caption = "How many tokens does a cycle add?"
        made.append(("tau", *figure, caption, tau_notices(compared)))
    return made


def _drafted(records: list[dict]) -> list[Shown]:
    """Where drafts of DFlash are accepted, if it was measured."""
    found = [trace_of(r) for r in records if r["method"] == "dflash"]
    traces = [trace for trace in found if trace is not None]
    if not any(trace.cycles for trace in traces):
        return []
    survival, counts = acceptance_per_position(traces)
    slots = acceptance_figure(survival, counts)
    caption = "How far into the block do drafts of dflash hold?"
    size = traces[0].header["block_size"]
    lengths = [c.acceptance_length for t in traces for c in t.cycles]
    bars = length_histogram(lengths, size)
    said = length_notices(lengths, size)
    return [
        ("acceptance", *slots, caption, slot_notices(survival)),
        ("lengths", *bars, "Tokens per cycle of dflash", said),
    ]

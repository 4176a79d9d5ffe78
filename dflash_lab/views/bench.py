"""Pictures and page of a bench run: speed-ups with intervals, tau, costs.

Leaves out: computing the rows (`measure/bench_summary.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dflash_lab.errors import DFlashLabError
from dflash_lab.measure.bench_summary import ALL
from dflash_lab.views.curves import Drawing, new_figure, title
from dflash_lab.views.render import render
from dflash_lab.views.style import OKABE_ITO

# A colour and a marker each, so that neither tells a method alone.
LOOKS = (
    (OKABE_ITO["blue"], "o"),
    (OKABE_ITO["vermillion"], "s"),
    (OKABE_ITO["green"], "D"),
    (OKABE_ITO["purple"], "^"),
    (OKABE_ITO["orange"], "v"),
    (OKABE_ITO["sky blue"], "P"),
    (OKABE_ITO["black"], "X"),
)
COLUMNS = (
    ("set", "set", "{}"),
    ("method", "method", "{}"),
    ("prompts", "prompts", "{}"),
    ("tau", "tau", "{:.2f}"),
    ("tokens_per_second", "tokens/s", "{:.1f}"),
    ("speedup", "speed-up", "{:.2f}"),
    ("predicted_speedup", "predicted", "{:.2f}"),
    ("cycle", "draft + verify + other, ms a cycle", "{}"),
    ("outputs", "outputs", "{}"),
)


def interval_figure(
    rows: Sequence[Mapping], column: str, label: str, line: float
) -> Drawing:
    """Dots with intervals: methods by colour and marker, prompt sets one under another.

    Args:
        rows: of `bench_summary.summarize`; those without the column are left out.
        column: `speedup` or `tau`.
        label: of the axis.
        line: where a vertical line is drawn: no gain.

    Returns:
        The figure and its alt text.

    Raises:
        DFlashLabError: no row has the column.
    """
    rows = [row for row in rows if row.get(column) is not None]
    if not rows:
        raise DFlashLabError(f"no method has a {column}")
    groups = list(dict.fromkeys(row["set"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    figure, axes = new_figure(6.6, 1.5 + 0.28 * (len(rows) + len(groups)))
    step = 1.0 / (len(methods) + 1)
    for row in rows:
        number = methods.index(row["method"])
        colour, marker = LOOKS[number % len(LOOKS)]
        place = groups.index(row["set"]) + step * (number + 1) - 0.5
        low, high = row[f"{column}_low"], row[f"{column}_high"]
        axes.plot([low, high], [place, place], color=colour, linewidth=1.6)
        axes.plot(row[column], place, marker, color=colour, markersize=6)
    axes.axvline(line, color="#666666", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(groups)), groups)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    title(axes, label[0].upper() + label[1:], "95 % intervals over prompts")
    for number, name in enumerate(methods):
        colour, marker = LOOKS[number % len(LOOKS)]
        axes.plot([], [], marker, color=colour, label=name)
    figure.legend(loc="outside lower left", ncols=4, frameon=False, fontsize=9)
    listed = "; ".join(
        f"{row['method']} on {row['set']} {_interval(row, column)}" for row in rows
    )
    return figure, f"Dots with intervals of the {label}: {listed}."


def notices(rows: Sequence[Mapping]) -> list[str]:
    """What the rows say: who gains, who loses, how well the cost model does."""
    groups = list(dict.fromkeys(row["set"] for row in rows))
    said = []
    for row in rows:
        if row.get("speedup") is None or row["method"] == "ar":
            continue
        overall = row["set"] == groups[-1]  # all sets together, or the only one
        slower = row["speedup_high"] < 1
        if not overall and not (row["method"] == "dflash" and slower):
            continue
        if row["speedup_low"] > 1:
            verdict = "is faster than"
        else:
            verdict = "is slower than" if slower else "cannot be told from"
        where, gain = f"{row['method']} on {row['set']}", _interval(row, "speedup", "x")
        said.append(f"{where} {verdict} plain decoding by our loop: {gain}")
    gaps = [
        abs(row["predicted_speedup"] / row["speedup"] - 1)
        for row in rows
        if row.get("predicted_speedup") and row.get("speedup") and row["method"] != "ar"
    ]
    if gaps:
        said.append(
            "the cost model is within "
            f"{max(gaps):.1%} of every measured speed-up it can be asked for"
        )
    return said


def tau_notices(rows: Sequence[Mapping]) -> list[str]:
    """Of each method: on which prompt set it adds most and least tokens a cycle."""
    said = []
    single = [row for row in rows if row["set"] != ALL and row.get("tau")]
    for method in dict.fromkeys(row["method"] for row in single):
        own = sorted(
            (row for row in single if row["method"] == method), key=lambda r: r["tau"]
        )
        low, high = own[0], own[-1]
        if method == "ar" or low is high:
            continue
        apart = low["tau_high"] < high["tau_low"]
        said.append(
            f"{method} adds most on {high['set']} ({high['tau']:.2f}) and least on "
            f"{low['set']} ({low['tau']:.2f}); their intervals "
            f"{'lie apart' if apart else 'overlap'}"
        )
    return said


def slot_notices(survival: Sequence[float]) -> list[str]:
    """Where most blocks end.

    Args:
        survival: of slots 1..K-1, the share of cycles in which its draft became text.
    """
    lost = [a - b for a, b in zip([1.0, *survival], survival, strict=False)]
    worst = max(range(len(lost)), key=lost.__getitem__)
    return [
        f"{survival[0]:.0%} of the cycles keep their first draft, {survival[-1]:.0%} "
        "all of them",
        f"slot {worst + 1} ends most cycles: {lost[worst]:.0%} of all",
    ]


def length_notices(lengths: Sequence[int], block_size: int) -> list[str]:
    """How many cycles gave nothing but the target's own token, how many everything."""
    ones, full = lengths.count(1) / len(lengths), lengths.count(block_size)
    return [
        f"{ones:.0%} of the cycles add the target's own token alone: their drafts were "
        "paid for in vain",
        f"{full / len(lengths):.0%} add {block_size}, the most that K allows",
    ]


def _interval(row: Mapping, column: str, unit: str = "") -> str:
    low, high = row[f"{column}_low"], row[f"{column}_high"]
    return f"{row[column]:.2f}{unit} ({low:.2f} to {high:.2f})"


def render_bench(
    run: Mapping, rows: Sequence[Mapping], figures: Sequence[tuple]
) -> str:
    """The run as one self-contained HTML page.

    Args:
        run: of `bench.read_run`.
        rows: of `bench_summary.summarize`.
        figures: tuples (PNG bytes, alt text, caption, list of what to notice).
    """
    rows = [{**row, **_summed_up(row)} for row in rows]
    shown = [c for c in COLUMNS if any(row.get(c[0]) is not None for row in rows)]
    return render(
        "views/bench.html",
        title=f"Bench: {run['pair']}, {run['dtype']}",
        heads=[name for _, name, _ in shown],
        rows=[[_cell(row, key, pattern) for key, _, pattern in shown] for row in rows],
        figures=figures,
        facts={**run["settings"]["decode"], **run["environment"], "git": run["git"]},
    )


def _summed_up(row: Mapping) -> dict[str, str]:
    """Costs and verdicts as one column each, so that the table fits a page."""
    found = {}
    costs = [row.get(f"{part}_ms") for part in ("draft", "verify", "other")]
    if None not in costs:
        found["cycle"] = " + ".join(f"{cost:.1f}" for cost in costs)
    names = {"equal": "equal", "ties": "ties", "differ": "DIFFER"}
    if any(row.get(key) is not None for key in names):
        counts = [f"{row[key]} {name}" for key, name in names.items() if row.get(key)]
        found["outputs"] = ", ".join(counts)
    return found


def _cell(row: Mapping, key: str, pattern: str) -> str:
    value = row.get(key)
    if value is None:
        return ""
    text = pattern.format(value)
    if f"{key}_low" in row:
        text += f" [{row[f'{key}_low']:.2f}, {row[f'{key}_high']:.2f}]"
    return text

"""Tau against blocks seen, on a log axis, with a fit and what it foretells.

    python benchmarks/learning_curve.py walk --work W RUN[+BLOCKS] [FOLDER=BLOCKS] ...
    python benchmarks/learning_curve.py draw

`walk` takes every drafter that runs kept (`log.keep_drafters`), and others with the
number of blocks they had seen, and walks its drafts over the target's answers to
held-out prompts, once with features and once with features of zero. `RUN+BLOCKS` is a
run that went on from a drafter with so many blocks. `draw` fits
tau = a + b log2(blocks) to the first run, from where features matter, and writes the
figure with what the fit foretells for the others.

Leaves out: decoding. A walk gives tau without its time.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path

import torch
from levers import held_out_examples, score

from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.files import environment
from dflash_lab.pairs.pair import load_pair
from dflash_lab.training.run.checkpoints import kept_drafters
from dflash_lab.views.curves import figure_png
from dflash_lab.views.diffusion import lines_figure

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "learning_curve.jsonl"
FIGURE = HERE.parent / "docs" / "images" / "learning_curve.png"


def named(argument: str) -> list[tuple[str, int, int, Path]]:
    """(run, blocks before it, blocks in all, folder) of each drafter of an argument."""
    if "=" in argument:
        folder, blocks = argument.split("=")
        return [(Path(folder).name, 0, int(blocks), Path(folder))]
    run, before = re.fullmatch(r"(.+?)(?:\+(\d+))?", argument).groups()
    start = int(before or 0)
    found = kept_drafters(run)
    line = (Path(run) / "metrics.jsonl").read_text("utf-8").splitlines()[-1]
    found[json.loads(line)["blocks"]] = Path(run) / "drafter"
    return [(Path(run).name, start, start + n, folder) for n, folder in found.items()]


def walk(arguments) -> None:
    """Walk all drafters; those that are done are not walked again."""
    pair = load_pair("smol", dtype="bfloat16", with_drafter=False, quiet=True)
    examples = held_out_examples(pair, arguments.work)[:: arguments.every]
    done = {(x["run"], x["blocks"]) for x in read()}
    for argument in arguments.drafters:
        for run, before, blocks, folder in named(argument):
            if (run, blocks) in done or blocks - before < arguments.at_least:
                continue
            drafter = DFlashDraftModel.from_pretrained(folder, torch.bfloat16)
            line = {
                "run": run,
                "blocks_before": before,
                "blocks": blocks,
                "answers": len(examples),
                **score(drafter, pair, examples),
                "environment": environment(),
            }
            with open(RESULTS, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(run, blocks, line["tau"], line["tau_without_features"], flush=True)


def read() -> list[dict]:
    """All lines so far."""
    if not RESULTS.exists():
        return []
    lines = RESULTS.read_text(encoding="utf-8").splitlines()
    return sorted(map(json.loads, lines), key=lambda x: x["blocks"])


def fit(points: list[tuple[float, float]]) -> tuple[float, float, float]:
    """a, b and the root mean square residual of tau = a + b log2(blocks)."""
    rows = torch.tensor([[1.0, math.log2(x)] for x, _ in points], dtype=torch.float64)
    taus = torch.tensor([y for _, y in points], dtype=torch.float64)
    found = torch.linalg.lstsq(rows, taus[:, None]).solution[:, 0]
    rest = (rows @ found - taus).pow(2).mean().sqrt()
    return float(found[0]), float(found[1]), float(rest)


def onset(lines: list[dict], gain: float = 0.03) -> int | None:
    """Blocks from which on features are worth at least `gain` of tau."""
    start = None
    for line in lines:
        better = line["tau"] - line["tau_without_features"] >= gain
        start = (start or line["blocks"]) if better else None
    return start


def draw() -> None:
    """Fit, foretell, and write the figure."""
    lines = read()
    first = [x for x in lines if x["run"] == lines[0]["run"]]
    later = [x for x in lines if x["run"] != lines[0]["run"]]
    start = onset(first)
    series = {
        "a run from nothing": [(x["blocks"], x["tau"]) for x in first],
        "the same, features zeroed": [
            (x["blocks"], x["tau_without_features"]) for x in first
        ],
        "stages of the shipped drafter": [(x["blocks"], x["tau"]) for x in later],
    }
    fitted = [(x["blocks"], x["tau"]) for x in first if x["blocks"] >= (start or 0)]
    a, b, rest = fit(fitted)
    ends = (fitted[0][0], max(x["blocks"] for x in lines))
    series["fit to the run from nothing"] = [(x, a + b * math.log2(x)) for x in ends]
    note = f"features matter from {start:,} blocks on" if start else ""
    made = lines_figure(
        series,
        x="blocks seen in training (log axis)",
        y="tau on held-out answers",
        headline="What more training buys",
        note=note,
        log_x=True,
    )
    if start:
        axes = made[0].axes[0]
        axes.axvline(start, color="#7C8186", linewidth=1, linestyle=":")
    FIGURE.write_bytes(figure_png(made[0]))
    print(f"tau = {a:.3f} + {b:.4f} log2(blocks), residual {rest:.3f}")
    for x in later:
        foretold = a + b * math.log2(x["blocks"])
        print(f"{x['run']}, {x['blocks']} blocks: {x['tau']:.2f}, fit {foretold:.2f}")
    print(f"features matter from {start} blocks on")
    for tau in (2.0, 3.0):
        print(f"tau {tau} at {2 ** ((tau - a) / b):.3g} blocks by this fit")
    print(made[1])


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    walking = commands.add_parser("walk")
    walking.add_argument("drafters", nargs="+")
    walking.add_argument("--work", type=Path, required=True)
    walking.add_argument("--every", type=int, default=2)
    walking.add_argument("--at-least", type=int, default=0)
    walking.set_defaults(run=walk)
    commands.add_parser("draw").set_defaults(run=lambda _: draw())
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()

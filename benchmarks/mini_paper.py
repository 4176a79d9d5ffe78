"""The paper's tables in small: the same questions put to the tiny pair.

    python benchmarks/mini_paper.py TABLE [TABLE ...] [--limit 12]
    python benchmarks/mini_paper.py show

TABLE is one of `1 fig3 6 7 8 9 10 13 fig5`, named after the paper's (arXiv 2602.06036).
Drafters come from `data/checkpoints` (the family by `tiny_family.py`), all decode the
same held-out prompts in turns beside plain decoding. A table's rows replace its earlier
ones in `benchmarks/results/mini_paper.jsonl`; `show` prints them as Markdown.

Leaves out: training, and the paper's own figures, which stand in `docs/results.md`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dflash_lab.baselines.eagle import EagleHead
from dflash_lab.baselines.eagle_proposer import Eagle
from dflash_lab.baselines.medusa import MedusaHeads
from dflash_lab.baselines.medusa_proposer import Medusa
from dflash_lab.drafter.variants import load_drafter
from dflash_lab.files import data_root, environment, write_text_atomically
from dflash_lab.measure.race import race, standings, tau_differences
from dflash_lab.pairs.pair import load_pair
from dflash_lab.pairs.prompts import load_prompts
from dflash_lab.speculative.ngram import NGramLookup
from dflash_lab.speculative.proposer import DFlash, Plain, Proposer
from dflash_lab.speculative.sampling import Sampling

RESULTS = Path(__file__).resolve().parent / "results" / "mini_paper.jsonl"
PLAIN = "plain"


@dataclass(frozen=True)
class Table:
    """A table of the paper.

    Attributes:
        asks: its question.
        rows: label to drafter and block size; the first row is what the others are
            compared with.
        temperatures: each is a part of its own.
    """

    asks: str
    rows: dict[str, tuple[str, int | None]]
    temperatures: tuple[float, ...] = (0.0,)


TABLES = {
    "1": Table(
        "DFlash, other drafters, plain decoding",
        {
            "DFlash": ("tiny", None),
            "EAGLE-3-style, chain of 7": ("eagle", 8),
            "Medusa-style": ("medusa", None),
            "n-gram lookup": ("ngram", 8),
        },
        (0.0, 1.0),
    ),
    "fig3": Table(
        "what drafting costs by block size",
        {
            f"{name}, K={size}": (drafter, size)
            for size in (4, 8, 16)
            for name, drafter in (
                ("DFlash, 1 layer", "base"),
                ("DFlash, 3 layers", "layers-3"),
                ("EAGLE-3-style, 1 layer", "eagle"),
            )
        },
    ),
    "6": Table(
        "number of draft layers",
        {
            "1 layer": ("base", None),
            "1 layer, another seed": ("again", None),
            "2 layers": ("layers-2", None),
            "3 layers": ("layers-3", None),
        },
    ),
    "7": Table(
        "number of target features",
        {
            "3 features": ("base", None),
            "3 features, another seed": ("again", None),
            "1 feature": ("features-1", None),
            "5 features": ("features-5", None),
        },
    ),
    "8": Table(
        "block size in training and in use",
        {
            f"trained {trained}, used {used}": (name, used)
            for trained, name in ((8, "base"), (16, "block-16"), (4, "block-4"))
            for used in (8, 16, 4)
        },
    ),
    "9": Table(
        "features as keys and values, or at the input only (3 layers)",
        {"KV injection": ("layers-3", None), "input fusion": ("input-fusion", None)},
    ),
    "10": Table(
        "with and without target features",
        {"features": ("base", None), "no features": ("no-features", None)},
        (0.0, 1.0),
    ),
    "13": Table(
        "random anchors or fixed blocks",
        {
            "random anchors": ("base", None),
            "fixed blocks": ("fault-fixed-blocks", None),
        },
    ),
    "fig5": Table(
        "the loss's decay",
        {"decay": ("base", None), "all slots weigh the same": ("loss-uniform", None)},
    ),
}


def proposer(name: str, block_size: int | None) -> Proposer:
    """A drafter of the tiny pair by name: of the family, or one of the baselines."""
    folder = data_root() / "checkpoints"
    if name == "ngram":
        return NGramLookup(block_size)
    if name == "eagle":
        return Eagle(EagleHead.from_pretrained(folder / "tiny-eagle"), block_size)
    if name == "medusa":
        return Medusa(MedusaHeads.from_pretrained(folder / "tiny-medusa"))
    place = folder / "tiny/drafter" if name == "tiny" else folder / "tiny-family" / name
    drafter = load_drafter(place, torch.float32)
    if block_size is not None and block_size > drafter.config.block_size:
        # Refused elsewhere, as such drafts are poor; how poor is what table 8 asks.
        drafter.config = replace(drafter.config, block_size=block_size)
    return DFlash(drafter, block_size)


def measure(name: str, limit: int) -> list[dict]:
    """A table's rows, every part of it."""
    table, lines = TABLES[name], []
    pair = load_pair("tiny", with_drafter=False, quiet=True)
    prompts = [
        pair.encode(prompt.turns[0])
        for group in pair.prompt_sets
        for prompt in load_prompts(group, limit)
    ]
    proposers = {PLAIN: Plain()}
    proposers |= {label: proposer(*how) for label, how in table.rows.items()}
    first = next(iter(table.rows))
    for temperature in table.temperatures:
        results = race(
            pair,
            proposers,
            prompts,
            max_new_tokens=128,
            stop_token_ids=pair.stop_token_ids,
            sampling=Sampling(temperature, seed=0),
            loop="host",  # the heads have no other
        )
        differences = tau_differences(results, first)
        for row in standings(results, PLAIN):
            lines.append(
                {
                    "table": name,
                    "temperature": temperature,
                    "row": row.name,
                    "tau": str(row.tau),
                    "tau_minus_first": str(differences.get(row.name, "")),
                    "speedup": str(row.speedup),
                    "draft_ms": row.draft_ms,
                    "cycle_ms": row.cycle_ms,
                    "equal": row.equal,
                    "prompts": row.prompts,
                    "environment": environment(),
                }
            )
    return lines


def show(lines: list[dict]) -> str:
    """Markdown: a table for every table and temperature."""
    parts: dict[tuple, list[dict]] = {}
    for line in lines:
        parts.setdefault((line["table"], line["temperature"]), []).append(line)
    text = []
    for (name, temperature), rows in parts.items():
        text += [
            f"{name}: {TABLES[name].asks}, T={temperature:g}",
            "",
            "| | tau | against the first row | draft ms | speed-up over plain |",
            "|---|---|---|---|---|",
        ]
        for row in rows:
            if row["row"] != PLAIN:
                text.append(
                    f"| {row['row']} | {row['tau']} | {row['tau_minus_first']} | "
                    f"{row['draft_ms']:.2f} | {row['speedup']} |"
                )
        text.append("")
    return "\n".join(text)


def main() -> None:
    """Parse the command line; measure tables, or show what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tables", nargs="+", choices=[*TABLES, "show"])
    parser.add_argument("--limit", type=int, default=12, help="prompts of each set")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.tables:
        lines = []
        if RESULTS.exists():
            text = RESULTS.read_text(encoding="utf-8")
            lines = [json.loads(line) for line in text.splitlines()]
        if name == "show":
            print(show(lines))
            continue
        lines = [line for line in lines if line["table"] != name]
        measured = measure(name, arguments.limit)
        order = list(TABLES)
        lines = sorted(lines + measured, key=lambda line: order.index(line["table"]))
        write_text_atomically(RESULTS, "".join(json.dumps(x) + "\n" for x in lines))
        print(show(measured))


if __name__ == "__main__":
    main()

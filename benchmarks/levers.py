"""What buys tau per CPU-hour on the smol pair: one change at a time, equal CPU time.

    python benchmarks/levers.py prepare CORPUS [CORPUS ...] --work W
    python benchmarks/levers.py run --work W --cpu-minutes 12 [--only NAME ...]

`prepare` lets the target answer the held-out prompts greedily, once, and a fifth of the
first corpus anew by sampling. `run` trains each
attempt of `ATTEMPTS` for the same processor time and walks its drafts over the held-out
answers, with and without features. A line of `benchmarks/results/levers.jsonl` is
written for each as soon as it is done, and attempts that have one are skipped.

Leaves out: repetitions with other seeds; differences of a few hundredths are noise.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch

from dflash_lab.clinic.diagnosis import Examination
from dflash_lab.files import environment
from dflash_lab.pairs.pair import load_pair
from dflash_lab.pairs.prompts import load_prompts
from dflash_lab.training.corpus.corpus import write_corpus
from dflash_lab.training.corpus.corpus_file import read_corpus, write_rows
from dflash_lab.training.data.dataset import load_examples
from dflash_lab.training.run.config import from_dict
from dflash_lab.training.run.train import train

RESULTS = Path(__file__).parent / "results" / "levers.jsonl"

BASE = {
    "pair": "smol",
    "dtype": "bfloat16",
    "device": "cpu",
    "drafter": {"num_hidden_layers": 2, "block_size": 8, "num_features": 5},
    "data": {"batch_size": 16, "num_anchors": 32},
    "objective": {"mixed_precision": "bf16", "head_tokens": 16384},
    "optimizer": {"learning_rate": 1e-3, "clock": "cpu"},
    "log": {"every": 25},
}
# name -> (what changes, {section: {field: value}})
ATTEMPTS = {
    "base": ("2 layers, K=8, 32 anchors, ce with decay", {}),
    "repeat": ("the same with another seed: the noise of one run", {"seed": 1}),
    "dpace": ("D-PACE weights", {"objective": {"loss": "dpace"}}),
    "kl": ("the target's whole distribution", {"objective": {"loss": "kl"}}),
    "anchors_64": (
        "64 anchors a text, 8 texts",
        {"data": {"num_anchors": 64, "batch_size": 8}},
    ),
    "anchors_16": (
        "16 anchors a text, 32 texts",
        {"data": {"num_anchors": 16, "batch_size": 32}},
    ),
    "layers_1": ("1 layer", {"drafter": {"num_hidden_layers": 1}}),
    "layers_3": ("3 layers", {"drafter": {"num_hidden_layers": 3}}),
    "block_4": (
        "K=4, 64 anchors",
        {"drafter": {"block_size": 4}, "data": {"num_anchors": 64}},
    ),
    "block_16": (
        "K=16, 16 anchors",
        {"drafter": {"block_size": 16}, "data": {"num_anchors": 16}},
    ),
    "head_4096": ("4096 candidates", {"objective": {"head_tokens": 4096}}),
    "head_full": ("the whole vocabulary", {"objective": {"head_tokens": None}}),
    "rate_2e-3": ("learning rate 2e-3", {"optimizer": {"learning_rate": 2e-3}}),
    "rate_4e-3": ("learning rate 4e-3", {"optimizer": {"learning_rate": 4e-3}}),
    "batch_8": ("8 texts a step", {"data": {"batch_size": 8}}),
    "low_layers": (
        "features of layers 1, 4, 7, 10, 13",
        {"drafter": {"target_layer_ids": [1, 4, 7, 10, 13]}},
    ),
    "high_layers": (
        "features of layers 16, 19, 22, 25, 28",
        {"drafter": {"target_layer_ids": [16, 19, 22, 25, 28]}},
    ),
    "init_last": (
        "layers start as the target's last two",
        {"drafter": {"init_layers": [28, 29]}},
    ),
    "init_first": (
        "layers start as the target's first two",
        {"drafter": {"init_layers": [0, 1]}},
    ),
    "no_features": ("without features", {"drafter": {"conditioning": "none"}}),
    "fifth_greedy": (
        "a fifth of the prompts, greedy answers, five times the passes",
        {"answers": "fifth_greedy"},
    ),
    "fifth_sampled": (
        "the same fifth, its answers drawn at temperature 0.7",
        {"answers": "fifth_sampled"},
    ),
}


def merged(changes: dict, out: Path, corpora: list[str], minutes: float):
    """Settings of an attempt."""
    values = {k: dict(v) if isinstance(v, dict) else v for k, v in BASE.items()}
    for section, fields in changes.items():
        if isinstance(fields, dict):
            values[section] = values.get(section, {}) | fields
        else:
            values[section] = fields
    if "target_layer_ids" in values["drafter"]:
        values["drafter"].pop("num_features", None)
    answers = values.pop("answers", None)
    if answers:
        corpora = [str(out.parent.parent / f"{answers}.jsonl")]
    taps = values["drafter"].get("target_layer_ids", ["default"])
    store = "-".join(["features", *map(str, taps), *([answers] if answers else [])])
    values["data"]["feature_folder"] = str(out.parent.parent / store)
    values["out"] = str(out)
    values["data"]["corpus"] = corpora
    values["optimizer"]["minutes"] = minutes
    return from_dict(values)


def held_out_examples(pair, work: Path):
    """The target's greedy answers to all held-out prompts, written once."""
    path = work / "held_out.jsonl"
    prompts = [
        {"kind": name, "prompt_ids": pair.encode(p.turns[0])}
        for name in pair.prompt_sets
        for p in load_prompts(name)
    ]
    write_corpus(
        pair.target,
        prompts,
        path,
        stop_token_ids=pair.stop_token_ids,
        header={"held_out": True},
        max_new_tokens=128,
        batch_size=64,
    )
    return load_examples([path])[0]


def write_fifths(pair, corpus: Path, work: Path) -> None:
    """A fifth of a corpus twice: its greedy answers, and the same prompts sampled."""
    header, rows = read_corpus(corpus)
    greedy = sorted(
        (row for row in rows if row["temperature"] == 0), key=lambda row: row["index"]
    )[: len(rows) // 5]
    rows = [row | {"index": number} for number, row in enumerate(greedy)]
    write_rows(work / "fifth_greedy.jsonl", header | {"temperatures": [0.0]}, rows)
    write_corpus(
        pair.target,
        [{"kind": "self", "prompt_ids": row["prompt_ids"]} for row in greedy],
        work / "fifth_sampled.jsonl",
        stop_token_ids=pair.stop_token_ids,
        header={k: header[k] for k in ("target", "dtype")},
        temperatures=(0.7,),
        max_new_tokens=header["max_new_tokens"],
        batch_size=64,
    )


def score(drafter, pair, examples) -> dict:
    """Tau by walking the drafts, with features and with features of zero."""
    found = {}
    for name, zero in (("tau", False), ("tau_without_features", True)):
        lengths = [0.0, 0.0]
        right = total = 0
        for start in range(0, len(examples), 8):
            part = Examination(drafter, pair.target, examples[start : start + 8])

            def change(batch, zero=zero):
                if not zero:
                    return batch
                hidden = torch.zeros_like(batch.target_hidden)
                return replace(batch, target_hidden=hidden)

            drafts = part.drafts(change)
            walked = part.walk(drafts)
            lengths[0] += sum(walked)
            lengths[1] += len(walked)
            right = right + (drafts.right & drafts.known).sum((0, 1))
            total = total + drafts.known.sum((0, 1))
        found[name] = lengths[0] / lengths[1]
        if not zero:
            found["accuracy"] = (right / total).tolist()
    return found


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["prepare", "run"])
    parser.add_argument("corpus", nargs="*")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--cpu-minutes", type=float, default=12.0)
    parser.add_argument("--only", nargs="*")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    pair = load_pair("smol", dtype="bfloat16", with_drafter=False, quiet=True)
    examples = held_out_examples(pair, arguments.work)
    note = arguments.work / "corpora.json"
    if arguments.what == "prepare":
        note.write_text(json.dumps(arguments.corpus), encoding="utf-8")
        write_fifths(pair, Path(arguments.corpus[0]), arguments.work)
        return
    corpora = json.loads(note.read_text(encoding="utf-8"))
    done = set()
    if RESULTS.exists():
        lines = RESULTS.read_text(encoding="utf-8").splitlines()
        done = {json.loads(line)["name"] for line in lines}
    for name in arguments.only or ATTEMPTS:
        if name in done:
            continue
        what, changes = ATTEMPTS[name]
        out = arguments.work / "runs" / name
        config = merged(changes, out, corpora, arguments.cpu_minutes)
        started = time.monotonic()
        result = train(config, resume=True, pair=replace(pair, prompt_sets=()))
        line = {
            "name": name,
            "what": what,
            "changes": changes,
            "cpu_minutes": arguments.cpu_minutes,
            "wall_minutes": round((time.monotonic() - started) / 60, 1),
            "steps": result.facts["steps"],
            "blocks": result.facts["blocks_seen"],
            "answer_tokens": result.facts["answer_tokens"],
            **score(result.drafter, pair, examples),
            "environment": environment(),
        }
        with open(RESULTS, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

"""A drafter in ten minutes of a GPU: corpus, training, evaluation, in one go.

    python benchmarks/gpu_train.py --out W
    python benchmarks/gpu_train.py --out W --pair tiny --device cpu --minutes 1

A third of the time goes to prompts and answers that the target writes, the rest to
training; what is there already is used again, so that a second call goes on. Figures
are left in `W/summary.json`, with the device's name. Without a GPU it says so and ends.

Leaves out: speed-ups, which `dflash-lab demo` measures on the machine that serves.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from dflash_lab.files import environment, write_text_atomically
from dflash_lab.pairs.pair import load_pair
from dflash_lab.training.corpus.corpus import write_corpus
from dflash_lab.training.corpus.corpus_file import read_corpus
from dflash_lab.training.run.config import from_dict
from dflash_lab.training.run.own_corpus import corpus_header, find_prompts
from dflash_lab.training.run.train import train


def write_answers(arguments, pair, path: Path) -> dict:
    """Prompts and answers within a third of the time."""
    started = time.monotonic()
    source = "generator" if arguments.pair == "tiny" else "self"
    prompts, described, _ = find_prompts(
        pair,
        source,
        path,
        count=arguments.num_prompts,
        max_new_tokens=arguments.max_new_tokens,
        batch_size=arguments.rows,
    )
    spent = time.monotonic() - started
    write_corpus(
        pair.target,
        prompts,
        path,
        stop_token_ids=pair.stop_token_ids,
        header=corpus_header(pair, described),
        temperatures=(0.0, 0.7),
        max_new_tokens=arguments.max_new_tokens,
        batch_size=arguments.rows,
        time_limit=max(5.0, 20 * arguments.minutes - spent),
    )
    rows = read_corpus(path)[1]
    return {
        "answers": len(rows),
        "answer_tokens": sum(len(row["answer_ids"]) for row in rows),
        "corpus_seconds": round(time.monotonic() - started, 1),
    }


def settings(arguments, corpus: Path):
    """A large run for the device and the time that is left."""
    cuda = arguments.device == "cuda"
    return from_dict(
        {
            "pair": arguments.pair,
            "dtype": "bfloat16" if cuda else "float32",
            "device": arguments.device,
            "out": str(arguments.out / "run"),
            "drafter": {
                "num_hidden_layers": arguments.layers,
                "block_size": arguments.block_size,
                "num_features": 5 if arguments.pair == "smol" else 3,
            },
            "data": {
                "corpus": [str(corpus)],
                # A pass of a small target is cheaper than moving its features.
                "features": "online",
                "batch_size": 64 if cuda else 16,
                "num_anchors": 64 if cuda else 16,
            },
            "objective": {
                "mixed_precision": "bf16" if cuda else "no",
                "chunk": 8192 if cuda else 512,
            },
            "optimizer": {"learning_rate": 1e-3, "minutes": 0.6 * arguments.minutes},
            "log": {"every": 50, "save_minutes": 2},
        }
    )


def main() -> None:
    """Parse the command line and run all three parts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pair", default="smol", choices=["smol", "tiny"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--num-prompts", type=int, default=40_000)
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--block-size", type=int, default=8)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing to do")
        return
    started = time.monotonic()
    dtype = "bfloat16" if arguments.device == "cuda" else "float32"
    pair = load_pair(
        arguments.pair, dtype=dtype, device=arguments.device, with_drafter=False
    )
    corpus = arguments.out / "corpus.jsonl"
    summary = write_answers(arguments, pair, corpus)
    result = train(settings(arguments, corpus), resume=True, pair=pair)
    name = "cpu"
    if arguments.device == "cuda":
        name = torch.cuda.get_device_name()
        summary["peak_gpu_mb"] = torch.cuda.max_memory_allocated() / 2**20
    summary |= {
        "device": name,
        "steps": result.facts["steps"],
        "blocks": result.facts["blocks_seen"],
        "training_minutes": result.facts["training_wall_minutes"],
        "held_out_tau": result.facts["held_out_tau"],
        "total_seconds": round(time.monotonic() - started, 1),
        "environment": environment(),
    }
    text = json.dumps(summary, indent=2) + "\n"
    write_text_atomically(arguments.out / "summary.json", text)
    print(text)


if __name__ == "__main__":
    main()

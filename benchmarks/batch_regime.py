"""What does verifying a block cost when many requests share a pass?

    python benchmarks/batch_regime.py --pair smol --dtype bfloat16 --threads 2

Alone, one row of a request leaves a machine idle, and K rows cost little more. With R
requests in a pass the machine is busy, and K rows each cost up to K times as much. For
each R the target's pass over R x K rows is timed in turns with its pass over R x 1, all
behind the same context. Their ratio is the least tau at which drafting can pay, with a
drafter that costs nothing. Appends to `benchmarks/results/batch_regime.jsonl`.

Leaves out: the drafter's own pass, and decoding text in batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from dflash_lab.files import environment
from dflash_lab.pairs.pair import load_pair

RESULTS = Path(__file__).parent / "results" / "batch_regime.jsonl"


def pass_ms(target, cache, requests: int, rows: int, context: int) -> float:
    """Milliseconds of one pass over `rows` rows of each request."""
    ids = torch.arange(requests * rows).view(requests, rows) % target.vocab_size
    places = torch.arange(context, context + rows).expand(requests, rows)
    started = time.perf_counter()
    target.forward(ids, places, cache)
    return 1e3 * (time.perf_counter() - started)


@torch.inference_mode()
def main() -> None:
    """Parse the command line, measure, print a line for each batch, append."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pair", default="smol")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", default="1,2,4,8,16,32")
    parser.add_argument("--block-size", type=int, default=8)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    pair = load_pair(asked.pair, dtype=asked.dtype, quiet=True)
    target, size, context = pair.target, asked.block_size, asked.context
    lines = []
    for requests in map(int, asked.requests.split(",")):
        cache = target.new_cache(requests, context + size)
        pass_ms(target, cache, requests, context, 0)
        found = {1: [], size: []}
        for turn in range(asked.rounds + 2):
            for rows, times in found.items():
                taken = pass_ms(target, cache, requests, rows, context)
                if turn >= 2:  # the first two warm up
                    times.append(taken)
        one, block = (statistics.median(found[rows]) for rows in (1, size))
        lines.append({"requests": requests, "one_ms": one, "block_ms": block})
        lines[-1]["least_tau"] = block / one
        print(lines[-1], flush=True)
    note = {
        "pair": asked.pair,
        "dtype": asked.dtype,
        "block_size": size,
        "context": context,
        "batches": lines,
        "environment": environment(),
    }
    with open(RESULTS, "a", encoding="utf-8") as file:
        file.write(json.dumps(note) + "\n")


if __name__ == "__main__":
    main()

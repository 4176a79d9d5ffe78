"""Can the speed-up be foretold? Costs measured apart, tau from text, then the clock.

    python benchmarks/cost_model.py --pair tiny --threads 1
    python benchmarks/cost_model.py --pair smol --dtype bfloat16 --threads 2

For each block size: T(1), T_draft, T_verify(K) and the rest are timed on a random
context, without any text; tau comes from decoding held-out prompts; the cost model
gives a speed-up, which is compared with the measured one of the same decoding, prefill
left out on both sides. Appends to `benchmarks/results/cost_model.jsonl`.

Leaves out: intervals; the costs are medians of few rounds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from dflash_lab.files import environment
from dflash_lab.measure.acceptance import acceptance_per_position, pooled_tau
from dflash_lab.measure.speedup import (
    best_block_size,
    measure_costs,
    tau_of_smaller_block,
)
from dflash_lab.pairs.pair import load_pair
from dflash_lab.pairs.prompts import load_prompts
from dflash_lab.speculative.generate import speculative_generate
from dflash_lab.speculative.proposer import DFlash, Plain

RESULTS = Path(__file__).parent / "results" / "cost_model.jsonl"


def main() -> None:
    """Parse the command line, measure, print a line per block size, append."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pair", default="tiny")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=int, default=3, help="prompts of each set")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--block-sizes", default="2,3,4,6,8")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    pair = load_pair(arguments.pair, dtype=arguments.dtype, quiet=True)
    sizes = [int(size) for size in arguments.block_sizes.split(",")]
    prompts = [
        pair.encode(prompt.turns[0])
        for name in pair.prompt_sets
        for prompt in load_prompts(name, arguments.limit)
    ]
    context = sum(map(len, prompts)) // len(prompts) + arguments.max_new_tokens // 2
    proposers = {1: Plain(), **{size: DFlash(pair.drafter, size) for size in sizes}}
    traces = {size: [] for size in proposers}
    speculative_generate(pair, proposers[sizes[-1]], prompts[0], max_new_tokens=8)
    before = measure_costs(pair.target, pair.drafter, sizes, context)
    for number, prompt in enumerate(prompts):
        order = list(proposers)
        shift = number % len(order)
        for size in order[shift:] + order[:shift]:
            result = speculative_generate(
                pair,
                proposers[size],
                prompt,
                max_new_tokens=arguments.max_new_tokens,
                stop_token_ids=pair.stop_token_ids,
            )
            traces[size].append(result.trace)
    after = measure_costs(pair.target, pair.drafter, sizes, context)
    plain = time_per_token(traces[1])
    survival, _ = acceptance_per_position(traces[sizes[-1]])
    lines, taus = [], {}
    for size in sizes:
        taus[size] = pooled_tau(traces[size])
        foretold = [costs[size].speedup(taus[size]) for costs in (before, after)]
        predicted = sum(foretold) / 2
        measured = plain / time_per_token(traces[size])
        lines.append(
            {
                "block_size": size,
                "tau": taus[size],
                "tau_from_larger_block": tau_of_smaller_block(survival, size),
                "break_even_tau": before[size].break_even_tau,
                "predicted": predicted,
                "measured": measured,
                "error": predicted / measured - 1,
                "costs_ms": vars(before[size]),
            }
        )
        print({k: v for k, v in lines[-1].items() if k != "costs_ms"}, flush=True)
    best = best_block_size(before, taus)
    print(f"best block size {best[0]} by prediction, {best[1]:.2f}x")
    note = {
        "pair": arguments.pair,
        "dtype": arguments.dtype,
        "context": context,
        "prompts": len(prompts),
        "sizes": lines,
        "environment": environment(),
    }
    with open(RESULTS, "a", encoding="utf-8") as file:
        file.write(json.dumps(note) + "\n")


def time_per_token(traces) -> float:
    """Milliseconds of all cycles over the tokens that they added."""
    cycles = [cycle for trace in traces for cycle in trace.cycles]
    spent = sum(c.draft_ms + c.verify_ms + c.other_ms for c in cycles)
    return spent / sum(c.acceptance_length for c in cycles)


if __name__ == "__main__":
    main()

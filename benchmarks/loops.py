"""Our loops against the others, with the same weights, in one process.

    python benchmarks/loops.py --pair tiny --threads 1
    python benchmarks/loops.py --pair smol --dtype bfloat16 --threads 2 --limit 2

Methods take turns on every prompt, in an order that changes, so that a busy machine
slows all alike. Greedy, one prompt at a time. The line that is appended to
`benchmarks/results/loops.jsonl` holds tokens per second of each method and the median
over prompts of paired ratios; the loops' own time is what a cycle takes beyond drafting
and verifying. Compiled cycles are measured when they are compiled.

Leaves out: intervals, and time to load.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from dflash_lab.baselines.growing_caches import generate_with_growing_caches
from dflash_lab.files import environment
from dflash_lab.interop.hf_assistant import as_hf_assistant
from dflash_lab.pairs.pair import load_pair
from dflash_lab.pairs.prompts import load_prompts
from dflash_lab.speculative.generate import speculative_generate
from dflash_lab.speculative.proposer import DFlash, Plain

RESULTS = Path(__file__).parent / "results" / "loops.jsonl"


def make_methods(pair, limit: int) -> dict:
    """name -> function of a prompt that gives (ids, result or None)."""
    drafted, assistant = DFlash(pair.drafter), as_hf_assistant(pair.drafter)
    stop = pair.stop_token_ids

    def ours(proposer, **options):
        def decode(ids):
            result = speculative_generate(
                pair.target,
                proposer,
                ids,
                max_new_tokens=limit,
                stop_token_ids=stop,
                **options,
            )
            return result.output_ids[0], result

        return decode

    def generate(**options):
        def decode(ids):
            inputs = torch.tensor([ids])
            with torch.inference_mode():
                output = pair.model.generate(
                    inputs,
                    attention_mask=torch.ones_like(inputs),
                    max_new_tokens=limit,
                    do_sample=False,
                    repetition_penalty=1.0,
                    eos_token_id=list(stop),
                    pad_token_id=stop[0],
                    **options,
                )
            return output[0, len(ids) :].tolist(), None

        return decode

    def growing(ids):
        found = generate_with_growing_caches(pair.model, pair.drafter, ids, limit, stop)
        return found[0], None

    return {
        "static": ours(drafted),
        "host": ours(drafted, loop="host"),
        "strict": ours(drafted, strict=True),
        "compiled": ours(drafted, compile=True),
        "native": generate(assistant_model=assistant, speculation_type="dflash"),
        "growing caches": growing,
        "plain": ours(Plain()),
        "plain compiled": ours(Plain(), compile=True),
        "generate": generate(),
    }


def measure(pair, prompts, limit: int) -> dict:
    """Seconds and tokens of every method on every prompt."""
    methods = make_methods(pair, limit)
    names = list(methods)
    for decode in methods.values():
        decode(prompts[0])
    seconds = {name: [] for name in names}
    tokens = {name: [] for name in names}
    outputs = {name: [] for name in names}
    cycles = {name: [] for name in names}
    first = {name: 0.0 for name in names}  # seconds until the first tokens
    for number, prompt in enumerate(prompts):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            started = time.perf_counter()
            ids, result = methods[name](prompt)
            seconds[name].append(time.perf_counter() - started)
            tokens[name].append(len(ids))
            outputs[name].append(ids)
            cycles[name] += result.trace.cycles if result else []
            first[name] += result.time_to_first_token if result else 0.0
    rate = {n: sum(tokens[n]) / sum(seconds[n]) for n in names}
    each = {
        n: [t / s for t, s in zip(tokens[n], seconds[n], strict=True)] for n in names
    }

    def ratio(one, two):
        pairs = zip(each[one], each[two], strict=True)
        return statistics.median(a / b for a, b in pairs)

    parts = {}
    for name in ("static", "host", "strict", "plain"):
        count = max(1, len(cycles[name]))
        parts[name] = {
            part: sum(getattr(c, f"{part}_ms") for c in cycles[name]) / count
            for part in ("draft", "verify", "other")
        }
    static, plain = parts["static"], parts["plain"]
    tau = sum(c.acceptance_length for c in cycles["static"]) / len(cycles["static"])
    # What drafting and verifying alone would allow: cycles without time of the loop's
    # own, behind the same prefill, against plain decoding as it was.
    count = sum(tokens["static"]) - len(prompts)
    ideal = first["static"] + count / tau * (static["draft"] + static["verify"]) / 1e3
    plainly = first["plain"] + count * sum(plain.values()) / 1e3
    allowed = plainly / ideal
    speedup = rate["static"] / rate["plain"]
    return {
        "tokens_per_second": rate,
        "static_over_native": ratio("static", "native"),
        "static_over_growing": ratio("static", "growing caches"),
        "static_over_plain": ratio("static", "plain"),
        "plain_over_generate": ratio("plain", "generate"),
        "compiled_over_static": ratio("compiled", "static"),
        "compiled_over_plain_compiled": ratio("compiled", "plain compiled"),
        "tau": tau,
        "speedup_allowed": allowed,
        "speedup_over_allowed": speedup / allowed,
        "cycle_ms": parts,
        "overhead": static["other"] / sum(static.values()),
        "late_over_early_cycles": late_over_early(cycles["static"]),
        "equal_to_plain": {
            n: sum(a == b for a, b in zip(outputs[n], outputs["plain"], strict=True))
            for n in names
        },
        "prompts": len(prompts),
    }


def late_over_early(cycles) -> float:
    """Median verify time at the far end of the texts over that at their beginning."""
    starts = sorted(cycle.start for cycle in cycles)
    low, high = starts[len(starts) // 4], starts[-len(starts) // 4]
    early = [c.verify_ms for c in cycles if c.start <= low]
    late = [c.verify_ms for c in cycles if c.start >= high]
    return statistics.median(late) / statistics.median(early)


def main() -> None:
    """Parse the command line, measure, print and append."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pair", default="tiny")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=int, default=4, help="prompts of each set")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--no-record", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    pair = load_pair(arguments.pair, dtype=arguments.dtype, quiet=True)
    prompts = [
        pair.encode(prompt.turns[0])
        for name in pair.prompt_sets
        for prompt in load_prompts(name, arguments.limit)
    ]
    line = {
        "pair": arguments.pair,
        "dtype": arguments.dtype,
        "max_new_tokens": arguments.max_new_tokens,
        **measure(pair, prompts, arguments.max_new_tokens),
        "environment": environment(),
    }
    print(json.dumps(line, indent=1))
    if not arguments.no_record:
        with open(RESULTS, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()

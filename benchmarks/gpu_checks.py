"""What only a GPU can show: capture, replay, bit equality there, the cost of a cycle.

    python benchmarks/gpu_checks.py               # about five minutes on a large card
    python benchmarks/gpu_checks.py --dry-run     # the same steps, tiny, on the CPU

Checks first: a graph is captured and replayed, replays make progress, drafted text is
bit for bit that of plain decoding (L1), sampled too, and reading late loses nothing.
Then times with random weights of the Qwen3-4B and Qwen3-8B shapes, whose cycles cost
what trained ones cost: one row and K rows of the target, a draft, a whole cycle beside
the time in which the weights can be read once, our loop beside transformers' own. The
figures go to `benchmarks/results/gpu_checks.jsonl` with the card's name.

Leaves out: acceptance, which random weights do not have.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_lab.drafter.config import DFlashConfig
from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.files import environment
from dflash_lab.interop.hf_assistant import as_hf_assistant
from dflash_lab.pairs.pair import load_pair
from dflash_lab.pairs.prompts import load_prompts
from dflash_lab.speculative.generate import speculative_generate
from dflash_lab.speculative.generation import new_row
from dflash_lab.speculative.graphs import make_cycles
from dflash_lab.speculative.proposer import DFlash, Plain
from dflash_lab.speculative.sampling import Sampling
from dflash_lab.speculative.static_loop import StaticLoop
from dflash_lab.target.fused import as_target

RESULTS = Path(__file__).parent / "results" / "gpu_checks.jsonl"
COMMON = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
SHAPES = {
    "Qwen3-4B": COMMON
    | {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": COMMON
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "dry": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 9,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
}


def check_small_pair(device: str) -> dict:
    """Equality and bit equality with the tiny pair, greedy and sampled."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        pair = load_pair("tiny", dtype=dtype, device=device, quiet=True)
        drafted, size = DFlash(pair.drafter), pair.drafter.config.block_size
        names = pair.prompt_sets
        prompts = [pair.encode(p.turns[0]) for n in names for p in load_prompts(n, 3)]
        for temperature in (0.0, 0.7):
            options = {
                "max_new_tokens": 64,
                "sampling": Sampling(temperature, seed=1),
                "stop_token_ids": pair.stop_token_ids,
            }
            made = {
                "static": speculative_generate(
                    pair, drafted, prompts, loop="static", **options
                ),
                "host": speculative_generate(
                    pair, drafted, prompts, loop="host", **options
                ),
                "plain": speculative_generate(pair, Plain(), prompts, **options),
                "strict": speculative_generate(
                    pair, drafted, prompts, strict=True, **options
                ),
                "twin": speculative_generate(
                    pair, Plain(size), prompts, strict=True, **options
                ),
            }
            outputs = {name: result.output_ids for name, result in made.items()}
            key = f"{dtype}, temperature {temperature}"
            found[key] = {
                "level 1": outputs["strict"] == outputs["twin"],
                "equal to plain": _share(outputs["static"], outputs["plain"]),
                "equal to the host loop": _share(outputs["static"], outputs["host"]),
                "tau": made["static"].tau,
            }
            assert found[key]["level 1"], f"{key}: strict output differs"
            if dtype == "float32" and temperature == 0:
                assert found[key]["equal to plain"] > 0.9, found[key]
    return found


def _share(one: list, two: list) -> float:
    return sum(a == b for a, b in zip(one, two, strict=True)) / len(one)


def measure_shape(name: str, device: str, context: int, seconds: float) -> dict:
    """Times of one shape in bfloat16, in milliseconds."""
    torch.manual_seed(0)
    config = Qwen3Config(**SHAPES[name], max_position_embeddings=40960)
    with torch.device(device):
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    target = as_target(model.eval())
    drafter_config = DFlashConfig.for_target(
        target.config, mask_token_id=config.vocab_size - 1
    )
    with torch.device(device):
        drafter = DFlashDraftModel(drafter_config).to(torch.bfloat16).eval()
    proposer = DFlash(drafter)
    prompt = torch.randint(0, config.vocab_size - 1, (context,)).tolist()
    budget = 4096
    row = new_row(0, prompt, budget, target)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    if not config.tie_word_embeddings:  # of a table, one row is read
        weights -= target.embedding_table.numel() * 2
    own = sum(p.numel() * p.element_size() for p in drafter.parameters())
    head = target.head.weight.numel() * 2
    rate = bandwidth(device)
    times = {"bandwidth_GB_s": rate / 1e9, "K": proposer.block_size}
    with torch.inference_mode():
        for part, what in (("plain", Plain()), ("dflash", proposer)):
            with target.tap(what.target_layer_ids) as tap:
                loop = StaticLoop(target, what, [row], Sampling(), [0], (), tap, 512)
                loop.prefill(0, row)
                loop.set_span(context + 1)
                times |= time_parts(loop, part, device, seconds)
    times["floor_verify_ms"] = weights / rate * 1e3
    times["floor_cycle_ms"] = (weights + own + head) / rate * 1e3
    drop(loop, tap)
    # A random drafter is wrong nearly always, so cycles are counted, not tokens.
    tokens = 64
    ids = torch.tensor([prompt], device=device)
    options = {
        "attention_mask": torch.ones_like(ids),
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    assistant = as_hf_assistant(drafter)
    cycles = []
    forward = assistant.forward
    assistant.forward = lambda *a, **k: cycles.append(1) or forward(*a, **k)
    for _ in range(2):  # the first one warms up
        cycles.clear()
        started = now(device)
        model.generate(
            ids,
            max_new_tokens=tokens,
            assistant_model=assistant,
            speculation_type="dflash",
            **options,
        )
        times["native_cycle_ms"] = (now(device) - started) * 1e3 / len(cycles)
    for _ in range(2):
        started = now(device)
        result = speculative_generate(target, proposer, prompt, max_new_tokens=tokens)
        spent = (now(device) - started) * 1e3
        times["our_cycle_ms"] = spent / len(result.trace.cycles)
    for _ in range(2):
        started = now(device)
        model.generate(ids, max_new_tokens=tokens, **options)
        times["generate_token_ms"] = (now(device) - started) * 1e3 / tokens
    return times


def time_parts(loop: StaticLoop, part: str, device: str, seconds: float) -> dict:
    """Parts of a cycle one by one, and cycles as they run."""
    if part == "plain":
        return {"T_1_ms": repeat(lambda: loop.verify(loop.masks), device, seconds)}
    times = {
        "T_K_ms": repeat(lambda: loop.verify(loop.masks), device, seconds),
        "T_draft_ms": repeat(loop.draft, device, seconds),
        "T_observe_ms": repeat(
            lambda: (loop.verify(loop.masks), loop.observe()), device, seconds
        ),
    }
    times["T_observe_ms"] -= times["T_K_ms"]
    times["eager_cycle_ms"] = repeat(loop.cycle, device, seconds)
    cycles = make_cycles(loop)
    span = loop.cache.static_span
    before = loop.anchor.clone()
    cycles.step(span)
    count = 30
    started = now(device)
    for _ in range(count):
        cycles.step(span)
    times["replayed_cycle_ms"] = (now(device) - started) / count * 1e3
    moved = int((loop.anchor - before).sum())
    assert moved >= count, f"{count} cycles added {moved} tokens"
    return times


def repeat(function, device: str, seconds: float) -> float:
    """Milliseconds of one call, replayed as a graph on a GPU."""
    for _ in range(3):
        function()
    call = function
    if device == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        call = graph.replay
    call()
    count, started = 0, now(device)
    while now(device) - started < seconds:
        for _ in range(10):
            call()
        count += 10
    return (now(device) - started) / count * 1e3


def bandwidth(device: str) -> float:
    """Bytes per second that a large copy reads and writes."""
    size = 2**31 if device == "cuda" else 2**26
    source = torch.empty(size, dtype=torch.uint8, device=device)
    goal = torch.empty_like(source)
    goal.copy_(source)
    started = now(device)
    for _ in range(5):
        goal.copy_(source)
    return 5 * 2 * size / (now(device) - started)


def now(device: str) -> float:
    """Seconds, when all work is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def drop(loop: StaticLoop, tap) -> None:
    """Free what a loop holds."""
    tap.close()
    loop.cache = loop.session = loop.tap = None
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    """Parse the command line, check, measure, append a line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--shapes", nargs="*", default=["Qwen3-4B", "Qwen3-8B"])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not arguments.dry_run and not torch.cuda.is_available():
        print("no GPU here: nothing was checked (--dry-run goes through the steps)")
        return
    device = "cpu" if arguments.dry_run else "cuda"
    shapes = ["dry"] if arguments.dry_run else arguments.shapes
    card = "cpu" if arguments.dry_run else torch.cuda.get_device_name()
    lines = [{"what": "checks", **check_small_pair(device)}]
    print(json.dumps(lines[-1], indent=1), flush=True)
    for name in shapes:
        context = 64 if arguments.dry_run else arguments.context
        times = measure_shape(name, device, context, 0.02 if device == "cpu" else 1.0)
        lines.append({"what": name, "context": context, **times})
        print(json.dumps(lines[-1], indent=1), flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with open(arguments.out, "a", encoding="utf-8") as file:
        for line in lines:
            note = {"card": card, "environment": environment(), **line}
            file.write(json.dumps(note) + "\n")


if __name__ == "__main__":
    main()

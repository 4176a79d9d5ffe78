"""`dflash-lab demo`: decode real prompts plainly and with DFlash, and compare.

Leaves out: decoding (`demo_run.py`), figures (`demo_summary.py`) and files
(`demo_report.py`).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from dflash_lab.cli.loading import add_pair_arguments, load_asked_pair
from dflash_lab.errors import DFlashLabError


def add(commands) -> None:
    """Add the command to a parser's subcommands."""
    demo = commands.add_parser(
        "demo", help="decode real prompts plainly and with DFlash, and compare"
    )
    add_pair_arguments(demo, default="smol")
    demo.add_argument("--prompt", help="your own prompt instead of held-out ones")
    demo.add_argument("--prompts", help="a prompt set's name or a JSON Lines file")
    demo.add_argument(
        "--limit", type=int, default=2, help="prompts per set (default: %(default)s)"
    )
    demo.add_argument(
        "--max-new-tokens",
        type=int,
        default=128,
        help="per answer (default: %(default)s)",
    )
    demo.add_argument("--block-size", type=int, help="default: as trained")
    demo.add_argument(
        "--strict",
        action="store_true",
        help="passes of one shape, so that equality is bit for bit in any dtype",
    )
    demo.add_argument(
        "--out", type=Path, default=Path("report"), help="folder (default: %(default)s)"
    )
    demo.set_defaults(run=run)


def run(arguments) -> int:
    """Decode and compare; 1 if an output is not the target's own."""
    from dflash_lab.cli.demo_report import write_outputs
    from dflash_lab.cli.demo_run import run_demo, trace_details
    from dflash_lab.cli.demo_summary import summarize
    from dflash_lab.pairs.prompts import Prompt, load_prompts
    from dflash_lab.speculative.proposer import DFlash

    if importlib.util.find_spec("matplotlib") is None:
        raise DFlashLabError(
            "the demo's figures need matplotlib; pip install 'dflash-lab[lab]'"
        )
    if arguments.limit < 1:
        raise DFlashLabError(f"--limit {arguments.limit} must be 1 or more")
    pair = load_asked_pair(arguments)
    if pair.drafter is None:
        raise DFlashLabError("the demo needs a drafter; give --drafter")
    DFlash(pair.drafter, arguments.block_size)  # refuse a bad size before any work
    if arguments.prompt is not None:
        prompts = [Prompt("prompt", "own", (arguments.prompt,))]
    elif arguments.prompts is not None:
        prompts = load_prompts(arguments.prompts, arguments.limit)
    else:
        sets = pair.prompt_sets or ("math", "code", "chat", "rewrite")
        prompts = [p for name in sets for p in load_prompts(name, arguments.limit)]
    pair.encode(prompts[0].turns[0])
    if arguments.max_new_tokens < 1:
        raise DFlashLabError(f"--max-new-tokens {arguments.max_new_tokens} is below 1")
    arguments.out.mkdir(parents=True, exist_ok=True)  # a bad folder is said now
    limit, size = arguments.max_new_tokens, arguments.block_size
    results = run_demo(
        pair,
        prompts,
        max_new_tokens=limit,
        block_size=size,
        strict=arguments.strict,
    )
    summary = summarize(pair, results)
    traces = trace_details(pair, results, size, limit)
    report = write_outputs(pair, results, summary, traces, arguments.out)
    _print(pair, results, summary)
    print(f"\nreport: {report}")
    return 0 if summary["lossless"] else 1


def _print(pair, results, summary: dict) -> None:
    from dflash_lab.views.tokens import ansi_text, token_states

    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for result in results:
        states = token_states(result.dflash.cycles, 0, result.dflash.ids)
        print(f"\n[{result.id}] {result.text}\n")
        print(ansi_text(states, pair.need_tokenizer().decode, color=color))
    # Answers of one token come from prefill alone and have no cycle.
    tau = "-" if summary["tau"] is None else f"{summary['tau']:.2f}"
    tau += f" of {summary['block_size']}"
    rows = [
        ("outputs", summary["level"]),
        ("tau (acceptance length)", tau),
        ("DFlash", f"{summary['tokens_per_second']:.1f} tokens/s"),
        (
            "plain decoding, our loop",
            f"{summary['plain_tokens_per_second']:.1f} tokens/s",
        ),
        ("model.generate", f"{summary['generate_tokens_per_second']:.1f} tokens/s"),
        ("speed-up over plain", f"{summary['speedup']:.2f}x"),
        ("speed-up over generate", f"{summary['speedup_vs_generate']:.2f}x"),
        (
            "cycle: draft, verify, other",
            f"{summary['draft_ms']:.1f}, {summary['verify_ms']:.1f}, "
            f"{summary['other_ms']:.1f} ms",
        ),
        (
            "acceptance per position",
            " ".join(f"{rate:.2f}" for rate in summary["acceptance_per_position"]),
        ),
    ]
    print(f"\npair {pair.name}, {summary['dtype']}, {summary['prompts']} answers")
    for name, value in rows:
        print(f"  {name:28} {value}")

"""The command line: `dflash-lab demo | generate | doctor`, and those of `commands/`.

Standard output carries results, standard error progress and errors. A wrong input is
one line on standard error and exit status 2; outputs that differ beyond certified ties
end `demo` with status 1; Ctrl-C ends with 130, and `generate` shows what it made.

Leaves out: the work itself, which lives in the library.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path

from dflash_lab import __version__
from dflash_lab.commands import check, corpus, export, train
from dflash_lab.errors import DFlashLabError


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except DFlashLabError as error:
        print(f"dflash-lab: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("dflash-lab: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader left (`| head`); nothing is wrong, and nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        reason = error.strerror or error
        print(f"dflash-lab: error: {where}{reason}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dflash-lab",
        description="Learn, train and analyse DFlash speculative decoding.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo", help="decode real prompts plainly and with DFlash, and compare"
    )
    _add_pair_arguments(demo, default="smol")
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
        "--out", type=Path, default=Path("report"), help="folder (default: %(default)s)"
    )
    demo.set_defaults(run=_demo)

    generate = commands.add_parser("generate", help="stream one answer")
    _add_pair_arguments(generate, default=None)
    text = generate.add_mutually_exclusive_group(required=True)
    text.add_argument("--prompt", help="a user message")
    text.add_argument("--input-ids", help="token ids, such as 1,2,3")
    generate.add_argument(
        "--max-new-tokens", type=int, default=128, help="default: %(default)s"
    )
    generate.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--top-k", type=int, default=0)
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument(
        "--rule",
        default="match",
        help="match: argmax drafts; speculative: sampled drafts (default: %(default)s)",
    )
    generate.add_argument("--block-size", type=int, help="default: as trained")
    generate.add_argument("--proposer", default="dflash", help="dflash, ngram or none")
    generate.add_argument(
        "--stop", action="append", default=[], help="a stop string; may be repeated"
    )
    generate.add_argument(
        "--json", action="store_true", help="one JSON object, no stream"
    )
    generate.set_defaults(run=_generate)

    for module in (corpus, train, check, export):
        module.add(commands)

    doctor = commands.add_parser("doctor", help="check this machine and installation")
    doctor.set_defaults(run=_doctor)
    return parser


def _add_pair_arguments(parser: argparse.ArgumentParser, default: str | None) -> None:
    parser.add_argument(
        "--pair", default=default, help=f"tiny or smol (default: {default or 'smol'})"
    )
    parser.add_argument("--target", help="folder or Hub repository of another target")
    parser.add_argument("--drafter", help="folder or Hub repository of its drafter")
    parser.add_argument(
        "--dtype", help="float32 or bfloat16 (default: the faster one on this machine)"
    )
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    parser.add_argument(
        "--thinking",
        action="store_true",
        help="let a target that can think do so (its drafter must have learnt it)",
    )
    parser.add_argument("--threads", type=int, help="default: one per core")


def _load(arguments, *, with_drafter: bool = True, quiet: bool = False):
    from dflash_lab.doctor import default_dtype
    from dflash_lab.pairs import load_pair

    _set_threads(arguments.threads)
    name = arguments.pair
    if arguments.target is None:
        name = name or "smol"
    elif name == "smol":
        name = None  # demo's default gives way to an explicit target
    dtype = arguments.dtype or default_dtype(name, arguments.device)
    return load_pair(
        name,
        target=arguments.target,
        drafter=arguments.drafter,
        dtype=dtype,
        device=arguments.device,
        with_drafter=with_drafter,
        thinking=arguments.thinking,
        quiet=quiet,
    )


def _set_threads(threads: int | None) -> None:
    import torch

    if threads is None:
        return
    if threads < 1:
        raise DFlashLabError(f"--threads {threads} must be 1 or more")
    torch.set_num_threads(threads)


def _demo(arguments) -> int:
    from dflash_lab import demo
    from dflash_lab.demo_report import write_outputs
    from dflash_lab.prompts import Prompt, load_prompts
    from dflash_lab.proposers import DFlash

    if importlib.util.find_spec("matplotlib") is None:
        raise DFlashLabError(
            "the demo's figures need matplotlib; pip install 'dflash-lab[lab]'"
        )
    if arguments.limit < 1:
        raise DFlashLabError(f"--limit {arguments.limit} must be 1 or more")
    pair = _load(arguments)
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
    results = demo.run_demo(pair, prompts, max_new_tokens=limit, block_size=size)
    summary = demo.summarize(pair, results)
    traces = demo.trace_details(pair, results, size, limit)
    report = write_outputs(pair, results, summary, traces, arguments.out)
    _print_demo(pair, results, summary)
    print(f"\nreport: {report}")
    return 0 if summary["lossless"] else 1


def _print_demo(pair, results, summary: dict) -> None:
    from dflash_lab.viz.tokens import ansi_text, token_states

    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for result in results:
        states = token_states(result.dflash.trace, 0, result.dflash.output_ids[0])
        print(f"\n[{result.id}] {result.text}\n")
        print(ansi_text(states, pair.tokenizer.decode, color=color))
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


def _generate(arguments) -> int:
    from dflash_lab.sampling import Sampling
    from dflash_lab.speculative import speculative_generate

    sampling = Sampling(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        rule=arguments.rule,
    )
    needs_drafter = arguments.proposer == "dflash"
    pair = _load(arguments, with_drafter=needs_drafter, quiet=arguments.json)
    proposer = _proposer(arguments, pair)
    if arguments.input_ids is not None:
        ids = _parse_ids(arguments.input_ids)
    else:
        ids = pair.encode(arguments.prompt)
    with_text = arguments.prompt is not None
    streamer = None
    if with_text and not arguments.json:
        from transformers import TextStreamer

        streamer = TextStreamer(pair.tokenizer, skip_special_tokens=True)
    result = speculative_generate(
        pair.target,
        proposer,
        ids,
        max_new_tokens=arguments.max_new_tokens,
        sampling=sampling,
        stop_token_ids=pair.stop_token_ids,
        stop_strings=arguments.stop,
        tokenizer=pair.tokenizer,
        on_tokens=None if arguments.json else _printer(streamer),
    )
    output = result.output_ids[0]
    rate = result.tokens_per_second
    if arguments.json:
        tau = result.tau if result.trace.cycles else None
        answer = {
            "text": pair.decode(output) if with_text else None,
            "output_ids": output,
            "acceptance_lengths": result.trace.acceptance_lengths[0],
            "tau": tau,
            "num_cycles": len(result.trace.cycles),
            "tokens_per_second": rate,
            "time_to_first_token": result.time_to_first_token,
            "stop_reason": result.stop_reasons[0],
        }
        print(json.dumps(answer))
    else:
        if streamer:
            streamer.end()
        else:
            print()
        print(
            f"{len(output)} tokens in {len(result.trace.cycles)} cycles, tau "
            f"{result.tau:.2f}, {rate:.1f} tokens/s, "
            f"stopped by {result.stop_reasons[0]}",
            file=sys.stderr,
        )
    return 130 if result.stop_reasons[0] == "interrupted" else 0


def _printer(streamer):
    import torch

    def show(row: int, tokens: list[int]) -> None:
        if streamer is None:
            print(*tokens, sep=",", end=",", flush=True)
        else:
            streamer.put(torch.tensor(tokens))

    return show


def _proposer(arguments, pair):
    from dflash_lab.proposers import DFlash, NGramLookup, Plain

    size = arguments.block_size
    if arguments.proposer == "none":
        return Plain()
    if arguments.proposer == "ngram":
        return NGramLookup() if size is None else NGramLookup(size)
    if arguments.proposer != "dflash":
        raise DFlashLabError(
            f"unknown proposer {arguments.proposer!r}; choose dflash, ngram or none"
        )
    if pair.drafter is None:
        raise DFlashLabError("--proposer dflash needs a drafter; give --drafter")
    return DFlash(pair.drafter, size)


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise DFlashLabError(
            f"--input-ids {text!r} is not a list of whole numbers such as 1,2,3"
        ) from None


def _doctor(arguments) -> int:
    from dflash_lab.doctor import run_doctor

    return run_doctor()

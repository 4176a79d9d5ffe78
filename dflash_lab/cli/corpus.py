"""`dflash-lab corpus`: the target answers prompts, for a drafter to learn from.

Standard error carries progress and counts, standard output one line about the result.
Ctrl-C ends with status 130 and loses only the answers in flight.

Leaves out: the work itself, which lives in `dflash_lab.training`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_lab.cli.loading import default_dtype
from dflash_lab.errors import DFlashLabError

if TYPE_CHECKING:
    from dflash_lab.pairs.pair import Pair
    from dflash_lab.training.corpus.processes import Processes

_EPILOG = """\
Repeat the command to go on where it stopped, with more prompts too, and with any number
of processes (accelerate launch -m dflash_lab corpus ...; on several machines --out must
be in a folder that all of them see). A file of prompts has one JSON object per line
with "messages" (the user's last), "turns" (the first is asked) or "prompt".
"""


def add(commands: argparse._SubParsersAction) -> None:
    """Add the parser to argparse's sub-parsers."""
    parser = commands.add_parser(
        "corpus",
        help="let the target write a drafter's training text",
        description="Let the target answer prompts, for a drafter to learn from.",
        epilog=_EPILOG,
    )
    _add_target(parser.add_argument_group("target"))
    _add_text(parser.add_argument_group("prompts and answers"))
    _add_run(parser.add_argument_group("run"))
    parser.set_defaults(run=_run)


def _add_target(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--pair", help="tiny or smol (default: smol)")
    group.add_argument("--target", help="folder or Hub repository of another target")
    group.add_argument(
        "--dtype", help="float32 or bfloat16 (default: the faster one on this machine)"
    )
    group.add_argument("--device", default="cpu", help="default: %(default)s")
    group.add_argument("--threads", type=int, help="default: one per core")
    group.add_argument(
        "--thinking", action="store_true", help="let a target that can think do so"
    )
    group.add_argument(
        "--server",
        metavar="URL",
        help="answers come from an OpenAI-compatible server; of the pair or target "
        "only the tokenizer is loaded",
    )
    group.add_argument(
        "--model", help="the server's name of it (default: its only one)"
    )


def _add_text(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prompts",
        required=True,
        metavar="FILE|generator|self",
        help="JSON Lines file; the project's generator; or written by the target "
        "itself behind its chat header",
    )
    group.add_argument(
        "--num-prompts",
        type=int,
        metavar="N",
        help="default: all of a file, 1000 of the others",
    )
    group.add_argument(
        "--max-prompt-tokens",
        type=int,
        metavar="N",
        help="longer prompts are left out and counted (default: what the target takes)",
    )
    group.add_argument(
        "--max-new-tokens", type=int, default=256, help="default: %(default)s"
    )
    group.add_argument(
        "--temperature",
        action="append",
        metavar="T[,T...]",
        help="may be repeated; prompts take them in turn, so 0,0,0,0.7 draws every "
        "fourth (default: 0, greedy)",
    )
    group.add_argument("--top-p", type=float, default=1.0, help="default: %(default)s")
    group.add_argument("--top-k", type=int, default=0, help="0: all (the default)")
    group.add_argument(
        "--seed", type=int, default=0, help="of prompts and draws (default: 0)"
    )


def _add_run(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--out",
        type=Path,
        required=True,
        help="JSON Lines file, or parquet if it ends in .parquet",
    )
    group.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="rows decoded together (default: 64), or requests at once (default: 16)",
    )
    group.add_argument(
        "--time-limit",
        type=float,
        metavar="MINUTES",
        help="of writing answers; then stop with what there is",
    )


def _run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    try:
        return _write(arguments)
    except KeyboardInterrupt:
        from dflash_lab.training.corpus.corpus_file import answers_on_disk

        print(
            f"\ndflash-lab: interrupted; {answers_on_disk(arguments.out)} answers are "
            f"kept for {arguments.out}. Run the same command again to go on",
            file=sys.stderr,
        )
        return 130


def _write(arguments: argparse.Namespace) -> int:
    from dflash_lab.training.corpus.corpus import write_corpus
    from dflash_lab.training.corpus.processes import processes_from_environment
    from dflash_lab.training.corpus.server import ChatServer
    from dflash_lab.training.corpus.server_corpus import write_corpus_from_server
    from dflash_lab.training.run.own_corpus import corpus_header

    processes = processes_from_environment()
    # First, because it takes no time to see that there is no server.
    server = ChatServer(arguments.server, arguments.model) if arguments.server else None
    pair = _load(arguments, processes)
    prompts, source = _prompts(arguments, pair, processes)
    header = corpus_header(pair, source)
    limit = arguments.time_limit
    settings = {
        "temperatures": _temperatures(arguments),
        "top_p": arguments.top_p,
        "top_k": arguments.top_k,
        "seed": arguments.seed,
        "max_new_tokens": arguments.max_new_tokens,
        "time_limit": None if limit is None else 60 * limit,
        "processes": processes,
    }
    skipped: dict = {}
    if server is not None:
        done, skipped = write_corpus_from_server(
            server,
            pair,
            prompts,
            arguments.out,
            header=header,
            requests_at_once=arguments.batch_size or 16,
            **settings,
        )
    else:
        done = write_corpus(
            pair.target,
            prompts,
            arguments.out,
            header=header,
            stop_token_ids=pair.stop_token_ids,
            batch_size=arguments.batch_size or 64,
            **settings,
        )
    if processes.rank == 0:
        _report(arguments.out, done, len(prompts), skipped)
    return 0


def _report(out: Path, done: int, wanted: int, skipped: dict) -> None:
    for reason, number in skipped.items():
        print(f"left out: {number} answers, {reason}", file=sys.stderr)
    print(f"{done} answers to {wanted} prompts in {out}")
    if done < wanted:
        print("run the same command again for the others", file=sys.stderr)


def _check(arguments: argparse.Namespace) -> None:
    """Refuse what can be refused before anything is loaded."""
    counts = "num-prompts max-prompt-tokens max-new-tokens batch-size threads"
    for option in counts.split():
        value = getattr(arguments, option.replace("-", "_"))
        if value is not None and value < 1:
            raise DFlashLabError(f"--{option} {value} must be 1 or more")
    if arguments.time_limit is not None and not arguments.time_limit > 0:
        raise DFlashLabError(f"--time-limit {arguments.time_limit} must be above 0")
    if arguments.model is not None and not arguments.server:
        raise DFlashLabError("--model names a server's model; give --server too")
    if arguments.server and arguments.prompts == "self":
        raise DFlashLabError(
            "--prompts self needs the target itself, not a server; give a file or "
            "'generator'"
        )
    if arguments.out.is_dir():
        raise DFlashLabError(f"--out {arguments.out} is a folder; give a file")
    from dflash_lab.training.corpus.corpus import corpus_samplings
    from dflash_lab.training.corpus.parquet import require_pyarrow

    corpus_samplings(
        _temperatures(arguments), arguments.top_p, arguments.top_k, arguments.seed
    )
    if arguments.out.suffix == ".parquet":
        require_pyarrow()


def _temperatures(arguments: argparse.Namespace) -> list[float]:
    given = ",".join(arguments.temperature or ["0"])
    try:
        return [float(part) for part in given.split(",") if part.strip()]
    except ValueError:
        raise DFlashLabError(
            f"--temperature {given!r} is no list of numbers such as 0,0.7"
        ) from None


def _load(arguments: argparse.Namespace, processes: Processes) -> Pair:
    import torch

    from dflash_lab.pairs.pair import load_pair

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    elif processes.world > 1 and "OMP_NUM_THREADS" not in os.environ:
        share = int(os.environ.get("LOCAL_WORLD_SIZE", processes.world))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // max(1, share)))
    name = arguments.pair or (None if arguments.target else "smol")
    if arguments.server:
        from dflash_lab.training.corpus.served_answers import tokenizer_pair

        return tokenizer_pair(name, arguments.target, arguments.thinking)
    device = arguments.device
    if device == "cuda" and processes.world > 1:
        device = f"cuda:{processes.local_rank}"
    return load_pair(
        name,
        target=arguments.target,
        dtype=arguments.dtype or default_dtype(name, device),
        device=device,
        with_drafter=False,
        thinking=arguments.thinking,
    )


def _prompts(
    arguments: argparse.Namespace, pair: Pair, processes: Processes
) -> tuple[list[dict], dict]:
    from dflash_lab.training.corpus.prompt_sources import describe_skipped
    from dflash_lab.training.run.own_corpus import find_prompts

    prompts, source, skipped = find_prompts(
        pair,
        arguments.prompts,
        arguments.out,
        count=arguments.num_prompts,
        max_prompt_tokens=arguments.max_prompt_tokens,
        max_new_tokens=arguments.max_new_tokens,
        seed=arguments.seed,
        batch_size=arguments.batch_size or 64,
        processes=processes,
    )
    if processes.rank == 0:
        left_out = describe_skipped(skipped)
        note = f"; left out: {left_out}" if left_out else ""
        print(f"{len(prompts)} prompts{note}", file=sys.stderr)
    return prompts, source

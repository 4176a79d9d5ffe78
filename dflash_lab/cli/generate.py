"""`dflash-lab generate`: stream one answer, or give it as one JSON object.

Leaves out: the loop.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from dflash_lab.cli.loading import add_pair_arguments, load_asked_pair
from dflash_lab.errors import DFlashLabError

if TYPE_CHECKING:
    from dflash_lab.pairs.pair import Pair
    from dflash_lab.speculative.generation import GenerationResult
    from dflash_lab.speculative.proposer import Proposer


def add(commands) -> None:
    """Add the command to a parser's subcommands."""
    generate = commands.add_parser("generate", help="stream one answer")
    add_pair_arguments(generate, default=None)
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
    generate.set_defaults(run=run)


def run(arguments) -> int:
    """Generate; 130 if interrupted, with what was made."""
    from dflash_lab.speculative.generate import speculative_generate
    from dflash_lab.speculative.sampling import Sampling

    sampling = Sampling(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        rule=arguments.rule,
    )
    needs_drafter = arguments.proposer == "dflash"
    pair = load_asked_pair(arguments, with_drafter=needs_drafter, quiet=arguments.json)
    proposer = _proposer(arguments, pair)
    if arguments.input_ids is not None:
        ids = _parse_ids(arguments.input_ids)
    else:
        ids = pair.encode(arguments.prompt)
    with_text = arguments.prompt is not None
    streamer = None
    if with_text and not arguments.json:
        from transformers import TextStreamer

        streamer = TextStreamer(pair.need_tokenizer(), skip_special_tokens=True)
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
    if arguments.json:
        text = pair.decode(result.output_ids[0]) if with_text else None
        print(json.dumps({"text": text, **_facts(result)}))
    else:
        if streamer:
            streamer.end()
        else:
            print()
        print(
            f"{len(result.output_ids[0])} tokens in {len(result.trace.cycles)} cycles, "
            f"tau {result.tau:.2f}, {result.tokens_per_second:.1f} tokens/s, stopped "
            f"by {result.stop_reasons[0]}",
            file=sys.stderr,
        )
    return 130 if result.stop_reasons[0] == "interrupted" else 0


def _facts(result: GenerationResult) -> dict:
    return {
        "output_ids": result.output_ids[0],
        "acceptance_lengths": result.trace.acceptance_lengths[0],
        "tau": result.tau if result.trace.cycles else None,
        "num_cycles": len(result.trace.cycles),
        "tokens_per_second": result.tokens_per_second,
        "time_to_first_token": result.time_to_first_token,
        "stop_reason": result.stop_reasons[0],
    }


def _printer(streamer):
    import torch

    def show(row: int, tokens: list[int]) -> None:
        if streamer is None:
            print(*tokens, sep=",", end=",", flush=True)
        else:
            streamer.put(torch.tensor(tokens))

    return show


def _proposer(arguments, pair: Pair) -> Proposer:
    from dflash_lab.speculative.ngram import NGramLookup
    from dflash_lab.speculative.proposer import DFlash, Plain

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

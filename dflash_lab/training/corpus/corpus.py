"""The target writes the drafter's training text.

A drafter is worth what it knows of its own target, so the answers it learns from are
the target's, greedy or sampled. `write_corpus` decodes many prompts at a time, and
every finished answer is one line of the file at once, so a killed run loses only the
answers in flight and the same call goes on where it stopped. Draws are keyed by the
prompt's number and the position, so an answer depends on neither the batch nor the
process that wrote it, up to the rounding of the batch's matrix products.

Leaves out: where prompts come from (`prompt_sources.py`), the decoding itself
(`batch_writer.py`), the file (`answer_log.py`) and servers (`server_corpus.py`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from dflash_lab.errors import DFlashLabError
from dflash_lab.speculative.sampling import Sampling
from dflash_lab.target.target import Target
from dflash_lab.training.corpus.answer_log import AnswerLog
from dflash_lab.training.corpus.batch_writer import BatchWriter
from dflash_lab.training.corpus.corpus_file import read_corpus as read_corpus
from dflash_lab.training.corpus.processes import ALONE, Processes


def write_corpus(
    target: Target,
    prompts: Sequence[dict],
    path: Path,
    *,
    stop_token_ids: Sequence[int],
    header: dict,
    temperatures: Sequence[float] = (0.0,),
    max_new_tokens: int = 256,
    batch_size: int = 64,
    time_limit: float | None = None,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    processes: Processes = ALONE,
) -> int:
    """Let the target answer prompts in batches; resume if the file exists.

    Args:
        target: writes the answers.
        prompts: each with `prompt_ids` (list of ids); other fields are kept.
        path: JSON Lines file whose first line is the header, or a `.parquet` file.
        stop_token_ids: an answer ends with the first of these (it is kept).
        header: what made the corpus (target, template, ...); `num_prompts`,
            `prompt_source` and `versions` may change between calls.
        temperatures: prompt i is answered at `temperatures[i % len]`.
        max_new_tokens: longest answer.
        batch_size: rows decoded together.
        time_limit: seconds after which the call returns with what it has.
        top_p: see `Sampling`.
        top_k: see `Sampling`.
        seed: of the draws, 0 to 2**31 - 1.
        processes: those that write this corpus together.

    Returns:
        Answers in the file.

    Raises:
        DFlashLabError: a setting outside its range, a prompt that does not fit the
            target's positions, a file made with other settings or other prompts, a
            full disk.
    """
    samplings = corpus_samplings(temperatures, top_p, top_k, seed)
    check_sizes(prompts, max_new_tokens, batch_size, target.max_positions)
    header = {
        **header,
        "target_fingerprint": target.fingerprint(),
        "stop_token_ids": list(stop_token_ids),
        **sampling_header(samplings, max_new_tokens),
    }
    started = time.monotonic()

    def time_is_up() -> bool:
        return time_limit is not None and time.monotonic() - started > time_limit

    with AnswerLog(path, header, prompts, processes) as log:
        writer = BatchWriter(
            target, prompts, samplings, set(stop_token_ids), max_new_tokens, log.add
        )
        writer.run(log.todo, batch_size, time_is_up)
    return len(log)


def corpus_samplings(
    temperatures: Sequence[float], top_p: float, top_k: int, seed: int
) -> list[Sampling]:
    """The checked `Sampling` of each temperature.

    Raises:
        DFlashLabError: no temperature, or a value outside its range.
    """
    if not temperatures:
        raise DFlashLabError("no temperature; give 0 for greedy answers")
    if not 0 <= seed < 2**31:
        raise DFlashLabError(f"seed {seed} is outside 0 to {2**31 - 1}")
    return [Sampling(t, top_k=top_k, top_p=top_p, seed=seed) for t in temperatures]


def sampling_header(samplings: Sequence[Sampling], max_new_tokens: int) -> dict:
    """The header's fields that say how answers were drawn."""
    first = samplings[0]
    return {
        "temperatures": [s.temperature for s in samplings],
        "top_p": first.top_p,
        "top_k": first.top_k,
        "seed": first.seed,
        "max_new_tokens": max_new_tokens,
    }


def check_sizes(
    prompts: Sequence[dict],
    max_new_tokens: int,
    batch_size: int,
    max_positions: int | None,
) -> None:
    """Refuse sizes that cannot work, before any work is done.

    Raises:
        DFlashLabError: a size below 1, an empty prompt, or a prompt and answer longer
            than the target's positions.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if value < 1:
            raise DFlashLabError(f"{name} {value} must be 1 or more")
    for index, prompt in enumerate(prompts):
        length = len(prompt["prompt_ids"])
        if length == 0:
            raise DFlashLabError(f"prompt {index} is empty; give at least one token")
        if max_positions is not None and length + max_new_tokens > max_positions:
            raise DFlashLabError(
                f"prompt {index} has {length} tokens, which with {max_new_tokens} new "
                f"ones exceeds the target's {max_positions} positions; leave it out or "
                "lower max_new_tokens"
            )

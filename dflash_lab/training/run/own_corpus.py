"""Prompts of any source for a pair, and a corpus that a training run writes itself.

Leaves out: the sources (`training/corpus/prompt_sources.py`) and the decoding
    (`training/corpus/corpus.py`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from dflash_lab.errors import DFlashLabError
from dflash_lab.files import environment
from dflash_lab.pairs.packaged_target import sha256_of
from dflash_lab.pairs.pair import Pair
from dflash_lab.pairs.prompts import read_prompt_file
from dflash_lab.training.corpus import prompt_sources as sources
from dflash_lab.training.corpus.corpus import write_corpus
from dflash_lab.training.corpus.processes import ALONE, Processes
from dflash_lab.training.run.config import CorpusSettings


def find_prompts(
    pair: Pair,
    name: str,
    out: Path,
    *,
    count: int | None = None,
    max_prompt_tokens: int | None = None,
    max_new_tokens: int = 256,
    seed: int = 0,
    batch_size: int = 64,
    processes: Processes = ALONE,
) -> tuple[list[dict], dict, Counter]:
    """Encoded prompts of a source.

    Args:
        pair: who answers them.
        name: `generator`, `self`, or a JSON Lines file.
        out: the corpus they are for; the target's own draws are kept beside it.
        count: all of a file, 1000 of the other sources, if None.
        max_prompt_tokens: longest prompt.
        max_new_tokens: room that the answer needs in the target's positions.
        seed: of generator and draws.
        batch_size: rows drawn together.
        processes: those that write the corpus together.

    Returns:
        Prompts for `write_corpus`, a description for its header, and how many
        candidates were left out, by reason.

    Raises:
        DFlashLabError: a source that has too few, or none.
    """
    limit = _longest_prompt(pair, max_prompt_tokens, max_new_tokens)
    is_close = sources.held_out_test(pair)
    described = {"from": name, "seed": seed}
    if name == "self":
        prompts, skipped = sources.target_written_prompts(
            pair,
            out.with_name(f"{out.name}.draws.jsonl"),
            count or 1000,
            is_close=is_close,
            max_prompt_tokens=limit,
            batch_size=batch_size,
            seed=seed,
            processes=processes,
        )
        return prompts, described, skipped
    candidates: Iterable[dict]
    if name == "generator":
        count = count or 1000
        candidates = sources.generated_prompts(pair, seed)
    else:
        candidates = read_prompt_file(Path(name))
        described = {"from": Path(name).name, "sha256": sha256_of(Path(name))}
    prompts, skipped = sources.choose_prompts(
        candidates, pair, count=count, is_close=is_close, max_prompt_tokens=limit
    )
    if name == "generator" and count is not None and len(prompts) < count:
        raise DFlashLabError(
            f"the generator has only {len(prompts)} of {count} prompts; ask for fewer"
        )
    return prompts, described, skipped


def corpus_header(pair: Pair, source: dict) -> dict:
    """What a corpus file says of its making, besides the settings of the draws."""
    template = str(getattr(pair.tokenizer, "chat_template", None) or "")
    header = {
        "target": pair.name,
        "thinking": pair.thinking,
        "chat_template_sha256": hashlib.sha256(template.encode("utf-8")).hexdigest(),
        "prompt_source": source,
        "versions": environment(),
    }
    if pair.target is not None:
        header["dtype"] = str(pair.target.dtype).removeprefix("torch.")
        header["revision"] = getattr(pair.model.config, "_commit_hash", None)
    return header


def write_own_corpus(
    pair: Pair, path: Path, settings: CorpusSettings, processes: Processes = ALONE
) -> None:
    """Write, or finish, the corpus of a training run that names none.

    Args:
        pair: the target, with a tokenizer.
        path: the corpus file.
        settings: section `corpus` of the run's settings.
        processes: those of the run.
    """
    prompts, source, _ = find_prompts(
        pair,
        settings.prompts,
        path,
        count=settings.num_prompts,
        max_new_tokens=settings.max_new_tokens,
        seed=settings.seed,
        batch_size=settings.batch_size,
        processes=processes,
    )
    write_corpus(
        pair.target,
        prompts,
        path,
        stop_token_ids=pair.stop_token_ids,
        header=corpus_header(pair, source),
        temperatures=settings.temperatures,
        max_new_tokens=settings.max_new_tokens,
        batch_size=settings.batch_size,
        seed=settings.seed,
        processes=processes,
    )


def _longest_prompt(pair: Pair, limit: int | None, max_new_tokens: int) -> int | None:
    """The tighter one of the limit and of what the target's positions leave."""
    most = None if pair.target is None else pair.target.max_positions
    if most is None:
        return limit
    room = most - max_new_tokens
    if room < 1:
        raise DFlashLabError(
            f"max_new_tokens {max_new_tokens} leaves no room for a prompt in the "
            f"target's {most} positions"
        )
    return room if limit is None else min(limit, room)

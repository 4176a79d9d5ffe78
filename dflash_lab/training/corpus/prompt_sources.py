"""Prompts for a corpus: from a generator, or the target itself.

Every source yields candidates (`messages`, or one `prompt`); `choose_prompts` encodes
them, and leaves out repeated ones, ones close to a held-out prompt, and ones that are
too long, and counts what it left out.

Leaves out: files (`pairs/prompts.py`), the grammar (`prompts.py`), and the answers
(`corpus.py`).
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import cast

from dflash_lab.errors import DFlashLabError
from dflash_lab.pairs.pair import Pair
from dflash_lab.pairs.prompts import load_prompts, messages_of, prompt_set_names
from dflash_lab.training.corpus.corpus import write_corpus
from dflash_lab.training.corpus.corpus_file import read_corpus
from dflash_lab.training.corpus.processes import ALONE, Processes
from dflash_lab.training.corpus.prompts import (
    KINDS,
    too_close,
    training_prompts,
    word_triples,
)
from dflash_lab.training.corpus.tiny_text import is_held_out, tiny_texts

REPEATED, HELD_OUT, TOO_LONG = "repeated", "close to a held-out prompt", "too long"


def generated_prompts(pair: Pair, seed: int) -> Iterator[dict]:
    """Endless candidates of the project's generator for a pair.

    The tiny pair knows the small world of `tiny_text.py` only; every other target is
    asked the grammar's prompts, none of them close to a held-out one.
    """
    texts = tiny_texts(seed)
    if pair.name != "tiny":
        texts = training_prompts(seed, held_out=held_out_texts())
    for turn in itertools.count():
        # The four kinds come in turn, and so do temperatures: were the kinds' order
        # always the same, one kind would get one temperature.
        kinds = deque(itertools.islice(texts, len(KINDS)))
        kinds.rotate(-turn)
        for text in kinds:
            yield {"kind": text["kind"], "prompt": text["prompt"]}


def held_out_test(pair: Pair) -> Callable[[str], bool]:
    """A test that is true for texts too close to the prompts a pair is measured on."""
    if pair.name == "tiny":  # its sentences share too many words to compare triples
        return is_held_out
    triples = [word_triples(text) for text in held_out_texts()]
    return lambda text: too_close(text, triples)


def held_out_texts() -> tuple[str, ...]:
    """All user messages of the prompt sets that come with the project."""
    names = [name for name in prompt_set_names() if not name.startswith("tiny-")]
    return tuple(t for name in names for p in load_prompts(name) for t in p.turns)


def choose_prompts(
    candidates: Iterable[dict],
    pair: Pair,
    *,
    count: int | None = None,
    is_close: Callable[[str], bool] = lambda text: False,
    max_prompt_tokens: int | None = None,
) -> tuple[list[dict], Counter]:
    """Encode candidates and leave out those that no corpus should hold.

    Args:
        candidates: `{"kind", "prompt"}` or `{"kind", "messages"}`; an iterator may
            be endless.
        pair: its tokenizer and chat template encode them.
        count: at most so many.
        is_close: true for a user's message close to a held-out one.
        max_prompt_tokens: longest prompt, template included; None for any.

    Returns:
        Rows for `write_corpus` (`kind`, `prompt` or `messages`, `prompt_ids`), and how
        many candidates were left out, by reason.

    Raises:
        DFlashLabError: no prompt is left, or the template refuses one.
    """
    chosen, skipped = _sift(candidates, pair, count, is_close, max_prompt_tokens)
    if not chosen:
        limit = "" if max_prompt_tokens is None else f" (limit {max_prompt_tokens})"
        raise DFlashLabError(
            f"no prompt is left: {describe_skipped(skipped) or 'there was none'}"
            f"{limit if skipped[TOO_LONG] else ''}; give other prompts"
            f"{' or raise --max-prompt-tokens' if skipped[TOO_LONG] else ''}"
        )
    return chosen, skipped


def describe_skipped(skipped: Counter) -> str:
    """Counts by reason, such as `3 repeated, 1 too long`; empty for none."""
    return ", ".join(f"{number} {reason}" for reason, number in skipped.items())


def target_written_prompts(
    pair: Pair,
    path: Path,
    count: int,
    *,
    is_close: Callable[[str], bool],
    max_prompt_tokens: int | None = None,
    batch_size: int = 256,
    seed: int = 0,
    processes: Processes = ALONE,
) -> tuple[list[dict], Counter]:
    """`count` prompts that the target writes when given only the user's header.

    An instruct target was trained on what users ask, and sampling behind the opening
    of a user's turn gives a varied picture of it (Magpie, arXiv:2406.08464). Kept are
    distinct texts of three words or more that ended by themselves; more are drawn
    until enough are left.

    Args:
        pair: an instruct target.
        path: corpus file of the raw draws, kept for resuming.
        count: how many prompts.
        is_close: as for `choose_prompts`.
        max_prompt_tokens: as for `choose_prompts`.
        batch_size: rows decoded together.
        seed: of the draws.
        processes: those that draw together.

    Returns:
        As `choose_prompts`.

    Raises:
        DFlashLabError: eight draws per prompt did not suffice; and as `write_corpus`.
    """
    begin, ends = user_header(pair)
    draws = count + count // 2 + 16
    while True:
        write_corpus(
            pair.target,
            [{"kind": "self", "prompt_ids": begin} for _ in range(draws)],
            path,
            stop_token_ids=ends,
            header={"self_written_prompts": True},
            temperatures=(1.0,),
            max_new_tokens=72,
            batch_size=batch_size,
            seed=seed,
            processes=processes,
        )
        rows = {r["index"]: r for r in read_corpus(path)[1] if not r["truncated"]}
        # Rows beyond `draws` are of an earlier call that drew more.
        ended = [rows[index]["answer_ids"] for index in range(draws) if index in rows]
        texts = [pair.decode(ids).strip() for ids in ended]
        candidates = [
            {"kind": "self", "prompt": text}
            for text in dict.fromkeys(texts)
            if len(text.split()) >= 3
        ]
        chosen, skipped = _sift(candidates, pair, count, is_close, max_prompt_tokens)
        if len(chosen) == count:
            return chosen, skipped
        if draws >= 8 * count:
            raise DFlashLabError(
                f"{draws} draws of {pair.name} gave fewer than {count} usable prompts; "
                "ask for fewer, or give a file of prompts"
            )
        draws *= 2


def user_header(pair: Pair) -> tuple[list[int], list[int]]:
    """How a user's turn begins and ends in the pair's chat template.

    Returns:
        The ids up to where the user's words begin, and the ids that end them.

    Raises:
        DFlashLabError: the tokenizer has no chat template.
    """
    tokenizer = pair.tokenizer
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise DFlashLabError(
            f"{pair.name} has no chat template behind whose header it could write "
            "prompts; give a file of prompts"
        )
    marker = "@@@@"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": marker}],
        add_generation_prompt=True,
        tokenize=False,
        enable_thinking=pair.thinking,
    )
    before, after = (
        tokenizer.encode(part, add_special_tokens=False)
        for part in cast(str, text).split(marker)
    )
    ends = set(pair.stop_token_ids)
    # Where no stop token closes the user's turn, the template's next mark does.
    ends |= set(after[:1]) & set(tokenizer.added_tokens_decoder)
    return before, sorted(ends)


def _sift(
    candidates: Iterable[dict],
    pair: Pair,
    count: int | None,
    is_close: Callable[[str], bool],
    max_prompt_tokens: int | None,
) -> tuple[list[dict], Counter]:
    chosen: list[dict] = []
    skipped: Counter = Counter()
    seen: set[tuple] = set()
    misses, endless = 0, not hasattr(candidates, "__len__")
    for candidate in candidates:
        messages = messages_of(candidate)
        key = tuple((m["role"], " ".join(m["content"].split())) for m in messages)
        reason, ids = None, []
        if key in seen:
            reason = REPEATED
        elif any(is_close(m["content"]) for m in messages if m["role"] == "user"):
            reason = HELD_OUT
        else:
            ids = pair.encode_messages(messages)
            if max_prompt_tokens is not None and len(ids) > max_prompt_tokens:
                reason = TOO_LONG
        seen.add(key)
        if reason is None:
            row = {k: v for k, v in candidate.items() if k != "messages"}
            alone = len(messages) == 1
            row |= (
                {"prompt": messages[0]["content"]} if alone else {"messages": messages}
            )
            chosen.append({**row, "prompt_ids": ids})
        else:
            skipped[reason] += 1
        misses = misses + 1 if reason else 0
        # An endless source that has run dry yields nothing new for long.
        dry = endless and misses > 10_000 + 10 * len(chosen)
        if dry or len(chosen) == count:
            break
    return chosen, skipped

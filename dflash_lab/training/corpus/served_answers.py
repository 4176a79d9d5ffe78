"""Token ids of answers that come from a server as text.

An answer whose ids do not decode to the same text, or that ended for another reason
than a stop token or the length limit, is not what the target drew.

Leaves out: the server (`server.py`), and what becomes of the ids (`server_corpus.py`).
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dflash_lab.errors import DFlashLabError
from dflash_lab.pairs.pair import (
    Pair,
    find_stop_token_ids,
    find_target,
    load_tokenizer,
)


def tokenizer_pair(
    name: str | None, target: str | Path | None = None, thinking: bool = False
) -> Pair:
    """A pair without weights, of which only `encode` and `decode` work.

    Args:
        name: `tiny` or `smol`; None if `target` is given.
        target: folder or Hub repository with the tokenizer of what is served.
        thinking: see `Pair`.

    Raises:
        DFlashLabError: unknown name, or no tokenizer or config there.
    """
    from transformers import AutoConfig, GenerationConfig

    target = find_target(name, target)
    tokenizer = load_tokenizer(target)
    if tokenizer is None:
        raise DFlashLabError(f"cannot load a tokenizer from {target}")
    # What of a model says where its answers end.
    model: Any = SimpleNamespace(config=None, generation_config=None)
    try:
        model.config = AutoConfig.from_pretrained(target)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise DFlashLabError(f"cannot load {target}: {first_line}") from None
    with contextlib.suppress(OSError):  # not every target has one
        model.generation_config = GenerationConfig.from_pretrained(target)
    no_weights: Any = None
    stop = find_stop_token_ids(model)
    return Pair(name or str(target), no_weights, None, tokenizer, stop, (), thinking)


def answer_ids(pair: Pair, message: dict, reason: str) -> tuple[list[int], str | None]:
    """Token ids of a served answer, or why it cannot be used.

    Args:
        pair: its tokenizer encodes the text.
        message: the assistant's message of the protocol.
        reason: its `finish_reason`.

    Returns:
        The ids, with the stop token if it ended by itself, and None; or no ids and
        the problem in a few words.
    """
    text = message.get("content") or ""
    if reason not in ("stop", "length"):
        return [], f"ended by {reason!r}"
    if message.get("reasoning_content") or message.get("reasoning"):
        return [], "thoughts split from the answer by the server"
    tokenizer = pair.tokenizer
    assert tokenizer is not None  # it encoded the prompts
    ids = tokenizer.encode(text, add_special_tokens=False)
    back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if back != text or set(ids) & set(pair.stop_token_ids):
        return [], "not the same text after tokenisation"
    if not ids:
        return [], "empty"
    if reason == "stop" and pair.stop_token_ids:
        # Of several stop tokens the tokenizer's own one ends a chat turn.
        own = tokenizer.eos_token_id
        ids.append(own if own in pair.stop_token_ids else pair.stop_token_ids[0])
    return ids, None

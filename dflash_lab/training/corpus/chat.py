"""Chat messages and the template that turns them into token ids.

Leaves out: where messages come from (`prompt_sources.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from dflash_lab.errors import DFlashLabError
from dflash_lab.pairs.pair import Pair


def messages_of(row: dict) -> list[dict]:
    """The conversation of a candidate or a corpus row, as chat messages."""
    if "messages" in row:
        return row["messages"]
    return [{"role": "user", "content": row["prompt"]}]


def encode_messages(pair: Pair, messages: Sequence[dict]) -> list[int]:
    """Token ids of chat messages that the target should answer.

    Raises:
        DFlashLabError: no tokenizer, or a message that its chat template refuses.
    """
    from jinja2 import TemplateError

    if len(messages) == 1:
        return pair.encode(messages[0]["content"])
    tokenizer = pair.tokenizer
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        return pair.encode("\n".join(m["content"] for m in messages))
    try:
        ids = tokenizer.apply_chat_template(
            list(messages),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            enable_thinking=pair.thinking,
        )
    except TemplateError as error:
        roles = ", ".join(m["role"] for m in messages)
        raise DFlashLabError(
            f"the chat template of {pair.name} refuses messages of the roles {roles}: "
            f"{error}"
        ) from None
    return cast(list[int], ids)  # what it gives for one tokenized conversation


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

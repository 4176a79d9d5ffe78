"""Files of prompts: held-out sets to measure on, and any file to train on.

A held-out set is a JSON Lines file with `id`, `kind` and `turns` (user messages) that
no drafter was trained on; any file of that form, or with one `prompt` per line, can
take its place. A file for training may have whole conversations.

Leaves out: prompts that are made up (`training/corpus/prompt_sources.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dflash_lab.errors import DFlashLabError
from dflash_lab.files import data_root
from dflash_lab.pairs.hub_prompts import SETS as HUB
from dflash_lab.pairs.hub_prompts import hub_rows
from dflash_lab.pairs.packaged_prompts import SETS as PACKAGED
from dflash_lab.pairs.packaged_prompts import packaged_prompts_file

ROLES = ("system", "user", "assistant")
T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """One conversation: the user's messages; the answers are the target's."""

    id: str
    kind: str
    turns: tuple[str, ...]


def prompt_set_names() -> list[str]:
    """Names of the sets that come with the project."""
    return sorted(path.stem for path in (data_root() / "prompts").glob("*.jsonl"))


def load_prompts(name_or_file: str | Path, limit: int | None = None) -> list[Prompt]:
    """Prompts of a named set or of a JSON Lines file.

    Args:
        name_or_file: a set's name (see `prompt_set_names`), a packaged set
            (`humaneval`, `mt-bench`, `gsm8k-100`), one of the Hub (`hub:gsm8k`,
            ...; see `hub_prompts.py`), or a path.
        limit: at most so many, from the start.

    Raises:
        DFlashLabError: no such set or file, or a line that is no prompt.
    """
    if str(name_or_file) in HUB:
        rows = hub_rows(str(name_or_file))[:limit]
        return [Prompt(r["id"], r["kind"], tuple(r["turns"])) for r in rows]
    path = Path(name_or_file)
    if not path.is_file() and str(name_or_file) in PACKAGED:
        path = packaged_prompts_file(str(name_or_file))
    if not path.is_file():
        path = data_root() / "prompts" / f"{name_or_file}.jsonl"
    if not path.is_file():
        raise DFlashLabError(
            f"unknown prompt set {str(name_or_file)!r}; choose one of "
            f"{', '.join(prompt_set_names())}, or give a JSON Lines file; from "
            f"packages come {', '.join(PACKAGED)}, from the Hub {', '.join(HUB)}"
        )

    def read(row: dict, number: int) -> Prompt:
        turns = row["turns"] if "turns" in row else [row["prompt"]]
        if not isinstance(turns, list) or not turns:
            raise TypeError
        if not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise ValueError("a message is not text, or empty")
        name = str(row.get("id", f"{path.stem}-{number}"))
        return Prompt(name, str(row.get("kind", path.stem)), tuple(turns))

    expected = "an object with 'turns' (a list of messages) or 'prompt' (one message)"
    return _read_lines(path, read, expected)[:limit]


def read_prompt_file(path: Path) -> list[dict]:
    """Candidates of a JSON Lines file.

    A line has `messages` (role and content; system messages may come first, the
    user's comes last), or `turns` (the user's messages; the first is asked, because
    later ones need the target's earlier answers), or `prompt`. `kind` and `id` are
    kept; other fields are not.

    Returns:
        `{"kind", "messages"}` of each line, with `id` where there is one.

    Raises:
        DFlashLabError: no such file, not UTF-8, no prompt in it, or a bad line, which
            is named by number.
    """

    def read(row: dict, number: int) -> dict:
        candidate: dict = {"kind": str(row.get("kind", path.stem))}
        if "id" in row:
            candidate["id"] = str(row["id"])
        return {**candidate, "messages": _messages_in(row)}

    expected = "a JSON object with 'messages', 'turns' or 'prompt'"
    try:
        return _read_lines(path, read, expected)
    except OSError as error:
        raise DFlashLabError(
            f"cannot read prompts from {path}: {error.strerror}; give a JSON Lines "
            "file, 'generator' or 'self'"
        ) from None


def messages_of(row: dict) -> list[dict]:
    """The conversation of a candidate or a corpus row, as chat messages."""
    if "messages" in row:
        return row["messages"]
    return [{"role": "user", "content": row["prompt"]}]


def _read_lines(path: Path, read: Callable[[dict, int], T], expected: str) -> list[T]:
    """What `read` makes of the object and number of each line that is not empty.

    `read` says what is wrong with a line in a ValueError, `expected` what is right.

    Raises:
        DFlashLabError: not UTF-8, no prompt, or a bad line, which is named by number.
    """
    try:
        # Not splitlines(): JSON strings may hold other line separators than \n.
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DFlashLabError(f"{path} is not UTF-8 text: {error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                found.append(read(json.loads(line), number))
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            known = type(error) in (ValueError, UnicodeEncodeError)
            raise DFlashLabError(
                f"{path}, line {number}: {error if known else 'not a prompt'}; "
                f"expected {expected}"
            ) from None
    if not found:
        raise DFlashLabError(f"{path} holds no prompt")
    return found


def _messages_in(row: dict) -> list[dict]:
    """The checked conversation of one line; ValueError says what is wrong."""
    if "turns" in row and "messages" not in row:
        if not isinstance(row["turns"], list):
            raise TypeError
        messages = [{"role": "user", "content": turn} for turn in row["turns"][:1]]
    else:
        asked = messages_of(row)
        messages = [{"role": m["role"], "content": m["content"]} for m in asked]
    for message in messages:
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise ValueError(f"role {role!r} is none of {', '.join(ROLES)}")
        if not isinstance(content, str) or (role == "user" and not content.strip()):
            raise ValueError(f"the {role}'s message is not text, or empty")
        content.encode("utf-8")  # half a surrogate pair cannot be written
    if not messages or messages[-1]["role"] != "user":
        raise ValueError("the last message is not the user's")
    return messages

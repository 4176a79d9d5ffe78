"""Held-out prompt sets: small files of conversations that no drafter was trained on.

A set is a JSON Lines file with `id`, `kind` and `turns` (user messages); any file of
that form, or with one `prompt` per line, can take its place.

Leaves out: prompts for training (`training/corpus/prompts.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from dflash_lab.errors import DFlashLabError
from dflash_lab.files import data_root
from dflash_lab.pairs.hub_prompts import SETS as HUB
from dflash_lab.pairs.hub_prompts import hub_rows
from dflash_lab.pairs.packaged_prompts import SETS as PACKAGED
from dflash_lab.pairs.packaged_prompts import packaged_prompts_file


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
    prompts = []
    try:
        # Not splitlines(): JSON strings may hold other line separators than \n.
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DFlashLabError(f"{path} is not UTF-8 text: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            turns = row["turns"] if "turns" in row else [row["prompt"]]
            good = isinstance(turns, list) and turns
            if not good or not all(isinstance(t, str) and t.strip() for t in turns):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise DFlashLabError(
                f"{path}, line {number}: expected an object with 'turns' (a list of "
                "messages) or 'prompt' (one message)"
            ) from None
        name = str(row.get("id", f"{path.stem}-{number}"))
        prompts.append(Prompt(name, str(row.get("kind", path.stem)), tuple(turns)))
    if not prompts:
        raise DFlashLabError(f"{path} holds no prompt")
    return prompts if limit is None else prompts[:limit]

"""Prompt sets of the paper's table 1 from the Hugging Face Hub.

`hub:gsm8k`, `hub:math500`, `hub:humaneval`, `hub:mbpp`, `hub:mt-bench`, `hub:alpaca`:
the data files of the named split are downloaded once by `huggingface_hub` and read from
its cache afterwards. Mathematics asks for step-by-step reasoning and a boxed answer, as
published figures did; how the other sets were worded in the authors' harness is not
known here, so figures on them can differ a little.

Leaves out: sets with access conditions (AIME, LiveCodeBench) and grading.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download

from dflash_lab.errors import DFlashLabError

# The request that drafters' published figures on mathematics were measured with.
ASK = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class HubSet:
    """Where a set lies and how a row becomes a conversation.

    Attributes:
        repository: data set on the Hub.
        patterns: its files, of one split.
        kind: of the prompts.
        turns: row -> user messages.
    """

    repository: str
    patterns: tuple[str, ...]
    kind: str
    turns: Callable[[dict], list[str]]


def ask_for_code(text: str) -> list[str]:
    """The user's message for the beginning of a Python function."""
    return [f"Complete this Python function.\n\n```python\n{text.rstrip()}\n```"]


def _mbpp(row: dict) -> list[str]:
    tests = "\n".join(row["test_list"])
    task = row.get("text") or row["prompt"]
    return [f"{task}\nThe code must pass these tests:\n\n```python\n{tests}\n```"]


def _alpaca(row: dict) -> list[str]:
    return ["\n\n".join(part for part in (row["instruction"], row["input"]) if part)]


SETS = {
    "hub:gsm8k": HubSet(
        "openai/gsm8k",
        ("main/test-*.parquet",),
        "math",
        lambda row: [row["question"] + ASK],
    ),
    "hub:math500": HubSet(
        "HuggingFaceH4/MATH-500",
        ("test.jsonl",),
        "math",
        lambda row: [row["problem"] + ASK],
    ),
    "hub:humaneval": HubSet(
        "openai/openai_humaneval",
        ("openai_humaneval/test-*.parquet",),
        "code",
        lambda row: ask_for_code(row["prompt"]),
    ),
    "hub:mbpp": HubSet(
        "google-research-datasets/mbpp",
        ("full/test-*.parquet",),
        "code",
        _mbpp,
    ),
    "hub:mt-bench": HubSet(
        "HuggingFaceH4/mt_bench_prompts",
        ("raw/question.jsonl", "data/train-*.parquet"),
        "chat",
        lambda row: list(row.get("turns") or row["prompt"]),
    ),
    "hub:alpaca": HubSet(
        "tatsu-lab/alpaca", ("data/train-*.parquet",), "chat", _alpaca
    ),
}


def hub_rows(name: str) -> list[dict]:
    """Rows of a set as `{"id", "kind", "turns"}`.

    Args:
        name: one of `SETS`.

    Raises:
        DFlashLabError: the Hub is not reachable and nothing is cached, or files of
            another form.
    """
    source = SETS[name]
    try:
        folder = Path(
            snapshot_download(
                source.repository,
                repo_type="dataset",
                allow_patterns=list(source.patterns),
            )
        )
    except Exception as error:
        raise DFlashLabError(
            f"the prompt set {name} ({source.repository}) is neither cached nor "
            f"reachable on the Hub ({type(error).__name__}); check the connection, or "
            "use a packaged set such as gsm8k-100"
        ) from None
    found = (sorted(folder.glob(pattern)) for pattern in source.patterns)
    files = next(filter(None, found), None)
    if files is None:
        raise DFlashLabError(
            f"{source.repository} has no file {' or '.join(source.patterns)}; its "
            "layout has changed"
        )
    try:
        rows = [row for file in files for row in _read(file)]
        label = name.removeprefix("hub:")
        return [
            {"id": f"{label}-{i}", "kind": source.kind, "turns": source.turns(row)}
            for i, row in enumerate(rows)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise DFlashLabError(
            f"the rows of {source.repository} have another form than expected ({error})"
        ) from None


def _read(path: Path) -> list[dict]:
    if path.suffix == ".parquet":
        try:
            from pyarrow import parquet
        except ImportError:
            raise DFlashLabError(
                "reading parquet files needs pyarrow; pip install 'dflash-lab[train]'"
            ) from None
        return parquet.read_table(path).to_pylist()
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line.strip()]

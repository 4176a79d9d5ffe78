"""One decode as one HTML page that needs nothing but itself.

The page holds its style and pictures and has no script, so it reads the same by mail,
from disk and on paper. Whatever a model or a user wrote is escaped, and a content
policy forbids scripts and network besides.

Leaves out: measuring and judging; all numbers come in the report's dictionary.
"""

from __future__ import annotations

from collections.abc import Mapping

from dflash_lab.views.render import count, known, render

_TAU = "\N{GREEK SMALL LETTER TAU}"
_TIMES = "\N{MULTIPLICATION SIGN}"


def render_report(report: Mapping) -> str:
    """The report as one self-contained HTML page.

    Args:
        report: a mapping with

            * `title`, `pair`, `dtype`: text; `machine`: mapping of names to values;
            * `summary`: what `summary.json` holds (`equal`, `lossless`, `ties`, `tau`,
              `speedup`, `speedup_vs_generate`, `tokens_per_second`,
              `plain_tokens_per_second`, `generate_tokens_per_second`,
              `acceptance_per_position`, `draft_ms`, `verify_ms`, `other_ms` per cycle,
              `plain_ms` per token, `level`, `block_size`, `num_cycles`, `num_tokens`,
              `prompts`); what is missing or None is left out of the page;
            * `prompts`: mappings with `id`, `kind`, `text`, `pairs` (what
              `tokens.token_states` gives), `cycles` (`CycleRecord`s), `tau`, `equal`,
              `lossless` (different at certified ties only);
            * `decode`: turns a list of token ids into text;
            * `figures`: tuples (PNG bytes, alt text, caption, list of what to notice).

    Returns:
        The page, to be written as UTF-8.
    """
    summary = report["summary"]
    cycle = [summary.get(f"{part}_ms") for part in ("draft", "verify", "other")]
    times = [*cycle, summary.get("plain_ms"), summary.get("tau")]
    comparable = all(map(known, times)) and sum(cycle) > 0 and times[3] > 0
    return render(
        "views/report.html",
        **report,
        verdict=verdict(summary),
        scope=_scope(report),
        cycle_ms=sum(cycle) if comparable else None,
    )


def verdict(summary: Mapping) -> str:
    """The outcome in one sentence: equality, speed and tau.

    Args:
        summary: as in `render_report`; needs `equal`, `tau` and `speedup`.
    """
    tau, speedup = summary["tau"], summary["speedup"]
    if summary["equal"]:
        equality = "The outputs equal plain decoding, token for token"
    elif summary.get("lossless"):
        ties = count(summary["ties"], "certified tie")
        equality = f"The outputs equal plain decoding up to {ties}"
    else:
        equality = "The outputs differ from plain decoding: do not rely on this run"
    if not known(speedup):
        pace = "the speed was not compared"
    elif speedup >= 1:
        pace = f"decoding was {speedup:.2f}{_TIMES} as fast"
    else:
        pace = f"decoding was slower, at {speedup:.2f}{_TIMES} the plain speed"
    length = f", at {tau:.2f} tokens per cycle ({_TAU})" if known(tau) else ""
    return f"{equality}; {pace}{length}."


def _scope(report: Mapping) -> list[str]:
    summary = report["summary"]
    parts = [f"{report['pair']}, {report['dtype']}"]
    parts.append(count(len(report["prompts"]), "prompt"))
    for key, noun in (("num_tokens", "token"), ("num_cycles", "cycle")):
        if known(summary.get(key)):
            parts.append(count(summary[key], noun))
    if known(summary.get("block_size")):
        parts.append(f"block size {summary['block_size']}")
    return parts

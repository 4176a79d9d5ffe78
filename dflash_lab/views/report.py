"""One decode as one HTML page that needs nothing but itself.

The page holds its style and pictures and has no script, so it reads the same by mail,
from disk and on paper. Whatever a model or a user wrote is escaped, and a content
policy forbids scripts and network besides.

Leaves out: measuring and judging; all numbers come in the report's dictionary.
"""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dflash_lab.views.style import STATES, page_css
from dflash_lab.views.tokens import (
    Decode,
    cycle_states,
    draft_states,
    html_chip,
    html_tokens,
)

if TYPE_CHECKING:
    from dflash_lab.speculative.trace import CycleRecord

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_TAU = "\N{GREEK SMALL LETTER TAU}"
_TIMES = "\N{MULTIPLICATION SIGN}"
_QUOTE = "\N{RIGHT SINGLE QUOTATION MARK}"
_DOT = " \N{MIDDLE DOT} "
_LEGEND = ("first", "accepted", "corrected", "bonus", "plain", "rejected", "unused")
_COLUMNS = (
    ("cycle", "n"),
    ("start", "n"),
    ("drafts", "wide"),
    ("target", ""),
    ("added", "n"),
    ("draft ms", "n"),
    ("verify ms", "n"),
    ("other ms", "n"),
)
_MEASURES = (
    (
        "Speed-up",
        "speedup",
        f"{{:.2f}}{_TIMES}",
        "over plain decoding, same loop",
    ),
    ("Speed-up", "speedup_vs_generate", f"{{:.2f}}{_TIMES}", "over model.generate"),
    ("Acceptance length", "tau", f"{_TAU} = {{:.2f}}", "tokens per cycle, pooled"),
    ("DFlash", "tokens_per_second", "{:.1f}/s", "tokens per second"),
    (
        "Plain decoding",
        "plain_tokens_per_second",
        "{:.1f}/s",
        "tokens/s, same loop",
    ),
    ("model.generate", "generate_tokens_per_second", "{:.1f}/s", "tokens per second"),
    ("Drafting", "draft_ms", "{:.1f} ms", "per cycle"),
    ("Verifying", "verify_ms", "{:.1f} ms", "per cycle"),
    ("Everything else", "other_ms", "{:.1f} ms", "per cycle"),
    ("Plain decoding", "plain_ms", "{:.1f} ms", "per token"),
)


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
    decode = report["decode"]
    prompts = "\n".join(
        _prompt(number, prompt, decode)
        for number, prompt in enumerate(report["prompts"], 1)
    )
    figures = "\n".join(figure_html(*figure) for figure in report["figures"])
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_escape(report["title"])}</title>
<style>
{page_css()}
</style>
</head>
<body>
<main>
<header><h1>{_escape(report["title"])}</h1>
<p class="verdict">{_escape(verdict(summary))}</p>
<p class="muted small">{_escape(_scope(report))}</p>
</header>
<section>
<h2>Summary</h2>
{_summary_table(summary)}
{_how_to_read(summary)}
</section>
<section><h2>Answers, token by token</h2>
<p>A draft becomes text only if the target accepts it. The marks tell how each token
came about.</p>
{_legend()}
{prompts}
</section>
{f"<section><h2>Figures</h2>{figures}</section>" if figures else ""}
<footer>
<dl>{_definitions({"pair": report["pair"], "dtype": report["dtype"]})}
{_definitions(report["machine"])}</dl>
</footer>
</main>
</body>
</html>
"""


def verdict(summary: Mapping) -> str:
    """The outcome in one sentence: equality, speed and tau.

    Args:
        summary: as in `render_report`; needs `equal`, `tau` and `speedup`.
    """
    tau, speedup = summary["tau"], summary["speedup"]
    if summary["equal"]:
        equality = "The outputs equal plain decoding, token for token"
    elif summary.get("lossless"):
        count = _count(summary["ties"], "certified tie")
        equality = f"The outputs equal plain decoding up to {count}"
    else:
        equality = "The outputs differ from plain decoding: do not rely on this run"
    if not _known(speedup):
        pace = "the speed was not compared"
    elif speedup >= 1:
        pace = f"decoding was {speedup:.2f}{_TIMES} as fast"
    else:
        pace = f"decoding was slower, at {speedup:.2f}{_TIMES} the plain speed"
    length = f", at {tau:.2f} tokens per cycle ({_TAU})" if _known(tau) else ""
    return f"{equality}; {pace}{length}."


def _scope(report: Mapping) -> str:
    summary = report["summary"]
    parts = [f"{report['pair']}, {report['dtype']}"]
    parts.append(_count(len(report["prompts"]), "prompt"))
    for key, noun in (("num_tokens", "token"), ("num_cycles", "cycle")):
        if _known(summary.get(key)):
            parts.append(_count(summary[key], noun))
    if _known(summary.get("block_size")):
        parts.append(f"block size {summary['block_size']}")
    return _DOT.join(parts)


def _summary_table(summary: Mapping) -> str:
    equal = "yes" if summary["equal"] else "no"
    if not summary["equal"] and summary.get("lossless"):
        equal = f"up to {_count(summary['ties'], 'tie')}"
    rows = [("Equal to plain decoding", equal, summary.get("level") or "")]
    rows += [
        (name, _value(summary.get(key), pattern), note)
        for name, key, pattern, note in _MEASURES
    ]
    body = "\n".join(
        f'<tr><th scope="row">{name}</th><td>{_escape(value)}</td>'
        f"<td>{_escape(note)}</td></tr>"
        for name, value, note in rows
        if value
    )
    slots = "".join(
        f'<span class="slot"><i>{slot}:</i> {share:.0%}</span>'
        for slot, share in enumerate(summary.get("acceptance_per_position") or [], 1)
    )
    if slots:
        name = "Drafts that became text, by slot"
        body += f'\n<tr><th scope="row">{name}</th><td colspan="2">{slots}</td></tr>'
    return f'<table class="summary"><tbody>\n{body}\n</tbody></table>'


def _how_to_read(summary: Mapping) -> str:
    paragraphs = [
        f"<b>How to read {_TAU}.</b> A cycle adds its accepted drafts and one token of "
        f"the target{_QUOTE}s own, so {_TAU} counts that bonus token and never falls "
        "below 1. It is pooled: all tokens added, divided by all cycles, whichever "
        "prompt they belong to."
    ]
    cycle = [summary.get(f"{part}_ms") for part in ("draft", "verify", "other")]
    plain, tau = summary.get("plain_ms"), summary.get("tau")
    if all(map(_known, [*cycle, plain, tau])) and plain > 0 and sum(cycle) > 0:
        cost = sum(cycle) / plain
        paragraphs.append(
            f"<b>When it pays.</b> A cycle takes {sum(cycle):.1f} ms here, as long as "
            f"{cost:.2f} plain tokens. Drafting gains time where {_TAU} is above that; "
            f"the two numbers give {tau:.2f} / {cost:.2f} = {tau / cost:.2f}{_TIMES}, "
            "without the pass over the prompt, which both ways of decoding share."
        )
    return "".join(f"<p>{text}</p>" for text in paragraphs)


def _legend() -> str:
    items = (
        f'<dt><span class="dfl-t dfl-{state}">{STATES[state].label}</span></dt>'
        f"<dd>{STATES[state].meaning} "
        f'<span class="muted">({STATES[state].mark})</span></dd>'
        for state in _LEGEND
    )
    return f'<dl class="legend small">{"".join(items)}</dl>'


def _prompt(number: int, prompt: Mapping, decode: Decode) -> str:
    facts = [_escape(prompt["kind"]), _count(len(prompt["pairs"]), "token")]
    if _known(prompt["tau"]):
        facts.append(f"{_TAU} = {prompt['tau']:.2f}")
    same = "equal to" if prompt["equal"] else "<b>differs from</b>"
    if not prompt["equal"] and prompt.get("lossless"):
        same = "differs at a certified tie from"
    facts.append(f"{same} plain decoding")
    return f"""<article>
<h3>{number}. {_escape(prompt["id"])}</h3>
<p class="muted small">{_DOT.join(facts)}</p>
<h4>Prompt</h4>
<div class="prompt">{_escape(prompt["text"])}</div>
<h4>Answer</h4>
{html_tokens(prompt["pairs"], decode)}
{_cycles(prompt["cycles"], decode) if prompt["cycles"] else ""}
</article>"""


def _cycles(cycles: Sequence[CycleRecord], decode: Decode) -> str:
    head = "".join(f'<th scope="col" class="{c}">{name}</th>' for name, c in _COLUMNS)
    rows = "\n".join(_cycle_row(cycle, decode) for cycle in cycles)
    return f"""<details><summary>{_count(len(cycles), "cycle")}, one by one</summary>
<p class="muted small">Cycles and positions count from 0, as in the trace.</p>
<table class="cycles"><thead><tr>{head}</tr></thead>
<tbody>
{rows}
</tbody></table>
</details>"""


def _cycle_row(cycle: CycleRecord, decode: Decode) -> str:
    chips = [
        html_chip(token, state, decode)
        for token, state in zip(cycle.draft_tokens, draft_states(cycle), strict=True)
    ]
    kept, added = sum(cycle.accepted), cycle.acceptance_length
    own = "none, the text ended before"
    if added > kept:
        own = html_chip(cycle.target_tokens[kept], cycle_states(cycle)[-1], decode)
    times = [f"{ms:.1f}" for ms in (cycle.draft_ms, cycle.verify_ms, cycle.other_ms)]
    drafts = "".join(chips) or "none"
    cells = [cycle.cycle, cycle.start, drafts, own, added, *times]
    # The labels stand in for the column heads where the screen is narrow.
    return "<tr>{}</tr>".format(
        "".join(
            f'<td class="{kind}" data-label="{name}">{cell}</td>'
            for (name, kind), cell in zip(_COLUMNS, cells, strict=True)
        )
    )


def figure_html(png: bytes, alt: str, caption: str, notice: Sequence[str]) -> str:
    """A picture with its alt text, caption and what to notice, as HTML."""
    data = base64.b64encode(png).decode("ascii")
    points = "".join(f"<li>{_escape(point)}</li>" for point in notice)
    points = f"<br>What to notice:<ul>{points}</ul>" if points else ""
    return (
        f'<figure><img alt="{_escape(alt)}" src="data:image/png;base64,{data}">'
        f"<figcaption><b>{_escape(caption)}</b>{points}</figcaption></figure>"
    )


def _definitions(values: Mapping) -> str:
    return "".join(
        f"<dt>{_escape(name)}</dt><dd>{_escape(value)}</dd>"
        for name, value in values.items()
    )


def _known(value) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _value(value, pattern: str) -> str:
    return pattern.format(value) if _known(value) else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _escape(text) -> str:
    return html.escape(str(text), quote=True)

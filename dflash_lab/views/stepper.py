"""One decoding cycle at a time: the block, its drafts, the target's picks, the verdict.

Leaves out: the cycles themselves (`trace.py`) and the widget around them.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence

from dflash_lab.errors import DFlashLabError
from dflash_lab.speculative.generation import GenerationResult
from dflash_lab.speculative.trace import CycleRecord, DecodeTrace
from dflash_lab.views.style import STATES
from dflash_lab.views.tokens import (
    ansi_text,
    cycle_states,
    draft_states,
    html_chip,
    html_tokens,
    token_states,
)
from dflash_lab.views.view import View, framed

Decode = Callable[[list[int]], str]


def cycles_of(trace: DecodeTrace, prompt: int = 0) -> list[CycleRecord]:
    """The cycles of one prompt.

    Raises:
        DFlashLabError: no such prompt, or one without cycles.
    """
    found = [cycle for cycle in trace.cycles if cycle.prompt == prompt]
    if not found:
        raise DFlashLabError(
            f"prompt {prompt} has no cycles; the trace has "
            f"{trace.header['num_prompts']} prompts, counted from 0"
        )
    return found


def cache_lengths(cycle: CycleRecord) -> dict[str, int]:
    """Rows that count in both caches, in text order, after a cycle.

    The target's cache holds every token but the newest, which has not been through it.
    The drafter's cache holds features of the same tokens once it drafts again: before
    that, those of the cycle are on their way.

    Returns:
        `before` and `after`: valid rows of the target's cache; `drafter`: context rows
        of the drafter when the cycle began.
    """
    return {
        "before": cycle.start,
        "after": cycle.start + cycle.acceptance_length,
        "drafter": cycle.start,
    }


def text_view(result: GenerationResult, decode: Decode, prompt: int = 0) -> View:
    """A finished answer with its tokens marked, and a legend of the marks in it.

    Args:
        result: of `speculative_generate`.
        decode: turns a list of ids into text.
        prompt: which of the prompts.
    """
    pairs = token_states(result.trace, prompt, result.output_ids[prompt])
    seen = {state for _, state in pairs}
    legend = "".join(
        f'<li><span class="dfl-t dfl-chip dfl-{state}">{style.label}</span> '
        f"({style.mark}): {html.escape(style.meaning)}</li>"
        for state, style in STATES.items()
        if state in seen
    )
    body = f"{html_tokens(pairs, decode)}<ul>{legend}</ul>"
    return View(framed(body), ansi_text(pairs, decode, color=False))


def cycle_view(
    trace: DecodeTrace,
    output_ids: Sequence[int],
    number: int,
    decode: Decode,
    prompt: int = 0,
) -> View:
    """What one cycle did.

    Args:
        trace: of the generation.
        output_ids: generated ids of this prompt.
        number: cycle, from 0.
        decode: turns a list of ids into text.
        prompt: which of the prompts.

    Raises:
        DFlashLabError: no such prompt or cycle.
    """
    cycles = cycles_of(trace, prompt)
    if not 0 <= number < len(cycles):
        raise DFlashLabError(f"no cycle {number}; there are 0 to {len(cycles) - 1}")
    cycle = cycles[number]
    done = cycle.start - trace.header["prompt_lengths"][prompt]
    anchor = output_ids[done]
    added = output_ids[done + 1 : done + 1 + cycle.acceptance_length]
    states = draft_states(cycle)
    columns = [("anchor", html_chip(anchor, "plain", decode), "", "given")]
    texts = [f"anchor {decode([anchor])!r}"]
    for slot, (draft, state) in enumerate(
        zip(cycle.draft_tokens, states, strict=True), 1
    ):
        pick = cycle.target_tokens[slot - 1]
        picked = html_chip(pick, "accepted", decode) if pick >= 0 else "none drawn"
        if state == "rejected":
            picked = html_chip(pick, "corrected", decode) if pick >= 0 else picked
        drafted = html_chip(draft, state, decode)
        columns.append((f"slot {slot}", drafted, picked, STATES[state].label))
        texts.append(f"slot {slot} {decode([draft])!r} {STATES[state].label}")
    if len(cycle_states(cycle)) and cycle_states(cycle)[-1] == "bonus":
        pick = cycle.target_tokens[len(cycle.draft_tokens)]
        columns.append(("bonus", "", html_chip(pick, "bonus", decode), "bonus token"))
        texts.append(f"bonus {decode([pick])!r}")
    rows = "".join(
        f'<tr><th scope="row">{name}</th>'
        + "".join(f"<td>{column[i]}</td>" for column in columns)
        + "</tr>"
        for i, name in ((0, "row"), (1, "draft"), (2, "target's pick"), (3, "verdict"))
    )
    lengths = cache_lengths(cycle)
    pairs = [(token, "prompt") for token in output_ids[: done + 1]]
    pairs += list(zip(added, cycle_states(cycle), strict=False))
    facts = (
        f"cycle {number} of {len(cycles)}: {cycle.acceptance_length} tokens added. "
        f"Target's cache {lengths['before']} → {lengths['after']} rows; drafter's "
        f"context {lengths['drafter']} rows. "
        f"Draft {cycle.draft_ms:.2f} ms, verify {cycle.verify_ms:.2f} ms."
    )
    body = (
        f'<p class="dfl-small">{html.escape(facts)}</p>'
        f'<div style="overflow-x:auto"><table class="dfl-table">{rows}</table></div>'
        f"{html_tokens(pairs, decode)}"
    )
    return View(framed(body), "\n".join([facts, *texts]))


def cycles_view(
    trace: DecodeTrace, decode: Decode, prompt: int = 0, at_most: int = 12
) -> View:
    """The first cycles as a table: what was drafted and what became of it."""
    cycles = cycles_of(trace, prompt)
    rows, texts = [], []
    for number, cycle in enumerate(cycles[:at_most]):
        chips = "".join(
            html_chip(token, state, decode)
            for token, state in zip(
                cycle.draft_tokens, draft_states(cycle), strict=True
            )
        )
        state, own_chip = cycle_states(cycle)[-1], ""
        if state != "accepted":  # else a stop rule ended the text within the drafts
            own = cycle.target_tokens[sum(cycle.accepted)]
            own_chip = html_chip(own, state, decode)
        rows.append(
            f'<tr><td class="dfl-n">{number}</td><td class="dfl-n">{cycle.start}</td>'
            f'<td class="dfl-n">{cycle.acceptance_length}</td><td>{chips}</td>'
            f"<td>{own_chip}</td></tr>"
        )
        texts.append(
            f"{number}: at {cycle.start}, {cycle.acceptance_length} added, drafts "
            f"{decode(cycle.draft_tokens)!r}"
        )
    more = len(cycles) - len(rows)
    note = f"and {more} more cycles" if more > 0 else ""
    heads = ("cycle", "anchor at", "added", "drafts", "target's own token")
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    body = (
        f'<table class="dfl-table"><thead><tr>{head}</tr></thead><tbody>'
        f'{"".join(rows)}</tbody></table><p class="dfl-small">{note}</p>'
    )
    return View(framed(body), "\n".join([*texts, note] if note else texts))

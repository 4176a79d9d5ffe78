"""One decoding cycle at a time: its drafts, what the target chose, and the verdict.

Leaves out: the cycles themselves (`speculative/trace.py`) and the widget around them.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_lab.errors import DFlashLabError
from dflash_lab.speculative.generation import GenerationResult
from dflash_lab.speculative.trace import CycleRecord, DecodeTrace
from dflash_lab.views.render import render
from dflash_lab.views.style import STATES
from dflash_lab.views.tokens import (
    Decode,
    ansi_text,
    cycle_states,
    marked_drafts,
    own_token,
    token_states,
)
from dflash_lab.views.view import View


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
    html = render("views/answer.html", pairs=pairs, decode=decode, seen=seen)
    return View(html, ansi_text(pairs, decode, color=False))


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
    columns, texts = _columns(cycle, anchor, decode)
    lengths = cache_lengths(cycle)
    pairs = [(token, "prompt") for token in output_ids[: done + 1]]
    pairs += list(zip(added, cycle_states(cycle), strict=False))
    facts = (
        f"cycle {number} of {len(cycles)}: {cycle.acceptance_length} tokens added. "
        f"Target's cache {lengths['before']} → {lengths['after']} rows; drafter's "
        f"context {lengths['drafter']} rows. "
        f"Draft {cycle.draft_ms:.2f} ms, verify {cycle.verify_ms:.2f} ms."
    )
    names = ("row", "draft", "target's token", "verdict")
    html = render(
        "views/cycle.html",
        facts=facts,
        rows=zip(names, zip(*columns, strict=True), strict=True),
        pairs=pairs,
        decode=decode,
    )
    return View(html, "\n".join([facts, *texts]))


def _columns(
    cycle: CycleRecord, anchor: int, decode: Decode
) -> tuple[list[tuple], list[str]]:
    """Name, draft, target's choice and verdict of each row; the same in words."""
    columns: list[tuple] = [("anchor", (anchor, "plain"), "", "given")]
    texts = [f"anchor {decode([anchor])!r}"]
    for slot, (draft, state) in enumerate(marked_drafts(cycle), 1):
        choice, label = cycle.target_tokens[slot - 1], STATES[state].label
        chosen = (choice, "corrected" if state == "rejected" else "accepted")
        drawn = chosen if choice >= 0 else "none drawn"
        columns.append((f"slot {slot}", (draft, state), drawn, label))
        texts.append(f"slot {slot} {decode([draft])!r} {label}")
    own = own_token(cycle)
    if own and own[1] == "bonus":
        columns.append(("bonus", "", own, STATES["bonus"].label))
        texts.append(f"bonus {decode([own[0]])!r}")
    return columns, texts


def cycles_view(
    trace: DecodeTrace, decode: Decode, prompt: int = 0, at_most: int = 12
) -> View:
    """The first cycles as a table: what was drafted and what became of it."""
    cycles = cycles_of(trace, prompt)
    shown, more = cycles[:at_most], len(cycles) - at_most
    texts = [
        f"{number}: at {cycle.start}, {cycle.acceptance_length} added, drafts "
        f"{decode(cycle.draft_tokens)!r}"
        for number, cycle in enumerate(shown)
    ]
    note = f"and {more} more cycles" if more > 0 else ""
    html = render("views/cycles.html", cycles=shown, decode=decode, note=note)
    return View(html, "\n".join([*texts, note] if note else texts))

"""Which token came from whom, and the answer with every token marked accordingly.

`token_states` reads the states off a trace; `ansi_text` and `html_tokens` draw them.
Byte-level tokens may hold part of a character only, so text is never decoded token by
token: each token gets the piece by which it extends the text decoded so far.

Leaves out: colours and CSS (`style.py`), the page around the text (`report.py`).
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from dflash_lab.errors import DFlashLabError
from dflash_lab.views.style import STATES

if TYPE_CHECKING:
    from dflash_lab.speculative.trace import CycleRecord, DecodeTrace

Decode = Callable[[list[int]], str]
_NEWLINE = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenPiece(NamedTuple):
    """A piece of text and the tokens behind it: several where they share a character.

    Attributes:
        text: empty only for tokens at the end that add none (a special token that the
            decoder skips, or a character that never got complete).
        pairs: (token id, state) of each token.
    """

    text: str
    pairs: list[tuple[int, str]]


def token_states(
    trace: DecodeTrace, prompt: int, output_ids: Sequence[int]
) -> list[tuple[int, str]]:
    """State of every generated token of one prompt.

    Args:
        trace: the generation.
        prompt: which of its prompts, from 0.
        output_ids: the generated ids of that prompt.

    Returns:
        (token id, state) for each output token. States: `first` (from the pass over
        the prompt), `accepted`, `corrected`, `bonus`, `plain`; and `unrecorded` for
        the last tokens of a generation that was interrupted within a cycle.

    Raises:
        DFlashLabError: no such prompt, or ids that this trace did not produce.
    """
    if not 0 <= prompt < trace.header["num_prompts"]:
        raise DFlashLabError(
            f"prompt {prompt} is not in the trace, which has "
            f"{trace.header['num_prompts']}; count from 0"
        )
    ids = list(output_ids)
    states = ["first"] if ids else []
    for cycle in (c for c in trace.cycles if c.prompt == prompt):
        place = len(states)
        states += cycle_states(cycle)
        kept = cycle.draft_tokens[: sum(cycle.accepted)]
        if len(states) > len(ids) or ids[place : place + len(kept)] != kept:
            raise DFlashLabError(
                f"cycle {cycle.cycle} of prompt {prompt} does not fit output_ids at "
                f"place {place}; pass the ids of the same generation"
            )
    missing = len(ids) - len(states)
    if missing > trace.header["block_size"]:
        raise DFlashLabError(
            f"the trace explains {len(states)} of {len(ids)} output tokens of prompt "
            f"{prompt}; pass the ids of the same generation"
        )
    return list(zip(ids, states + ["unrecorded"] * missing, strict=True))


def cycle_states(cycle: CycleRecord) -> list[str]:
    """States of the tokens that one cycle added to the text.

    They are the accepted drafts and one token of the target, which is missing where a
    stop rule ended the text within the drafts.
    """
    kept = sum(cycle.accepted)
    if cycle.acceptance_length <= kept:
        return ["accepted"] * cycle.acceptance_length
    if not cycle.draft_tokens:
        return ["plain"]
    own = "bonus" if kept == len(cycle.draft_tokens) else "corrected"
    return ["accepted"] * kept + [own]


def draft_states(cycle: CycleRecord) -> list[str]:
    """State of each draft of a cycle: `accepted`, `rejected` or `unused`.

    One draft at most is rejected; those behind it, or behind the end of the text, never
    counted.
    """
    kept = sum(cycle.accepted)
    states = ["accepted"] * kept + ["unused"] * (len(cycle.draft_tokens) - kept)
    if kept < len(states) and cycle.acceptance_length > kept:
        states[kept] = "rejected"
    return states


def marked_drafts(cycle: CycleRecord) -> list[tuple[int, str]]:
    """(token id, state) of each draft of a cycle."""
    return list(zip(cycle.draft_tokens, draft_states(cycle), strict=True))


def own_token(cycle: CycleRecord) -> tuple[int, str] | None:
    """The target's own token and its state; None if the text ended before it."""
    kept = sum(cycle.accepted)
    if cycle.acceptance_length <= kept:
        return None
    return cycle.target_tokens[kept], cycle_states(cycle)[-1]


def token_pieces(pairs: Sequence[tuple[int, str]], decode: Decode) -> list[TokenPiece]:
    """Split the decoded text among its tokens.

    Args:
        pairs: (token id, state) of each token.
        decode: turns a list of ids into text.

    Returns:
        Pieces whose texts, joined, are the decoded whole, less an incomplete character
        at its end. A token that adds no text shares the piece of the next one.
    """
    ids = [token for token, _ in pairs]
    whole = decode(ids).rstrip(_REPLACEMENT) if ids else ""
    pieces, waiting, done = [], [], 0
    for count, pair in enumerate(pairs, 1):
        # A character cut in two decodes to something that the whole does not have, so
        # the common prefix stops before it and the token waits for the rest.
        prefix = decode(ids[:count]) if count < len(ids) else whole
        end = done
        if prefix.startswith(whole[:done]):
            while end < min(len(prefix), len(whole)) and prefix[end] == whole[end]:
                end += 1
        waiting.append(pair)
        if end > done:
            pieces.append(TokenPiece(whole[done:end], waiting))
            waiting, done = [], end
    if waiting:
        pieces.append(TokenPiece("", waiting))
    return pieces


def ansi_text(
    pairs: Sequence[tuple[int, str]], decode: Decode, color: bool = True
) -> str:
    """The text for a terminal, each token marked by its state.

    Args:
        pairs: (token id, state) of each token.
        decode: turns a list of ids into text.
        color: mark by colour together with underline, reverse, bold or italics; if
            False, by brackets alone: `[correction]`, `{bonus}`, `<first>`, `(plain)`,
            and accepted drafts bare.

    Returns:
        Text without any control character of the model's own but newline and tab.
    """
    parts = []
    pieces = token_pieces(pairs, decode)
    for state, run in groupby(pieces, key=lambda piece: piece.pairs[-1][1]):
        style = STATES[state]
        before, after = "", ""
        if not color:
            before, after = style.brackets
        elif style.ansi:
            before, after = f"\x1b[{style.ansi}m", "\x1b[0m"
        texts = [piece.text for piece in run]
        if state == "prompt":  # one pair of marks around all of it is easier to read
            texts = ["".join(texts)]
        for text in texts:
            lead, body, tail = _split(text)
            if not body and "\n" in tail and before:
                body = _NEWLINE * tail.count("\n")
            body = _visible(body)
            parts += [lead, before + body + after if body else "", _visible(tail)]
    return "".join(parts)


def html_tokens(pairs: Sequence[tuple[int, str]], decode: Decode) -> str:
    """The text as HTML, one `<span>` per piece, styled by `style.token_css()`.

    Args:
        pairs: (token id, state) of each token.
        decode: turns a list of ids into text.

    Returns:
        A `<div class="dfl-tokens">`. Its text content is the decoded text; signs for
        newlines come from the CSS and do not get into copies.
    """
    parts = []
    for text, group in token_pieces(pairs, decode):
        lead, body, tail = _split(text)
        extra, note = "", ""
        if not text:
            extra, note = " dfl-empty", " (adds no text)"
        title = "; ".join(_title(token, state) for token, state in group) + note
        newlines = 0 if body else tail.count("\n")
        sign = f' data-nl="{_NEWLINE * newlines}"' if newlines else ""
        # Spaces and newlines stand outside, so that marks never hang over a line's end.
        parts.append(
            f'{lead}<span class="dfl-t dfl-{group[-1][1]}{extra}"{sign} '
            f'title="{title}">{_escape(body)}</span>{_escape(tail)}'
        )
    return f'<div class="dfl-tokens">{"".join(parts)}</div>'


def html_chip(token: int, state: str, decode: Decode) -> str:
    """One token on its own as a small HTML box, with its white space made visible.

    A token that holds only part of a character is shown by its number.
    """
    text = decode([token])
    if not text or _REPLACEMENT in text:
        body = f"<i>#{token}</i>"
    else:
        body = _escape(text)
        for character, sign in ((" ", "\u2423"), ("\n", _NEWLINE), ("\t", "\u21e5")):
            body = body.replace(character, f"<i>{sign}</i>")
    title = _title(token, state)
    return f'<span class="dfl-t dfl-chip dfl-{state}" title="{title}">{body}</span>'


def _title(token: int, state: str) -> str:
    return f"{STATES[state].label}, token {token}"


def _split(text: str) -> tuple[str, str, str]:
    """White space before, marked part, white space from the last newlines on."""
    body = text.rstrip(" \t\n")
    if "\n" in text[len(body) :]:
        tail = text[len(body) :]
    else:
        body, tail = text, ""
    inner = body.lstrip(" \t\n")
    if not inner:  # indentation alone is marked itself
        return "", body, tail
    return body[: len(body) - len(inner)], inner, tail


def _visible(text: str) -> str:
    """Control characters as pictures: a model must not drive the reader's terminal."""
    if text.isprintable():
        return text
    return "".join(_picture(c) if c not in "\n\t" else c for c in text)


def _picture(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\N{SYMBOL FOR DELETE}"
    return f"\\x{code:02x}" if 0x80 <= code < 0xA0 else character


def _escape(text: str) -> str:
    return html.escape(_visible(text), quote=True)

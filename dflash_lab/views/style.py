"""Colours and marks of token states, and the style sheets that carry them.

A state is never told by colour alone: each has a second mark (underline, box, weight)
that survives grey printing and colour blindness. The colours are those of Okabe and
Ito. They go into marks and faint tints; the words themselves stay in the ink colour,
because most of the palette is too pale for text on white.

Leaves out: what state a token is in (`tokens.py`) and the page itself (`report.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

OKABE_ITO = {
    "black": "#000000",
    "orange": "#E69F00",
    "sky blue": "#56B4E9",
    "green": "#009E73",
    "yellow": "#F0E442",
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "purple": "#CC79A7",
}


@dataclass(frozen=True)
class TokenStyle:
    """How one token state looks and what it is called.

    Attributes:
        label: short name, for titles.
        meaning: one sentence for legends.
        mark: the second mark in words.
        colours: palette names for light and dark background; None for grey.
        css: declarations; `var(--m)` is the state's colour.
        ansi: SGR parameters, with the terminal's own 16 colours, which its theme keeps
            legible; "" for none.
        brackets: what stands around the token where there is no colour.
    """

    label: str
    meaning: str
    mark: str
    colours: tuple[str, str] | None
    css: str
    ansi: str
    brackets: tuple[str, str]


STATES = {
    "prompt": TokenStyle(
        "prompt",
        "Text that was given, not generated.",
        "italics",
        None,
        "font-style:italic;color:var(--dfl-muted)",
        "2;3",
        ("«", "»"),
    ),
    "first": TokenStyle(
        "first token",
        "The target's token from its pass over the prompt, before any draft.",
        "double underline",
        ("purple", "purple"),
        "border-bottom:4px double var(--m)",
        "3;35",
        ("⟨", "⟩"),
    ),
    "accepted": TokenStyle(
        "accepted draft",
        "Drafted, and confirmed by the target.",
        "solid underline",
        ("green", "green"),
        "border-bottom:2px solid var(--m)",
        "4;32",
        ("", ""),
    ),
    "corrected": TokenStyle(
        "correction",
        "The target's own token, in the place of the first draft it rejected.",
        "box",
        ("vermillion", "vermillion"),
        "border:1.5px solid var(--m);border-radius:3px;padding:0 1px",
        "7;31",
        ("⟦", "⟧"),
    ),
    "bonus": TokenStyle(
        "bonus token",
        "The target's own token after a block whose drafts were all accepted.",
        "bold, dotted underline",
        ("blue", "sky blue"),
        "font-weight:700;border-bottom:3px dotted var(--m)",
        "1;36",
        ("⟪", "⟫"),
    ),
    "plain": TokenStyle(
        "plain token",
        "The target's token in a cycle that drafted nothing.",
        "thin dashed underline",
        None,
        "border-bottom:1px dashed var(--m)",
        "",
        ("⟮", "⟯"),
    ),
    "rejected": TokenStyle(
        "rejected draft",
        "The target disagreed, and put its own token here.",
        "struck through",
        ("vermillion", "vermillion"),
        "text-decoration:line-through 1.5px var(--m)",
        "9;31",
        ("~", "~"),
    ),
    "unused": TokenStyle(
        "unused draft",
        "Behind the rejection or the end of the text, so it never counted.",
        "struck through, grey",
        None,
        "color:var(--dfl-muted);text-decoration:line-through 1px var(--m)",
        "2;9",
        ("~", "~"),
    ),
    "unrecorded": TokenStyle(
        "unrecorded token",
        "From a cycle that was interrupted before it was recorded.",
        "no mark",
        None,
        "",
        "",
        ("", ""),
    ),
}

THEMES = {
    "light": {
        "page": "#FDFDFB",
        "card": "#F5F5F1",
        "ink": "#1B1D1F",
        "muted": "#5A5F64",
        "rule": "#D9D9D3",
        "grey": "#7C8186",
    },
    "dark": {
        "page": "#15171A",
        "card": "#1D2024",
        "ink": "#E6E6E2",
        "muted": "#A5ABB1",
        "rule": "#383C42",
        "grey": "#868C93",
    },
}

_TINT = {"light": 0.10, "dark": 0.20}


def mark_colour(state: str, theme: str) -> str:
    """Colour of a state's mark on the `"light"` or `"dark"` theme, as `#RRGGBB`."""
    colours = STATES[state].colours
    return OKABE_ITO[colours[theme == "dark"]] if colours else THEMES[theme]["grey"]


def tint_colour(state: str, theme: str) -> str:
    """Background of a token: its mark's colour, faint over the theme's card."""
    card = THEMES[theme]["card"]
    if STATES[state].colours is None or state == "rejected":
        return card
    share = _TINT[theme]
    pairs = zip(_rgb(mark_colour(state, theme)), _rgb(card), strict=True)
    return "#" + "".join(f"{round(share * a + (1 - share) * b):02X}" for a, b in pairs)


def token_css(root: str = ":root") -> str:
    """CSS that `html_tokens` and `html_chip` need.

    Args:
        root: selector that carries the custom properties; in a notebook, the class of
            a container of your own.

    Returns:
        Rules for both colour schemes, without a `<style>` element.
    """
    rules = [
        f"{root}{{{_variables('light')}}}",
        f"@media (prefers-color-scheme:dark){{{root}{{{_variables('dark')}}}}}",
        # Paper is white whatever the screen was.
        f"@media print{{{root}{{{_variables('light')}}}}}",
        # JupyterLab's theme need not be the system's.
        f'[data-jp-theme-light="true"] {root}{{{_variables("light")}}}',
        f'[data-jp-theme-light="false"] {root}{{{_variables("dark")}}}',
        resource("views/tokens.css"),
    ]
    rules += [
        f".dfl-{state}{{--m:var(--dfl-{state});"
        f"background:var(--dfl-{state}-tint);{style.css}}}"
        for state, style in STATES.items()
    ]
    return "\n".join(rules)


@cache
def resource(name: str) -> str:
    """Text of a template or style sheet.

    Args:
        name: `views/page.css` for the file `page.css` in `views/templates`.
    """
    room, file = name.split("/")
    path = files("dflash_lab") / room / "templates" / file
    return path.read_text(encoding="utf-8").rstrip()


def _variables(theme: str) -> str:
    values = dict(THEMES[theme])
    for state in STATES:
        values[state] = mark_colour(state, theme)
        values[f"{state}-tint"] = tint_colour(state, theme)
    return ";".join(f"--dfl-{name}:{value}" for name, value in values.items())


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))

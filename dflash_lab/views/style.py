"""Colours and marks of token states, and the CSS of everything that becomes HTML.

A state is never told by colour alone: each has a second mark (underline, box, weight)
that survives grey printing and colour blindness. The colours are those of Okabe and
Ito. They go into marks and faint tints; the words themselves stay in the ink colour,
because most of the palette is too pale for text on white.

Leaves out: what state a token is in (`tokens.py`) and the page itself (`report.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

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


def text_colour(state: str, theme: str) -> str:
    """Colour of a token's letters: ink, or the muted ink for what did not count."""
    muted = "color:var(--dfl-muted)" in STATES[state].css
    return THEMES[theme]["muted" if muted else "ink"]


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two `#RRGGBB` colours by WCAG 2, from 1 to 21."""
    low, high = sorted(_luminance(colour) + 0.05 for colour in (first, second))
    return high / low


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
        _TOKEN_CSS,
    ]
    rules += [
        f".dfl-{state}{{--m:var(--dfl-{state});"
        f"background:var(--dfl-{state}-tint);{style.css}}}"
        for state, style in STATES.items()
    ]
    return "\n".join(rules)


def page_css() -> str:
    """CSS of a whole report page, `token_css` included."""
    return f"{token_css()}\n{_PAGE_CSS}"


_TOKEN_CSS = """\
.dfl-tokens,.dfl-chip{font-family:ui-monospace,"SF Mono",Menlo,Consolas,
  "DejaVu Sans Mono",monospace}
.dfl-tokens{white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.85;
  background:var(--dfl-card);color:var(--dfl-ink)}
.dfl-t{margin-right:1px;border-radius:2px;padding-bottom:1px;
  print-color-adjust:exact;-webkit-print-color-adjust:exact}
.dfl-t[data-nl]::before{content:attr(data-nl)}
.dfl-t.dfl-empty::before{content:"\\2205"}
.dfl-chip{display:inline-block;white-space:pre;margin:1px 3px 1px 0;padding:0 3px;
  line-height:1.5;font-size:.93em;max-width:100%;overflow-wrap:anywhere}
.dfl-chip i{font-style:normal;color:var(--dfl-muted)}"""

_PAGE_CSS = """\
:root{color-scheme:light dark} *{box-sizing:border-box}
body{margin:0;background:var(--dfl-page);color:var(--dfl-ink);
  font:1.0625rem/1.6 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif}
main{max-width:60rem;margin:0 auto;padding:3rem 1.25rem 4rem}
h1{font-size:1.9rem;margin:0 0 .6rem} h1,h2,h3{line-height:1.25;text-wrap:balance}
h2{font-size:1.3rem;margin:3rem 0 .8rem} h3{font-size:1.05rem;margin:2.4rem 0 .3rem}
h4{font-size:.875rem;margin:1.1rem 0 .3rem;color:var(--dfl-muted)}
p,ul,.prompt{max-width:75ch;margin:.6rem 0} table+p{margin-top:1.4rem}
.verdict{font-size:1.25rem;line-height:1.45;max-width:58ch;text-wrap:pretty}
.muted,figcaption,footer,.summary td:nth-child(3){color:var(--dfl-muted)}
.small,footer,figcaption,.summary td:nth-child(3){font-size:.9rem}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:baseline;padding:.4rem 1rem .4rem 0}
thead th{font-size:.8125rem;color:var(--dfl-muted);white-space:nowrap}
tr{border-bottom:1px solid var(--dfl-rule)} .summary th{width:15rem;font-weight:400}
.summary td:nth-child(2){width:10rem;font-weight:600}
.slot{display:inline-block;margin-right:1.1em;font-weight:600}
.slot i{font-style:normal;font-weight:400;color:var(--dfl-muted)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1.2rem;margin:1rem 0}
dd,.prompt{margin:0;overflow-wrap:anywhere} .legend{row-gap:.45rem}
.prompt{white-space:pre-wrap;padding-left:1rem;border-left:3px solid var(--dfl-rule)}
.dfl-tokens{padding:.8rem 1rem;border-radius:6px;font-size:.925rem;max-width:84ch}
summary{cursor:pointer;width:fit-content;margin:.8rem 0}
summary:focus-visible{outline:2px solid currentColor;outline-offset:2px}
.cycles{font-size:.875rem} .cycles :is(td,th){padding:.3rem .9rem .3rem 0}
.cycles .n{text-align:right;white-space:nowrap} .cycles .wide{width:60%}
figure{margin:1.8rem 0;display:grid;gap:.4rem 2rem;align-items:center;
  grid-template-columns:minmax(0,32rem) minmax(0,1fr)}
figure img{width:100%;height:auto;border-radius:6px;border:1px solid var(--dfl-rule)}
ul{padding-left:1.1rem} figcaption b{color:var(--dfl-ink)}
footer{margin-top:3rem;border-top:1px solid var(--dfl-rule)}
@media (max-width:44rem){
  main{padding:1.6rem 1rem 3rem} h1{font-size:1.55rem} .verdict{font-size:1.125rem}
  figure,.legend{grid-template-columns:minmax(0,1fr)}
  .legend{gap:.1rem} .legend dd{margin-bottom:.5rem}
  .summary tr{display:grid;grid-template-columns:1fr auto;padding:.4rem 0}
  .summary :is(th,td){padding:0;width:auto!important}
  .summary td:nth-child(3),.summary td[colspan]{grid-column:1/-1}
  .cycles thead{position:absolute;clip-path:inset(50%)} .cycles .wide{width:100%}
  .cycles tr{display:flex;flex-wrap:wrap;column-gap:1rem;padding:.5rem 0}
  .cycles :is(td,th){padding:0}
  .cycles td::before{content:attr(data-label) " ";color:var(--dfl-muted)}
}
@media (prefers-color-scheme:dark){figure img{filter:brightness(.88)}}
@media print{
  body{font-size:10.5pt} main{max-width:none;padding:0} figure img{filter:none}
  figure,tr,.prompt{break-inside:avoid} h2,h3,h4,summary{break-after:avoid}
  details::details-content{content-visibility:visible;display:block}
}"""


def _variables(theme: str) -> str:
    values = dict(THEMES[theme])
    for state in STATES:
        values[state] = mark_colour(state, theme)
        values[f"{state}-tint"] = tint_colour(state, theme)
    return ";".join(f"--dfl-{name}:{value}" for name, value in values.items())


def _rgb(colour: str) -> tuple[int, int, int]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def _luminance(colour: str) -> float:
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (value / 255 for value in _rgb(colour))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

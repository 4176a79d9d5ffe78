"""Pictures of a decode: states, marked text, figures and the report page.

Traces are built by hand and the tokenizer is a fake whose tokens are single bytes, so
every expectation can be read off the test. Leaves out: how the page looks.
"""

import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from dflash_lab.errors import DFlashLabError
from dflash_lab.speculative.trace import CycleRecord, DecodeTrace
from dflash_lab.views import curves, style, tokens
from dflash_lab.views.report import render_report, verdict

PNG = b"\x89PNG\r\n\x1a\n fake"


def decode(ids):
    """Fake byte-level tokenizer: token i is byte i; 300 is special, without text."""
    return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


def cycle(number, drafts, accepted, own, added=None, prompt=0):
    """A cycle that kept `accepted` drafts and added `own` unless `added` says less."""
    count = len(drafts)
    target = [*drafts[:accepted], own, *[0] * (count - accepted)]
    added = accepted + 1 if added is None else added
    kept = [slot < min(accepted, added) for slot in range(count)]
    return CycleRecord(
        prompt, number, 10, added, list(drafts), target, kept, 1.0, 2.0, 0.5
    )


def trace_of(*cycles, prompts=1, block_size=4):
    return DecodeTrace({"num_prompts": prompts, "block_size": block_size}, list(cycles))


def all_states(text, state="accepted"):
    return [(byte, state) for byte in text.encode()]


class Page(HTMLParser):
    """Elements, text outside the style sheet, and parsing of nothing else."""

    def __init__(self, source):
        super().__init__()
        self.elements, self.text, self._hidden = [], "", False
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._hidden = tag == "style"

    def handle_endtag(self, tag):
        self._hidden = False

    def handle_data(self, data):
        self.text += "" if self._hidden else data

    def all(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]


# States


def test_each_kind_of_token_gets_its_state():
    trace = trace_of(
        cycle(0, [1, 2, 3], accepted=3, own=4),
        cycle(1, [5, 9, 9], accepted=1, own=6),
        cycle(2, [], accepted=0, own=7),
        cycle(3, [9], accepted=0, own=8),
    )
    expected = [
        (0, "first"),
        *[(1, "accepted"), (2, "accepted"), (3, "accepted"), (4, "bonus")],
        *[(5, "accepted"), (6, "corrected")],
        (7, "plain"),
        (8, "corrected"),
    ]
    assert tokens.token_states(trace, 0, range(9)) == expected


@pytest.mark.parametrize(
    ("added", "states"),
    [
        (4, ["accepted"] * 3 + ["bonus"]),
        (3, ["accepted"] * 3),  # the stop token was the last draft
        (2, ["accepted"] * 2),
        (1, ["accepted"]),
    ],
)
def test_a_block_cut_by_a_stop_rule_has_no_token_of_the_target(added, states):
    cut = cycle(0, [1, 2, 3], accepted=3, own=4, added=added)
    got = tokens.token_states(trace_of(cut), 0, range(added + 1))
    assert [state for _, state in got] == ["first", *states]


def test_other_prompts_are_left_alone():
    trace = trace_of(
        cycle(0, [1], 1, 2), cycle(0, [7], 0, 6, prompt=1), prompts=2, block_size=2
    )
    assert tokens.token_states(trace, 1, [5, 6]) == [(5, "first"), (6, "corrected")]
    assert tokens.token_states(trace_of(), 0, []) == []


def test_drafts_behind_a_rejection_are_not_called_rejected():
    rejected = tokens.draft_states(cycle(0, [1, 2, 3, 4], accepted=1, own=9))
    assert rejected == ["accepted", "rejected", "unused", "unused"]
    cut = tokens.draft_states(cycle(0, [1, 2, 3], accepted=3, own=4, added=2))
    assert cut == ["accepted", "accepted", "unused"]


def test_tokens_of_an_interrupted_cycle_are_kept():
    got = tokens.token_states(trace_of(cycle(0, [1], 1, 2)), 0, [0, 1, 2, 3, 4])
    assert got[3:] == [(3, "unrecorded"), (4, "unrecorded")]


@pytest.mark.parametrize(
    ("prompt", "ids", "message"),
    [
        (1, [0, 1, 2], "prompt 1 is not in the trace"),
        (0, [0, 8, 2], "does not fit"),  # another draft than the accepted one
        (0, [0, 1], "does not fit"),  # shorter than the trace
        (0, list(range(20)), "explains 3 of 20"),
    ],
)
def test_ids_of_another_generation_are_refused(prompt, ids, message):
    with pytest.raises(DFlashLabError, match=message):
        tokens.token_states(trace_of(cycle(0, [1], 1, 2)), prompt, ids)


# Text


@pytest.mark.parametrize(
    "text", ["plain", "naïve", "日本 — ok", "a😀😀b", "\n\n  x\n", ""]
)
def test_pieces_join_to_the_decoded_whole(text):
    pieces = tokens.token_pieces(all_states(text), decode)
    assert "".join(piece.text for piece in pieces) == text
    assert not any("\ufffd" in piece.text for piece in pieces)
    grouped = [pair for piece in pieces for pair in piece.pairs]
    assert grouped == all_states(text)


def test_tokens_that_share_a_character_share_a_piece():
    pairs = [(97, "first"), *zip("é".encode(), ["accepted", "bonus"], strict=True)]
    assert tokens.token_pieces(pairs, decode) == [
        ("a", [(97, "first")]),
        ("é", [(0xC3, "accepted"), (0xA9, "bonus")]),
    ]
    assert "accepted draft, token 195; bonus token, token 169" in tokens.html_tokens(
        pairs, decode
    )


def test_an_unfinished_character_at_the_end_is_not_shown_as_garbage():
    pairs = all_states("a😀")[:-1]
    assert [piece.text for piece in tokens.token_pieces(pairs, decode)] == ["a", ""]
    assert "\ufffd" not in tokens.html_tokens(pairs, decode)
    assert tokens.ansi_text(pairs, decode, color=False) == "a"


def test_bytes_that_are_no_character_stay_in_place():
    pairs = [(97, "accepted"), (0xFF, "accepted"), (98, "accepted")]
    pieces = tokens.token_pieces(pairs, decode)
    assert "".join(piece.text for piece in pieces) == "a\ufffdb"


def test_a_special_token_without_text_is_still_there():
    page = Page(tokens.html_tokens([(97, "accepted"), (300, "bonus")], decode))
    last = page.all("span")[-1]
    assert "dfl-empty" in last["class"]
    assert "token 300 (adds no text)" in last["title"]


def test_html_text_is_the_decoded_text_with_states_in_titles():
    text = "if a < b & c:\n    <b>\"x\" 'é'</b>\n\n"
    page = Page(tokens.html_tokens(all_states(text, "corrected"), decode))
    assert page.text == text
    assert {tag for tag, _ in page.elements} == {"div", "span"}
    assert page.all("span")[0]["title"] == f"correction, token {ord('i')}"
    assert page.all("span")[0]["class"] == "dfl-t dfl-corrected"


def test_markup_within_one_token_is_escaped():
    evil = "<img src=x onerror=alert(1)>"
    page = Page(tokens.html_tokens([(0, "accepted")], lambda ids: evil))
    assert not page.all("img") and page.text == evil
    page = Page(tokens.html_chip(0, "accepted", lambda ids: evil))
    assert not page.all("img") and page.text == evil.replace(" ", "\u2423")


def test_newlines_carry_their_mark():
    page = Page(tokens.html_tokens([(10, "corrected"), (97, "accepted")], decode))
    assert page.all("span")[0]["data-nl"] == "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"
    assert "white-space:pre-wrap" in style.token_css()


def test_terminal_text_without_colour_marks_by_brackets():
    pairs = [
        *[(97, "first"), (98, "accepted"), (99, "corrected")],
        *[(100, "bonus"), (101, "plain")],
    ]
    assert tokens.ansi_text(pairs, decode, color=False) == "⟨a⟩b⟦c⟧⟪d⟫⟮e⟯"
    prompt = all_states("a b", "prompt")
    assert tokens.ansi_text(prompt, decode, color=False) == "«a b»"


def test_terminal_text_with_colour_marks_by_more_than_colour():
    shown = {
        state: tokens.ansi_text([(97, state)], decode)
        for state in ("first", "accepted", "corrected", "bonus", "plain", "rejected")
    }
    assert shown["plain"] == "a"
    assert len(set(shown.values())) == 6
    codes = [
        text.split("m")[0][2:].split(";") for text in shown.values() if "\x1b" in text
    ]
    marks = {tuple(code for code in group if int(code) < 30) for group in codes}
    assert len(marks) == 5 and () not in marks
    spaced = tokens.ansi_text(all_states("ab \n cd"), decode)
    plain = re.sub(r"\x1b\[[\d;]*m", "", spaced)
    assert plain.replace("\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}", "") == "ab \n cd"


@pytest.mark.parametrize("color", [True, False])
def test_a_model_cannot_send_control_sequences_to_the_terminal(color):
    shown = tokens.ansi_text(all_states("\x1b[2J\x07\x9b\x7f"), decode, color=color)
    shown = re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)


# Style


def luminance(colour):
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first, second):
    """Contrast ratio of two `#RRGGBB` colours by WCAG 2, from 1 to 21."""
    low, high = sorted(luminance(colour) + 0.05 for colour in (first, second))
    return high / low


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("state", style.STATES)
def test_text_and_marks_have_enough_contrast(theme, state):
    is_muted = "color:var(--dfl-muted)" in style.STATES[state].css
    text = style.THEMES[theme]["muted" if is_muted else "ink"]
    for ground in (style.tint_colour(state, theme), style.THEMES[theme]["page"]):
        assert contrast(text, ground) >= 4.5
        muted = style.THEMES[theme]["muted"]
        assert contrast(muted, ground) >= 4.5
    assert contrast(style.mark_colour(state, theme), style.THEMES[theme]["page"]) >= 3


def test_contrast_knows_the_ends_of_its_scale():
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21)
    assert contrast("#777777", "#777777") == 1
    assert contrast("#767676", "#FFFFFF") == pytest.approx(4.54, abs=0.01)


def test_no_two_states_share_their_second_mark():
    def without_colour(css):
        return re.sub(r"(?<!-)color:[^;]*;?|var\(--m\)", "", css)

    marks = [without_colour(s.css) for s in style.STATES.values()]
    assert len(set(marks)) == len(marks)
    assert len({s.mark for s in style.STATES.values()}) == len(style.STATES)


def test_css_covers_every_state_in_both_colour_schemes():
    css = style.token_css(".mine")
    for state in style.STATES:
        assert f".dfl-{state}{{" in css
        for theme in style.THEMES:
            assert f"--dfl-{state}:{style.mark_colour(state, theme)}" in css
    dark = f"--dfl-page:{style.THEMES['dark']['page']}"
    assert f"@media (prefers-color-scheme:dark){{.mine{{{dark}" in css


# Figures


def bars(figure):
    return [patch for axes in figure.axes for patch in axes.patches]


def test_acceptance_figure_has_one_bar_per_slot():
    figure, alt = curves.acceptance_figure([0.9, 0.5, 0.25], [8, 8, 7])
    assert [bar.get_height() for bar in bars(figure)] == [0.9, 0.5, 0.25]
    assert "slot 1 90%, slot 2 50%, slot 3 25%" in alt
    assert "7 to 8 cycles" in alt
    axes = figure.axes[0]
    assert "slot" in axes.get_xlabel() and "(%)" in axes.get_ylabel()


def test_time_figure_stacks_the_three_parts():
    rows = [
        {"name": "plain", "draft_ms": 0, "verify_ms": 9, "other_ms": 1},
        {"name": "D$x$", "draft_ms": 2, "verify_ms": 3, "other_ms": 0.5},
    ]
    figure, alt = curves.time_figure(rows)
    assert len(bars(figure)) == 6
    ends = [bar.get_x() + bar.get_width() for bar in bars(figure)[-2:]]
    assert ends == pytest.approx([10, 5.5])
    assert len({bar.get_hatch() for bar in bars(figure)}) == 3
    assert "plain 10.0 ms" in alt and "D$x$ 5.5 ms" in alt
    assert figure.axes[0].get_yticklabels()[1].get_text() == r"D\$x\$"
    assert "(ms)" in figure.axes[0].get_xlabel()


def test_length_histogram_has_a_bar_for_every_possible_length():
    figure, alt = curves.length_histogram([1, 1, 4, 2], block_size=5)
    assert [bar.get_height() for bar in bars(figure)] == [2, 1, 0, 1, 0]
    assert "tau, is 2.00" in alt and "1 token 2, 2 tokens 1, 4 tokens 1" in alt


@pytest.mark.parametrize(
    "call",
    [
        lambda: curves.acceptance_figure([], []),
        lambda: curves.acceptance_figure([0.5], [1, 2]),
        lambda: curves.time_figure([]),
        lambda: curves.length_histogram([], 4),
        lambda: curves.length_histogram([5], 4),
        lambda: curves.length_histogram([0], 4),
    ],
)
def test_figures_refuse_what_they_cannot_draw(call):
    with pytest.raises(DFlashLabError):
        call()


def test_png_bytes_are_reproducible():
    first, second = (
        curves.figure_png(curves.length_histogram([1, 2], 2)[0]) for _ in range(2)
    )
    assert first == second
    assert first.startswith(b"\x89PNG") and b"Software" not in first


def test_importing_views_does_not_import_matplotlib():
    code = (
        "import sys, dflash_lab.views.curves, dflash_lab.views.report; "
        "assert not {'matplotlib', 'torch'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Report


def summary(**changes):
    values = {
        "pair": "tiny",
        "dtype": "float32",
        "prompts": 1,
        "equal": True,
        "ties": 0,
        "tau": 3.0,
        "speedup": 1.5,
        "speedup_vs_generate": None,
        "tokens_per_second": 60.0,
        "plain_tokens_per_second": 40.0,
        "generate_tokens_per_second": None,
        "acceptance_per_position": [0.75, 0.5, 0.25],
        "draft_ms": 5.0,
        "verify_ms": 20.0,
        "other_ms": 5.0,
        "plain_ms": 20.0,
        "level": "L2: equal to ordinary plain decoding",
        "block_size": 4,
        "num_cycles": 2,
        "num_tokens": 7,
    }
    return values | changes


def report(**changes):
    evil = "<script>alert(1)</script>"
    cycles = [cycle(0, [60, 38, 120], 2, 34), cycle(1, [], 0, 39)]
    values = {
        "title": f"Title {evil}",
        "pair": "tiny",
        "dtype": "float32",
        "machine": {"cpu": evil, "torch": "2.0"},
        "summary": summary(),
        "prompts": [
            {
                "id": f"p1 {evil}",
                "kind": evil,
                "text": evil,
                "pairs": all_states(evil),
                "cycles": cycles,
                "tau": 2.0,
                "equal": True,
            }
        ],
        "decode": decode,
        "figures": [(PNG, f'alt "{evil}"', f"caption {evil}", [f"notice {evil}"])],
    }
    return values | changes


def test_nothing_that_a_model_or_user_wrote_becomes_markup():
    source = render_report(report())
    page = Page(source)
    assert not page.all("script")
    assert page.text.count("<script>alert(1)</script>") == 9
    assert page.all("img")[0]["alt"] == 'alt "<script>alert(1)</script>"'


def test_the_page_needs_nothing_from_elsewhere():
    source = render_report(report())
    page = Page(source)
    assert "http://" not in source and "https://" not in source
    assert "url(" not in source and "@import" not in source
    assert not page.all("link")
    for _, attrs in page.elements:
        assert "href" not in attrs
        assert attrs.get("src", "data:").startswith("data:")
    policy = [m for m in page.all("meta") if "http-equiv" in m]
    assert policy[0]["content"].startswith("default-src 'none'")


def test_every_image_has_its_alt_text_and_notes():
    figures = [(PNG, "first alt", "one", ["look here"]), (PNG, "second alt", "two", [])]
    page = Page(render_report(report(figures=figures)))
    assert [image["alt"] for image in page.all("img")] == ["first alt", "second alt"]
    assert page.text.count("What to notice") == 1 and "look here" in page.text


def test_cycles_are_listed_with_what_became_of_each_draft():
    source = render_report(report())
    page = Page(source)
    chips = [s for s in page.all("span") if "dfl-chip" in s["class"]]
    assert [chip["title"] for chip in chips] == [
        "accepted draft, token 60",
        "accepted draft, token 38",
        "rejected draft, token 120",
        "correction, token 34",
        "plain token, token 39",
    ]
    assert "line-through" in style.STATES["rejected"].css
    assert len(page.all("details")) == len(page.all("summary")) == 1
    body = source.split("<tbody>")[-1]
    cells = re.findall(r'data-label="([a-z ]+)">([\d.]+)<', body)[:6]
    assert cells == [
        ("cycle", "0"),
        ("start", "10"),
        ("added", "3"),
        ("draft ms", "1.0"),
        ("verify ms", "2.0"),
        ("other ms", "0.5"),
    ]


def test_a_cut_cycle_shows_no_token_of_the_target():
    data = report()
    data["prompts"][0]["cycles"] = [cycle(0, [60, 38], 2, 34, added=2)]
    page = Page(render_report(data))
    assert "the text ended before" in page.text
    assert not [
        s for s in page.all("span") if s.get("title") == "bonus token, token 34"
    ]


def test_part_of_a_character_shows_as_a_number():
    assert ">#195<" in tokens.html_chip(0xC3, "accepted", decode).replace("<i>", "")
    assert "\ufffd" not in tokens.html_chip(0xC3, "accepted", decode)
    assert "␣" in tokens.html_chip(32, "accepted", decode)


def test_the_break_even_is_computed_from_the_times():
    text = " ".join(Page(render_report(report())).text.split())
    assert "A cycle takes 30.0 ms here, as long as 1.50 plain tokens" in text
    assert "3.00 / 1.50 = 2.00\N{MULTIPLICATION SIGN}" in text


def test_missing_numbers_leave_their_rows_out():
    gone = dict.fromkeys(
        ("speedup", "plain_ms", "plain_tokens_per_second", "acceptance_per_position")
    )
    text = Page(render_report(report(summary=summary(**gone, tau=float("nan"))))).text
    assert "None" not in text and "nan" not in text
    assert "the speed was not compared" in text
    assert "When it pays" not in text and "Speed-up" not in text
    assert "Drafting" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "equal plain decoding, token for token; decoding was 1.50"),
        ({"equal": False, "lossless": True, "ties": 2}, "up to 2 certified ties"),
        ({"equal": False}, "differ from plain decoding"),
        ({"equal": False, "lossless": False, "ties": 2}, "do not rely on this run"),
        ({"speedup": 0.8}, "decoding was slower, at 0.80"),
    ],
)
def test_the_verdict_is_one_plain_sentence(changes, words):
    sentence = verdict(summary(**changes))
    assert words in sentence and sentence.endswith("at 3.00 tokens per cycle (τ).")
    assert sentence in Page(render_report(report(summary=summary(**changes)))).text

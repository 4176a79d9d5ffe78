"""Views say everything without scripts; widgets show the view of their controls."""

from __future__ import annotations

import html.parser
import re
from dataclasses import replace
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
import torch
from helpers import ROOT
from jinja2 import UndefinedError

from dflash_lab.diffusion.samplers import SampleHistory
from dflash_lab.errors import DFlashLabError
from dflash_lab.measure.speedup import Costs
from dflash_lab.speculative.generation import GenerationResult
from dflash_lab.speculative.trace import CycleRecord, DecodeTrace

pytest.importorskip("matplotlib")
widgets = pytest.importorskip("ipywidgets")

from dflash_lab.views.acceptance import acceptance_view  # noqa: E402
from dflash_lab.views.diffusion import film_strip, frame_text, lines_figure, player  # noqa: E402
from dflash_lab.views.masks import block_diffusion_picture, drafter_picture, mask_view  # noqa: E402
from dflash_lab.views.render import render  # noqa: E402
from dflash_lab.views.speedup import speedup_figure  # noqa: E402
from dflash_lab.views.stepper import cycle_view, cycles_view, text_view  # noqa: E402
from dflash_lab.views.training import accuracy_figure, tau_figure  # noqa: E402
from dflash_lab.views.view import figure_view, table_view  # noqa: E402
from dflash_lab.views.widgets.acceptance_explorer import acceptance_explorer  # noqa: E402
from dflash_lab.views.widgets.decode_stepper import decode_stepper  # noqa: E402
from dflash_lab.views.widgets.denoise_player import denoise_player  # noqa: E402
from dflash_lab.views.widgets.mask_explorer import (  # noqa: E402
    block_mask_explorer,
    drafter_mask_explorer,
)
from dflash_lab.views.widgets.shell import shell  # noqa: E402
from dflash_lab.views.widgets.speedup_calculator import speedup_calculator  # noqa: E402

MASK = 9


class Balance(html.parser.HTMLParser):
    """Every opened element is closed, in order."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in ("img", "input", "br", "li"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag != "li":
            assert self.open.pop() == tag


def parsed(view):
    parser = Balance()
    parser.feed(view.html)
    assert parser.open == []
    # Nothing is fetched; a drawing names its own kind, which is no address to fetch.
    assert not re.search(r"""(?:src|href)=["']https?:|url\(["']?http""", view.html)
    return parser.seen


def decode(ids):
    return "".join("ab<\n&fgh"[i] for i in ids)


def history():
    frames = [
        torch.tensor([[MASK, MASK, MASK], [0, MASK, MASK]]),
        torch.tensor([[MASK, 1, MASK], [0, MASK, 5]]),
        torch.tensor([[2, 1, 3], [0, 4, 5]]),
    ]
    return SampleHistory(frames[-1], frames, 2)


def test_a_film_strip_shows_every_state_and_marks_what_is_new():
    view = film_strip(history().frames, MASK, decode)
    seen = parsed(view)
    assert view.text.splitlines() == ["___", "_b_", "<b⏎"]
    classes = [attrs.get("class") for _, attrs in seen]
    assert classes.count("dfl-mask") == 3 + 2
    assert classes.count("dfl-new") == 1 + 2
    assert "&lt;" in view.html and "3 masked" in view.html
    assert film_strip(history().frames, MASK, decode, row=1).text.endswith("a&f")
    assert len(film_strip(history().frames, MASK, decode, at_most=2).text.split()) == 2


def test_a_player_is_whole_without_its_script():
    view = player(history().frames, MASK, decode)
    seen = parsed(view)
    states = [attrs for _, attrs in seen if attrs.get("class") == "dfl-state"]
    assert ["hidden" in attrs for attrs in states] == [True, True, False]
    assert any(tag == "details" for tag, _ in seen)
    slider = next(attrs for tag, attrs in seen if tag == "input")
    assert (slider["min"], slider["max"], slider["value"]) == ("0", "2", "2")
    names = [
        re.search(r'id="(\S+)"', v.html).group(1)
        for v in (view, player([*history().frames], MASK, decode))
    ]
    assert names[0] != names[1]


def test_a_figure_prints_its_alt_text_and_what_to_notice():
    made = lines_figure(
        {"one & two": [(1, 2.0), (4, 3.0)], "flat": [(1, 1.0), (4, 1.0)]},
        x="steps",
        y="nats",
        headline="A figure",
        log_x=True,
        ticks=(1, 2, 4),
    )
    view = figure_view(made, ["It rises."])
    seen = parsed(view)
    image = next(attrs for tag, attrs in seen if tag == "img")
    assert image["alt"] == made[1] and "one & two from 2 at 1 to 3 at 4" in made[1]
    drawing = image["src"].partition(",")[2]
    svg = ElementTree.fromstring(unquote(drawing))
    assert svg.tag.endswith("svg") and len(list(svg.iter())) > 20
    assert figure_view(made, ["It rises."]).html == view.html  # no dates, no chance
    assert view.text == f"{made[1]}\n* It rises."
    assert view._repr_mimebundle_() == {"text/html": view.html, "text/plain": view.text}
    single = lines_figure({"dot": [(4, 3.0)]}, x="x", y="y", headline="")
    assert single[1] == "Lines of y against x: dot 3 at 4."
    lines = made[0].axes[0].lines
    looks = {(x.get_color(), x.get_linestyle(), x.get_marker()) for x in lines}
    assert len(looks) == 2
    with pytest.raises(DFlashLabError, match="0 series"):
        lines_figure({}, x="", y="", headline="")


def test_a_table_reads_the_same_as_text():
    view = table_view(["name", "tau"], [["a<b", 1.234], ["c", 2]], "A table")
    parsed(view)
    assert view.text == "A table\nname  tau\na<b   1.23\nc     2"
    assert '<td class="dfl-n">1.23</td>' in view.html and "a&lt;b" in view.html


def test_nothing_that_a_view_is_given_becomes_markup():
    evil = "<script>alert('1')</script>"
    trace, ids = trace_of_two_cycles()
    made = lines_figure({evil: [(1, 2.0)]}, x=evil, y=evil, headline=evil)
    picture = block_diffusion_picture(2, 1)
    names = [evil] * len(picture.rows)
    picture = replace(picture, rows=names, columns=names, reason=lambda *_: evil)
    for view in (
        table_view([evil], [[evil]], evil),
        figure_view(made, [evil]),
        mask_view(picture, evil),
        film_strip(history().frames, MASK, lambda _: evil),
        cycle_view(trace, ids, 0, lambda _: evil),
        cycles_view(trace, lambda _: evil),
        text_view(
            GenerationResult([ids], ["length"], trace, 1.0, 0.1), lambda _: evil * 9
        ),
    ):
        seen = parsed(view)
        assert "script" not in {tag for tag, _ in seen}
        assert "&lt;script&gt;" in view.html


def test_templates_put_nothing_in_unescaped_but_cells_of_notebooks():
    """`| safe` lets HTML through; a value that a template misses is an error."""
    templates = (ROOT / "dflash_lab").glob("*/templates/*.html")
    marked = re.compile(r"\{\{[^}]*\| *safe[^}]*\}\}")
    found = {p.name: marked.findall(p.read_text("utf-8")) for p in templates}
    assert len(found) > 10
    assert {name: texts for name, texts in found.items() if texts} == {
        "denoise.html": ['{{ "" if loop.first else "↵<br>" | safe }}'],
        "lesson.html": ["{{ body | safe }}"],
        "slides.html": ["{{ slide | safe }}"],
    }
    with pytest.raises(UndefinedError, match="sentence"):
        render("views/view.html")


def test_the_denoise_player_shows_the_state_of_its_slider():
    box = denoise_player(history(), MASK, decode)
    assert box.view.text.splitlines() == ["_b_", "<b⏎"]
    box.controls["step"].value = 0
    assert box.view.text == "___" and box.pane.value == box.view.html
    box.controls["text"].value = 1
    assert box.view.text == "a__"
    assert repr(box) == "a__"
    bundle = box._repr_mimebundle_()
    assert bundle["text/html"] == box.view.html and bundle["text/plain"] == "a__"


def test_a_shell_redraws_when_any_control_moves():
    number = widgets.IntSlider(value=1, max=5)
    box = shell({"n": number}, lambda n: table_view(["n"], [[n]]))
    number.value = 4
    assert box.view.text == "n\n4"


def test_frames_as_text():
    assert frame_text([MASK, 0, 3], MASK, decode) == "_a⏎"


def test_every_cell_of_a_mask_says_why():
    for picture in (block_diffusion_picture(4, 2), drafter_picture((2, 4), 6, 3)):
        view = mask_view(picture, "A mask")
        cells = [
            attrs for tag, attrs in parsed(view) if tag == "td" and "title" in attrs
        ]
        assert len(cells) == len(picture.rows) * len(picture.columns)
        for number, cell in enumerate(cells):
            row, column = divmod(number, len(picture.columns))
            is_open = picture.open[row][column]
            assert ("dfl-open" in cell["class"]) == is_open
            assert ("does not see" in cell["title"]) != is_open
        lines = view.text.splitlines()[1:]
        for line, row in zip(lines, picture.open, strict=True):
            assert line[-len(row) :] == "".join("■" if x else "·" for x in row)
    with pytest.raises(DFlashLabError, match="limit is 4096"):
        mask_view(block_diffusion_picture(40, 2))


def test_mask_explorers_follow_their_controls():
    box = block_mask_explorer(6)
    assert "K = 2" in box.view.text
    box.controls["block_size"].value = 6
    assert (
        box.view.text
        == mask_view(
            block_diffusion_picture(6, 6), "6 noisy rows (~) and 6 clean ones, K = 6"
        ).text
    )
    box = drafter_mask_explorer(6)
    before = box.view.text
    box.controls["first"].value = 5
    assert box.view.text != before
    assert box.view.text.splitlines()[1].startswith("block 0: anchor  ■■■■■·")


def trace_of_two_cycles():
    """Prompt of 3 ids, first token 4; one cycle with a rejection, one with a bonus."""
    header = {"num_prompts": 1, "prompt_lengths": [3], "block_size": 4}
    cycles = [
        CycleRecord(0, 0, 3, 2, [5, 6, 7], [5, 1, 2, 3], [True, False, False]),
        CycleRecord(0, 1, 5, 3, [0, 1], [0, 1, 2], [True, True]),
    ]
    return DecodeTrace(header, cycles), [4, 5, 1, 0, 1, 2]


def test_a_cycle_shows_drafts_picks_and_both_caches():
    trace, ids = trace_of_two_cycles()
    view = cycle_view(trace, ids, 0, decode)
    parsed(view)
    lines = view.text.splitlines()
    assert "2 tokens added. Target's cache 3 → 5 rows" in lines[0]
    assert "drafter's context 3 rows" in lines[0]
    assert [line.split()[-2:] for line in lines[2:]] == [
        ["accepted", "draft"],
        ["rejected", "draft"],
        ["unused", "draft"],
    ]
    assert view.html.count("dfl-corrected") >= 2  # the target's token, and the text
    second = cycle_view(trace, ids, 1, decode)
    assert second.text.splitlines()[-1] == "bonus '<'"
    with pytest.raises(DFlashLabError, match="no cycle 2; there are 0 to 1"):
        cycle_view(trace, ids, 2, decode)
    with pytest.raises(DFlashLabError, match="prompt 1 has no cycles"):
        cycle_view(trace, ids, 0, decode, prompt=1)


def test_the_table_of_cycles_says_how_many_are_left_out():
    trace, _ = trace_of_two_cycles()
    view = cycles_view(trace, decode, at_most=1)
    parsed(view)
    assert view.text.splitlines() == [
        "0: at 3, 2 added, drafts 'fgh'",
        "and 1 more cycles",
    ]
    assert len(cycles_view(trace, decode).text.splitlines()) == 2


def test_an_answer_comes_with_the_legend_of_its_marks():
    trace, ids = trace_of_two_cycles()
    view = text_view(GenerationResult([ids], ["length"], trace, 1.0, 0.1), decode)
    parsed(view)
    assert view.text.startswith("⟨&⟩f⟦b⟧")
    for state in ("first", "accepted", "corrected", "bonus"):
        assert f'dfl-chip dfl-{state}"' in view.html
    assert 'dfl-chip dfl-plain"' not in view.html


def test_the_stepper_follows_its_slider():
    trace, ids = trace_of_two_cycles()
    result = GenerationResult([ids], ["length"], trace, 1.0, 0.1)
    box = decode_stepper(result, decode)
    assert box.view.text.startswith("cycle 0 of 2")
    box.controls["cycle"].value = 1
    assert box.view.text.startswith("cycle 1 of 2")


def test_the_acceptance_explorer_shows_the_definitions_that_are_ticked():
    trace, _ = trace_of_two_cycles()
    box = acceptance_explorer({"one": [trace], "two": [trace, trace]})
    assert "4 cycles" not in box.view.text and "6 cycles" in box.view.text
    box.controls["prompts"].value = "two"
    assert "4 cycles" in box.view.text
    for name in ("marginal:", "conditional:", "survival:"):
        assert name in box.view.text
    box.controls["marginal"].value = False
    assert "marginal:" not in box.view.text and "survival:" in box.view.text
    parsed(box.view)
    found = acceptance_view([trace], ["survival"])
    assert (
        "survival: became text 1 at 1 to" not in found.text
    )  # one cycle rejects slot 2
    assert "from 1 at 1 to 0 at 3" in found.text
    assert re.search(r"tau +2\.50", found.text)
    with pytest.raises(DFlashLabError, match="choose from marginal"):
        acceptance_view([trace], ["quality"])


def test_the_calculator_agrees_with_the_cost_model():
    cost = Costs(8, 2.0, 1.0, 3.0, 0.0)  # a cycle costs two plain tokens
    box = speedup_calculator(cost, tau=3.0)
    parsed(box.view)
    assert "Drafting pays." in box.view.text
    assert re.search(r"speed-up +1\.50", box.view.text)
    assert re.search(r"break-even tau +2\.00", box.view.text)
    box.controls["tau"].value = 1.5
    assert "Drafting does not pay." in box.view.text
    box.controls["tau"].value = 12.0  # more than a block has
    assert re.search(r"and adds \(tau\) +8\.00", box.view.text)


def test_the_speedup_figure_says_from_where_on_it_pays():
    costs = {2: Costs(2, 1.0, 0.2, 1.0, 0.0), 8: Costs(8, 1.0, 0.5, 1.5, 0.0)}
    figure, alt = speedup_figure(costs, tau=2.5)
    assert "K = 2 from tau 1.20, K = 8 from tau 2.00" in alt
    assert len(figure.axes[0].lines) == 4  # two sizes, break-even, the marked tau


def test_training_figures_read_a_runs_metrics():
    lines = [
        {"step": n, "accuracy": [n / 100, 0.1, 0.2], "predicted_tau": 1 + n / 50}
        for n in (10, 20, 30)
    ]
    figure, alt = accuracy_figure(lines)
    assert "slot 1 from 0.1 at 10 to 0.3 at 30" in alt and "slot 3" in alt
    assert len(figure.axes[0].lines) == 3
    assert "measured" not in tau_figure(lines)[1]
    lines[1]["measured_tau"] = 1.3
    assert "measured on held-out prompts 1.3 at 20" in tau_figure(lines)[1]
    for make in (accuracy_figure, tau_figure):
        with pytest.raises(DFlashLabError, match="no metrics yet"):
            make([])

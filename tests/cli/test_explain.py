"""`explain` prints reasons whose chain is the loop's own, and leaves its files."""

from __future__ import annotations

import re

import pandas as pd
import pytest

from dflash_lab.cli.main import main
from dflash_lab.errors import DFlashLabError
from dflash_lab.measure.explain import reasons_by_slot
from dflash_lab.views.reasons import reasons_figure

TINY = ["--pair", "tiny", "--dtype", "float32", "--limit", "1"]


def test_the_chain_row_is_the_measured_tau(capsys, tmp_path):
    out = tmp_path / "why"
    more = ["--max-new-tokens", "48", "--out", str(out)]
    assert main(["explain", *TINY, *more]) == 0
    said = capsys.readouterr().out
    measured = re.search(r"4 answers, tau ([\d.]+) measured", said)[1]
    chain = re.search(r"chain +tau +([\d.]+)", said)[1]
    assert measured == chain
    assert "what each lever wins" in said and "\n* The right token was" in said
    lost = pd.read_csv(out / "lost.csv")
    assert {"slot", "rank", "reason", "in_lookup", "near_tie"} <= set(lost)
    assert (out / "reasons.png").read_bytes().startswith(b"\x89PNG")
    figure, alt = reasons_figure(reasons_by_slot(lost))
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "Where did the right token stand?"
    heights = [bar.get_height() for bars in axes.containers for bar in bars]
    assert sum(heights) == pytest.approx(lost["slot"].nunique())
    assert "second choice" in alt


@pytest.mark.parametrize("option", ["--limit", "--max-new-tokens"])
def test_bad_numbers_are_refused(option, capsys):
    assert main(["explain", "--pair", "tiny", option, "0"]) == 2
    assert f"{option} 0 must be 1 or more" in capsys.readouterr().err


def test_an_empty_table_is_not_drawn():
    with pytest.raises(DFlashLabError, match="no lost drafts"):
        reasons_figure(pd.DataFrame())

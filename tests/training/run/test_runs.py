"""Runs are watched, stopped, read back and laid side by side."""

from __future__ import annotations

import asyncio
import functools
import threading
from types import SimpleNamespace

import pytest
import torch

from dflash_lab.clinic.family import (
    family_root,
    flat_settings,
    load_member,
    member_facts,
    names,
)
from dflash_lab.errors import DFlashLabError
from dflash_lab.training.run.background import BackgroundRun
from dflash_lab.training.run.config import from_dict
from dflash_lab.training.run.runs import Run, differing, find_runs, read_run
from dflash_lab.training.run.train import train

pytest.importorskip("accelerate")
pytest.importorskip("matplotlib")
pytest.importorskip("ipywidgets")

from helpers import bare_pair, settings

from dflash_lab.views.runs import curves_figure, runs_frame, runs_view
from dflash_lab.views.training import STATES, run_view, status_sentence
from dflash_lab.views.widgets.run_browser import run_browser
from dflash_lab.views.widgets.training_monitor import training_monitor


def line(step: int, **more) -> dict:
    return {
        "step": step,
        "loss": 5.0 - step / 10,
        "accuracy": [step / 40, step / 80, 0.1],
        "predicted_tau": 1 + step / 20,
        "blocks": 100 * step,
        "blocks_per_second": 50.0,
        "cpu_seconds": 6.0 * step,
        "seconds_left": 90.0,
    } | more


def fake(lines, finished=True, gate=None):
    """A run that reports `lines`, then waits for `gate` or for being stopped."""

    def work(on_line, should_stop, quiet):
        assert quiet
        for number in lines:
            on_line(line(number))
        while gate is not None and not gate.wait(0.01):
            if should_stop():
                return SimpleNamespace(finished=False)
        return SimpleNamespace(finished=finished)

    return work


# --- in the background ----------------------------------------------------------------


def test_a_background_run_reports_and_returns():
    told = []
    run = BackgroundRun(fake([10, 20]), lambda: told.append(run.state))
    with pytest.raises(DFlashLabError, match=r"not begun; call start\(\)"):
        run.result()
    assert run.start().result().finished and run.state == "finished"
    assert [x["step"] for x in run.lines] == [10, 20]
    assert told == ["running", "running", "finished"]
    with pytest.raises(DFlashLabError, match="is finished; make another"):
        run.start()


def test_a_background_run_stops_when_asked():
    run = BackgroundRun(fake([10], gate=threading.Event())).start()
    run.stop()
    assert not run.result().finished and run.state == "stopped"


def test_a_run_can_be_awaited_while_other_things_go_on():
    async def both():
        run = BackgroundRun(fake([10], gate=threading.Event()))
        with pytest.raises(DFlashLabError, match="not begun"):
            await run.wait()
        waiting = asyncio.create_task(run.start().wait())
        await asyncio.sleep(0.05)  # the loop is free: this is what a button needs
        assert not waiting.done()
        run.stop()
        return await waiting

    assert not asyncio.run(both()).finished


def test_a_cancelled_wait_stops_the_run_and_keeps_its_result():
    async def interrupted():
        run = BackgroundRun(fake([10], gate=threading.Event())).start()
        waiting = asyncio.create_task(run.wait())
        await asyncio.sleep(0.05)
        waiting.cancel()
        return await waiting

    assert not asyncio.run(interrupted()).finished


def test_an_interrupt_while_waiting_stops_the_run_and_keeps_its_result(monkeypatch):
    run = BackgroundRun(fake([10], gate=threading.Event())).start()
    join, calls = run._thread.join, []

    def interrupted():
        calls.append(run.state)
        if len(calls) == 1:
            raise KeyboardInterrupt
        join()

    monkeypatch.setattr(run._thread, "join", interrupted)
    assert not run.result().finished
    assert calls == ["running", "stopping"] or calls == ["running", "stopped"]


def test_an_error_is_raised_where_the_result_is_asked_for():
    def work(**_):
        raise DFlashLabError("no room")

    run = BackgroundRun(work).start()
    with pytest.raises(DFlashLabError, match="no room"):
        run.result()
    assert run.state == "failed"


def test_a_real_run_can_be_stopped_and_resumed_to_the_same_drafter(tmp_path):
    whole, parts = [], []
    make = functools.partial(train, pair=bare_pair(), quiet=True)
    one = make(from_dict(settings(tmp_path / "one")), on_line=whole.append)
    config = from_dict(settings(tmp_path / "two"))
    first = make(config, on_line=parts.append, should_stop=lambda: bool(parts))
    assert not first.finished and first.drafter is None
    assert [x["step"] for x in parts] == [4]
    two = make(config, on_line=parts.append, resume=True)
    assert [x["step"] for x in parts] == [x["step"] for x in whole] == [4, 8, 12]
    states = one.drafter.state_dict(), two.drafter.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


# --- the monitor ----------------------------------------------------------------------


def test_the_monitor_shows_a_real_run_to_its_end(tmp_path, capsys):
    config = from_dict(settings(tmp_path))
    work = functools.partial(train, config, pair=bare_pair())
    monitor = training_monitor(work, redraw_seconds=0.0)
    result = monitor.result()
    assert result.finished and monitor.button.disabled
    assert monitor.button.description == "finished"
    assert [x["step"] for x in monitor.run.lines] == [4, 8, 12]
    assert monitor.view.text.startswith("The run is done. step 12, loss ")
    assert "Lines of tau against training step" in monitor.view.text
    assert monitor.pane.value == monitor.view.html
    bundle = monitor._repr_mimebundle_()  # what a page without widgets shows
    assert bundle["text/plain"] == monitor.view.text
    assert "train:" not in capsys.readouterr().err  # no bar between the pictures


def test_the_monitors_button_stops_the_run():
    monitor = training_monitor(fake([10], gate=threading.Event()))
    assert not monitor.button.disabled
    monitor.button.click()
    assert not monitor.result().finished
    assert monitor.button.disabled and monitor.button.description == "stopped"
    assert "resume=True" in monitor.view.text


def test_the_monitor_is_not_redrawn_for_every_line(monkeypatch):
    from dflash_lab.views.widgets import training_monitor as module

    drawn = []
    make = module.run_view
    monkeypatch.setattr(module, "run_view", lambda *a: drawn.append(a[1]) or make(*a))
    monitor = training_monitor(fake(range(1, 50)), redraw_seconds=60.0)
    monitor.result()
    assert len(drawn) <= 4 and drawn[-1] == "finished"


def test_a_runs_sentence_says_where_it_stands():
    assert status_sentence([], "running").endswith("first line of metrics.")
    assert run_view([], "failed").text == STATES["failed"]
    lines = [line(10, measured_tau=1.25), line(20)]
    assert status_sentence(lines, "running") == (
        "The run goes on. step 20, loss 3.000, tau 1.25 measured at step 10, "
        "50 blocks/s, 1.5 minutes left."
    )
    assert "minutes left" not in status_sentence(lines, "stopped")
    view = run_view(lines, "running")
    assert view.html.count("<img") == 2 and "slot 3" in view.text


# --- runs on the disk -----------------------------------------------------------------


def test_the_shipped_family_reads_as_runs():
    runs = {run.name: run for run in find_runs(family_root())}
    assert sorted(runs) == sorted(names())
    for name, run in runs.items():
        assert run.settings == flat_settings(name) and run.facts == member_facts(name)
        assert run.metrics[-1]["step"] == run.facts["steps"]
    changed = differing([runs["base"], runs["block-4"]])
    assert changed == ["drafter.block_size"]
    assert differing([runs["base"], runs["again"]]) == ["seed"]
    assert differing([runs["base"]]) == []


def test_every_member_of_the_family_is_what_its_settings_say():
    for name in names():
        drafter, settled = load_member(name), flat_settings(name)
        assert drafter.config.block_size == settled["drafter.block_size"], name
        layers = settled["drafter.num_hidden_layers"]
        assert drafter.config.num_hidden_layers == layers, name
        assert member_facts(name)["parameters"] == sum(
            p.numel() for p in drafter.parameters()
        )
    with pytest.raises(DFlashLabError, match="no member 'layers-9'; choose among base"):
        load_member("layers-9")


def test_a_run_that_goes_on_is_read_from_its_settings(tmp_path):
    config = from_dict(settings(tmp_path / "a"))
    lines = []
    train(
        config,
        pair=bare_pair(),
        quiet=True,
        on_line=lines.append,
        should_stop=lambda: bool(lines),
    )
    (run,) = find_runs(tmp_path)
    assert run.name == "a/run" and run.facts == {} and run.metrics == lines
    assert run.settings["drafter.block_size"] == 4 and "out" not in run.settings
    train(config, pair=bare_pair(), quiet=True, resume=True)
    done = read_run(tmp_path / "a" / "run")
    assert done.facts["steps"] == 12 and done.settings == run.settings


def test_folders_without_runs_are_named(tmp_path):
    with pytest.raises(DFlashLabError, match="holds no run with metrics"):
        find_runs(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    with pytest.raises(DFlashLabError, match="holds no run with metrics"):
        find_runs(tmp_path)  # metrics of something else
    with pytest.raises(DFlashLabError, match="is no folder"):
        find_runs(tmp_path / "none")
    with pytest.raises(DFlashLabError, match=r"neither config\.yaml nor"):
        read_run(tmp_path)


def some_runs(tmp_path, count=3) -> list[Run]:
    return [
        Run(
            f"r{i}",
            tmp_path,
            {"seed": 0, "optimizer.learning_rate": 10.0**-i, "data.corpus": None},
            [line(10, measured_tau=1.0 + i), line(20)],
            {"held_out_tau": {"pooled": 2.0 + i}} if i else {},
        )
        for i in range(count)
    ]


def test_runs_side_by_side(tmp_path):
    runs = some_runs(tmp_path)
    frame = runs_frame(runs)
    assert list(frame["optimizer.learning_rate"]) == [1.0, 0.1, 0.01]
    assert "seed" not in frame and list(frame["cpu_minutes"]) == [2.0] * 3
    assert list(frame["measured_tau"]) == [1.0, 2.0, 3.0]
    assert frame["held_out_tau"].isna().tolist() == [True, False, False]
    figure, alt = curves_figure(runs, "loss", "blocks seen")
    assert "r0 from 4 at 1000 to 3 at 2000" in alt and len(figure.axes[0].lines) == 3
    # Tau is measured now and then: only lines that have it are points.
    assert "r2 3 at 10" in curves_figure(runs, "measured tau")[1]
    view = runs_view(runs, ["r2", "r0"], "predicted tau", "CPU-minutes")
    assert "r2 from 1.5 at 1 to 2 at 2" in view.text and "r1" not in view.text
    assert view.text.splitlines()[-2].split()[-2:] == ["4.00", "0.01"]
    assert "-" in view.text.splitlines()[-1].split()  # no card yet
    with pytest.raises(DFlashLabError, match="cannot draw 'speed' against 'steps'"):
        curves_figure(runs, "speed")
    with pytest.raises(DFlashLabError, match="choose among r0, r1, r2"):
        runs_view(runs, ["r7"], "loss")
    for run in runs:
        del run.metrics[0]
    with pytest.raises(DFlashLabError, match="none of these runs has measured tau"):
        curves_figure(runs, "measured tau")


def test_the_browser_follows_its_controls(tmp_path):
    box = run_browser(some_runs(tmp_path, 7), ["r1"])
    assert "accuracy of slot 1 against steps: r1 from 0.25" in box.view.text
    box.controls["quantity"].value = "loss"
    box.controls["axis"].value = "CPU-minutes"
    box.controls["chosen"].value = ("r0", "r3")
    assert "loss against CPU-minutes: r0 from 4 at 1 to 3" in box.view.text
    assert "r3" in box.view.text and box.pane.value == box.view.html
    box.controls["chosen"].value = tuple(f"r{i}" for i in range(7))
    assert "2 more chosen, not shown" in box.view.text
    box.controls["chosen"].value = ()
    assert "r0 from" in box.view.text  # never an empty picture


def test_the_cards_of_the_family_say_what_their_notes_say():
    for name in names():
        card = (family_root() / name / "README.md").read_text(encoding="utf-8")
        facts = member_facts(name)
        assert f"{facts['steps']} steps, {facts['blocks_seen']} blocks" in card
        assert f"| pooled | {facts['held_out_tau']['pooled']:.2f} |" in card

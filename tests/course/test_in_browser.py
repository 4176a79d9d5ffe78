"""Lessons in JupyterLab and as static pages, in a real browser.

JupyterLab opens a lesson in headless Chromium, all cells run, every control of every
widget is moved by keyboard or mouse, and the picture beside it must change.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from helpers import ROOT

sync_api = pytest.importorskip("playwright.sync_api")
pytest.importorskip("jupyterlab")

from dflash_lab.course.lessons import to_notebook  # noqa: E402
from dflash_lab.course.masters import Cell  # noqa: E402
from dflash_lab.course.site import build_site  # noqa: E402

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    None,
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="no Chromium on this machine: install one to run these"
    ),
]
MINUTE = 60_000  # milliseconds

# The widgets that lessons 02, 03 and 06 do not have, in one notebook.
OTHERS = [
    """
import functools, tempfile, threading, torch
from types import SimpleNamespace
from dflash_lab.diffusion.samplers import SampleHistory
from dflash_lab.views.widgets.denoise_player import denoise_player
frames = [torch.tensor([[9, 9, 9], [0, 9, 9]]), torch.tensor([[9, 1, 9], [0, 9, 5]]),
          torch.tensor([[2, 1, 3], [0, 4, 5]])]
denoise_player(SampleHistory(frames[-1], frames, 2), 9, lambda i: "abcdefgh"[i[0]])
""",
    """
from dflash_lab.views.widgets.mask_explorer import drafter_mask_explorer
drafter_mask_explorer(12)
""",
    """
from dflash_lab.views.widgets.speedup_calculator import speedup_calculator
speedup_calculator()
""",
    """
from dflash_lab.clinic.family import family_root
from dflash_lab.training.run.runs import find_runs
from dflash_lab.views.widgets.run_browser import run_browser
run_browser(find_runs(family_root()), ["base"])
""",
]
# Its run goes on until it is stopped.
MONITOR = [
    """
import time
from types import SimpleNamespace
from dflash_lab.views.widgets.training_monitor import training_monitor

def train(on_line, should_stop, quiet):
    step = 0
    while not should_stop():
        step += 1
        on_line({"step": step, "loss": 1 / step, "accuracy": [0.5, 0.4], "blocks": step,
                 "predicted_tau": 1.7, "blocks_per_second": 9.0, "seconds_left": 9.0})
        time.sleep(0.2)
    return SimpleNamespace(finished=False)

monitor = training_monitor(train, redraw_seconds=0.5)
monitor
""",
    "print('ended:', (await monitor.wait()).finished)",
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Address and folder of a JupyterLab server on copies of the lessons."""
    home = tmp_path_factory.mktemp("lab")
    folder = home / "notebooks"
    shutil.copytree(ROOT / "notebooks", folder, ignore=shutil.ignore_patterns("*.py"))
    for name, sources in (("others", OTHERS), ("monitor", MONITOR)):
        cells = [Cell("code", source.strip()) for source in sources]
        text = json.dumps(to_notebook(cells))
        (folder / f"{name}.ipynb").write_text(text, encoding="utf-8")
    # All cells in the page, also those that are scrolled out of sight.
    settings = home / "settings" / "@jupyterlab"
    for name, text in (
        ("notebook-extension/tracker", '{"windowingMode": "none"}'),
        # No question in a corner, which could lie over what is to be clicked.
        (
            "apputils-extension/notification",
            '{"fetchNews": "false", "checkForUpdates": false}',
        ),
    ):
        path = settings / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "DFLASH_LAB_FAST": "1",
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        ),
    }
    options = ["--no-browser", "--allow-root", "--expose-app-in-browser"]
    options += [
        f"--port={port}",
        "--ServerApp.port_retries=0",
        "--IdentityProvider.token=",
    ]
    with open(home / "server.log", "w", encoding="utf-8") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options, str(folder)],
            env=env,
            stdout=log,
            stderr=log,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{address}/api", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        else:
            raise AssertionError((home / "server.log").read_text(encoding="utf-8"))
        yield address
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as play:
        # No call to anywhere: the tests must also pass where nothing can be reached.
        quiet = ["--disable-background-networking", "--disable-component-update"]
        quiet += ["--disable-sync", "--no-first-run", "--disable-gpu", "--disable-quic"]
        chromium = play.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", *quiet]
        )
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser):
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    yield page
    page.close()


def run_all(page, address: str, name: str, wait: bool = True) -> None:
    """Open a notebook, run its cells and wait for the last one."""
    page.goto(f"{address}/lab/tree/{name}.ipynb?reset", timeout=2 * MINUTE)
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=2 * MINUTE)
    page.wait_for_function(
        "() => { const p = window.jupyterapp.shell.currentWidget;"
        " const s = p?.sessionContext; p?.content.model && (window.panel = p);"
        " return s?.session?.kernel?.status === 'idle' }",
        timeout=2 * MINUTE,
    )
    page.evaluate(
        "() => { jupyterapp.commands.execute('notebook:clear-all-cell-outputs');"
        " jupyterapp.commands.execute('notebook:run-all-cells') }"
    )
    if not wait:
        return
    page.wait_for_function(
        "() => { const cells = panel.content.widgets.filter("
        "   w => w.model.type === 'code');"
        " return cells.some(c => c.model.outputs.toJSON().some("
        "   o => o.output_type === 'error'))"
        "  || cells.every(c => c.model.sharedModel.execution_count) }",
        timeout=8 * MINUTE,
    )
    assert errors(page) == []


def errors(page) -> list[str]:
    return page.evaluate(
        "() => panel.content.widgets.filter(w => w.model.type === 'code')"
        ".flatMap(c => c.model.outputs.toJSON())"
        ".filter(o => o.output_type === 'error').map(o => o.ename + ': ' + o.evalue)"
    )


def picture(box) -> str:
    return box.locator(".widget-html-content").first.inner_html()


def must_change(box, before: str, what: str) -> str:
    for _ in range(300):
        after = picture(box)
        if after != before:
            return after
        time.sleep(0.1)
    raise AssertionError(f"{what} was moved and the view stayed as it was")


def move_everything(box) -> int:
    """Move each control of a widget; returns how many there were."""
    moved = 0
    before = picture(box)
    for handle in box.locator(".noUi-handle").all():
        low, now = (
            float(handle.get_attribute(f"aria-value{x}")) for x in ("min", "now")
        )
        handle.focus()
        handle.press("ArrowRight" if now == low else "ArrowLeft")
        before = must_change(box, before, "a slider")
        moved += 1
    for tick in box.locator("input[type=checkbox]").all():
        tick.click()
        before = must_change(box, before, "a tick")
        tick.click()
        before = must_change(box, before, "a tick")
        moved += 1
    for choice in box.locator(".widget-toggle-buttons").all():
        option = choice.locator("button:not(.mod-active)").first
        option.focus()
        option.press("Space")
        before = must_change(box, before, "a choice")
        moved += 1
    for several in box.locator(".widget-select-multiple select").all():
        several.select_option(index=[0, 2, 3])
        before = must_change(box, before, "a list")
        several.press("End")
        before = must_change(box, before, "a list by keyboard")
        moved += 1
    for number in box.locator("input[type=number]").all():
        number.fill("1")
        number.press("Enter")
        before = must_change(box, before, "a number")
        moved += 1
    return moved


def widgets_of(page) -> list:
    boxes = page.locator(".jp-OutputArea-output .widget-vbox")
    boxes.first.wait_for(timeout=MINUTE)
    return boxes.all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, controls",
    [
        ("02_from_texts_to_blocks", [1]),
        ("03_draft_and_verify", [1]),
        ("06_what_acceptance_means", [4]),
        ("others", [2, 3, 5, 3]),
    ],
)
def test_all_cells_run_and_every_control_changes_its_view(lab, page, name, controls):
    run_all(page, lab, name)
    assert [move_everything(box) for box in widgets_of(page)] == controls


@pytest.mark.slow
def test_the_play_button_steps_through_a_generation(lab, page):
    run_all(page, lab, "others")
    (box, *_) = widgets_of(page)
    handle = box.locator(".noUi-handle")
    handle.focus()
    handle.press("Home")
    for _ in range(50):
        if handle.get_attribute("aria-valuenow") == "0.0":
            break
        time.sleep(0.1)
    before = picture(box)
    box.locator(".jupyter-widget-play button, .widget-play button").first.click()
    must_change(box, before, "the play button")


@pytest.mark.slow
def test_a_run_is_stopped_from_the_page_while_a_cell_waits_for_it(lab, page):
    run_all(page, lab, "monitor", wait=False)
    (box,) = widgets_of(page)
    box.locator("img").first.wait_for(timeout=MINUTE)  # curves have appeared
    before = picture(box)
    before = must_change(box, before, "the run")
    box.get_by_role("button", name="stop").click()
    page.get_by_text("ended: False").wait_for(timeout=MINUTE)
    box.get_by_text("The run was stopped").wait_for(timeout=MINUTE)
    assert box.get_by_role("button", name="stopped").is_disabled()
    assert errors(page) == []


@pytest.mark.slow
def test_static_pages_say_the_same_without_javascript(browser, tmp_path):
    pages = build_site(ROOT / "notebooks", tmp_path)
    told = {}
    for scripts in (True, False):
        context = browser.new_context(java_script_enabled=scripts)
        view = context.new_page()
        asked = []
        view.on("request", lambda r, asked=asked: asked.append(r.url))
        for path in pages:
            view.goto(path.as_uri())
            text = view.locator("main").inner_text()
            # What scripts add is the label of a player's slider.
            text = re.sub(r"step of denoising\s+step \d+", "", text)
            told.setdefault(path.name, []).append(" ".join(text.split()))
        assert [u for u in asked if not u.startswith(("file:", "data:"))] == []
        context.close()
    for name, (with_scripts, without) in told.items():
        assert with_scripts == without and len(without) > 500, name
    # The views of the three lessons are there, as they are in the notebooks.
    assert "Three meanings of acceptance" not in told["index.html"][1]
    assert "conditional" in told["06_what_acceptance_means.html"][1]
    assert "accepted draft" in told["03_draft_and_verify.html"][1]
    assert "K = 8" in told["02_from_texts_to_blocks.html"][1]

"""Is this machine ready? One line per check, and what to do where it is not.

Leaves out: measuring speed.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from dflash_lab.cli.loading import has_fast_bfloat16

OK, NOTE, FAIL = "OK", "NOTE", "FAIL"
Check = tuple[str, str]


def add(commands) -> None:
    """Add the command to a parser's subcommands."""
    doctor = commands.add_parser("doctor", help="check this machine and installation")
    doctor.set_defaults(run=run)


def run(arguments) -> int:
    """Print every check; 0 if none failed."""
    worst = 0
    for check in (_python, _libraries, _processor, _device, _extras, _tiny, _smol):
        try:
            for state, text in check():
                print(f"{state:5} {text}")
                worst = max(worst, state == FAIL)
        except Exception as error:  # a check that breaks is itself a finding
            print(f"{FAIL:5} {check.__name__.strip('_')}: {error}")
            worst = 1
    return int(worst)


def _python() -> Iterator[Check]:
    good = sys.version_info >= (3, 11)
    yield (OK if good else FAIL), f"Python {platform.python_version()} (3.11 or newer)"


def _libraries() -> Iterator[Check]:
    import torch
    import transformers

    for module, least in ((torch, (2, 9)), (transformers, (5, 15))):
        version = tuple(int(part) for part in module.__version__.split(".")[:2])
        wanted = ".".join(map(str, least))
        name = f"{module.__name__} {module.__version__}"
        if version >= least:
            yield OK, name
        else:
            yield FAIL, f"{name}: too old, pip install '{module.__name__}>={wanted}'"
    for name in ("gguf", "safetensors", "tokenizers"):
        found = importlib.util.find_spec(name) is not None
        yield (
            (OK if found else FAIL),
            f"{name}{'' if found else f': pip install {name}'}",
        )


def _processor() -> Iterator[Check]:
    import torch

    threads = torch.get_num_threads()
    yield OK, f"{platform.machine()}, {threads} threads"
    if has_fast_bfloat16():
        yield OK, "bfloat16 in hardware: the smol pair decodes in it by default"
    else:
        yield NOTE, "no bfloat16 in hardware: float32 everywhere, smaller speed-ups"


def _device() -> Iterator[Check]:
    import torch

    if torch.cuda.is_available():
        yield OK, f"GPU {torch.cuda.get_device_name()}"
    else:
        yield NOTE, "no CUDA GPU: everything here runs on the CPU"


def _extras() -> Iterator[Check]:
    for name, purpose in (
        ("matplotlib", "figures of the demo's report"),
        ("pandas", "traces as tables"),
        ("ipywidgets", "widgets of the lessons"),
        ("jupyterlab", "the lessons"),
    ):
        found = importlib.util.find_spec(name) is not None
        hint = "" if found else ": pip install 'dflash-lab[lab]'"
        yield (OK if found else NOTE), f"{name}, for {purpose}{hint}"


def _tiny() -> Iterator[Check]:
    from dflash_lab.pairs.pair import load_pair
    from dflash_lab.speculative.generate import speculative_generate
    from dflash_lab.speculative.proposer import DFlash, Plain, Proposer

    pair = load_pair("tiny")
    ids = pair.encode("Tell Mia about the fox.")
    proposers: tuple[Proposer, ...] = (Plain(), DFlash(pair.drafter))
    outputs = [
        speculative_generate(pair, proposer, ids, max_new_tokens=40).output_ids
        for proposer in proposers
    ]
    if outputs[0] == outputs[1]:
        yield OK, "tiny pair: loads, and decodes the same text with and without drafter"
    else:
        yield FAIL, "tiny pair: DFlash and plain decoding differ in float32"


def _smol() -> Iterator[Check]:
    from dflash_lab.pairs.packaged_target import NEEDED_BYTES, cache_root, is_intact

    folders = [f for f in cache_root().glob("smollm2-*") if f.is_dir()]
    if any(is_intact(folder) for folder in folders):
        yield OK, f"smol target: ready in {_short(cache_root())}"
        return
    place = cache_root()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < NEEDED_BYTES:
        need = NEEDED_BYTES // 2**20
        yield FAIL, f"smol target: needs {need} MB in {place}, {free // 2**20} MB free"
    else:
        yield NOTE, "smol target: not fetched yet; dflash-lab demo does it once (93 MB)"


def _short(path: Path) -> str:
    """A path that names nobody: the home folder as ~."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)

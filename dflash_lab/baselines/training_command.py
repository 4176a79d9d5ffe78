"""What the training commands of baselines share: options, loading, writing the note.

    python -m dflash_lab.baselines.assistant_training --help
    python -m dflash_lab.baselines.eagle_training --help

Leaves out: what is trained.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path

import torch

from dflash_lab.errors import DFlashLabError
from dflash_lab.files import environment, write_text_atomically
from dflash_lab.pairs.pair import Pair, load_pair
from dflash_lab.training.data.dataset import Example, load_examples

HELD_OUT = 50  # last texts, for what is reported


def parser_for(module: str, about: str) -> argparse.ArgumentParser:
    """Options that all have: target, corpus, budget, batch, machine.

    Args:
        module: below `dflash_lab.baselines`.
        about: one line.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m dflash_lab.baselines.{module}", description=about
    )
    parser.add_argument("--pair", help="tiny or smol")
    parser.add_argument("--target", help="folder or Hub repository of another target")
    parser.add_argument("--corpus", nargs="+", required=True, help="files of answers")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--cpu-minutes", type=float, help="budget of processor time")
    parser.add_argument("--steps", type=int, help="in place of --cpu-minutes")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--max-length", type=int, help="of the texts, in tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    return parser


def run_command(parser, arguments: Sequence[str] | None, run: Callable) -> int:
    """Parse and run; an error that was foreseen is one line and status 2."""
    try:
        asked = parser.parse_args(arguments)
        if asked.threads < 1:
            raise DFlashLabError(f"--threads {asked.threads} must be 1 or more")
        torch.set_num_threads(asked.threads)
        return run(asked)
    except DFlashLabError as error:
        print(f"dflash_lab.baselines: error: {error}", file=sys.stderr)
        return 2


def settings_of(kind, asked):
    """Settings from options of the same names.

    Args:
        kind: a dataclass; every field must be an option.
        asked: parsed.
    """
    return kind(**{field.name: getattr(asked, field.name) for field in fields(kind)})


def load_asked(asked) -> tuple[Pair, list[Example], list[Example]]:
    """The target, the texts to learn, and the last ones, `HELD_OUT`, kept out."""
    pair = load_pair(asked.pair, target=asked.target, with_drafter=False)
    examples, _ = load_examples(asked.corpus, asked.max_length)
    kept_out = min(HELD_OUT, len(examples) // 10)
    return pair, examples[: len(examples) - kept_out], examples[-kept_out:][:kept_out]


def write_note(asked, settings, answers: int, steps: int, **facts) -> None:
    """Write `training.json` beside what was trained."""
    note = {
        "settings": asdict(settings),
        "corpora": [Path(path).name for path in asked.corpus],
        "answers": answers,
        "steps": steps,
        **facts,
        "environment": environment(),
    }
    text = json.dumps(note, indent=2) + "\n"
    write_text_atomically(asked.out / "training.json", text)

"""Train the tiny target: `python -m dflash_lab.training.run.make_tiny_target OUT`.

Leaves out: its drafter, which `configs/tiny.yaml` trains.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from dflash_lab.files import write_text_atomically
from dflash_lab.training.run.tiny import build_target, build_tokenizer, train_target


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()
    torch.manual_seed(0)  # `transformers` initialises from torch's own generator
    tokenizer = build_tokenizer()
    model = build_target(len(tokenizer))
    started = time.monotonic()
    losses = train_target(model, tokenizer, arguments.steps)
    minutes = (time.monotonic() - started) / 60
    for part in (model, tokenizer):
        part.save_pretrained(arguments.folder)
    note = {
        "steps": arguments.steps,
        "final_loss": sum(losses[-50:]) / len(losses[-50:]),
        "wall_minutes": round(minutes, 1),
    }
    text = json.dumps(note, indent=2) + "\n"
    write_text_atomically(arguments.folder / "training.json", text)


if __name__ == "__main__":
    main()

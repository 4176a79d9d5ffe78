"""The shipped family of tiny drafters, alike but for one thing each.

    names()                       # base, again, layers-2, ..., fault-label-shift, ...
    load_member("layers-2")

All had one corpus and the same number of steps (`benchmarks/tiny_family.py`), so what
differs in their tau comes from the one thing, or from the seed: `again` is `base` with
another one. Members named `fault-...` are faulty on purpose.

Leaves out: training them.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.drafter.variants import load_drafter
from dflash_lab.errors import DFlashLabError
from dflash_lab.files import data_root
from dflash_lab.training.run.metrics import read_metrics
from dflash_lab.training.run.runs import flat


def family_root() -> Path:
    """Folder of the family, a folder for each member."""
    return data_root() / "checkpoints" / "tiny-family"


def names() -> list[str]:
    """Members: `base` first, then in alphabetical order, faulty ones last."""
    found = [path.name for path in family_root().iterdir() if path.is_dir()]
    return sorted(found, key=lambda n: (n != "base", n.startswith("fault-"), n))


def member_folder(name: str) -> Path:
    """Folder of a member: checkpoint, card, `training.json`, `metrics.jsonl`.

    Raises:
        DFlashLabError: no such member.
    """
    if name not in names():
        raise DFlashLabError(
            f"the family has no member {name!r}; choose among {', '.join(names())}"
        )
    return family_root() / name


def load_member(name: str) -> DFlashDraftModel:
    """A member's drafter, float32.

    Raises:
        DFlashLabError: no such member.
    """
    return load_drafter(member_folder(name), torch.float32)


def member_facts(name: str) -> dict:
    """What its training left: `steps`, `blocks_seen`, `held_out_tau`, settings.

    Raises:
        DFlashLabError: no such member.
    """
    return json.loads((member_folder(name) / "training.json").read_text("utf-8"))


def member_metrics(name: str) -> list[dict]:
    """Lines of its training run, see `training.metrics`.

    Raises:
        DFlashLabError: no such member.
    """
    return read_metrics(member_folder(name) / "metrics.jsonl")


def flat_settings(name: str) -> dict:
    """A member's training settings, `drafter.block_size` and the like.

    Where files lay is left out.

    Raises:
        DFlashLabError: no such member.
    """
    return flat(member_facts(name)["settings"])

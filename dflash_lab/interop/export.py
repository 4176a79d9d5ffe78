"""Exporting a drafter: a folder that vLLM, SGLang or speculators reads, checked.

The weights stay as they are. What differs is the form of `config.json`, which settings
an engine obeys, and the command that serves the folder. An engine that would ignore a
setting drafts nonsense without a word, so such an export is refused. The folder is
written beside its destination, read back, compared bit for bit, and only then moved.

Leaves out: quantising or sharding weights, uploading them, and starting a server.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dflash_lab.conditioning.taps import check_layer_ids
from dflash_lab.drafter.checkpoint import find_checkpoint
from dflash_lab.drafter.config import DFlashConfig
from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.errors import DFlashLabError
from dflash_lab.files import environment, write_text_atomically
from dflash_lab.interop.engines import (
    ENGINES,
    check_engine,
    engine_notes,
    serve_command,
)
from dflash_lab.interop.speculators_folder import read_speculators, write_speculators
from dflash_lab.interop.speculators_format import (
    is_speculators,
    same_meaning,
    verifier_name,
)

FORMAT = "dflash-lab export 1"
FILES = ("README.md", "config.json", "export.json", "model.safetensors")


@dataclass(frozen=True)
class Export:
    """What an export wrote.

    Attributes:
        folder: where it lies.
        command: the command that serves it.
        check: one line that says what was read back and compared.
        notes: what the user of this engine must know; often empty.
    """

    folder: Path
    command: str
    check: str
    notes: tuple[str, ...]


def export_drafter(
    drafter: str | Path,
    out: str | Path,
    engine: str = "dflash",
    target: str | Path | None = None,
) -> Export:
    """Write a drafter as the folder an engine reads, and read it back.

    Args:
        drafter: folder or Hub repository, in the published or in speculators' format.
        out: new or empty folder, or an earlier export, which is replaced.
        engine: `dflash` (the published form), `vllm`, `sglang` or `speculators`.
        target: name or folder of the model it drafts for. All engines but `dflash`
            need it; a speculators folder names its own. A local folder is also
            compared with the drafter.

    Raises:
        DFlashLabError: an unknown engine, a folder that holds anything else, a
            drafter that cannot be read or that the engine would run wrongly, or a
            target that does not fit.
    """
    if engine not in ENGINES:
        raise DFlashLabError(
            f"unknown engine {engine!r}; choose one of {', '.join(ENGINES)}"
        )
    source, place = find_checkpoint(drafter), Path(out).resolve()
    _check_place(place, Path(out), source)
    model, named = _load(source, target)
    target = None if target is None and named is None else str(target or named)
    if target is None and engine != "dflash":
        raise DFlashLabError(
            f"--for {engine} needs --target, the name or folder of the model this "
            "drafter was trained for: the folder or its serve command names it"
        )
    facts = _target_facts(target)
    model.config = _fit(model.config, target, facts)
    check_engine(model.config, engine)
    command = serve_command(model.config, engine, str(out), target or "TARGET")
    notes = engine_notes(model.config, engine)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=place.parent, prefix=f".{place.name}-"
    ) as scratch:
        made = Path(scratch) / "new"
        made.mkdir()
        if engine == "speculators":
            assert target is not None  # said above for engines
            write_speculators(made, model, target, facts.get("architectures") or [])
        else:
            model.save_pretrained(made)
        count, size = _read_back(made, model, engine)
        _write_card(made, model, engine, command, notes, str(drafter), target)
        _move_into_place(made, place, Path(scratch) / "old")
    check = (
        f"checked: {out} was read back; its config and its {count} tensors ({size} "
        f"bytes) are those of {drafter}, bit for bit"
    )
    return Export(Path(out), command, check, notes)


def _load(source: Path, target) -> tuple[DFlashDraftModel, str | None]:
    """The drafter, and the target that its folder names, if it does."""
    try:
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}  # the ordinary reader says what is wrong
    if not isinstance(config, dict) or not is_speculators(config):
        return DFlashDraftModel.from_pretrained(source), None
    named = verifier_name(config)
    folder = Path(target or named or "")
    known = bool(target or named) and folder.is_dir()
    return read_speculators(source, folder if known else None), named


def _target_facts(target: str | None) -> dict:
    """`config.json` of a local target, its text part on top; empty for a Hub name."""
    if target is None:
        return {}
    folder = Path(target)
    if not folder.is_dir():
        if folder.is_absolute() or target.startswith(".") or target.count("/") > 1:
            raise DFlashLabError(
                f"the target {target!r} is no folder here and no Hub name such as "
                "Qwen/Qwen3-8B; check --target"
            )
        return {}
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return {**config, **(config.get("text_config") or {})} | {
            "architectures": config.get("architectures")
        }
    except (OSError, ValueError, AttributeError, TypeError):
        raise DFlashLabError(
            f"{folder} has no readable config.json; is it the target's folder?"
        ) from None


def _fit(config: DFlashConfig, target: str | None, facts: dict) -> DFlashConfig:
    """The config, completed by a local target's depth and compared with its shape."""
    depth = facts.get("num_hidden_layers")
    for name, ours in (
        ("hidden_size", config.hidden_size),
        ("vocab_size", config.vocab_size),
        ("num_hidden_layers", config.num_target_layers),
    ):
        theirs = facts.get(name)
        if None not in (ours, theirs) and ours != theirs:
            raise DFlashLabError(
                f"the drafter was trained for a target with {name}={ours}, {target} "
                f"has {theirs}; give the target it was trained for"
            )
    depth = config.num_target_layers or depth
    if depth is not None:
        check_layer_ids(config.target_layer_ids, depth)
    return replace(config, num_target_layers=depth)


def _read_back(made: Path, model: DFlashDraftModel, engine: str) -> tuple[int, int]:
    """Compare a written folder with what it was written from.

    Returns:
        Number of tensors and their bytes.
    """
    if engine == "speculators":
        again = read_speculators(made)
        same = same_meaning(again.config, model.config)
    else:
        again = DFlashDraftModel.from_pretrained(made)
        same = again.config == model.config
    if not same:
        raise DFlashLabError(
            "the written config.json reads back as another one, so nothing was "
            "exported; check the disk and try again"
        )
    ours, theirs = model.state_dict(), again.state_dict()
    for name, tensor in ours.items():
        if name not in theirs or not _same_bits(tensor, theirs[name]):
            raise DFlashLabError(
                f"the written tensor {name} reads back with other bits, so nothing was "
                "exported; check the disk and try again"
            )
    return len(ours), sum(t.numel() * t.element_size() for t in ours.values())


def _same_bits(left: Tensor, right: Tensor) -> bool:
    # As bytes: NaN equals itself, and 0.0 does not equal -0.0.
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    left, right = left.detach().contiguous(), right.detach().contiguous()
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def _write_card(
    made: Path,
    model: DFlashDraftModel,
    engine: str,
    command: str,
    notes: tuple[str, ...],
    drafter: str,
    target: str | None,
) -> None:
    config = model.config
    lines = [
        f"# DFlash drafter for {target or 'the target it was trained for'}",
        "",
        f"Exported from `{drafter}` in the form that {engine} reads. The weights are "
        "unchanged, and their licence is that of their source. They are no model by "
        "themselves: embedding and head are the target's.",
        "",
        "```bash",
        command,
        "```",
        "",
    ]
    if target is None:
        lines += ["Put the name or folder of the target in place of `TARGET`.", ""]
    lines += [f"Note: {note}.\n" for note in notes]
    if engine == "dflash":
        lines += ["For the commands of vLLM and SGLang, export with `--for`.", ""]
    lines += [
        "| | |",
        "|---|---|",
        f"| block_size | {config.block_size}, the anchor included |",
        f"| mask_token_id | {config.mask_token_id} |",
        f"| target_layer_ids | {', '.join(map(str, config.target_layer_ids))} |",
        f"| layers | {', '.join(config.layer_types)} |",
        f"| dtype | {str(model.dtype).removeprefix('torch.')} |",
        f"| parameters | {sum(p.numel() for p in model.parameters())} |",
        "",
    ]
    write_text_atomically(made / "README.md", "\n".join(lines))
    record = {
        "format": FORMAT,
        "for": engine,
        "drafter": drafter,
        "target": target,
        "command": command,
        "environment": environment(),
    }
    text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
    write_text_atomically(made / "export.json", text)


def _check_place(place: Path, out: Path, source: Path) -> None:
    """Refuse a destination that holds anything but an earlier export."""
    if place == source.resolve():
        raise DFlashLabError(f"--out {out} is the drafter itself; give another folder")
    if place.exists() and not place.is_dir():
        raise DFlashLabError(f"--out {out} is a file; give a new folder")
    found = {path.name for path in place.iterdir()} if place.is_dir() else set()
    if not found:
        return
    try:
        record = json.loads((place / "export.json").read_text(encoding="utf-8"))
        earlier = record["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError):
        earlier = False
    foreign = sorted(found - set(FILES))
    if not earlier or foreign:
        raise DFlashLabError(
            f"--out {out} holds {', '.join(foreign or sorted(found))} and is not just "
            "an earlier export; give a new folder, or empty this one"
        )


def _move_into_place(made: Path, place: Path, old: Path) -> None:
    """One rename, or two if an earlier export is in the way."""
    if not place.exists():
        os.replace(made, place)
        return
    os.replace(place, old)
    try:
        os.replace(made, place)
    except OSError:
        os.replace(old, place)
        raise

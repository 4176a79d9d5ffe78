"""A drafter's folder: `config.json` and safetensors, as the published checkpoints.

Leaves out: what the tensors mean (`model.py`), and pickled weights, which run code.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Protocol

from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_lab.errors import DFlashLabError


def find_checkpoint(name_or_path: str | Path) -> Path:
    """The folder itself, or that of a Hub repository, downloaded if need be.

    Raises:
        DFlashLabError: neither a folder nor reachable.
    """
    folder = Path(name_or_path)
    if folder.is_dir():
        return folder
    try:
        patterns = ["*.json", "*.safetensors"]
        return Path(snapshot_download(str(name_or_path), allow_patterns=patterns))
    except Exception as error:
        raise DFlashLabError(
            f"{str(name_or_path)!r} is neither a folder here nor reachable on the Hub "
            f"({type(error).__name__}); check the name or the connection"
        ) from None


def read_checkpoint(folder: Path, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of a folder, exactly those that are wanted.

    Args:
        folder: with one or more `*.safetensors`.
        wanted: tensors of the right shapes; their values do not matter.

    Raises:
        DFlashLabError: no readable file, or missing, unknown or misshapen tensors.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DFlashLabError(f"no *.safetensors file in {folder}")
    state: dict[str, Tensor] = {}
    for file in files:
        try:
            state.update(load_file(file))
        except (SafetensorError, OSError) as error:
            raise DFlashLabError(
                f"{file} cannot be read ({error}); download or copy it again"
            ) from None
    missing, extra = sorted(wanted.keys() - state), sorted(state.keys() - wanted.keys())
    if missing or extra:
        raise DFlashLabError(
            f"the tensors in {folder} are not those of its config: "
            f"{len(missing)} missing ({', '.join(missing[:3]) or '-'}), "
            f"{len(extra)} unknown ({', '.join(extra[:3]) or '-'})"
        )
    for name, tensor in wanted.items():
        if state[name].shape != tensor.shape:
            raise DFlashLabError(
                f"{name} in {folder} has shape {tuple(state[name].shape)}, its config "
                f"says {tuple(tensor.shape)}"
            )
    return state


class SavedConfig(Protocol):
    """A config that is written beside weights."""

    def to_dict(self, dtype: str) -> dict:
        """`config.json` of a folder whose weights have this dtype."""


def write_checkpoint(
    folder: Path, config: SavedConfig, state: dict[str, Tensor]
) -> None:
    """Write config and weights, each atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v.detach().contiguous().cpu() for k, v in state.items()}
    dtype = str(next(iter(state.values())).dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        weights = Path(scratch) / "model.safetensors"
        save_file(state, weights, metadata={"format": "pt"})
        config_file = Path(scratch) / "config.json"
        text = json.dumps(config.to_dict(dtype), indent=2) + "\n"
        config_file.write_text(text, encoding="utf-8")
        for file in (weights, config_file):
            file.chmod(0o644)
            os.replace(file, folder / file.name)

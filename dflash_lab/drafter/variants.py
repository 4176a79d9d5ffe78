"""From a config or a folder to the drafter that it describes.

Leaves out: the variants themselves (`model.py`, `input_fusion.py`).
"""

from __future__ import annotations

from pathlib import Path

import torch

from dflash_lab.drafter.checkpoint import find_checkpoint
from dflash_lab.drafter.config import DFlashConfig
from dflash_lab.drafter.input_fusion import InputFusionDraftModel
from dflash_lab.drafter.model import DFlashDraftModel

_VARIANTS = {cls.conditioning: cls for cls in (DFlashDraftModel, InputFusionDraftModel)}


def build_drafter(config: DFlashConfig) -> DFlashDraftModel:
    """A drafter of the kind that the config names, with weights as torch makes them."""
    return _VARIANTS[config.conditioning](config)


def load_drafter(
    name_or_path: str | Path,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> DFlashDraftModel:
    """A trained drafter of any kind; arguments and errors as in `from_pretrained`."""
    folder = find_checkpoint(name_or_path)
    kind = _VARIANTS[DFlashConfig.from_folder(folder).conditioning]
    return kind.from_pretrained(folder, dtype, device)

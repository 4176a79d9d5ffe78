"""A speculators DFlash folder: loaded as an ordinary drafter, and written.

Its tensors have the published names. Older folders also hold copies of the target's
embedding and head; DFlash v1 borrows these, so they are compared with the target's and
left out, and a trained embedding or head is refused.

Leaves out: `config.json` (`speculators_format.py`) and reduced draft vocabularies.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash_lab.drafter.checkpoint import read_checkpoint, write_checkpoint
from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.errors import DFlashLabError
from dflash_lab.files import write_text_atomically
from dflash_lab.interop.speculators_format import (
    config_from_speculators,
    config_to_speculators,
)

# Only the library's trainer uses these, to compute what the drafter should predict.
_TRAINING_ONLY = ("verifier_lm_head.weight", "verifier_norm.weight")
# DFlash v1 borrows these from the target, so a folder may only hold copies of them.
_BORROWED = ("embed_tokens.weight", "lm_head.weight")


def write_speculators(
    folder: Path, drafter: DFlashDraftModel, verifier: str, architectures: list[str]
) -> None:
    """Write config and weights of a drafter in speculators' format.

    Args and errors as in `config_to_speculators`.
    """
    dtype = str(drafter.dtype).removeprefix("torch.")
    config = config_to_speculators(drafter.config, verifier, architectures, dtype)
    write_checkpoint(folder, drafter.config, drafter.state_dict())
    text = json.dumps(config, indent=2) + "\n"
    write_text_atomically(folder / "config.json", text)


def read_speculators(folder: Path, target: Path | None = None) -> DFlashDraftModel:
    """Load a speculators DFlash folder as an ordinary drafter.

    Args:
        folder: with `config.json` and safetensors.
        target: the target's folder; needed only if the checkpoint holds copies of the
            target's embedding or head, which are compared with it and left out.

    Raises:
        DFlashLabError: not DFlash v1, float16, missing or unknown tensors, or an
            embedding or head that is not the target's.
    """
    config = config_from_speculators(
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
    )
    with torch.device("meta"):
        model = DFlashDraftModel(config)
    names = _stored(folder).keys()
    maps = sorted(names & {"d2t", "t2d"})
    if maps:
        raise DFlashLabError(
            f"{folder} holds {' and '.join(maps)}, which map a vocabulary of the "
            "drafter's own; DFlash v1 drafts in the target's, so it cannot be converted"
        )
    wanted = dict(model.state_dict())
    table = torch.empty(config.vocab_size, config.hidden_size, device="meta")
    for name in names & {*_BORROWED, *_TRAINING_ONLY}:
        wanted[name] = table[0] if name == "verifier_norm.weight" else table
    state = read_checkpoint(folder, wanted)
    for name in _TRAINING_ONLY:
        state.pop(name, None)
    for name in _BORROWED:
        if name in state:
            _check_borrowed(name, state.pop(name), folder, target)
    if any(tensor.dtype == torch.float16 for tensor in state.values()):
        raise DFlashLabError(
            f"{folder} stores float16, in which DFlash drafters overflow (NaN, no "
            "draft accepted); save it as bfloat16 first"
        )
    model.load_state_dict(state, assign=True)
    return model.eval()


def _stored(folder: Path) -> dict[str, Path]:
    """Name of every tensor in a folder's safetensors, and the file that has it."""
    found: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as opened:
                found |= dict.fromkeys(opened.keys(), file)
        except (SafetensorError, OSError) as error:
            raise DFlashLabError(
                f"{file} cannot be read ({error}); download or copy it again"
            ) from None
    return found


def _check_borrowed(
    name: str, stored: Tensor, folder: Path, target: Path | None
) -> None:
    """Refuse an embedding or head that the target does not have."""
    if target is None:
        raise DFlashLabError(
            f"{folder} holds its own {name}, and DFlash v1 uses the target's; give "
            "--target FOLDER so that the two can be compared"
        )
    own = _target_tensor(target, name)
    if own.shape != stored.shape or not torch.equal(own.to(stored.dtype), stored):
        raise DFlashLabError(
            f"{name} in {folder} is not that of the target {target}: it was trained, "
            "or for another target; DFlash v1 uses the target's, so it cannot be "
            "converted"
        )


def _target_tensor(target: Path, name: str) -> Tensor:
    # A head that is tied to the embedding is not stored.
    stored = _stored(target)
    for wanted in dict.fromkeys((name, "embed_tokens.weight")):
        for key, file in stored.items():
            if key == wanted or key.endswith(f".{wanted}"):
                with safe_open(file, "pt") as opened:
                    return opened.get_tensor(key)
    raise DFlashLabError(
        f"no {name} in any *.safetensors of {target}; give the folder of the target "
        "that the drafter was trained for"
    )

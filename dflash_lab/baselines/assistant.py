"""An assistant: a target with few layers, to draft inside `generate(assistant_model=)`.

Classic speculative decoding wants a small language model with the target's tokenizer.
Where none is published we make one: the target's own architecture and widths, two
layers deep, between the target's embedding and the target's head. Those two are shared
with the target, never trained and never stored, so a folder holds a few layers and one
norm. In memory it is an ordinary `transformers` causal LM.

Leaves out: training (`assistant_training.py`), and telling apart two targets of equal
shape: an assistant of the wrong one drafts badly, the text stays the target's.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dflash_lab.conditioning.taps import find_decoder_layers
from dflash_lab.drafter.checkpoint import read_checkpoint
from dflash_lab.errors import DFlashLabError
from dflash_lab.files import write_text_atomically
from dflash_lab.target.target import Target

MODEL_TYPE = "dflash_lab_assistant"
# Fields of the target's config that its layers and its table must agree in.
SHAPE = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)


def build_assistant(target: Target, num_hidden_layers: int = 2, seed: int = 0):
    """A fresh assistant that shares the target's embedding and head.

    Args:
        target: a decoder of `transformers` with layers and a final norm.
        num_hidden_layers: layers of the assistant.
        seed: of the layers' random weights.

    Returns:
        A causal LM of the target's class, its layers and norm in float32.

    Raises:
        DFlashLabError: a number of layers that is no saving, or a target without a
            final norm in the usual place.
    """
    if not 1 <= num_hidden_layers < target.num_layers:
        raise DFlashLabError(
            f"an assistant of {num_hidden_layers} layers is none for a target of "
            f"{target.num_layers}; take 1 to {target.num_layers - 1}"
        )
    if not isinstance(getattr(target.model.base_model, "norm", None), nn.Module):
        raise DFlashLabError(
            f"{type(target.model).__name__} has no final norm at model.norm; the "
            "assistant is made for decoders like Llama and Qwen3"
        )
    config = copy.deepcopy(target.model.config)
    config.num_hidden_layers = num_hidden_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_hidden_layers]
    model = type(target.model)(config).float()
    # `transformers` draws from torch's own generator; these draws can be repeated.
    generator = torch.Generator().manual_seed(seed)
    for weight in find_decoder_layers(model).parameters():
        if weight.ndim == 2:
            std = config.initializer_range
            nn.init.normal_(weight, std=std, generator=generator)
    model.set_input_embeddings(target.model.get_input_embeddings())
    model.set_output_embeddings(target.head)
    return model.to(target.device).eval()


def evenly_spaced(count: int, depth: int) -> tuple[int, ...]:
    """`count` of `depth` layers from the first to the last; the middle one alone.

    The ends are kept: one layer learnt to read the embedding, one to feed the head.
    """
    if count == 1:
        return (depth // 2,)
    return tuple(round(i * (depth - 1) / (count - 1)) for i in range(count))


def copy_layers(model: nn.Module, target: Target, layers: Sequence[int]) -> None:
    """Start an assistant's layers and norm with those of the target.

    Args:
        model: of `build_assistant`, changed in place.
        target: the target.
        layers: a target layer for each of the assistant's.
    """
    theirs = find_decoder_layers(target.model)
    with torch.no_grad():
        for layer, number in zip(find_decoder_layers(model), layers, strict=True):
            layer.load_state_dict(theirs[number].state_dict())
    _norm(model).load_state_dict(_norm(target.model).state_dict())


def _norm(model: nn.Module) -> nn.Module:
    return cast(Any, model).base_model.norm


def own_modules(model: nn.Module) -> nn.ModuleDict:
    """What an assistant does not share with its target."""
    layers = find_decoder_layers(model)
    return nn.ModuleDict({"layers": layers, "norm": _norm(model)})


def save_assistant(model: nn.Module, folder: str | Path) -> None:
    """Write the layers and the norm, and the shape of the target that they fit."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state: dict[str, Tensor] = {
        name: tensor.detach().contiguous().cpu()
        for name, tensor in own_modules(model).state_dict().items()
    }
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        weights = Path(scratch) / "model.safetensors"
        save_file(state, weights, metadata={"format": "pt"})
        weights.chmod(0o644)
        os.replace(weights, folder / weights.name)
    config = {
        "model_type": MODEL_TYPE,
        "num_hidden_layers": len(find_decoder_layers(model)),
        "target": _shape_of(model.config),
    }
    text = json.dumps(config, indent=2) + "\n"
    write_text_atomically(folder / "config.json", text)


def is_assistant(folder: str | Path) -> bool:
    """Whether `save_assistant` wrote this folder."""
    return _read_config(folder).get("model_type") == MODEL_TYPE


def load_assistant(folder: str | Path, target: Target):
    """An assistant of this project, with the target's embedding and head.

    Returns:
        A causal LM in the target's dtype and on its device.

    Raises:
        DFlashLabError: another kind of folder, damaged weights, or a target of another
            shape than the one it was trained for.
    """
    folder = Path(folder)
    if not is_assistant(folder):
        raise DFlashLabError(
            f"{folder} holds no assistant of this project; train one with "
            "python -m dflash_lab.baselines.assistant_training"
        )
    config = _read_config(folder)
    try:
        wanted, layers = dict(config["target"]), int(config["num_hidden_layers"])
    except (KeyError, TypeError, ValueError):
        raise DFlashLabError(
            f"{folder / 'config.json'} is damaged: it names no target or no number of "
            "layers; copy the folder again"
        ) from None
    found = _shape_of(target.model.config)
    other = [name for name in SHAPE if wanted.get(name) != found[name]]
    if other:
        listed = "; ".join(
            f"{name} is {found[name]}, was {wanted.get(name)}" for name in other
        )
        raise DFlashLabError(
            f"the assistant {folder} was trained for another target ({listed}); load "
            "that target, or train an assistant for this one"
        )
    model = build_assistant(target, layers)
    own = own_modules(model)
    own.load_state_dict(read_checkpoint(folder, own.state_dict()))
    own.to(target.dtype)
    return model.eval()


def _read_config(folder: str | Path) -> dict:
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _shape_of(config) -> dict[str, Any]:
    config = getattr(config, "get_text_config", lambda: config)()
    shape: dict[str, Any] = {name: getattr(config, name, None) for name in SHAPE}
    if shape["head_dim"] is None:
        shape["head_dim"] = shape["hidden_size"] // shape["num_attention_heads"]
    return shape

"""Listening to the target: which layers to tap, and how to tap only those.

DFlash conditions its drafter on hidden states of a few target layers. A layer id l
names a decoder layer, counted from 0, and its feature is the residual stream *after*
that layer, which `transformers` calls `hidden_states[l + 1]`. Forward hooks copy out
just these layers, so the other states of a pass are freed as usual.

Leaves out: projecting the features (`drafter/model.py`) and targets that carry several
residual streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from dflash_lab.errors import DFlashLabError

# Where the list of decoder layers lives, tried in order. Nearly every decoder of
# `transformers` keeps it at `model.layers`. Only decoders with rotary or relative
# positions are listed: tables of learned positions end where a draft may still look.
LAYER_PATHS = (
    "model.layers",
    "model.language_model.layers",
    "language_model.layers",
    "gpt_neox.layers",
)


def build_target_layer_ids(num_target_layers: int, num_features: int) -> list[int]:
    """Default choice of tapped layers: evenly spaced, from the 2nd to the 3rd-last.

    Args:
        num_target_layers: N, decoder layers of the target.
        num_features: n, how many of them to tap.

    Returns:
        n ascending layer ids. One feature takes the middle layer N // 2; several are
        spread from layer 1 to layer N - 3, rounded half to even (paper section 5; the
        rounding is that of the published checkpoints).

    Raises:
        DFlashLabError: the target is too shallow for that many distinct layers.
    """
    if num_features == 1:
        ids = [num_target_layers // 2]
    else:
        span = num_target_layers - 4
        ids = [round(1 + i * span / (num_features - 1)) for i in range(num_features)]
    if num_features < 1 or ids != sorted(set(ids)):
        raise DFlashLabError(
            f"cannot choose {num_features} distinct layers between layer 1 and layer "
            f"{num_target_layers - 3} of a target with {num_target_layers} layers; "
            "tap fewer layers or name them yourself with target_layer_ids"
        )
    return ids


def find_decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The list of decoder layers of a `transformers` causal LM.

    Raises:
        DFlashLabError: no list of layers at any of the known places.
    """
    for path in LAYER_PATHS:
        found: object = model
        for name in path.split("."):
            found = getattr(found, name, None)
        if isinstance(found, nn.ModuleList):
            return found
    raise DFlashLabError(
        f"no decoder layers found in {type(model).__name__} at any of "
        f"{', '.join(LAYER_PATHS)}; this architecture is not supported"
    )


def check_layer_ids(target_layer_ids: Sequence[int], num_target_layers: int) -> None:
    """Refuse ids that the target does not have, and the last layer.

    The last layer is refused because `hidden_states[N]` is taken after the final
    norm while a hook sees the state before it: two tools would disagree.

    Raises:
        DFlashLabError: naming the id and the range.
    """
    last = num_target_layers - 1
    for layer_id in target_layer_ids:
        if layer_id == last:
            raise DFlashLabError(
                f"target layer {layer_id} is the last of {num_target_layers}: its "
                "hidden state is normed in some tools and raw in others; tap layer "
                f"{last - 1} or lower"
            )
        if not 0 <= layer_id < last:
            raise DFlashLabError(
                f"target layer {layer_id} is outside 0..{last - 1}: the drafter was "
                f"trained for a target with at least {layer_id + 2} layers, this one "
                f"has {num_target_layers}; load the target it was trained for"
            )


class FeatureTap:
    """Keeps the outputs of chosen decoder layers of the last pass.

    Args:
        target_layer_ids: 0-based decoder layers, in the order in which their outputs
            are concatenated.
        num_target_layers: N of the target.

    Raises:
        DFlashLabError: ids that cannot be tapped, see `check_layer_ids`.
    """

    def __init__(self, target_layer_ids: Sequence[int], num_target_layers: int):
        check_layer_ids(target_layer_ids, num_target_layers)
        self.target_layer_ids = tuple(target_layer_ids)
        self._states: dict[int, Tensor] = {}

    def keep(self, layer_id: int, state: Tensor) -> None:
        """Remember the output (B, T, D) of a layer, if it is tapped."""
        if layer_id in self.target_layer_ids:
            self._states[layer_id] = state

    def take(self) -> Tensor | None:
        """Features of the last forward pass, which are then forgotten.

        Returns:
            `target_hidden`, (B, T, n*D) in the target's dtype, layer-major along the
            last dimension; None if no layer is tapped.
        """
        if not self.target_layer_ids:
            return None
        states, self._states = self._states, {}
        return torch.cat([states[i] for i in self.target_layer_ids], dim=-1)

    def close(self) -> None:
        """Stop listening."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()


class HiddenStateTap(FeatureTap):
    """A tap on the modules of a `transformers` causal LM, by forward hooks.

    Args:
        model: the causal LM.
        target_layer_ids: as in `FeatureTap`.

    Attributes:
        captures: how many layer outputs were kept so far (tests count them).
    """

    def __init__(self, model: nn.Module, target_layer_ids: Sequence[int]):
        layers = find_decoder_layers(model)
        super().__init__(target_layer_ids, len(layers))
        self.captures = 0
        self._handles = [
            layers[layer_id].register_forward_hook(self._keeper(layer_id))
            for layer_id in set(self.target_layer_ids)
        ]

    def _keeper(self, layer_id: int):
        def keep(module, inputs, output):
            self.keep(layer_id, output[0] if isinstance(output, tuple) else output)
            self.captures += 1

        return keep

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

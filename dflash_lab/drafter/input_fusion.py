"""The other way to condition: features as the drafter's input, not in every layer.

DFlash hands the fused features to each drafter layer as keys and values. The usual way
before it, here for comparison (paper table 9), is to let them enter once, at the
bottom: each context row is a row of the drafter's own sequence, passes through
attention and feed-forward of every layer, and a layer's keys and values come from what
the layers below made of it. The deeper the drafter, the less of the feature is left,
and a context row costs as much as a block row. With one layer the two differ only by
the layer's input norm. The paper does not spell its variant out; this one keeps
everything else equal: no token embedding is added to a context row.

Leaves out: sliding windows, and the published format, which has no place for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_lab.conditioning.cache import PositionCache, causal_mask
from dflash_lab.drafter.config import DFlashConfig
from dflash_lab.drafter.layers import KeyValue
from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.errors import DFlashLabError


class InputFusionDraftModel(DFlashDraftModel):
    """A drafter whose context rows pass through all of its layers.

    Args:
        config: with `conditioning="input"`.

    Raises:
        DFlashLabError: sliding-window layers.
    """

    conditioning = "input"

    def __init__(self, config: DFlashConfig):
        if "sliding_attention" in config.layer_types:
            raise DFlashLabError(
                "conditioning 'input' has no sliding windows; use full_attention "
                "layers, or conditioning 'kv'"
            )
        super().__init__(config)

    def context_keys_values(
        self, context: Tensor, cos: Tensor, sin: Tensor
    ) -> list[KeyValue]:
        """As in the base class, by a causal pass of the context rows (B, S, D)."""
        positions = torch.arange(context.shape[1])[None]
        mask = causal_mask(positions, context.shape[1], device=context.device)
        pairs = []
        for layer in self.layers:
            pairs.append(self._pair(layer, context, cos, sin))
            nothing = tuple(t[:, :, :0] for t in pairs[-1])
            context = layer(context, cos, sin, nothing, mask)
        return pairs

    def append_context(
        self,
        target_hidden: Tensor,
        positions: Tensor,
        cache: PositionCache,
        rows: Tensor | None = None,
    ) -> None:
        """As in the base class; the new rows attend to those in the cache.

        Each row's positions must be consecutive.
        """
        context = self.fuse(target_hidden)
        cos, sin = self.rotary(context, positions)
        span = cache.write_at(positions, rows)
        self.context_rows += positions.numel()
        # A row named twice has its tokens in the cache as well: what lies before a
        # row's first new token is read there, the rest is the row's own.
        earlier = causal_mask(positions[:, :1] - 1, span, device=context.device)
        earlier = earlier.expand(-1, -1, positions.shape[1], -1)
        own = torch.ones(positions.shape[1], positions.shape[1]).tril().bool()
        own = own.to(context.device).expand(len(positions), 1, -1, -1)
        mask = torch.cat([earlier, own], dim=-1)
        for index, layer in enumerate(self.layers):
            cache.write(*self._pair(layer, context, cos, sin), index)
            context = layer(context, cos, sin, cache.read(index, span, rows), mask)

    def _pair(self, layer, context: Tensor, cos: Tensor, sin: Tensor) -> KeyValue:
        normed = layer.input_layernorm(context)
        return layer.self_attn.keys_values(normed, cos, sin)

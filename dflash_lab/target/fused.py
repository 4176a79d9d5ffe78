"""The passes of decoding without the machinery around them.

For a few rows a pass of a small model spends as much time between its matrix products
as in them. `FusedTarget` runs the usual decoders (Llama, Mistral, Qwen2, Qwen3) from
the weights of their `transformers` model, with the same cache and the same masks, and
`FusedDrafter` does it for the drafter. Both give what the modules give, up to rounding
(tests compare them), wait for nothing on the way, and so can be captured as a graph.

Weights are read once: who changes them makes a new target or proposer.

Leaves out: every other architecture, which runs as its module; training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_lab.compat import rope_settings
from dflash_lab.conditioning.cache import PositionCache
from dflash_lab.conditioning.masks import block_position_ids, decoding_masks
from dflash_lab.conditioning.taps import FeatureTap, find_decoder_layers
from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.target.fused_layers import FusedLayer, RopeTable, as_packed, rms_norm
from dflash_lab.target.packed import small_enough
from dflash_lab.target.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# Rotations whose frequencies do not depend on the length of the text.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class FusedTarget(Target):
    """A `Target` whose passes run without its modules; see the top of this file."""

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        config, base = self.config, cast(Any, model).model
        copy = small_enough(model.parameters())
        eps = config.rms_norm_eps
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._layers = [
            FusedLayer(
                layer.self_attn,
                layer.mlp,
                (layer.input_layernorm, layer.post_attention_layernorm),
                eps,
                heads,
                kv_heads,
                copy,
            )
            for layer in cast(Any, find_decoder_layers(model))
        ]
        kinds = getattr(config, "layer_types", None)
        self._kinds = kinds or ["full_attention"] * self.num_layers
        self._norm = base.norm.weight.detach()
        self._head = as_packed([self.head], copy)
        self._rope = RopeTable(base.rotary_emb, self.embedding_table)
        self._taps: list[FusedTap] = []

    def tap(self, target_layer_ids: Sequence[int]) -> FusedTap:
        return FusedTap(self._taps, target_layer_ids, self.num_layers)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        cache: PositionCache,
        rows: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
    ) -> Tensor:
        span = cache.write_at(positions, rows)
        masks = self._masks(positions, span)
        self._rope.grow(cache.capacity)
        rope = self._rope.at(positions)
        x = F.embedding(input_ids.to(self.device), self.embedding_table)
        for index, layer in enumerate(self._layers):
            mask = masks[self._kinds[index]]

            def store(keys, values, index=index, mask=mask):
                return *cache.update(keys, values, index), mask

            x = layer(x, rope, store)
            for tap in self._taps:
                tap.keep(index, x)
        if isinstance(logits_to_keep, int):
            kept = x[:, -logits_to_keep:] if logits_to_keep else x
        else:
            kept = x[:, logits_to_keep.to(self.device)]
        return self.logits(rms_norm(kept, self._norm, self.config.rms_norm_eps))


class FusedTap(FeatureTap):
    """What `HiddenStateTap` is to modules; see there."""

    def __init__(
        self, taps: list[FusedTap], target_layer_ids: Sequence[int], num_layers: int
    ):
        super().__init__(target_layer_ids, num_layers)
        self._taps = taps
        taps.append(self)

    def close(self) -> None:
        if self in self._taps:
            self._taps.remove(self)


class FusedDrafter:
    """`append_context` and `draft` of a `DFlashDraftModel`; see there."""

    def __init__(self, drafter: DFlashDraftModel):
        config = drafter.config
        self.config, self.dtype, self.device = config, drafter.dtype, drafter.device
        self._patterns = config.attention_patterns
        copy = small_enough(drafter.parameters())
        self._fc = as_packed([drafter.fc], copy)
        self._layers = [
            FusedLayer(
                layer.self_attn,
                layer.mlp,
                (layer.input_layernorm, layer.post_attention_layernorm),
                config.rms_norm_eps,
                config.num_attention_heads,
                config.num_key_value_heads,
                copy,
                context=True,
            )
            for layer in drafter.layers
        ]
        self._context_norm = drafter.hidden_norm.weight.detach()
        self._norm = drafter.norm.weight.detach()
        self._rope = RopeTable(drafter.rotary, self._norm)
        self.context_rows = 0  # rows projected, for tests

    def append_context(
        self,
        target_hidden: Tensor,
        positions: Tensor,
        cache: PositionCache,
        rows: Tensor | None = None,
    ) -> None:
        self._rope.grow(cache.capacity)
        rope = self._rope.at(positions)
        context = self._fc(target_hidden.to(self.dtype))
        context = rms_norm(context, self._context_norm, self.config.rms_norm_eps)
        cache.write_at(positions, rows)
        if cache.static_span is None:
            self.context_rows += positions.numel()
        for index, layer in enumerate(self._layers):
            cache.write(*layer.keys_values(context, rope), index)

    def draft(
        self, noise_embedding: Tensor, start: Tensor, cache: PositionCache
    ) -> Tensor:
        block_size = noise_embedding.shape[1]
        self._rope.grow(cache.capacity)
        rope = self._rope.at(block_position_ids(start[:, None], block_size))
        span = cache.span_before(start)
        masks = decoding_masks(
            self._patterns,
            start.to(self.device),
            span,
            block_size,
            cache.reads_exactly(start),
        )
        x = noise_embedding
        for index, layer in enumerate(self._layers):
            mask = masks[self.config.layer_types[index]]

            def store(keys, values, index=index, mask=mask):
                seen = zip(cache.read(index, span), (keys, values), strict=True)
                keys, values = (torch.cat(pair, dim=2) for pair in seen)
                return keys, values, mask

            x = layer(x, rope, store)
        return rms_norm(x, self._norm, self.config.rms_norm_eps)


def can_fuse(model: PreTrainedModel) -> bool:
    """Whether `FusedTarget` knows this model: exactly a causal LM of `MODEL_TYPES`."""
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    names = {f"{t.capitalize()}ForCausalLM" for t in MODEL_TYPES}
    if kind not in MODEL_TYPES or type(model).__name__ not in names:
        return False
    rope = rope_settings(config.to_dict())
    return (
        rope["rope_type"] in ROPE_TYPES
        and config.hidden_act == "silu"
        and not getattr(config, "mlp_bias", False)
        and config._attn_implementation == "sdpa"
    )


def as_target(model: PreTrainedModel) -> Target:
    """The fastest `Target` for a `transformers` causal LM."""
    return FusedTarget(model) if can_fuse(model) else Target(model)


def as_fast_drafter(drafter: DFlashDraftModel) -> DFlashDraftModel | FusedDrafter:
    """What decodes with a drafter's weights."""
    return FusedDrafter(drafter) if type(drafter) is DFlashDraftModel else drafter

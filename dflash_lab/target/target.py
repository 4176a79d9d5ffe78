"""The target: any `transformers` decoder behind one small, explicit interface.

The speculative loop needs four things of a target: a forward pass at given positions
over a `PositionCache`, the raw embedding table, the language-model head, and its
limits. `Target` supplies them and nothing else, and changes no weight.

Leaves out: tokenizers and chat templates (`pairs/pair.py`), and targets with recurrent
state, whose rejected tokens cannot be taken back from a cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dflash_lab.compat import cache_kwarg
from dflash_lab.conditioning.cache import PositionCache, causal_mask
from dflash_lab.conditioning.taps import FeatureTap, HiddenStateTap, find_decoder_layers
from dflash_lab.errors import DFlashLabError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Target:
    """A frozen causal LM, ready to be verified against.

    Args:
        model: a `transformers` causal LM; it is put in evaluation mode.

    Attributes:
        num_layers: N, its decoder layers.
        hidden_size: D.
        vocab_size: rows V of the language-model head.
        max_positions: its position limit, or None if the config names none.

    Raises:
        DFlashLabError: an attention implementation or layer type that cannot be
            driven by position (flash attention, recurrent layers).
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model.eval()
        # Configs of different models have no common type.
        self.config: Any = model.config.get_text_config()
        self.num_layers = len(find_decoder_layers(model))
        embedding: Any = model.get_input_embeddings()
        self.embedding_table: Tensor = embedding.weight  # (V', D)
        self.head: Any = model.get_output_embeddings()
        if self.head is None:
            raise DFlashLabError(f"{type(model).__name__} has no language-model head")
        self.hidden_size = self.embedding_table.shape[1]
        self.vocab_size = self.head.weight.shape[0]
        self.max_positions = getattr(self.config, "max_position_embeddings", None)
        self.device = self.embedding_table.device
        self.dtype = self.embedding_table.dtype
        attention = self.config._attn_implementation
        if attention not in ("sdpa", "eager"):
            raise DFlashLabError(
                f"attention implementation {attention!r} takes no explicit mask; load "
                "the target with attn_implementation='sdpa'"
            )
        self._additive_mask = attention == "eager"
        self._windows = _windows_by_layer_type(self.config)
        self._cache_kwarg = cache_kwarg(model)

    def check_shape(
        self, what: str, num_target_layers: int, hidden_size: int, vocab_size: int
    ) -> None:
        """Refuse `what` if it was trained for a target of another shape.

        Raises:
            DFlashLabError: naming both shapes.
        """
        found = self.num_layers, self.hidden_size, self.vocab_size
        wanted = num_target_layers, hidden_size, vocab_size
        if found != wanted:
            raise DFlashLabError(
                f"{what} was trained for a target of {wanted} layers, width and "
                f"vocabulary, this one has {found}; load the target it was trained "
                "for, or train anew for this one"
            )

    def new_cache(self, batch_size: int, capacity: int) -> PositionCache:
        """An empty cache for `batch_size` rows of `capacity` positions."""
        return PositionCache(batch_size, capacity)

    def fingerprint(self) -> str:
        """Hash of the first, middle and last weights, to tell targets apart."""
        digest = hashlib.sha256(type(self.model).__name__.encode())
        weights = list(self.model.parameters())
        for weight in (weights[0], weights[len(weights) // 2], weights[-1]):
            sample = weight.detach().flatten()[: 2**20].float().cpu()
            digest.update(sample.numpy().tobytes())
        return digest.hexdigest()

    def tap(self, target_layer_ids: Sequence[int]) -> FeatureTap:
        """Hooks that keep these layers' outputs; close them after use."""
        return HiddenStateTap(self.model, target_layer_ids)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        cache: PositionCache,
        rows: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
    ) -> Tensor:
        """One pass over tokens at given positions; writes their keys and values.

        Args:
            input_ids: (B, T) int64.
            positions: (B, T) int64 on the CPU.
            cache: written at `positions`; read up to the largest of them.
            rows: (B,) int64 cache rows, all if None.
            logits_to_keep: last rows to compute logits for, 0 for all; or their
                indices, (T',) int64.

        Returns:
            (B, T', V) logits in the target's dtype.
        """
        span = cache.write_at(positions, rows)
        masks = self._masks(positions, span)
        # A model with one kind of layer takes the mask itself, a mixed one a mask
        # for each kind; a ready mask keeps `transformers` from building its own.
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        output = self.model(
            input_ids=input_ids.to(self.device),
            attention_mask=mask,
            position_ids=positions.to(self.device),
            use_cache=True,
            logits_to_keep=logits_to_keep,
            **{self._cache_kwarg: cache},
        )
        return output.logits

    def logits(self, hidden: Tensor) -> Tensor:
        """The head: (B, T, D) in the target's dtype -> (B, T, V)."""
        return self.head(hidden)

    def _masks(self, positions: Tensor, span: int) -> dict[str, Tensor]:
        """One mask for each kind of layer."""
        return {
            kind: self._mask(positions, span, window)
            for kind, window in self._windows.items()
        }

    def _mask(self, positions: Tensor, span: int, window: int | None) -> Tensor:
        mask = causal_mask(positions, span, window, self.device)
        if not self._additive_mask:
            return mask
        zero = torch.zeros((), dtype=self.dtype, device=self.device)
        return zero.where(mask, torch.finfo(self.dtype).min)


def _windows_by_layer_type(config) -> dict[str, int | None]:
    """Layer kind -> sliding window (None for full attention) of a target config."""
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return {"full_attention": window}
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise DFlashLabError(
            f"layers of type {', '.join(sorted(unknown))} keep a state that cannot be "
            "cropped after a rejected draft; this target is not supported"
        )
    windows = {"full_attention": None, "sliding_attention": window}
    return {kind: windows[kind] for kind in sorted(set(kinds))}

"""The DFlash drafter: a small block-diffusion model that reads the target's mind.

One forward pass turns a block [last token, MASK, MASK, ...] into hidden states for all
its slots at once. Context comes as hidden states of several target layers, fused by one
projection; every layer makes keys and values of it, so a context row costs two small
matrices per layer and nothing else, and is kept in a cache. Block rows attend to the
context and to each other in both directions. Embedding and language-model head are the
target's (paper section 4, appendix A.3).

Leaves out: the layers (`layers.py`), files (`checkpoint.py`), the target, the loop, and
denoising in several steps (one step suffices).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from dflash_lab.conditioning.cache import PositionCache
from dflash_lab.conditioning.masks import (
    LayerMasks,
    Mask,
    block_position_ids,
    decoding_masks,
)
from dflash_lab.drafter.checkpoint import (
    find_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from dflash_lab.drafter.config import DFlashConfig
from dflash_lab.drafter.layers import DFlashLayer, KeyValue, RMSNorm, Rotary
from dflash_lab.errors import DFlashLabError


class DFlashDraftModel(nn.Module):
    """DFlash drafter with the published state-dict keys.

    Args:
        config: shapes and conventions.

    Raises:
        DFlashLabError: the config is that of another variant (`variants.py`).
    """

    conditioning = "kv"

    def __init__(self, config: DFlashConfig):
        if config.conditioning != self.conditioning:
            raise DFlashLabError(
                f"this drafter has conditioning {config.conditioning!r}, "
                f"{type(self).__name__} is for {self.conditioning!r}; load it with "
                "dflash_lab.drafter.variants.load_drafter"
            )
        super().__init__()
        self.config = config
        self.patterns = config.attention_patterns
        features = len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(features, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers: Sequence[DFlashLayer] = nn.ModuleList(  # type: ignore[assignment]
            DFlashLayer(config) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config)
        self.context_rows = 0  # rows projected by `append_context`, for tests

    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Fresh weights: normal(0, initializer_range) matrices, no bias, norms at 1."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                nn.init.normal_(
                    parameter, std=self.config.initializer_range, generator=generator
                )

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    def fuse(self, target_hidden: Tensor) -> Tensor:
        """Target features (B, S, n*D) -> context rows (B, S, D), used by all layers."""
        return self.hidden_norm(self.fc(target_hidden.to(self.dtype)))

    def forward(
        self,
        noise_embedding: Tensor,
        target_hidden: Tensor,
        position_ids: Tensor,
        attention_mask: Mask | LayerMasks | None = None,
    ) -> Tensor:
        """One pass without a cache: training, and the reference for decoding.

        Args:
            noise_embedding: (B, N*K, D), embedded blocks.
            target_hidden: (B, S, n*D), features of the context.
            position_ids: (B, S + N*K) int64, context positions, then block positions.
            attention_mask: (B, 1, N*K, S + N*K) bool or another form that `attend`
                takes, or one for each layer type; None if everything is visible (one
                block right behind its context).

        Returns:
            (B, N*K, D), normed hidden states ready for the target's head. Row j of a
            block predicts the token at its own position; row 0 (the anchor) is not
            used.
        """
        context = self.fuse(target_hidden)
        length = context.shape[1]
        cos, sin = self.rotary(context, position_ids)
        context_rope = cos[:, :length], sin[:, :length]
        contexts = self.context_keys_values(context, *context_rope)
        block_rope = cos[:, length:], sin[:, length:]
        return self._run(noise_embedding, *block_rope, contexts, attention_mask)

    def context_keys_values(
        self, context: Tensor, cos: Tensor, sin: Tensor
    ) -> list[KeyValue]:
        """Every layer's keys and values of context rows (B, S, D) from position 0."""
        return [layer.self_attn.keys_values(context, cos, sin) for layer in self.layers]

    def append_context(
        self,
        target_hidden: Tensor,
        positions: Tensor,
        cache: PositionCache,
        rows: Tensor | None = None,
    ) -> None:
        """Project features of new tokens once and keep their keys and values.

        Args:
            target_hidden: (R, S, n*D), features of S new tokens of R rows.
            positions: (R, S) int64, their absolute positions.
            cache: the drafter's cache.
            rows: (R,) int64, which cache rows; all if None.
        """
        context = self.fuse(target_hidden)
        cos, sin = self.rotary(context, positions)
        cache.write_at(positions, rows)
        if cache.static_span is None:
            self.context_rows += positions.numel()
        for index, layer in enumerate(self.layers):
            keys, values = layer.self_attn.keys_values(context, cos, sin)
            cache.write(keys, values, index)

    def draft(
        self, noise_embedding: Tensor, start: Tensor, cache: PositionCache
    ) -> Tensor:
        """One pass over one block per row, with the context in the cache.

        The block's own keys and values are used and forgotten, so there is nothing to
        crop afterwards.

        Args:
            noise_embedding: (B, K, D).
            start: (B,) int64 on the CPU, position of each row's anchor.
            cache: holds the context of positions 0..start-1 of each row.

        Returns:
            (B, K, D) normed hidden states, as `forward`.
        """
        block_size = noise_embedding.shape[1]
        span = cache.span_before(start)
        positions = block_position_ids(start[:, None], block_size)
        cos, sin = self.rotary(noise_embedding, positions)
        contexts = [cache.read(i, span) for i in range(len(self.layers))]
        masks = decoding_masks(
            self.patterns,
            start.to(self.device),
            span,
            block_size,
            cache.reads_exactly(start),
        )
        return self._run(noise_embedding, cos, sin, contexts, masks)

    def _run(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        contexts: list[KeyValue],
        masks: Mask | LayerMasks | None,
    ) -> Tensor:
        for kind, layer, context in zip(
            self.config.layer_types, self.layers, contexts, strict=True
        ):
            mask = masks.get(kind) if isinstance(masks, Mapping) else masks
            x = layer(x, cos, sin, context, mask)
        return self.norm(x)

    def scale_logits(self, logits: Tensor) -> Tensor:
        """The config's multiplier and soft cap, on logits of the target's head."""
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `config.json` and `model.safetensors`, each atomically."""
        write_checkpoint(Path(folder), self.config, self.state_dict())

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
    ) -> DFlashDraftModel:
        """Load a checkpoint folder, or a Hub repository, in the authors' format.

        Args:
            name_or_path: a folder, or a repository id such as
                `z-lab/Qwen3-8B-DFlash-b16`.
            dtype: of the weights; as stored if None.
            device: where to put them.

        Raises:
            DFlashLabError: no such folder, an unsupported config, missing, extra or
                misshapen tensors, or float16 (these drafters overflow in it).
        """
        folder = find_checkpoint(name_or_path)
        config = DFlashConfig.from_folder(folder)
        with torch.device("meta"):
            model = cls(config)
        state = read_checkpoint(folder, model.state_dict())
        stored = {tensor.dtype for tensor in state.values()}
        if dtype == torch.float16 or (dtype is None and torch.float16 in stored):
            raise DFlashLabError(
                "float16 overflows in DFlash drafters (NaN, no draft accepted); load "
                "with dtype=torch.bfloat16 or torch.float32"
            )
        model.load_state_dict(state, assign=True)
        return model.to(device=device, dtype=dtype).eval()

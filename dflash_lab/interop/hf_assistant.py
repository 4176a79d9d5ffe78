"""Our drafter inside `transformers`' own DFlash decoding.

    model.generate(**inputs, assistant_model=as_hf_assistant(drafter),
                   speculation_type="dflash", do_sample=False)

`transformers` (5.15 and up) brings a loop of its own for one family of drafters. The
adapter gives any published drafter the interface that this loop expects. It serves as a
cross-check and as a baseline; the loop takes one prompt at a time, grows its caches by
concatenation, and overshoots stop strings.

Leaves out: input fusion, which that loop has no place for.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from dflash_lab.conditioning.masks import decoding_masks
from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.errors import DFlashLabError


class HFAssistant(nn.Module):
    """A drafter as the `assistant_model` of `generate`; see `as_hf_assistant`."""

    def __init__(self, drafter: DFlashDraftModel):
        super().__init__()
        own = drafter.config
        self.drafter = drafter
        # What the loop and its cache read. Windows are masks here, so that its cache
        # keeps every position.
        self.config = Qwen3Config(
            num_hidden_layers=own.num_hidden_layers,
            hidden_size=own.hidden_size,
            vocab_size=own.vocab_size,
            layer_types=["full_attention"] * own.num_hidden_layers,
        )
        self.config.target_layer_ids = list(own.target_layer_ids)
        self.config.block_size = own.block_size
        self.config.mask_token_id = own.mask_token_id

    @property
    def device(self) -> torch.device:
        return self.drafter.device

    def forward(
        self,
        noise_embeds: Tensor,
        context_hidden_states: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache=None,
        past_key_values=None,
    ) -> SimpleNamespace:
        """One draft, with the context's new rows.

        Args:
            noise_embeds: (1, K, D).
            context_hidden_states: (1, S, n*D), features of tokens that are new.
            position_ids: (1, S + K).
            attention_mask: not used; one prompt without padding has none.
            cache: grows by S + K rows; the caller takes the K rows back.
            past_key_values: the cache, by its name in older releases.
        """
        drafter, cache = self.drafter, cache if cache is not None else past_key_values
        config = drafter.config
        noise = noise_embeds * config.input_embedding_scale
        x = noise.to(drafter.dtype)
        context = drafter.fuse(context_hidden_states)
        patterns = config.attention_patterns
        new, size = context.shape[1], x.shape[1]
        cos, sin = drafter.rotary(x, position_ids)
        for index, (kind, layer) in enumerate(
            zip(config.layer_types, drafter.layers, strict=True)
        ):
            attention = layer.self_attn
            context_pair = attention.keys_values(context, cos[:, :new], sin[:, :new])
            block = layer.input_layernorm(x)
            block_pair = attention.keys_values(block, cos[:, new:], sin[:, new:])
            grown = (
                torch.cat(p, dim=2) for p in zip(context_pair, block_pair, strict=True)
            )
            keys, values = cache.update(*grown, index)
            length = keys.shape[2] - size
            earlier = keys[:, :, :length], values[:, :, :length]
            start = torch.tensor([length], device=x.device)
            masks = decoding_masks(patterns, start, length, size, exact=True)
            x = layer(x, cos[:, new:], sin[:, new:], earlier, masks[kind])
        return SimpleNamespace(last_hidden_state=drafter.norm(x))


def as_hf_assistant(drafter: DFlashDraftModel) -> HFAssistant:
    """A drafter for `generate(assistant_model=..., speculation_type="dflash")`.

    Raises:
        DFlashLabError: a drafter whose logits are scaled, or with input fusion.
    """
    config = drafter.config
    if config.conditioning != "kv":
        raise DFlashLabError(
            f"conditioning {config.conditioning!r} does not fit transformers' DFlash "
            "loop; use speculative_generate"
        )
    if config.output_multiplier != 1.0 or config.final_logit_softcapping is not None:
        raise DFlashLabError(
            "transformers' DFlash loop applies neither output_multiplier nor "
            "final_logit_softcapping; use speculative_generate"
        )
    return HFAssistant(drafter).eval()

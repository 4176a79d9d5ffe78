"""One small transformer for three ways of writing text.

Autoregressive, masked and block diffusion models differ in who may see whom and in what
is asked for, not in their layers. So all three are this one module, given another mask;
twins of the same size are twins indeed.

Leaves out: time conditioning, which masked diffusion does without (the number of masks
tells the time), and dropout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_lab.drafter.layers import RMSNorm, rotate

# Keys and values of each layer, (B, H, S, d) both.
Cache = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class TextModelConfig:
    """Sizes of a model.

    Args:
        vocab_size: V, the mask token included.
        mask_token_id: never predicted.
        width: D, a multiple of `heads`.
        layers: number of them.
        heads: attention heads.
    """

    vocab_size: int
    mask_token_id: int
    width: int = 128
    layers: int = 4
    heads: int = 4


class _Layer(nn.Module):
    def __init__(self, config: TextModelConfig):
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm, self.norm_mlp = RMSNorm(width, 1e-6), RMSNorm(width, 1e-6)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 6 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x, cos, sin, mask, past):
        batch, rows, width = x.shape
        split = self.qkv(self.norm(x)).view(batch, rows, 3, self.heads, -1)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)  # (B, H, T, d) each
        queries, keys = rotate(queries, cos, sin), rotate(keys, cos, sin)
        if past is not None:
            keys = torch.cat([past[0], keys], dim=2)
            values = torch.cat([past[1], values], dim=2)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, rows, width))
        gate, up = self.gate_up(self.norm_mlp(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up), (keys, values)


class TextModel(nn.Module):
    """Tokens in, logits out; the mask decides what kind of model it is.

    Args:
        config: its sizes.
        generator: of the fresh weights; torch's own if None.
    """

    def __init__(
        self, config: TextModelConfig, generator: torch.Generator | None = None
    ):
        super().__init__()
        self.frequencies: Tensor
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, 1e-6)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                std = 0.02 if name.startswith("embed") else weight.shape[1] ** -0.5
                nn.init.normal_(weight, std=std, generator=generator)
        size = config.width // config.heads
        frequencies = 10000.0 ** (-torch.arange(0, size, 2).float() / size)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Cache]:
        """Logits of every place.

        Args:
            ids: (B, T) int64.
            mask: bool, True where a row may look at a column; (T, T), or (T, S + T)
                with a cache of S rows. None lets everybody see everybody.
            positions: (T,) int64; behind the cache if None.
            cache: keys and values of earlier rows; it is not changed.

        Returns:
            Logits (B, T, V), -inf for the mask token, and the cache with the new rows
            behind the old ones.
        """
        past = cache[0][0].shape[2] if cache else 0
        if positions is None:
            positions = torch.arange(past, past + ids.shape[1], device=ids.device)
        angles = positions[:, None] * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)[None]  # (1, T, d)
        cos, sin = angles.cos(), angles.sin()
        x = self.embed(ids)
        grown: Cache = []
        for number, layer in enumerate(self.layers):
            x, pair = layer(x, cos, sin, mask, cache[number] if cache else None)
            grown.append(pair)
        logits = self.norm(x) @ self.embed.weight.T
        forbidden = torch.zeros_like(logits[0, 0], dtype=torch.bool)
        forbidden[self.config.mask_token_id] = True
        return logits.masked_fill(forbidden, float("-inf")), grown


def causal_mask(length: int) -> Tensor:
    """(T, T) bool: everybody sees himself and what came before."""
    return torch.ones(length, length, dtype=torch.bool).tril()

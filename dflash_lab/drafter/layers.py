"""The drafter's layers: attention over context and block, and what surrounds it.

Context rows enter a layer only as keys and values; queries, feed-forward and residual
stream exist for block rows alone (paper appendix A.3).

Leaves out: which rows see which (`conditioning/masks.py`) and where the context comes
    from.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash_lab.conditioning.attention import attend
from dflash_lab.conditioning.masks import Mask
from dflash_lab.drafter.config import DFlashConfig

KeyValue = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype != torch.float64 else x
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Rotary:
    """Rotation angles of a config, made on first use.

    No module: `.to(bfloat16)` would round its frequencies, and a model built on the
    meta device would lose them.

    Args:
        config: with `hidden_size`, `num_attention_heads`, `head_dim`,
            `max_position_embeddings` and `rope`.
    """

    def __init__(self, config):
        self._config = config
        self._made: Qwen3RotaryEmbedding | None = None

    def __call__(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin (B, T, d) in x's dtype for position_ids (B, T)."""
        if self._made is None:
            config = self._config
            rope = Qwen3Config(
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_attention_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters=dict(config.rope),
            )
            with torch.device("cpu"):
                self._made = Qwen3RotaryEmbedding(rope)
        return self._made(x, position_ids.to(x.device))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding; x (B, H, T, d), cos and sin (B, T, d)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


class DFlashAttention(nn.Module):
    """Attention of block rows over context rows and block rows."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        width, d, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = d
        self.q_proj = nn.Linear(width, self.heads * d, bias=bias)
        self.k_proj = nn.Linear(width, self.kv_heads * d, bias=bias)
        self.v_proj = nn.Linear(width, self.kv_heads * d, bias=bias)
        self.o_proj = nn.Linear(self.heads * d, width, bias=bias)
        self.q_norm = RMSNorm(d, config.rms_norm_eps)
        self.k_norm = RMSNorm(d, config.rms_norm_eps)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> KeyValue:
        """Keys and values of context rows and block rows alike.

        x (B, T, D) -> keys (B, Hkv, T, d), normed and rotated; values (B, Hkv, T, d).
        """
        shape = (*x.shape[:2], self.kv_heads, self.head_dim)
        keys = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        values = self.v_proj(x).view(shape).transpose(1, 2)
        return rotate(keys, cos, sin), values

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        context: KeyValue,
        mask: Mask | None,
    ) -> Tensor:
        batch, rows, _ = x.shape
        queries = self.q_norm(self.q_proj(x).view(batch, rows, self.heads, -1))
        queries = rotate(queries.transpose(1, 2), cos, sin)  # (B, Hq, K, d)
        keys, values = self.keys_values(x, cos, sin)
        keys = torch.cat([context[0], keys], dim=2)  # (B, Hkv, S+K, d)
        values = torch.cat([context[1], values], dim=2)
        mixed = attend(queries, keys, values, mask)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, rows, -1))


class DFlashMLP(nn.Module):
    """SwiGLU feed-forward layer."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DFlashLayer(nn.Module):
    """Pre-norm layer. Only block rows pass through it; context enters as K and V."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.self_attn = DFlashAttention(config)
        self.mlp = DFlashMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        context: KeyValue,
        mask: Mask | None,
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, context, mask)
        return x + self.mlp(self.post_attention_layernorm(x))

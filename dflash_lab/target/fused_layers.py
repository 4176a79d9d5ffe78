"""A transformer layer as a plain function of its weights, for decoding.

The same arithmetic as a decoder layer of `transformers` or of the drafter, with the
products that share an input made at once, and no module calls in between.

Leaves out: which rows see which; the caller stores keys and values and brings the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_lab.conditioning.attention import attend
from dflash_lab.conditioning.masks import Mask
from dflash_lab.target.packed import PackedLinear

Rope = tuple[Tensor, Tensor]
# Takes keys and values of the rows; gives all of them, and what hides some.
Store = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Mask | None]]


class Normed(Protocol):
    """A norm, known by its weight."""

    @property
    def weight(self) -> Tensor: ...


class Attention(Protocol):
    """The projections of attention; there may be `q_norm` and `k_norm` besides."""

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear


class SwiGLU(Protocol):
    """The projections of a gated feed-forward layer."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear


class FusedLayer:
    """One pre-norm layer with grouped attention, of a target or a drafter.

    Args:
        attention: its projections.
        mlp: the feed-forward part's.
        norms: the norm before each.
        eps: of all norms.
        heads: query heads.
        kv_heads: key and value heads.
        copy: see `PackedLinear`.
        context: whether `keys_values` is needed.
    """

    def __init__(
        self,
        attention: Attention,
        mlp: SwiGLU,
        norms: tuple[Normed, Normed],
        eps: float,
        heads: int,
        kv_heads: int,
        copy: bool,
        context: bool = False,
    ):
        q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
        self.qkv = as_packed([q, k, v], copy)
        self.kv = as_packed([k, v], copy) if context else None
        self.out = as_packed([attention.o_proj], copy)
        self.gate_up = as_packed([mlp.gate_proj, mlp.up_proj], copy)
        self.down = as_packed([mlp.down_proj], copy)
        self.eps, self.heads, self.kv_heads = eps, heads, kv_heads
        self.norm_1, self.norm_2 = (norm.weight.detach() for norm in norms)
        # One weight for each head: queries and keys are normed in one go.
        self.qk_norm = self.k_norm = None
        q_norm, k_norm = (getattr(attention, f"{x}_norm", None) for x in "qk")
        if q_norm is not None and k_norm is not None:
            self.k_norm = k_norm.weight.detach()
            queries = q_norm.weight.detach().expand(heads, -1)
            self.qk_norm = torch.cat([queries, self.k_norm.expand(kv_heads, -1)])

    def keys_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """(B, T, D), normed if it should be -> keys and values (B, Hkv, T, d)."""
        assert self.kv is not None
        both = self.kv(x).unflatten(-1, (2 * self.kv_heads, -1))
        keys, values = both.split(self.kv_heads, dim=2)
        keys = turned(keys, self.k_norm, self.eps, rope)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def __call__(self, x: Tensor, rope: Rope, store: Store) -> Tensor:
        """One layer.

        Args:
            x: (B, T, D).
            rope: cos and signed sin, each (B, T, 1, d).
            store: called with keys and values of the rows, (B, Hkv, T, d) each; gives
                all keys, all values and the mask.
        """
        heads, shared = self.heads, self.kv_heads
        rows = self.qkv(rms_norm(x, self.norm_1, self.eps))
        rows = rows.unflatten(-1, (heads + 2 * shared, -1))  # (B, T, H, d)
        queries_keys, values = rows.split([heads + shared, shared], dim=2)
        queries_keys = turned(queries_keys, self.qk_norm, self.eps, rope)
        queries, keys = queries_keys.transpose(1, 2).split([heads, shared], dim=1)
        mixed = attend(queries, *store(keys, values.transpose(1, 2)))
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(rms_norm(x, self.norm_2, self.eps)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class RopeTable:
    """cos and signed sin of every position, made once by the model's own module.

    Args:
        rotary: called as `rotary(x, position_ids)`.
        like: a tensor of the dtype and device that are wanted.
    """

    def __init__(self, rotary, like: Tensor):
        self._rotary, self._like = rotary, like
        self._table: tuple[Tensor, Tensor] | None = None

    def grow(self, capacity: int) -> None:
        """Cover positions 0..capacity-1."""
        if self._table is not None and len(self._table[0]) >= capacity:
            return
        positions = torch.arange(capacity, device=self._like.device)[None]
        cos, sin = self._rotary(self._like.new_zeros(1), positions)
        cos, sin = cos[0], sin[0].clone()  # (capacity, d)
        sin[:, : sin.shape[1] // 2].neg_()
        self._table = cos, sin

    def at(self, positions: Tensor) -> Rope:
        """(B, T) -> cos and signed sin, each (B, T, 1, d)."""
        assert self._table is not None, "call grow first"
        cos, sin = self._table
        positions = positions.to(cos.device)
        return cos[positions][:, :, None], sin[positions][:, :, None]


def as_packed(modules: Sequence[nn.Linear], copy: bool) -> PackedLinear:
    """Linear modules that read the same input, as one product."""
    weights = [module.weight for module in modules]
    return PackedLinear(weights, [module.bias for module in modules], copy)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight, the mean taken along the last dimension."""
    if weight.dim() == 1:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x, x.shape[-1:], None, eps) * weight


def turned(x: Tensor, weight: Tensor | None, eps: float, rope: Rope) -> Tensor:
    """Heads (B, T, H, d), normed if there is a weight, and rotated."""
    if weight is not None:
        x = rms_norm(x, weight, eps)
    cos, sin = rope
    half = x.shape[-1] // 2
    return x * cos + x.roll(half, dims=-1) * sin

"""A transformer layer as a plain function of its weights, for decoding.

The same arithmetic as a decoder layer of `transformers` or of the drafter, with the
products that share an input made at once, and no module calls in between.

Leaves out: which rows see which; the caller stores keys and values and brings the mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_lab.attention import attend
from dflash_lab.packed import PackedLinear


class FusedLayer:
    """One pre-norm layer with grouped attention, of a target or a drafter.

    Args:
        attention: with `q_proj`, `k_proj`, `v_proj`, `o_proj`, and perhaps `q_norm`
            and `k_norm`.
        mlp: SwiGLU with `gate_proj`, `up_proj`, `down_proj`.
        norms: the norm before each.
        eps: of all norms.
        heads: query heads.
        kv_heads: key and value heads.
        pack: see `PackedLinear`.
        context: whether `keys_values` is needed.
    """

    def __init__(
        self,
        attention: nn.Module,
        mlp: nn.Module,
        norms: tuple[nn.Module, nn.Module],
        eps: float,
        heads: int,
        kv_heads: int,
        pack: bool,
        context: bool = False,
    ):
        q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
        self.qkv = as_packed([q, k, v], pack)
        self.kv = as_packed([k, v], pack) if context else None
        self.out = as_packed([attention.o_proj], pack)
        self.gate_up = as_packed([mlp.gate_proj, mlp.up_proj], pack)
        self.down = as_packed([mlp.down_proj], pack)
        self.eps, self.heads, self.kv_heads = eps, heads, kv_heads
        self.norm_1, self.norm_2 = (norm.weight.detach() for norm in norms)
        self.q_norm = _weight_of(attention, "q_norm")
        self.k_norm = _weight_of(attention, "k_norm")

    def keys_values(self, x: Tensor, rope: tuple[Tensor, Tensor]):
        """(B, T, D), normed if it should be -> keys and values (B, Hkv, T, d)."""
        assert self.kv is not None
        k, v = self.kv(x)
        return self._keys(k, rope), _by_head(v, self.kv_heads).transpose(1, 2)

    def _keys(self, k: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        return _turned(k, self.kv_heads, self.k_norm, self.eps, rope)

    def __call__(self, x: Tensor, rope: tuple[Tensor, Tensor], store) -> Tensor:
        """One layer.

        Args:
            x: (B, T, D).
            rope: cos and signed sin, each (B, T, 1, d).
            store: called with keys and values of the rows, (B, Hkv, T, d) each; gives
                all keys, all values and the mask.
        """
        q, k, v = self.qkv(rms_norm(x, self.norm_1, self.eps))
        queries = _turned(q, self.heads, self.q_norm, self.eps, rope)
        values = _by_head(v, self.kv_heads).transpose(1, 2)
        mixed = attend(queries, *store(self._keys(k, rope), values))
        x = x + self.out(mixed.transpose(1, 2).flatten(2))[0]
        gate, up = self.gate_up(rms_norm(x, self.norm_2, self.eps))
        return x + self.down(F.silu(gate) * up)[0]


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

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T) -> cos and signed sin, each (B, T, 1, d)."""
        assert self._table is not None, "call grow first"
        cos, sin = self._table
        positions = positions.to(cos.device)
        return cos[positions][:, :, None], sin[positions][:, :, None]


def as_packed(modules: Sequence[nn.Module], pack: bool) -> PackedLinear:
    """Linear modules that read the same input, as one product."""
    weights = [module.weight for module in modules]
    return PackedLinear(weights, [module.bias for module in modules], pack)


def _weight_of(module: nn.Module, name: str) -> Tensor | None:
    found = getattr(module, name, None)
    return None if found is None else found.weight.detach()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight along the last dimension."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _by_head(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1))  # (B, T, H, d)


def _turned(
    x: Tensor,
    heads: int,
    weight: Tensor | None,
    eps: float,
    rope: tuple[Tensor, Tensor],
) -> Tensor:
    """Normed and rotated: (B, T, H*d) -> (B, H, T, d)."""
    x = _by_head(x, heads)
    if weight is not None:
        x = rms_norm(x, weight, eps)
    cos, sin = rope
    half = x.shape[-1] // 2
    return (x * cos + x.roll(half, dims=-1) * sin).transpose(1, 2)

"""Matrix products of decoding: weights laid out for the processor once, not each time.

A decoding pass multiplies a few rows with every weight of a model. On a CPU oneDNN
rearranges a bfloat16 weight before each such product, which costs as much as the
product; here it is rearranged once. Several matrices that read the same input become
one. On other devices, and where oneDNN is not there, the plain product is used.

Leaves out: training, and weights in integers.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, library
from torch.nn import functional as F

# Joined and packed weights are copies. Models above this size keep their own.
MOST_BYTES = 4 * 2**30
# In float32 the plain product is the faster one up to this many rows, and for weights
# of fewer elements.
FEW_ROWS = 3
SMALL_WEIGHT = 2**18


class PackedLinear:
    """x @ W.T for one or more weights that share their input.

    Args:
        weights: each (O, I), of one dtype and device.
        biases: one for each weight, or None.
        copy: False keeps to the given weights and makes no copy.

    Attributes:
        packed: whether the joined weight was rearranged.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None] | None = None,
        copy: bool = True,
    ):
        self._weights = [weight.detach() for weight in weights]
        biases = biases or [None] * len(weights)
        self._biases = [None if b is None else b.detach() for b in biases]
        if copy and len(weights) > 1:
            self._weights = [torch.cat(self._weights)]
            given = [bias for bias in self._biases if bias is not None]
            self._biases = [torch.cat(given) if given else None]
        whole = self._weights[0]
        self._always = whole.dtype == torch.bfloat16
        large = self._always or whole.numel() >= SMALL_WEIGHT
        self.packed = copy and large and can_pack(whole)
        if self.packed:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(whole, 8)
            self._handle = len(_PACKED)
            _PACKED.append(weakref.ref(self))
            self._size = len(whole)

    def __call__(self, x: Tensor) -> Tensor:
        """(B, T, I) -> (B, T, sum of O), the weights' outputs one after the other."""
        if self.packed and (self._always or x.shape[0] * x.shape[1] > FEW_ROWS):
            if torch.compiler.is_compiling():
                return _packed_product(x, self._handle, self._size)
            return torch.ops.mkldnn._linear_pointwise(
                x, self._packed, self._biases[0], "none", [], ""
            )
        if len(self._weights) == 1:
            return F.linear(x, self._weights[0], self._biases[0])
        pairs = zip(self._weights, self._biases, strict=True)
        return torch.cat([F.linear(x, w, b) for w, b in pairs], dim=-1)


_PACKED: list[weakref.ref[PackedLinear]] = []


@library.custom_op("dflash_lab::packed_product", mutates_args=())
def _packed_product(x: Tensor, handle: int, size: int) -> Tensor:
    """The product of one `PackedLinear`, for compilers that cannot trace its weight."""
    product = _PACKED[handle]()
    assert product is not None
    return torch.ops.mkldnn._linear_pointwise(
        x, product._packed, product._biases[0], "none", [], ""
    )


@_packed_product.register_fake
def _(x: Tensor, handle: int, size: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], size)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN multiplies with rearranged weights of this kind here."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def small_enough(parameters) -> bool:
    """Whether copies of all these weights are affordable."""
    return sum(p.numel() * p.element_size() for p in parameters) <= MOST_BYTES

"""Matrix products of decoding: weights laid out for the processor once, not each time.

A decoding pass multiplies a few rows with every weight of a model. On a CPU oneDNN
rearranges a bfloat16 weight before each such product, which costs as much as the
product; here it is rearranged once. Several matrices that read the same input become
one. On other devices, and where oneDNN is not there, the plain product is used.

Leaves out: training, and weights in integers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

# A packed weight is a copy. Models above this size keep the plain products.
MOST_BYTES = 4 * 2**30
# In float32 the plain product is the faster one up to this many rows.
FEW_ROWS = 3


class PackedLinear:
    """x @ W.T for one or more weights that share their input.

    Args:
        weights: each (O, I), of one dtype and device.
        biases: one for each weight, or None.
        pack: False keeps the plain products and makes no copy.

    Attributes:
        packed: whether the weights were rearranged.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None] | None = None,
        pack: bool = True,
    ):
        self._plain = [weight.detach() for weight in weights]
        biases = biases or [None] * len(weights)
        self._biases = [None if b is None else b.detach() for b in biases]
        self._sizes = [len(weight) for weight in weights]
        self._always = self._plain[0].dtype == torch.bfloat16
        self.packed = pack and can_pack(self._plain[0])
        if not self.packed:
            return
        whole = torch.cat(self._plain) if len(weights) > 1 else self._plain[0]
        self._bias = None
        if self._biases[0] is not None:
            self._bias = torch.cat(self._biases)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(whole, 8)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """(B, T, I) -> a (B, T, O) for each weight."""
        if self.packed and (self._always or x.shape[0] * x.shape[1] > FEW_ROWS):
            product = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return product.split(self._sizes, dim=-1)
        pairs = zip(self._plain, self._biases, strict=True)
        return tuple(F.linear(x, weight, bias) for weight, bias in pairs)


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

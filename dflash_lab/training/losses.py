"""What a drafter is trained to minimise: cross entropy that decays along the block.

A wrong draft at slot k makes the slots behind it worthless, so early slots count more:
slot k has weight exp(-(k - 1) / gamma) (paper appendix A.1).

Leaves out: distillation losses.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

# gamma for a block size K, from the paper's appendix A.1.
PAPER_GAMMA = {8: 4.0, 10: 5.0, 16: 7.0}


def default_gamma(block_size: int) -> float:
    """The paper's gamma for this block size; K / 2 where it gives none, which is
    between its values for 8 and 10 and near that for 16."""
    return PAPER_GAMMA.get(block_size, block_size / 2)


def decay_weights(block_size: int, gamma: float | None) -> Tensor:
    """(K,) float32: 0 for the anchor, then exp(-(k - 1) / gamma), or all 1 if None."""
    slot = torch.arange(block_size, dtype=torch.float32)
    weights = (
        torch.ones(block_size) if gamma is None else torch.exp(-(slot - 1) / gamma)
    )
    weights[0] = 0.0
    return weights


class _FrozenHeadLoss(torch.autograd.Function):
    """Weighted cross entropy through a frozen head, a chunk of rows at a time.

    The head gets no gradient, so the gradient of the hidden states can be formed while
    a chunk's logits exist, and no logits are kept: memory does not grow with rows x V.
    """

    @staticmethod
    def forward(ctx, hidden, head, labels, weight, transform, chunk):
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        gradient = torch.empty_like(hidden)
        loss = torch.zeros((), dtype=dtype, device=hidden.device)
        right = torch.zeros_like(labels, dtype=torch.bool)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            with torch.enable_grad():
                raw = F.linear(hidden[rows], head).to(dtype).requires_grad_()
                logits = transform(raw)
            scores = logits.detach()
            right[rows] = scores.argmax(dim=-1) == labels[rows]
            picked = labels[rows, None]
            normaliser = scores.logsumexp(dim=-1, keepdim=True)
            excess = normaliser - scores.gather(-1, picked)
            loss += (excess[:, 0] * weight[rows]).sum()
            # d loss / d logits = weight * (softmax - one-hot), formed in place.
            slope = (scores - normaliser).exp_()
            slope.scatter_add_(-1, picked, -torch.ones_like(excess))
            slope.mul_(weight[rows, None])
            if logits is not raw:
                (slope,) = torch.autograd.grad(logits, raw, slope)
            gradient[rows] = slope.to(head.dtype) @ head
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(right)
        return loss, right

    @staticmethod
    def backward(ctx, loss_gradient, _):
        (gradient,) = ctx.saved_tensors
        return gradient * loss_gradient, None, None, None, None, None


def frozen_head_cross_entropy(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    label_mask: Tensor,
    weights: Tensor,
    transform: Callable[[Tensor], Tensor] = lambda logits: logits,
    chunk: int = 512,
) -> tuple[Tensor, Tensor, Tensor]:
    """Decayed cross entropy over all slots that count, through a frozen head.

    Args:
        hidden: (M, K-1, D), the drafter's output at slots 1..K-1 of M blocks.
        head: (V, D), the target's head, or some rows of it.
        labels: (M, K-1) int64, indices into the rows of `head`.
        label_mask: (M, K-1) bool.
        weights: (K-1,) float32, see `decay_weights`.
        transform: what the drafter does to its logits (multiplier, soft cap).
        chunk: rows whose logits exist at a time.

    Returns:
        Scalar mean loss; (K-1,) right argmax drafts; (K-1,) labels.
    """
    weight = label_mask * weights.to(label_mask.device)
    total = weight.sum().clamp(min=1e-9)
    # Slots that do not count are left out before the costly part.
    counts = label_mask.flatten()
    loss, right = _FrozenHeadLoss.apply(
        hidden.flatten(0, 1)[counts],
        head.to(hidden.dtype),
        labels.flatten()[counts],
        (weight / total).flatten()[counts],
        transform,
        chunk,
    )
    per_slot = torch.zeros_like(label_mask)
    per_slot[label_mask] = right
    return loss, per_slot.sum(dim=0), label_mask.sum(dim=0)

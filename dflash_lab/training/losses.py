"""What a drafter is trained to minimise, and how a large frozen head is afforded.

A wrong draft at slot k makes the slots behind it worthless, so early slots count more.
`ce` is cross entropy with the text's own token, slot k weighted exp(-(k - 1) / gamma)
(paper appendix A.1). `kl` has the same weights and the target's whole distribution in
place of one token. `dpace` is cross entropy whose weights follow the drafter's own
confidence: a slot counts as far as the slots before it are likely to be right
(arXiv:2605.18810).

Leaves out: where labels come from (`training/data/anchors.py`), and sums over processes
(`training/run/trainer.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_lab.speculative.sampling import most_likely

LOSSES = ("ce", "kl", "dpace")
# gamma for a block size K, from the paper's appendix A.1.
PAPER_GAMMA = {8: 4.0, 10: 5.0, 16: 7.0}
DPACE_SMOOTHING = 0.5  # alpha of arXiv:2605.18810


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


def dpace_weights(cross_entropy: Tensor, label_mask: Tensor) -> Tensor:
    """Weights of D-PACE: what each slot is worth, given the confidence before it.

    With q_j = exp(-cross entropy) smoothed to s_j = (1 - a) q_j + a, slot j weighs the
    sum over m >= j of the product of s_1..s_m: the blocks' expected length that hangs
    on it. Constants of the gradient, so nothing flows back through them.

    Args:
        cross_entropy: (M, K-1) float.
        label_mask: (M, K-1) bool; a slot without a label ends its block.

    Returns:
        (M, K-1) float, 0 where there is no label.
    """
    confidence = torch.exp(-cross_entropy.detach())
    smooth = (1 - DPACE_SMOOTHING) * confidence + DPACE_SMOOTHING
    reach = (smooth * label_mask).cumprod(dim=1)
    return reach.flip(1).cumsum(dim=1).flip(1) * label_mask


class _FrozenHeadLoss(torch.autograd.Function):
    """Loss of each row through a frozen head, a chunk of rows at a time.

    The head gets no gradient, so the gradient of a row's hidden state can be formed
    while its logits exist, and no logits are kept: memory does not grow with rows x V.
    Rows are weighted afterwards, so that weights may depend on the losses.
    """

    @staticmethod
    def forward(ctx, hidden, head, labels, teacher, transform, chunk):
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        gradient = torch.empty_like(hidden)
        losses = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        right = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            with torch.enable_grad():
                raw = F.linear(hidden[rows], head).to(dtype).requires_grad_()
                logits = transform(raw)
            scores = logits.detach()
            right[rows] = most_likely(scores) == labels[rows]
            log_probs = scores - scores.logsumexp(dim=-1, keepdim=True)
            picked = labels[rows, None]
            if teacher is None:
                losses[rows] = -log_probs.gather(-1, picked)[:, 0]
                # d loss / d logits = softmax - one-hot, formed in place.
                slope = log_probs.exp_()
                slope.scatter_add_(-1, picked, slope.new_full(picked.shape, -1.0))
            else:
                wanted = F.linear(teacher[rows], head).to(dtype).log_softmax(dim=-1)
                probs = wanted.exp()
                losses[rows] = (probs * wanted.sub_(log_probs)).sum(dim=-1)
                slope = log_probs.exp_().sub_(probs)
            if logits is not raw:
                (slope,) = torch.autograd.grad(logits, raw, slope)
            gradient[rows] = slope.to(head.dtype) @ head
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(right)
        return losses, right

    @staticmethod
    def backward(ctx, loss_gradient, _):
        (gradient,) = ctx.saved_tensors
        scaled = gradient * loss_gradient[:, None].to(gradient.dtype)
        return scaled, None, None, None, None, None


class LossSums(NamedTuple):
    """Sums over the blocks of a pass; ratios are formed after adding over passes.

    Attributes:
        loss: weighted sum of the losses, scalar with gradient.
        weight: sum of the weights, scalar.
        right: (K-1,) int64, right argmax drafts of each slot.
        total: (K-1,) int64, labels of each slot.
    """

    loss: Tensor
    weight: Tensor
    right: Tensor
    total: Tensor


def frozen_head_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    label_mask: Tensor,
    decay: Tensor,
    *,
    kind: str = "ce",
    teacher: Tensor | None = None,
    transform: Callable[[Tensor], Tensor] = lambda logits: logits,
    chunk: int = 512,
) -> LossSums:
    """Weighted loss over all slots that count, through a frozen head.

    Args:
        hidden: (M, K-1, D), the drafter's output at slots 1..K-1 of M blocks.
        head: (V, D), the target's head, or some rows of it.
        labels: (M, K-1) int64, indices into the rows of `head`.
        label_mask: (M, K-1) bool.
        decay: (K-1,) float32, see `decay_weights`; not used by `dpace`.
        kind: one of `LOSSES`.
        teacher: (M, K-1, D), for `kl`: the target's own head inputs one position
            before each label.
        transform: what the drafter does to its logits (multiplier, soft cap).
        chunk: rows whose logits exist at a time.
    """
    # Slots that do not count are left out before the costly part.
    counts = label_mask.flatten()
    picked = None if teacher is None else teacher.flatten(0, 1)[counts].to(hidden.dtype)
    losses, right = _FrozenHeadLoss.apply(
        hidden.flatten(0, 1)[counts],
        head.to(hidden.dtype),
        labels.flatten()[counts],
        picked,
        transform,
        chunk,
    )
    if kind == "dpace":
        spread = losses.new_zeros(label_mask.shape)
        spread[label_mask] = losses.detach()
        weight = dpace_weights(spread, label_mask)
    else:
        weight = label_mask * decay.to(device=losses.device, dtype=losses.dtype)
    per_slot = torch.zeros_like(label_mask)
    per_slot[label_mask] = right
    return LossSums(
        (losses * weight[label_mask]).sum(),
        weight.sum(),
        per_slot.sum(dim=0),
        label_mask.sum(dim=0),
    )

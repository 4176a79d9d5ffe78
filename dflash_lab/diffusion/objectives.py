"""What each kind of model is trained on, and the bound on likelihood it gives.

* Autoregressive: the next token, exactly.
* Masked (MDLM): masked tokens, each weighted by -alpha'(t) / (1 - alpha(t)); the mean
  over t bounds the negative log-likelihood from above.
* Block: the same within each block, given the clean blocks before it.

Leaves out: objectives for the uniform process, which `toy.py` treats exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_lab.diffusion.blocks import block_logits
from dflash_lab.diffusion.model import TextModel, causal_mask
from dflash_lab.diffusion.schedules import Schedule, spread_times
from dflash_lab.errors import DFlashLabError

KINDS = ("autoregressive", "masked", "block")


def weighted_loss(
    logits: Tensor, ids: Tensor, masked: Tensor, weight: Tensor
) -> Tensor:
    """Nats per token: cross entropy of masked places, weighted, over all places.

    Args:
        logits: (B, S, V).
        ids: (B, S) clean tokens.
        masked: (B, S) bool.
        weight: broadcast against ids.
    """
    chosen = F.cross_entropy(logits.transpose(1, 2).float(), ids, reduction="none")
    return (chosen * weight * masked).sum() / ids.numel()


def autoregressive_loss(model: TextModel, ids: Tensor) -> Tensor:
    """Nats per token, exact; the first token is asked for behind a mask token."""
    first = torch.full_like(ids[:, :1], model.config.mask_token_id)
    rows = torch.cat([first, ids[:, :-1]], 1)
    logits, _ = model(rows, causal_mask(ids.shape[1]).to(ids.device))
    return F.cross_entropy(logits.transpose(1, 2).float(), ids)


def diffusion_loss(
    model: TextModel,
    ids: Tensor,
    schedule: Schedule,
    generator: torch.Generator,
    block_size: int | None = None,
) -> Tensor:
    """Nats per token, an estimate of the bound from one time per block.

    Args:
        model: the denoiser.
        ids: (B, S) clean tokens.
        schedule: of the masks.
        generator: of times and masks.
        block_size: K; the whole text if None.
    """
    batch, length = ids.shape
    size = block_size or length
    times = spread_times(batch * (length // size), generator).to(ids.device)
    times = times.view(batch, -1).repeat_interleave(size, 1)  # (B, S)
    draws = torch.rand(ids.shape, generator=generator).to(ids.device)
    masked = draws < schedule.masked_share(times)
    noisy = torch.where(masked, model.config.mask_token_id, ids)
    if block_size is None:
        logits, _ = model(noisy)
    else:
        logits = block_logits(model, noisy, ids, block_size)
    return weighted_loss(logits, ids, masked, schedule.weight(times))


def loss_of(
    kind: str,
    model: TextModel,
    ids: Tensor,
    generator: torch.Generator,
    *,
    schedule: Schedule | None = None,
    block_size: int | None = None,
) -> Tensor:
    """The loss of a kind of model, in nats per token.

    Raises:
        DFlashLabError: an unknown kind, or a block model without a block size.
    """
    schedule = schedule or Schedule()
    if kind == "autoregressive":
        return autoregressive_loss(model, ids)
    if kind == "masked":
        return diffusion_loss(model, ids, schedule, generator)
    if kind == "block" and block_size:
        return diffusion_loss(model, ids, schedule, generator, block_size)
    raise DFlashLabError(
        f"no kind {kind!r} with block_size {block_size}; choose from "
        f"{', '.join(KINDS)}, and give block a block_size"
    )


@torch.no_grad()
def bound(
    kind: str,
    model: TextModel,
    ids: Tensor,
    *,
    schedule: Schedule | None = None,
    block_size: int | None = None,
    draws: int = 16,
    seed: int = 0,
) -> float:
    """Negative log-likelihood in nats per token: exact, or its upper bound.

    Args:
        kind: of the model.
        model: to be judged.
        ids: (B, S) held-out texts.
        schedule: of the masks.
        block_size: K of a block model.
        draws: how often times and masks are drawn; 1 is enough for `autoregressive`.
        seed: of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    if kind == "autoregressive":
        draws = 1
    losses = [
        loss_of(
            kind, model, ids, generator, schedule=schedule, block_size=block_size
        ).item()
        for _ in range(draws)
    ]
    return sum(losses) / len(losses)

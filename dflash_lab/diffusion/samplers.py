"""Samplers of masked diffusion: from all masks to a text, step by step.

`ancestral_sample` walks the reverse chain of the absorbing process on a time grid.
`fill_masks` does the same with a fixed number of tokens per step, at random places or
where the model is surest. Both keep every state in between, for the player.

Leaves out: samplers that change a token once it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_lab.errors import DFlashLabError

# (B, S) ids with masks -> (B, S, V) logits.
Predict = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class SampleHistory:
    """Texts and how they came about.

    Attributes:
        ids: (B, S) int64, finished.
        frames: states from all masks to finished, (B, S) each.
        passes: passes over the model that it took.
    """

    ids: Tensor
    frames: list[Tensor]
    passes: int


def draw(logits: Tensor, generator: torch.Generator, greedy: bool = False) -> Tensor:
    """One token per place: logits (..., V) -> ids (...)."""
    if greedy:
        return logits.argmax(-1)
    probs = logits.float().softmax(-1)
    flat = torch.multinomial(probs.flatten(0, -2).cpu(), 1, generator=generator)
    return flat.view(logits.shape[:-1]).to(logits.device)


@torch.no_grad()
def ancestral_sample(
    predict: Predict,
    start: Tensor,
    mask_token_id: int,
    alphas: Sequence[float],
    generator: torch.Generator,
) -> SampleHistory:
    """Walk the reverse chain of the absorbing process.

    At the step from time t to s each masked token is written with the chance
    (alpha_s - alpha_t) / (1 - alpha_t), whatever the others do.

    Args:
        predict: the model.
        start: (B, S) int64; whatever is not a mask stays.
        mask_token_id: the mask.
        alphas: shares of clean tokens on the time grid, from 1 (text) to 0 (noise).
        generator: of the draws.

    Raises:
        DFlashLabError: a grid that does not run from 1 down to 0.
    """
    if len(alphas) < 2 or alphas[0] != 1 or alphas[-1] != 0:
        raise DFlashLabError(
            f"the grid runs from {alphas[0] if alphas else None} to "
            f"{alphas[-1] if alphas else None}; it must run from 1 to 0"
        )
    ids = start.clone()
    frames, passes = [ids.clone()], 0
    for later in range(len(alphas) - 1, 0, -1):
        early, late = alphas[later - 1], alphas[later]
        masked = ids == mask_token_id
        share = (early - late) / (1 - late)
        written = masked & (torch.rand(ids.shape, generator=generator) < share)
        # A step that writes nothing needs no pass.
        if written.any():
            ids = torch.where(written, draw(predict(ids), generator), ids)
            passes += 1
        frames.append(ids.clone())
    return SampleHistory(ids, frames, passes)


def tokens_per_step(masked: int, steps: int) -> list[int]:
    """How many of `masked` tokens each step writes: as even as can be, none zero."""
    steps = max(1, min(steps, masked))
    return [masked * (i + 1) // steps - masked * i // steps for i in range(steps)]


@torch.no_grad()
def fill_masks(
    predict: Predict,
    start: Tensor,
    mask_token_id: int,
    steps: int,
    generator: torch.Generator,
    *,
    order: str = "confidence",
    greedy: bool = False,
) -> SampleHistory:
    """Write all masks in a fixed number of passes.

    Args:
        predict: the model.
        start: (B, S) int64; every row has the same number of masks.
        mask_token_id: the mask.
        steps: passes; more than there are masks are not used.
        generator: of the draws.
        order: `confidence` writes where the chance of the drawn token is highest,
            `random` anywhere.
        greedy: take the most likely token instead of drawing one.

    Raises:
        DFlashLabError: rows with unequal numbers of masks, or an unknown order.
    """
    if order not in ("confidence", "random"):
        raise DFlashLabError(f"no order {order!r}; choose confidence or random")
    counts = (start == mask_token_id).sum(-1)
    if counts.min() != counts.max():
        raise DFlashLabError(
            f"rows have {int(counts.min())} to {int(counts.max())} masks; give rows "
            "with equally many"
        )
    ids = start.clone()
    frames, passes = [ids.clone()], 0
    if counts.max() == 0:
        return SampleHistory(ids, frames, passes)
    for count in tokens_per_step(int(counts[0]), steps):
        logits = predict(ids)
        passes += 1
        tokens = draw(logits, generator, greedy)
        if order == "random":
            score = torch.rand(ids.shape, generator=generator)
        else:
            probs = logits.float().softmax(-1)
            score = probs.gather(-1, tokens[..., None])[..., 0]
        score = score.masked_fill(ids != mask_token_id, -1.0)
        chosen = score.topk(count, dim=-1).indices
        ids = ids.scatter(-1, chosen, tokens.gather(-1, chosen))
        frames.append(ids.clone())
    return SampleHistory(ids, frames, passes)

"""Block diffusion: left to right by blocks, by denoising within a block.

A text is cut into blocks of K tokens. Block b is denoised given all blocks before it,
clean (Arriola et al. 2025, "Block diffusion: interpolating between autoregressive and
diffusion language models"). With K = 1 this is an autoregressive model, with K = the
whole text it is masked diffusion. A finished block is never looked at again except
through its keys and values.

Training sees all blocks of a text in one pass of 2 S rows: the noisy text, then the
clean one; the mask decides who sees whom.

Leaves out: blocks of changing size, and one pass that both finishes a block and begins
the next.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_lab.diffusion.model import Cache, TextModel
from dflash_lab.diffusion.samplers import SampleHistory, fill_masks
from dflash_lab.errors import DFlashLabError


def check_block_size(length: int, block_size: int) -> None:
    """Refuse a text that is no whole number of blocks."""
    if block_size < 1 or length % block_size:
        raise DFlashLabError(
            f"block_size is {block_size} and the text has {length} tokens; take a "
            "block size that divides the length"
        )


def block_diffusion_mask(length: int, block_size: int) -> Tensor:
    """Who sees whom in a pass over the noisy text and the clean text behind it.

    Noisy rows see their own block, noisy, and all earlier blocks, clean. Clean rows see
    their own block and earlier ones, clean. Nobody else sees a noisy row.

    Returns:
        (2 S, 2 S) bool, rows and columns in the order noisy, clean.
    """
    check_block_size(length, block_size)
    block = torch.arange(length) // block_size
    own = block[:, None] == block[None, :]
    earlier = block[:, None] > block[None, :]
    nobody = torch.zeros_like(own)
    return torch.cat(
        [torch.cat([own, earlier], 1), torch.cat([nobody, own | earlier], 1)]
    )


def block_logits(
    model: TextModel, noisy: Tensor, clean: Tensor, block_size: int
) -> Tensor:
    """Logits (B, S, V) of the noisy rows, all blocks at once."""
    length = clean.shape[1]
    mask = block_diffusion_mask(length, block_size).to(clean.device)
    positions = torch.arange(length, device=clean.device).repeat(2)
    logits, _ = model(torch.cat([noisy, clean], 1), mask, positions)
    return logits[:, :length]


@torch.no_grad()
def sample_blocks(
    model: TextModel,
    prompt: Tensor,
    new_tokens: int,
    block_size: int,
    steps: int,
    generator: torch.Generator,
    *,
    order: str = "random",
    greedy: bool = False,
) -> SampleHistory:
    """Write block by block, denoising each in `steps` passes.

    Each block costs `steps` passes over K rows, and one more over its K clean rows,
    whose keys and values go into the cache.

    Args:
        model: trained with `block_logits` at this block size.
        prompt: (B, S) int64, a whole number of blocks.
        new_tokens: a whole number of blocks.
        block_size: K.
        steps: passes per block, at most K of use.
        generator: of the draws.
        order: `random` (the ancestral sampler) or `confidence`.
        greedy: take the most likely token instead of drawing one.

    Returns:
        Texts with all states in between; `passes` counts the passes over the model but
        not the one over the prompt.
    """
    check_block_size(prompt.shape[1], block_size)
    check_block_size(new_tokens, block_size)
    total = prompt.shape[1] + new_tokens
    canvas = torch.full((len(prompt), total), model.config.mask_token_id)
    canvas[:, : prompt.shape[1]] = prompt
    frames, passes = [canvas.clone()], 0
    cache: Cache | None = None
    if prompt.shape[1]:
        block = torch.arange(prompt.shape[1]) // block_size
        _, cache = model(prompt, block[:, None] >= block[None, :])
    for start in range(prompt.shape[1], total, block_size):
        here = slice(start, start + block_size)

        def predict(ids: Tensor, cache: Cache | None = cache) -> Tensor:
            return model(ids, cache=cache)[0]

        filled = fill_masks(
            predict,
            canvas[:, here],
            model.config.mask_token_id,
            steps,
            generator,
            order=order,
            greedy=greedy,
        )
        for state in filled.frames[1:]:
            canvas[:, here] = state
            frames.append(canvas.clone())
        passes += filled.passes
        if start + block_size < total:
            _, cache = model(canvas[:, here], cache=cache)
            passes += 1
    return SampleHistory(canvas, frames, passes)

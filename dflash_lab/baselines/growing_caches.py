"""The loop as first published: caches that grow, a host that looks at everything.

The same algorithm as `speculative/host_loop.py` in the fewest words: the target keeps a
`DynamicCache` to which every pass appends and from which rejected rows are cropped, the
drafter's keys and values are concatenated, and each cycle ends when the host has read
how many drafts were accepted. It is a baseline for speed and an independent twin for
tests. Acceptance is greedy.

Leaves out: batches, sampling, and everything that makes it fast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from dflash_lab.compat import cache_kwarg
from dflash_lab.conditioning.masks import decoding_masks
from dflash_lab.drafter.model import DFlashDraftModel


@torch.inference_mode()
def generate_with_growing_caches(
    model,
    drafter: DFlashDraftModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    stop_token_ids: Sequence[int] = (),
) -> tuple[list[int], list[int]]:
    """Decode one prompt greedily.

    Args:
        model: a `transformers` causal LM.
        drafter: trained for it.
        prompt: token ids.
        max_new_tokens: most new tokens.
        stop_token_ids: the first of these ends the answer and is kept.

    Returns:
        New ids, and tokens per cycle (cut where the answer ends).
    """
    config, device = drafter.config, drafter.device
    cache, kept_pairs = DynamicCache(config=model.config), None
    masks = torch.full((1, config.block_size - 1), config.mask_token_id, device=device)
    ids = torch.tensor([list(prompt)], device=device)
    logits, features = _verify(model, drafter, ids, cache)
    output, cycles = [int(logits[0, -1].argmax())], []

    def finished() -> bool:
        return len(output) >= max_new_tokens or output[-1] in stop_token_ids

    while not finished():
        anchor = torch.tensor([[output[-1]]], device=device)
        hidden, kept_pairs = _draft(
            model, drafter, torch.cat([anchor, masks], dim=1), features, kept_pairs
        )
        head = model.get_output_embeddings()
        drafts = drafter.scale_logits(head(hidden[:, 1:])).argmax(dim=-1)
        block = torch.cat([anchor, drafts], dim=1)
        length = cache.get_seq_length()
        logits, states = _verify(model, drafter, block, cache)
        choices = logits[0].argmax(dim=-1)
        wrong = (drafts[0] != choices[:-1]).nonzero()
        accepted = int(wrong[0]) if len(wrong) else drafts.shape[1]
        _crop(cache, length + accepted + 1)
        features = states[:, : accepted + 1]
        before = len(output)
        for token in choices[: accepted + 1].tolist():
            output.append(token)
            if finished():
                break
        cycles.append(len(output) - before)
    return output, cycles


def _verify(model, drafter, ids: Tensor, cache) -> tuple[Tensor, Tensor]:
    """Logits of all rows, and the tapped features (1, T, n*D)."""
    result = model(
        input_ids=ids,
        use_cache=True,
        output_hidden_states=True,
        **{cache_kwarg(model): cache},
    )
    taps = [result.hidden_states[i + 1] for i in drafter.config.target_layer_ids]
    return result.logits, torch.cat(taps, dim=-1)


def _draft(model, drafter, block: Tensor, features: Tensor, kept_pairs):
    """Hidden states of a block, and the context's keys and values, grown."""
    config = drafter.config
    table = model.get_input_embeddings().weight
    x = F.embedding(block, table) * config.input_embedding_scale
    x = x.to(drafter.dtype)
    context = drafter.fuse(features)
    start = 0 if kept_pairs is None else kept_pairs[0][0].shape[2]
    length = start + context.shape[1]
    positions = torch.arange(start, length + block.shape[1], device=block.device)[None]
    cos, sin = drafter.rotary(x, positions)
    new = context.shape[1]
    anchor = torch.tensor([length], device=x.device)
    masks = decoding_masks(
        config.attention_patterns, anchor, length, block.shape[1], exact=True
    )
    grown = []
    for index, (kind, layer) in enumerate(
        zip(config.layer_types, drafter.layers, strict=True)
    ):
        pair = layer.self_attn.keys_values(context, cos[:, :new], sin[:, :new])
        if kept_pairs is not None:
            both = zip(kept_pairs[index], pair, strict=True)
            pair = tuple(torch.cat(tensors, dim=2) for tensors in both)
        grown.append(pair)
        x = layer(x, cos[:, new:], sin[:, new:], pair, masks[kind])
    return drafter.norm(x), grown


def _crop(cache, length: int) -> None:
    """Keep the first `length` positions, in every release's own way of saying so."""
    surplus = cache.get_seq_length() - length
    if surplus == 0:
        return
    try:
        cache.crop(-surplus)
    except ValueError:  # releases that take the length itself
        cache.crop(length)

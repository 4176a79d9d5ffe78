"""Twins of one size on one corpus: train them, let them write, and judge the texts.

The corpus is the small world of `training/corpus/tiny_text.py`, in the tokens of the
tiny pair; the judge is the tiny target, which knows that world. Judged quality is the
target's negative log-likelihood of what was written. That alone can be cheated by
repeating one likely phrase, so the variety of tokens stands beside it.

Leaves out: figures (`views/diffusion.py`).
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from dflash_lab.diffusion.model import TextModel, TextModelConfig, causal_mask
from dflash_lab.diffusion.objectives import loss_of
from dflash_lab.diffusion.samplers import SampleHistory, draw
from dflash_lab.diffusion.schedules import Schedule
from dflash_lab.training.corpus.tiny_text import KINDS as KINDS_OF_TEXT
from dflash_lab.training.corpus.tiny_text import tiny_texts
from dflash_lab.training.run.tiny import encode


@dataclass(frozen=True)
class Trained:
    """A trained twin.

    Attributes:
        kind: `autoregressive`, `masked` or `block`.
        model: in evaluation mode.
        block_size: of a block model.
        losses: nats per token of every step.
        seconds: of training.
    """

    kind: str
    model: TextModel
    block_size: int | None
    losses: list[float]
    seconds: float


def text_rows(
    tokenizer,
    length: int,
    *,
    seed: int = 0,
    held_out: bool = False,
    kinds: Sequence[str] = KINDS_OF_TEXT,
) -> Iterator[Tensor]:
    """Endless rows (length,) of texts; each begins with a prompt, what is over is cut.

    Texts of the given kinds follow one another in a row until it is full.
    """
    row: list[int] = []
    for text in tiny_texts(seed, held_out):
        if text["kind"] not in kinds:
            continue
        row += encode(tokenizer, text)[0]
        if len(row) >= length:
            yield torch.tensor(row[:length])
            row = []


def text_batch(tokenizer, count: int, length: int, **options) -> Tensor:
    """(count, length) of `text_rows`."""
    return torch.stack(
        list(itertools.islice(text_rows(tokenizer, length, **options), count))
    )


def train_twin(
    kind: str,
    tokenizer,
    mask_token_id: int,
    *,
    steps: int,
    length: int = 64,
    block_size: int | None = None,
    batch_size: int = 32,
    learning_rate: float = 2e-3,
    schedule: Schedule | None = None,
    width: int = 128,
    layers: int = 4,
    seed: int = 0,
    vocab_size: int | None = None,
    kinds: Sequence[str] = KINDS_OF_TEXT,
) -> Trained:
    """Train a model of one kind on fresh texts: AdamW, warm-up, cosine.

    Args:
        kind: `autoregressive`, `masked` or `block`.
        tokenizer: of the texts.
        mask_token_id: the mask.
        steps: optimiser steps.
        length: tokens S of a row.
        block_size: K of a block model.
        batch_size: rows per step.
        learning_rate: its peak.
        schedule: of the masks; linear if None.
        width: D.
        layers: number of them.
        seed: of weights, texts and masks.
        vocab_size: V; the tokenizer's if None.
        kinds: of text.
    """
    generator = torch.Generator().manual_seed(seed)
    size = vocab_size or len(tokenizer)
    model = TextModel(TextModelConfig(size, mask_token_id, width, layers), generator)
    rows = text_rows(tokenizer, length, seed=seed, kinds=kinds)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    losses: list[float] = []
    started = time.monotonic()
    label = f"{kind} {block_size or ''}".strip()
    for step in (progress := tqdm(range(steps), desc=label, mininterval=5)):
        share = 0.5 * (1 + math.cos(math.pi * step / steps))
        rate = learning_rate * min(1.0, (step + 1) / 50) * share
        optimizer.param_groups[0]["lr"] = rate
        ids = torch.stack(list(itertools.islice(rows, batch_size)))
        loss = loss_of(
            kind, model, ids, generator, schedule=schedule, block_size=block_size
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        progress.set_postfix_str(f"{losses[-1]:.3f} nats/token", refresh=False)
    model.eval()
    return Trained(kind, model, block_size, losses, time.monotonic() - started)


@torch.no_grad()
def write_left_to_right(
    model: TextModel,
    prompt: Tensor,
    new_tokens: int,
    generator: torch.Generator,
    greedy: bool = False,
) -> SampleHistory:
    """The autoregressive twin writes: one pass per token, with a cache."""
    mask_id = model.config.mask_token_id
    width = prompt.shape[1]
    canvas = torch.full((len(prompt), width + new_tokens), mask_id)
    canvas[:, :width] = prompt
    frames = [canvas.clone()]
    rows = torch.cat([torch.full_like(canvas[:, :1], mask_id), prompt], 1)
    logits, cache = model(rows, causal_mask(rows.shape[1]))
    for place in range(width, width + new_tokens):
        canvas[:, place] = draw(logits[:, -1], generator, greedy)
        frames.append(canvas.clone())
        if place + 1 < width + new_tokens:
            logits, cache = model(canvas[:, place : place + 1], cache=cache)
    return SampleHistory(canvas, frames, new_tokens)


@torch.no_grad()
def judge(target, ids: Tensor, start: int) -> dict[str, float]:
    """How well a target thinks of texts, and how varied they are.

    Args:
        target: a `transformers` causal LM.
        ids: (B, S) int64.
        start: where the judged part begins, at least 1.

    Returns:
        `nats_per_token` under the target, and `entropy`, the entropy in nats of the
        tokens within a text, averaged over texts.
    """
    logits = target(input_ids=ids).logits[:, start - 1 : -1].float()
    wanted = ids[:, start:]
    nats = torch.nn.functional.cross_entropy(logits.transpose(1, 2), wanted)
    entropies = []
    for row in wanted.tolist():
        counts = Counter(row).values()
        entropies.append(-sum(c / len(row) * math.log(c / len(row)) for c in counts))
    return {
        "nats_per_token": float(nats),
        "entropy": sum(entropies) / len(entropies),
    }

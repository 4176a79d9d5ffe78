"""Training the EAGLE-3-style head by unrolling its drafting ("training-time test").

    python -m dflash_lab.baselines.eagle_training --pair smol --corpus corpus.jsonl \\
        --cpu-minutes 12 --draft-vocab-size 8192 --bf16 --out smol-eagle

The head is fed its own output for as many steps as it will draft, all places of a text
at once, and learns the text's own tokens at a sample of places, redrawn every epoch;
step k weighs 0.8 ** (k - 1), as in EAGLE-3.

Leaves out: the loop and its budget (`training_loop.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_lab.baselines.eagle import EagleConfig, EagleHead, embed
from dflash_lab.baselines.training_command import (
    load_asked,
    parser_for,
    run_command,
    settings_of,
    write_note,
)
from dflash_lab.baselines.training_loop import (
    Batch,
    OnStep,
    StepLoss,
    TrainingBudget,
    train_loop,
)
from dflash_lab.target.target import Target
from dflash_lab.training.data.dataset import Example, collate
from dflash_lab.training.data.feature_store import cache_features
from dflash_lab.training.data.features import (
    OfflineFeatures,
    OnlineFeatures,
    feature_scale,
)

DECAY = 0.8


@dataclass(frozen=True)
class EagleTraining(TrainingBudget):
    """How a head is trained.

    Attributes:
        draft_vocab_size: most frequent tokens of the texts that it can draft.
        unroll: steps, the drafts of a block.
        places: of each text and step at which the loss is taken.
        bf16: autocast to bfloat16.
    """

    draft_vocab_size: int | None = None
    unroll: int = 7
    places: int = 32
    bf16: bool = False


def train_eagle(
    target: Target,
    examples: Sequence[Example],
    features,
    settings: EagleTraining,
    *,
    on_step: OnStep | None = None,
    quiet: bool = False,
) -> EagleHead:
    """Train a head.

    Args:
        target: supplies embedding and, to start from, head rows.
        examples: the texts.
        features: of the head's taps (`EagleConfig.for_target`), online or offline, of
            the same texts in the same order.
        settings: see `EagleTraining`.
        on_step: gets `step`, `loss`, `accuracy` (a list by draft) of every step.
        quiet: no progress bar.

    Raises:
        DFlashLabError: no budget, or a loss that is not a number.
    """
    settings.check()
    head, place_of = start_head(target, examples, settings)
    scale = _scale(features, examples)

    def loss_of(batch: Batch) -> StepLoss:
        hidden = features.batch(batch.indices, batch.ids)[0].float() * scale
        with torch.autocast("cpu", torch.bfloat16, settings.bf16):
            return unrolled_loss(head, target, batch, hidden, place_of, settings)

    train_loop("eagle", head.parameters(), examples, settings, loss_of, on_step, quiet)
    head.fc.weight.data *= scale  # raw features from now on
    return head.eval()


def start_head(
    target: Target, examples: Sequence[Example], settings: EagleTraining
) -> tuple[EagleHead, Tensor]:
    """A fresh head over the texts' most frequent tokens.

    Returns:
        The head, its vocabulary's rows those of the target's head, and (V,) the place
        of each token in the draft vocabulary, -1 for none.
    """
    counts = np.zeros(target.vocab_size, dtype=np.int64)
    for example in examples:
        np.add.at(counts, example.input_ids[example.prompt_length :], 1)
    size = min(settings.draft_vocab_size or len(counts), len(counts))
    kept = np.sort(np.argsort(-counts, kind="stable")[:size])
    head = EagleHead(EagleConfig.for_target(target.config, size))
    noise = torch.Generator().manual_seed(settings.seed)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.02, generator=noise)
        head.draft_ids.copy_(torch.from_numpy(kept))
        head.lm_head.weight.copy_(target.head.weight[head.draft_ids])
    place_of = torch.full((target.vocab_size,), -1)
    place_of[head.draft_ids] = torch.arange(size)
    return head, place_of


def unrolled_loss(
    head: EagleHead,
    target: Target,
    batch: Batch,
    hidden: Tensor,
    place_of: Tensor,
    settings: EagleTraining,
) -> StepLoss:
    """Weighted cross entropy of a batch, and right and counted drafts of each step.

    Args:
        head: in training.
        target: supplies the embedding.
        batch: the texts.
        hidden: (B, S, 3*D), their features.
        place_of: of `start_head`.
        settings: see `EagleTraining`.
    """
    ids, mask = batch.ids, batch.mask
    embedding = embed(target.embedding_table.detach(), ids, torch.float32)
    outputs = head.unroll(hidden, embedding, settings.unroll)
    # A place counts if its first draft, two tokens on, is supervised.
    first = F.pad(mask[:, 2:], (0, 2))
    count = min(settings.places, ids.shape[1])
    places = batch.scores.masked_fill(~first, -1.0).topk(count, dim=1).indices  # (B, N)
    loss = weight = ids.new_zeros((), dtype=torch.float32)
    right, total = torch.zeros(settings.unroll), torch.zeros(settings.unroll)
    for k, output in enumerate(outputs, 1):
        label_at = places + k + 1
        inside = (label_at < ids.shape[1]) & first.gather(1, places)
        label_at = label_at.clamp(max=ids.shape[1] - 1)
        labels = place_of[ids.gather(1, label_at)]
        counts = inside & mask.gather(1, label_at) & (labels >= 0)
        rows = places.clamp(max=output.shape[1] - 1)[..., None]
        picked = output.gather(1, rows.expand(-1, -1, output.shape[-1]))
        logits = head.logits(picked).float()
        losses = F.cross_entropy(
            logits.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none"
        )
        share = DECAY ** (k - 1)
        loss = loss + share * (losses * counts.flatten()).sum()
        weight = weight + share * counts.sum()
        hits = logits.detach().max(dim=-1).indices == labels
        right[k - 1], total[k - 1] = (hits & counts).sum(), counts.sum()
    return loss / weight.clamp(min=1), right, total


def _scale(features, examples: Sequence[Example], samples: int = 64) -> Tensor:
    """1 / rms of each feature over some texts, see `features.feature_scale`."""
    picked = range(0, len(examples), max(1, len(examples) // samples))
    parts = [features.batch([i], collate(examples, [i])[0])[0][0] for i in picked]
    return feature_scale(parts)


@torch.inference_mode()
def accuracy_by_draft(
    head: EagleHead, target: Target, examples: Sequence[Example], unroll: int = 7
) -> list[float]:
    """Share of the answers' tokens that draft 1..unroll has right, at every place.

    Args:
        head: trained; its scale is folded in.
        target: writes the features.
        examples: the texts.
        unroll: drafts.
    """
    features = OnlineFeatures(target, head.config.target_layer_ids)
    place_of = torch.full((target.vocab_size,), -1)
    place_of[head.draft_ids] = torch.arange(len(head.draft_ids))
    right, total = torch.zeros(unroll), torch.zeros(unroll)
    for index in range(len(examples)):
        ids, mask = collate(examples, [index])
        settings = EagleTraining(unroll=unroll, places=ids.shape[1])
        hidden = features.batch([index], ids)[0].float()
        batch = Batch([index], ids, mask, torch.ones(ids.shape))
        _, hits, counted = unrolled_loss(
            head, target, batch, hidden, place_of, settings
        )
        right, total = right + hits, total + counted
    return (right / total.clamp(min=1)).tolist()


def main(arguments: Sequence[str] | None = None) -> int:
    """Train from the command line and write the folder."""
    parser = parser_for("eagle_training", "Train an EAGLE-3-style head.")
    parser.add_argument("--draft-vocab-size", type=int, help="default: all tokens")
    parser.add_argument("--unroll", type=int, default=7, help="drafts (default: 7)")
    parser.add_argument("--places", type=int, default=32, help="of each text and step")
    return run_command(parser, arguments, _run)


def _run(asked) -> int:
    settings = settings_of(EagleTraining, asked)
    settings.check()
    pair, taught, held_out = load_asked(asked)
    taps = EagleConfig.for_target(pair.target.config).target_layer_ids
    store = asked.out.parent / f"{asked.out.name}-features"
    cache_features(pair.target, [e.input_ids for e in taught], taps, store)
    lines: list[dict] = []
    head = train_eagle(
        pair.target, taught, OfflineFeatures(store), settings, on_step=lines.append
    )
    facts: dict = {"parameters": sum(p.numel() for p in head.parameters())}
    if held_out:
        found = accuracy_by_draft(head, pair.target, held_out, settings.unroll)
        facts["held_out_accuracy"] = [round(share, 4) for share in found]
    if asked.bf16:
        head.to(torch.bfloat16)
    head.save_pretrained(asked.out)
    write_note(asked, settings, len(taught), len(lines), **facts)
    print(f"{len(lines)} steps, held-out accuracy {facts.get('held_out_accuracy')}")
    print(f"head: {asked.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

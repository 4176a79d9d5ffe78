"""Training an assistant: next-token cross entropy on what its target wrote.

    python -m dflash_lab.baselines.assistant_training --pair tiny \\
        --corpus corpus.jsonl --cpu-minutes 3 --out data/checkpoints/tiny-assistant

The layers and the norm learn; embedding and head are the target's and stay. The loss is
taken at a sample of the answers' places, redrawn every epoch, since with a large
vocabulary the head costs more than the layers.

Leaves out: the loop and its budget (`training_loop.py`), and writing the corpus
(`dflash-lab corpus`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_lab.baselines.assistant import (
    build_assistant,
    copy_layers,
    evenly_spaced,
    own_modules,
    save_assistant,
)
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
from dflash_lab.errors import DFlashLabError
from dflash_lab.target.target import Target
from dflash_lab.training.data.dataset import Example, collate
from dflash_lab.training.losses import LossSums, frozen_head_loss

STARTS = ("target", "fresh")


@dataclass(frozen=True)
class AssistantTraining(TrainingBudget):
    """How an assistant is trained.

    Attributes:
        num_hidden_layers: its layers.
        start: `target` copies evenly spaced layers and the norm; `fresh` draws them.
        places: of each text at which the loss is taken; all if None.
        bf16: autocast to bfloat16.
    """

    num_hidden_layers: int = 2
    start: str = "target"
    places: int | None = 64
    bf16: bool = False

    def check(self) -> None:
        """As `TrainingBudget.check`, for `start` and `places` too."""
        super().check()
        if self.start not in STARTS:
            raise DFlashLabError(
                f"start {self.start!r} is unknown; choose {' or '.join(STARTS)}"
            )
        if self.places is not None and self.places < 1:
            raise DFlashLabError(f"places {self.places} must be 1 or more")


def train_assistant(
    target: Target,
    examples: Sequence[Example],
    settings: AssistantTraining,
    *,
    on_step: OnStep | None = None,
    quiet: bool = False,
):
    """Train an assistant; returns the model, layers and norm in float32.

    Args:
        target: supplies embedding, head and first weights.
        examples: the texts.
        settings: see `AssistantTraining`.
        on_step: gets `step`, `loss` and `accuracy` of every step.
        quiet: no progress bar.

    Raises:
        DFlashLabError: no budget, an unknown start, or a loss that is not a number.
    """
    settings.check()
    model = build_assistant(target, settings.num_hidden_layers, settings.seed)
    if settings.start == "target":
        layers = evenly_spaced(settings.num_hidden_layers, target.num_layers)
        copy_layers(model, target, layers)
    parameters = list(own_modules(model).parameters())

    def loss_of(batch: Batch) -> StepLoss:
        with torch.autocast(target.device.type, torch.bfloat16, settings.bf16):
            sums = next_token_loss(
                model, target, batch.ids, batch.mask, batch.scores, settings
            )
        loss = sums.loss / sums.weight.clamp(min=1)
        return loss, sums.right.sum(), sums.total.sum()

    # The head and the table are the target's: they collect no gradient.
    train_loop("assistant", parameters, examples, settings, loss_of, on_step, quiet)
    return model.eval()


def next_token_loss(
    model: nn.Module,
    target: Target,
    ids: Tensor,
    mask: Tensor,
    scores: Tensor | None,
    settings: AssistantTraining,
) -> LossSums:
    """Cross entropy with the next token, summed over the places that count.

    Args:
        model: the assistant.
        target: supplies embedding and head.
        ids: (B, S) texts; mask: (B, S) supervised tokens.
        scores: (B, S) from which places are drawn; None for all places.
        settings: see `AssistantTraining`.
    """
    table = target.embedding_table.detach()
    embedded = F.embedding(ids.to(table.device), table).float()
    # Padding stands behind the texts, and nothing sees what is behind it.
    decoder = cast(Any, model).base_model
    hidden = decoder(inputs_embeds=embedded, use_cache=False)[0][:, :-1]
    labels, counts = ids[:, 1:], mask[:, 1:]
    if scores is not None and settings.places is not None:
        size = min(settings.places, counts.shape[1])
        ranked = scores[:, 1:].masked_fill(~counts, -1.0)
        places = ranked.topk(size, dim=1).indices  # (B, N)
        labels, counts = labels.gather(1, places), counts.gather(1, places)
        rows = places.to(hidden.device)[..., None].expand(-1, -1, hidden.shape[-1])
        hidden = hidden.gather(1, rows)
    device = hidden.device
    dtype = torch.bfloat16 if settings.bf16 else torch.float32
    return frozen_head_loss(
        hidden.to(dtype),
        target.head.weight.detach(),
        labels.to(device),
        counts.to(device),
        torch.ones(labels.shape[1]),
    )


@torch.inference_mode()
def agreement(
    model: nn.Module, target: Target, examples: Sequence[Example], batch_size: int = 16
) -> float:
    """Share of the answers' tokens that are the assistant's first choice."""
    right = total = 0
    for start in range(0, len(examples), batch_size):
        indices = range(start, min(start + batch_size, len(examples)))
        ids, mask = collate(examples, indices)
        sums = next_token_loss(model, target, ids, mask, None, AssistantTraining())
        right, total = right + int(sums.right.sum()), total + int(sums.total.sum())
    return right / max(total, 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train from the command line and write the folder."""
    parser = parser_for("assistant_training", __doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=2, dest="num_hidden_layers")
    parser.add_argument("--start", choices=STARTS, default="target")
    parser.add_argument("--places", type=int, default=64, help="of each text and step")
    return run_command(parser, arguments, _run)


def _run(asked) -> int:
    settings = settings_of(AssistantTraining, asked)
    settings.check()
    pair, taught, held_out = load_asked(asked)
    lines: list[dict] = []
    model = train_assistant(pair.target, taught, settings, on_step=lines.append)
    facts: dict = {
        "parameters": sum(p.numel() for p in own_modules(model).parameters())
    }
    if held_out:
        facts["held_out_agreement"] = round(agreement(model, pair.target, held_out), 4)
    if asked.bf16:
        own_modules(model).to(torch.bfloat16)
    save_assistant(model, asked.out)
    write_note(asked, settings, len(taught), len(lines), **facts)
    print(f"{len(lines)} steps, held-out agreement {facts.get('held_out_agreement')}")
    print(f"assistant: {asked.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

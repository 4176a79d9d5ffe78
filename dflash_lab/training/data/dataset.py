"""Training texts, and which of them make up a step.

Everything random about the data is a pure function of (seed, epoch, text): the order of
the batches and the scores from which anchors are drawn. So a run needs no stored random
state to resume, and two processes that share a batch see the texts, anchors and labels
that one process sees.

Leaves out: features (`features.py`) and the blocks themselves (`anchors.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dflash_lab.errors import DFlashLabError
from dflash_lab.training.corpus.corpus_file import read_corpus


@dataclass(frozen=True)
class Example:
    """One training text: `input_ids` (S,), the first `prompt_length` unsupervised."""

    input_ids: list[int]
    prompt_length: int


def load_examples(
    paths: Sequence[str | Path], max_length: int | None = None
) -> tuple[list[Example], list[dict]]:
    """Texts of corpus files, and the files' headers.

    Texts are cut at `max_length`; those left with fewer than two supervised tokens in a
    row hold no anchor and are dropped.

    Raises:
        DFlashLabError: no file, or no text with an anchor.
    """
    if not paths:
        raise DFlashLabError("no corpus is named; write one with `dflash-lab corpus`")
    examples, headers, rows = [], [], 0
    for path in paths:
        header, answers = read_corpus(Path(path))
        headers.append(header)
        for row in answers:
            rows += 1
            prompt, answer = row["prompt_ids"], row["answer_ids"]
            ids = (prompt + answer)[:max_length]
            if len(ids) - len(prompt) >= 2 and prompt:
                examples.append(Example(ids, len(prompt)))
    if not examples:
        names = ", ".join(str(path) for path in paths)
        raise DFlashLabError(
            f"none of the {rows} answers in {names} has two supervised tokens in a row"
            + (f" within max_length {max_length}" if max_length else "")
            + ": there is nothing to train on; write longer answers or raise the limit"
        )
    return examples, headers


class BatchPlan:
    """The order of batches: which texts each step sees.

    Texts of similar length share a batch, so that little is padding; batches come in
    random order, and both are drawn anew every epoch. The last, smaller batch of an
    epoch is kept.

    Args:
        lengths: tokens of each text.
        batch_size: texts per step, over all processes and accumulation rounds.
        seed: of all draws.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int):
        self.lengths = np.asarray(lengths)
        self.batch_size, self.seed = batch_size, seed
        self.steps_per_epoch = -(-len(self.lengths) // batch_size)
        self._epoch = -1
        self._batches: list[list[int]] = []

    def batch(self, step: int) -> tuple[int, list[int]]:
        """Epoch and text indices of a step, counted from 0."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._draw(epoch)
        return epoch, self._batches[place]

    def _draw(self, epoch: int) -> list[list[int]]:
        noise = np.random.default_rng((self.seed, 1, epoch))
        order = np.argsort(self.lengths + 16 * noise.random(len(self.lengths)))
        size = self.batch_size
        groups = [order[i : i + size].tolist() for i in range(0, len(order), size)]
        return [groups[i] for i in noise.permutation(len(groups))]


def anchor_scores(seed: int, epoch: int, indices: Sequence[int], width: int) -> Tensor:
    """(B, width) float32 uniform scores of each text's positions in this epoch.

    A text's scores do not depend on the batch or process it is in.
    """
    rows = [
        np.random.default_rng((seed, 2, epoch, i)).random(width, dtype=np.float32)
        for i in indices
    ]
    return torch.from_numpy(np.stack(rows))


def collate(
    examples: Sequence[Example], indices: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """`input_ids` (B, S) int64, zero behind their ends, and `loss_mask` (B, S) bool."""
    length = max(len(examples[i].input_ids) for i in indices)
    ids = torch.zeros(len(indices), length, dtype=torch.long)
    loss_mask = torch.zeros(len(indices), length, dtype=torch.bool)
    for row, i in enumerate(indices):
        example = examples[i]
        ids[row, : len(example.input_ids)] = torch.tensor(example.input_ids)
        loss_mask[row, example.prompt_length : len(example.input_ids)] = True
    return ids, loss_mask

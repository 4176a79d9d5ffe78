"""Drafting without a model: copy what followed the same words before.

The text's last n-gram is looked up in the text itself, prompt included, and what stood
behind its last occurrence is offered. It costs no pass, and helps where answers repeat:
code, rewriting, quoting.

Leaves out: n-grams of other texts, and several candidates for one n-gram.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_lab.drafter.config import check_block_size
from dflash_lab.errors import DFlashLabError
from dflash_lab.speculative.proposer import Proposal
from dflash_lab.target.target import Target


class NGramLookup:
    """Copies what followed the last occurrence of the text's latest n-gram.

    Args:
        block_size: K; at most K-1 tokens are copied.
        max_ngram: longest n-gram to look for; shorter ones are tried after it.
    """

    name = "ngram"
    target_layer_ids: tuple[int, ...] = ()

    def __init__(self, block_size: int = 8, max_ngram: int = 3):
        if max_ngram < 1:
            raise DFlashLabError(f"max_ngram {max_ngram} must be 1 or more")
        self.block_size, self.max_ngram = check_block_size(block_size), max_ngram

    def start(self, target: Target, batch_size: int, capacity: int) -> _NGramSession:
        return _NGramSession(batch_size, self.max_ngram)


class _NGramSession:
    def __init__(self, batch_size: int, max_ngram: int):
        self.max_ngram = max_ngram
        # Per row: n-gram -> position behind its last occurrence, and tokens indexed.
        self.index: list[dict[tuple[int, ...], int]] = [{} for _ in range(batch_size)]
        self.indexed = [0] * batch_size

    def observe(self, target_hidden, positions, rows) -> None:
        pass

    def propose(self, texts, num_drafts, sampling, seeds, details) -> Proposal:
        copies = [
            self._lookup(row, text)[:num_drafts] for row, text in enumerate(texts)
        ]
        counts = torch.tensor([len(copy) for copy in copies])
        tokens = torch.zeros(len(texts), int(counts.max()), dtype=torch.long)
        for row, copy in enumerate(copies):
            tokens[row, : len(copy)] = torch.tensor(copy, dtype=torch.long)
        return Proposal(tokens, counts)

    def _lookup(self, row: int, text: Sequence[int]) -> list[int]:
        index = self.index[row]
        # The last token ends the n-gram that is looked up, so it is not indexed yet.
        for end in range(self.indexed[row] + 1, len(text)):
            for n in range(1, min(self.max_ngram, end) + 1):
                index[tuple(text[end - n : end])] = end
        self.indexed[row] = len(text) - 1
        for n in range(min(self.max_ngram, len(text)), 0, -1):
            found = index.get(tuple(text[len(text) - n :]))
            if found is not None:
                return list(text[found:])
        return []

    def keep_rows(self, rows: Tensor) -> None:
        self.index = [self.index[row] for row in rows.tolist()]
        self.indexed = [self.indexed[row] for row in rows.tolist()]

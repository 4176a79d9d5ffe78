"""Building blocks for drafters of one's own, to be put into the loop.

    FromFunction(lambda text, limit: [...])     # any function that guesses tokens
    ConfidenceCut(DFlash(drafter), least=0.3)   # offers only what it is sure of
    BigramDFlash(drafter, table, weight=0.5)    # slots listen to the slot before

The target judges every draft, so none of them can change a text; they can only be fast
or slow. All run in the host loop.

Leaves out: training, and drafts that are drawn (`ConfidenceCut` and `BigramDFlash`
offer the most likely tokens; with temperature the match rule still holds).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dflash_lab.drafter.config import check_block_size
from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.errors import DFlashLabError
from dflash_lab.speculative.proposer import DFlash, DFlashSession, Proposal, Proposer
from dflash_lab.speculative.sampling import check_finite
from dflash_lab.target.target import Target


class FromFunction:
    """A function as a proposer.

    Args:
        function: called with the text's ids (prompt and output) and the number of
            drafts wanted; returns at most so many ids. It must not change the text.
        block_size: K; K-1 drafts are asked for.
        name: for tables.

    Raises:
        DFlashLabError: a block without drafts.
    """

    target_layer_ids: tuple[int, ...] = ()

    def __init__(
        self,
        function: Callable[[list[int], int], Sequence[int]],
        block_size: int = 8,
        name: str = "own",
    ):
        self.function, self.name = function, name
        self.block_size = check_block_size(block_size)

    def start(self, target: Target, batch_size: int, capacity: int):
        return _FunctionSession(self.function, target.vocab_size)


class _FunctionSession:
    def __init__(self, function, vocab_size: int):
        self.function, self.vocab_size = function, vocab_size

    def observe(self, target_hidden, positions, rows) -> None:
        pass

    def propose(self, texts, num_drafts, sampling, seeds, details) -> Proposal:
        drafts = [
            [int(token) for token in self.function(list(text), num_drafts)][:num_drafts]
            for text in texts
        ]
        for token in (token for row in drafts for token in row):
            if not 0 <= token < self.vocab_size:
                raise DFlashLabError(
                    f"the function drafted token {token}; ids are 0 to "
                    f"{self.vocab_size - 1}"
                )
        counts = torch.tensor([len(row) for row in drafts])
        tokens = torch.zeros(len(texts), int(counts.max()), dtype=torch.long)
        for place, row in enumerate(drafts):
            tokens[place, : len(row)] = torch.tensor(row, dtype=torch.long)
        return Proposal(tokens, counts)

    def keep_rows(self, rows: Tensor) -> None:
        pass


class ConfidenceCut:
    """Offers another proposer's drafts up to the first that it doubts.

    Fewer rows make verification cheaper where its cost grows with their number.

    Args:
        proposer: one that states its confidence, such as `DFlash`.
        least: probability that a draft must have, 0 to 1.

    Raises:
        DFlashLabError: `least` out of range.
    """

    def __init__(self, proposer: Proposer, least: float):
        if not 0 <= least <= 1:
            raise DFlashLabError(f"least {least} is no probability; give 0 to 1")
        self.proposer, self.least = proposer, least
        self.name = f"{proposer.name} cut at {least:g}"
        self.block_size = proposer.block_size
        self.target_layer_ids = proposer.target_layer_ids

    def start(self, target: Target, batch_size: int, capacity: int):
        return _CutSession(
            self.proposer.start(target, batch_size, capacity), self.least
        )


class _CutSession:
    def __init__(self, session, least: float):
        self.session, self.least = session, least

    def observe(self, target_hidden, positions, rows) -> None:
        self.session.observe(target_hidden, positions, rows)

    def propose(self, texts, num_drafts, sampling, seeds, details) -> Proposal:
        offered = self.session.propose(texts, num_drafts, sampling, seeds, True)
        if offered.tokens.shape[1] == 0:
            return offered
        if offered.confidence is None:
            raise DFlashLabError(
                "this proposer states no confidence, so nothing can be cut by it; use "
                "one that does, such as DFlash"
            )
        sure = (offered.confidence >= self.least).int().cumprod(dim=1).sum(dim=1)
        counts = torch.minimum(offered.num_drafts, sure.cpu())
        width = int(counts.max())
        log_probs = offered.log_probs
        return replace(
            offered,
            tokens=offered.tokens[:, :width],
            num_drafts=counts,
            log_probs=None if log_probs is None else log_probs[:, :width],
            confidence=offered.confidence[:, :width] if details else None,
        )

    def keep_rows(self, rows: Tensor) -> None:
        self.session.keep_rows(rows)


def bigram_table(
    texts: Iterable[Sequence[int]], vocab_size: int, smoothing: float = 0.1
) -> Tensor:
    """Which token follows which: log-probabilities, (V, V) float32.

    Args:
        texts: token ids, of the target's own text.
        vocab_size: V; meant for small vocabularies, the table has V x V numbers.
        smoothing: count given to pairs that never occur.
    """
    counts = torch.full((vocab_size, vocab_size), smoothing)
    for text in texts:
        ids = torch.tensor(list(text))
        pairs = torch.ones(len(ids) - 1)
        counts.index_put_((ids[:-1], ids[1:]), pairs, accumulate=True)
    return (counts / counts.sum(dim=1, keepdim=True)).log()


class BigramDFlash(DFlash):
    """DFlash whose slots are chosen from left to right, each after the one before.

    The block's logits come from one pass and know nothing of each other's choice. A
    table of followers is added to each slot's logits, in the row of the token chosen
    before: a Markov chain over the block, at the price of K-1 small sums.

    Args:
        drafter: a trained drafter.
        table: (V, V), log-probabilities of followers, see `bigram_table`.
        weight: of the table; 0 is `DFlash`.
        block_size: as for `DFlash`.

    Raises:
        DFlashLabError: a table of another vocabulary.
    """

    name = "dflash-bigram"

    def __init__(
        self,
        drafter: DFlashDraftModel,
        table: Tensor,
        weight: float = 0.5,
        block_size: int | None = None,
    ):
        size = drafter.config.vocab_size
        if table.shape != (size, size):
            raise DFlashLabError(
                f"a table of {tuple(table.shape)} for a vocabulary of {size}; make it "
                "with bigram_table and this size"
            )
        super().__init__(drafter, block_size)
        self.table, self.weight = table.to(drafter.device), weight

    def start(self, target: Target, batch_size: int, capacity: int):
        return _BigramSession(self, target, batch_size, capacity)


class _BigramSession(DFlashSession):
    def __init__(self, proposer: BigramDFlash, target, batch_size, capacity):
        super().__init__(proposer, target, batch_size, capacity)
        self.table, self.weight = proposer.table, proposer.weight

    def propose(self, texts, num_drafts, sampling, seeds, details) -> Proposal:
        if num_drafts == 0:
            return Proposal.none(len(texts))
        logits = self.block_logits(texts, num_drafts).float()
        check_finite(logits, "drafter")
        last = torch.tensor([text[-1] for text in texts], device=logits.device)
        tokens, confidence = [], []
        for slot in range(logits.shape[1]):
            scores = logits[:, slot] + self.weight * self.table[last]
            last = scores.argmax(dim=-1)
            chance = scores.softmax(dim=-1).gather(-1, last[:, None])[:, 0]
            tokens.append(last)
            confidence.append(chance)
        counts = torch.full((len(texts),), len(tokens))
        chosen = torch.stack(tokens, dim=1)
        sure = torch.stack(confidence, dim=1) if details else None
        return Proposal(chosen, counts, None, sure)

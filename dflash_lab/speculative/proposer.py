"""Who drafts: DFlash, or nobody.

The loop knows a proposer only as something that may listen to tapped target layers and
offers up to K-1 tokens per cycle. `start` opens a session that holds what belongs to
one generation (caches, indices), so a proposer can be shared.

Leaves out: judging drafts (`acceptance.py`), n-gram lookup (`ngram.py`), and drafters
that need several passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_lab.conditioning.cache import PositionCache
from dflash_lab.conditioning.taps import check_layer_ids
from dflash_lab.drafter.config import check_block_size
from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.errors import DFlashLabError
from dflash_lab.speculative.sampling import (
    STREAM_DRAFT,
    Sampling,
    check_finite,
    gumbel_noise,
    gumbel_sample,
    most_likely,
    warped_log_probs,
)
from dflash_lab.target.fused import as_fast_drafter
from dflash_lab.target.target import Target


@dataclass(frozen=True)
class Proposal:
    """Drafts of one cycle.

    Attributes:
        tokens: (B, G) int64, padded where a row drafts less.
        num_drafts: (B,) int64 on the CPU, real drafts of each row.
        log_probs: (B, G, V), the distribution the drafts were drawn from; None if they
            were not drawn.
        confidence: (B, G), the drafter's probability of each draft, where asked for.
    """

    tokens: Tensor
    num_drafts: Tensor
    log_probs: Tensor | None = None
    confidence: Tensor | None = None

    @classmethod
    def none(cls, rows: int) -> Proposal:
        """No draft for any of the rows."""
        counts = torch.zeros(rows, dtype=torch.long)
        return cls(counts[:, None][:, :0], counts)


class DraftSession(Protocol):
    """What a proposer keeps for one generation."""

    def observe(self, target_hidden: Tensor | None, positions: Tensor, rows: Tensor):
        """Features of tokens that became text.

        Args:
            target_hidden: (R, S, n*D); None if nothing is tapped.
            positions: (R, S) int64.
            rows: (R,) int64, the generation's rows they belong to.
        """

    def propose(
        self,
        texts: Sequence[Sequence[int]],
        num_drafts: int,
        sampling: Sampling,
        seeds: Tensor,
        details: bool,
    ) -> Proposal:
        """Draft at most `num_drafts` tokens behind each text (prompt and output)."""

    def keep_rows(self, rows: Tensor) -> None:
        """Forget all rows but these, in this order."""


class Proposer(Protocol):
    """A way of drafting."""

    name: str
    block_size: int
    target_layer_ids: tuple[int, ...]

    def start(self, target: Target, batch_size: int, capacity: int) -> DraftSession:
        """Open a session for `batch_size` rows of at most `capacity` positions."""


class Plain:
    """Nobody drafts: the loop becomes plain autoregressive decoding.

    Args:
        kernel_rows: rows of each pass. With the block size of a drafter, `strict`
            decoding runs the very kernels of a drafted run; rows behind the first are
            junk then.
    """

    name = "none"
    block_size = 1
    target_layer_ids: tuple[int, ...] = ()

    def __init__(self, kernel_rows: int = 1):
        if kernel_rows < 1:
            raise DFlashLabError(f"kernel_rows {kernel_rows} must be 1 or more")
        self.kernel_rows = kernel_rows

    def start(self, target: Target, batch_size: int, capacity: int) -> _PlainSession:
        return _PlainSession()


class _PlainSession:
    def observe(self, target_hidden, positions, rows) -> None:
        pass

    def propose(self, texts, num_drafts, sampling, seeds, details) -> Proposal:
        return Proposal.none(len(texts))

    def keep_rows(self, rows: Tensor) -> None:
        pass


class DFlash:
    """The DFlash drafter as a proposer.

    Args:
        drafter: a trained drafter; None, as a pair without one has, is refused.
        block_size: K at decoding; the trained one if None. A smaller one drafts less
            per cycle; a larger one was never trained.
        fused: decode with a copy of the weights laid out for speed (`target/fused.py`);
            False runs the drafter's own modules.

    Raises:
        DFlashLabError: a block size out of range.
    """

    name = "dflash"

    def __init__(
        self,
        drafter: DFlashDraftModel | None,
        block_size: int | None = None,
        fused: bool = True,
    ):
        if drafter is None:
            raise DFlashLabError("no drafter is loaded; give one, or use Plain()")
        trained = drafter.config.block_size
        self.drafter = drafter
        block_size = trained if block_size is None else block_size
        self.block_size = check_block_size(block_size, trained)
        self.kernel_rows = self.block_size
        self.target_layer_ids = drafter.config.target_layer_ids
        self.passes = as_fast_drafter(drafter) if fused else drafter

    def start(self, target: Target, batch_size: int, capacity: int) -> DFlashSession:
        check_pair(self.drafter, target)
        return DFlashSession(self, target, batch_size, capacity)


class DFlashSession:
    """A generation's drafter cache, and the pass over its blocks."""

    def __init__(
        self, proposer: DFlash, target: Target, batch_size: int, capacity: int
    ):
        self.drafter, self.target = proposer.drafter, target
        self.block_size = proposer.block_size
        self.cache = PositionCache(batch_size, capacity)
        self.passes = proposer.passes

    def observe(self, target_hidden, positions, rows) -> None:
        self.passes.append_context(target_hidden, positions, self.cache, rows)
        for row, end in zip(rows.tolist(), positions[:, -1].tolist(), strict=True):
            self.cache.lengths[row] = end + 1

    def propose(self, texts, num_drafts, sampling, seeds, details) -> Proposal:
        if num_drafts == 0:  # the last token of the budget needs no draft
            return Proposal.none(len(texts))
        logits = self.block_logits(texts, num_drafts)
        check_finite(logits, "drafter")
        counts = torch.full((len(texts),), logits.shape[1])
        log_probs = confidence = None
        if sampling.rule == "speculative" and not sampling.greedy:
            ends = torch.tensor([len(text) for text in texts])
            positions = ends[:, None] + torch.arange(logits.shape[1])
            positions, seeds = positions.to(logits.device), seeds.to(logits.device)
            size = logits.shape[-1]
            noise = gumbel_noise(seeds, positions, size, STREAM_DRAFT)
            log_probs = warped_log_probs(logits, sampling)
            tokens = gumbel_sample(log_probs, noise)
        else:
            tokens = most_likely(logits)
        if details:
            probs = logits.float().softmax(dim=-1)
            confidence = probs.gather(-1, tokens[..., None])[..., 0]
        return Proposal(tokens, counts, log_probs, confidence)

    def block_logits(self, texts: Sequence[Sequence[int]], num_drafts: int) -> Tensor:
        """One pass over every text's block: logits of its first drafts, (B, G, V)."""
        anchors = torch.tensor([[text[-1]] for text in texts])
        start = torch.tensor([len(text) - 1 for text in texts])
        # The whole block is always evaluated, even if fewer drafts fit: its rows see
        # each other, so a shorter block would give other proposals.
        mask = self.drafter.config.mask_token_id
        block = F.pad(anchors, (0, self.block_size - 1), value=mask)
        hidden = self.passes.draft(self.embed(block), start, self.cache)
        return self.logits(hidden[:, 1 : 1 + num_drafts])

    def embed(self, block: Tensor) -> Tensor:
        """Raw rows of the target's table, (B, K) -> (B, K, D)."""
        rows = F.embedding(block.to(self.target.device), self.target.embedding_table)
        scaled = rows * self.drafter.config.input_embedding_scale
        return scaled.to(self.drafter.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's head and the drafter's scaling, (B, G, D) -> (B, G, V)."""
        head = self.target.logits(hidden.to(self.target.dtype))
        return self.drafter.scale_logits(head)

    def keep_rows(self, rows: Tensor) -> None:
        self.cache.keep_rows(rows)


def check_pair(drafter: DFlashDraftModel, target: Target) -> None:
    """Refuse a drafter that was trained for another target.

    Raises:
        DFlashLabError: naming both sides of the misfit.
    """
    config = drafter.config
    trained_for = config.num_target_layers
    if trained_for is not None and trained_for != target.num_layers:
        raise DFlashLabError(
            f"the drafter was trained for a target of {trained_for} layers, this "
            f"target has {target.num_layers}; load the target it was trained for"
        )
    check_layer_ids(config.target_layer_ids, target.num_layers)
    if config.hidden_size != target.hidden_size:
        raise DFlashLabError(
            f"the drafter has hidden size {config.hidden_size}, the target "
            f"{target.hidden_size}; they share embedding and head, so it must be equal"
        )
    if config.vocab_size != target.vocab_size:
        raise DFlashLabError(
            f"the drafter was trained with a vocabulary of {config.vocab_size}, the "
            f"target has {target.vocab_size}; load the target it was trained for"
        )
    if config.mask_token_id >= target.embedding_table.shape[0]:
        raise DFlashLabError(
            f"mask_token_id {config.mask_token_id} has no row in the target's "
            f"embedding table of {target.embedding_table.shape[0]} rows"
        )

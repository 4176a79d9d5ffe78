"""Medusa-style heads as a proposer: one product, then the target's head, per cycle.

The heads read the target's last hidden state behind its final norm, which the loop's
taps do not offer: they keep outputs of inner layers. So a session listens to the
target's passes itself, and keeps one row for each text: that of its last token but one,
the last that the target has read.

Leaves out: the heads (`medusa.py`), and targets whose module for everything below the
head does not return `last_hidden_state`.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from dflash_lab.baselines.medusa import MedusaHeads
from dflash_lab.drafter.config import check_block_size
from dflash_lab.speculative.proposer import Proposal
from dflash_lab.speculative.sampling import (
    STREAM_DRAFT,
    check_finite,
    gumbel_noise,
    gumbel_sample,
    most_likely,
    warped_log_probs,
)
from dflash_lab.target.fused import FusedTap, FusedTarget
from dflash_lab.target.target import Target


class Medusa:
    """The heads as a proposer.

    Args:
        heads: trained heads.
        block_size: K at decoding; all heads if None. A smaller one uses the first K-1.

    Raises:
        DFlashLabError: a block size out of range.
    """

    name = "medusa"
    target_layer_ids: tuple[int, ...] = ()  # see `_LastHidden`

    def __init__(self, heads: MedusaHeads, block_size: int | None = None):
        trained = heads.config.block_size
        self.heads = heads
        block_size = trained if block_size is None else block_size
        self.block_size = check_block_size(block_size, trained)

    def start(self, target: Target, batch_size: int, capacity: int) -> _MedusaSession:
        config = self.heads.config
        target.check_shape(
            "a set of heads",
            config.num_target_layers,
            config.hidden_size,
            config.vocab_size,
        )
        return _MedusaSession(self.heads, target, batch_size)


class _MedusaSession:
    def __init__(self, heads: MedusaHeads, target: Target, batch_size: int):
        self.heads, self.target = heads, target
        self.last = torch.zeros(
            batch_size, target.hidden_size, dtype=target.dtype, device=target.device
        )
        self.listener = _listen(target)
        # A generation may end anywhere; its listener ends with its session.
        weakref.finalize(self, self.listener.close)

    def observe(self, target_hidden, positions, rows) -> None:
        hidden = self.listener.take()  # (B, T, D)
        # Tokens of a text come first in its row of the pass, so their number says
        # where the last one stands. They come as one long entry or as many of one.
        texts, entries = rows.unique_consecutive(return_counts=True)
        end = entries * positions.shape[1] - 1
        self.last[texts] = hidden[torch.arange(len(texts)), end]

    def propose(self, texts, num_drafts, sampling, seeds, details) -> Proposal:
        if num_drafts == 0:
            none = torch.zeros(len(texts), 0, dtype=torch.long)
            return Proposal(none, torch.zeros(len(texts), dtype=torch.long))
        logits = self.logits(num_drafts)
        check_finite(logits, "drafter")
        log_probs = confidence = None
        if sampling.rule == "speculative" and not sampling.greedy:
            start = torch.tensor([[len(text)] for text in texts])
            positions = (start + torch.arange(num_drafts)).to(logits.device)
            log_probs = warped_log_probs(logits, sampling)
            noise = gumbel_noise(
                seeds.to(logits.device), positions, logits.shape[-1], STREAM_DRAFT
            )
            tokens = gumbel_sample(log_probs, noise)
        else:
            tokens = most_likely(logits)
        if details:
            probs = logits.float().softmax(dim=-1)
            confidence = probs.gather(-1, tokens[..., None])[..., 0]
        counts = torch.full((len(texts),), num_drafts)
        return Proposal(tokens, counts, log_probs, confidence)

    def logits(self, num_drafts: int) -> Tensor:
        """(B, G, V) of the first G heads."""
        hidden = self.heads(self.last)[:, :num_drafts]
        return self.target.logits(hidden.to(self.target.dtype))

    def keep_rows(self, rows: Tensor) -> None:
        self.last = self.last[rows.to(self.last.device)]


def _listen(target: Target) -> _LastHidden | _FusedLastHidden:
    if isinstance(target, FusedTarget):
        return _FusedLastHidden(target)
    return _LastHidden(target)


class _LastHidden:
    """Keeps what a target's modules below the head return."""

    def __init__(self, target: Target):
        self._hidden: Tensor | None = None

        def keep(module, inputs, output):
            self._hidden = output.last_hidden_state

        self._handle = target.model.base_model.register_forward_hook(keep)

    def take(self) -> Tensor:
        """(B, T, D) of the last pass, which is then forgotten."""
        hidden, self._hidden = self._hidden, None
        assert hidden is not None  # a pass came before
        return hidden

    def close(self) -> None:
        """Stop listening."""
        self._handle.remove()


class _FusedLastHidden(FusedTap):
    """The same of passes that call no module: the last layer's output, then normed."""

    def __init__(self, target: FusedTarget):
        super().__init__(target._taps, (), target.num_layers)
        # The last layer is refused by name, as its features are normed in some tools
        # and raw in others. Here the norm follows, so nothing is left open.
        self.target_layer_ids = (target.num_layers - 1,)
        self._norm = target.model.base_model.norm

    def take(self) -> Tensor:
        """As `_LastHidden.take`."""
        return self._norm(super().take())

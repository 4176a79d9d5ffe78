"""The EAGLE-3-style head as a proposer: a chain of drafts, one pass each.

Features of tokens that became text are written into the head's cache with the
embedding of the token behind them; a draft's own row is overwritten once its true
feature is known.

Leaves out: the head itself (`eagle.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_lab.baselines.eagle import EagleHead, embed
from dflash_lab.conditioning.attention import attend
from dflash_lab.conditioning.cache import PositionCache, causal_mask
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
from dflash_lab.target.target import Target


class Eagle:
    """The head as a proposer.

    Args:
        head: a trained head.
        block_size: K; the chain has K-1 drafts, each a pass of the head.

    Raises:
        DFlashLabError: a block size below 2.
    """

    name = "eagle"

    def __init__(self, head: EagleHead, block_size: int = 8):
        self.head, self.block_size = head, check_block_size(block_size)
        self.target_layer_ids = head.config.target_layer_ids

    def start(self, target: Target, batch_size: int, capacity: int) -> _EagleSession:
        config = self.head.config
        target.check_shape(
            "the head", config.num_target_layers, config.hidden_size, config.vocab_size
        )
        return _EagleSession(self, target, batch_size, capacity)


class _EagleSession:
    def __init__(self, proposer: Eagle, target: Target, batch_size: int, capacity: int):
        self.head, self.target = proposer.head, target
        self.cache = PositionCache(batch_size, capacity)
        # Features that wait for the token behind theirs, by row, and where they start.
        self.waiting: list[list[Tensor]] = [[] for _ in range(batch_size)]
        self.first = [0] * batch_size

    def observe(self, target_hidden, positions, rows) -> None:
        for row, features in zip(rows.tolist(), target_hidden, strict=True):
            self.waiting[row].append(features)

    def propose(self, texts, num_drafts, sampling, seeds, details) -> Proposal:
        if num_drafts == 0:
            none = torch.zeros(len(texts), 0, dtype=torch.long)
            return Proposal(none, torch.zeros(len(texts), dtype=torch.long))
        hidden = torch.cat([self._catch_up(row, t) for row, t in enumerate(texts)])
        start = torch.tensor([[len(text) - 1] for text in texts])
        drawn = sampling.rule == "speculative" and not sampling.greedy
        tokens, drawn_from, confidence = [], [], []
        for step in range(num_drafts):
            scores = self.head.logits(hidden)[:, 0]  # (B, V')
            check_finite(scores, "drafter")
            if drawn:
                log_probs = self._widen(warped_log_probs(scores, sampling))[:, None]
                noise = gumbel_noise(
                    seeds.to(log_probs.device),
                    (start + 1 + step).to(log_probs.device),
                    log_probs.shape[-1],
                    STREAM_DRAFT,
                )
                token = gumbel_sample(log_probs, noise)[:, 0]
                drawn_from.append(log_probs)
            else:
                token = self.head.draft_ids[most_likely(scores)]
            tokens.append(token)
            if details:
                confidence.append(scores.float().softmax(dim=-1).amax(dim=-1))
            if step + 1 < num_drafts:
                hidden = self._feed(token[:, None], hidden, start + step)
        counts = torch.full((len(texts),), num_drafts)
        return Proposal(
            torch.stack(tokens, dim=1),
            counts,
            torch.cat(drawn_from, dim=1) if drawn else None,
            torch.stack(confidence, dim=1) if details else None,
        )

    def _catch_up(self, row: int, text) -> Tensor:
        """Feed features of new text; (1, 1, D) output at the last of them."""
        features = torch.cat(self.waiting[row])[None]
        start = self.first[row]
        count = features.shape[1]
        positions = start + torch.arange(count)[None]
        ids = torch.tensor([text[start + 1 : start + 1 + count]])
        embedding = embed(self.target.embedding_table, ids, self.head.dtype)
        hidden = self.head.fuse(features)
        out = self._pass(embedding, hidden, positions, torch.tensor([row]))
        self.waiting[row], self.first[row] = [], start + count
        return out[:, -1:]

    def _feed(self, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """One more row of each text, from drafts and the head's own output."""
        embedding = embed(self.target.embedding_table, tokens, self.head.dtype)
        return self._pass(embedding, hidden, positions, None)

    def _pass(self, embedding, hidden, positions, rows) -> Tensor:
        queries, keys, values = self.head.queries_keys_values(
            embedding, hidden, positions
        )
        span = self.cache.write_at(positions, rows)
        seen = self.cache.update(keys, values, 0)
        mask = causal_mask(positions, span, device=queries.device)
        return self.head.finish(hidden, attend(queries, *seen, mask))

    def _widen(self, log_probs: Tensor) -> Tensor:
        """(B, V') -> (B, V); what cannot be drafted has probability 0."""
        if log_probs.shape[-1] == self.target.vocab_size:
            return log_probs
        shape = (len(log_probs), self.target.vocab_size)
        wide = log_probs.new_full(shape, -torch.inf)
        return wide.index_copy(1, self.head.draft_ids, log_probs)

    def keep_rows(self, rows: Tensor) -> None:
        self.cache.keep_rows(rows)
        self.waiting = [self.waiting[row] for row in rows.tolist()]
        self.first = [self.first[row] for row in rows.tolist()]

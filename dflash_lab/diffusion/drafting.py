"""Drafting in several denoising steps, to measure what DFlash leaves out.

A drafter trained on all-masked blocks drafts in one pass. One trained with some slots
shown (`data.reveal`) can also go on: write the surest slots, look at the block again,
write the next. Each step is a pass, so it has to pay for itself in acceptance.

Leaves out: drawn drafts; every step takes the most likely tokens.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from dflash_lab.diffusion.samplers import tokens_per_step
from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.errors import DFlashLabError
from dflash_lab.speculative.proposer import DFlash, DFlashSession, Proposal
from dflash_lab.speculative.sampling import check_finite
from dflash_lab.target.target import Target

ORDERS = ("left", "confidence")


class StepwiseDFlash(DFlash):
    """DFlash with several denoising steps per block; one step is DFlash itself.

    Args:
        drafter: a trained drafter.
        steps: passes per block, at most K - 1 of use.
        order: which slots are written first: the leftmost, or the surest.
        block_size: as for `DFlash`.

    Raises:
        DFlashLabError: no step, or an unknown order.
    """

    name = "dflash-stepwise"

    def __init__(
        self,
        drafter: DFlashDraftModel,
        steps: int,
        order: str = "left",
        block_size: int | None = None,
    ):
        if steps < 1 or order not in ORDERS:
            raise DFlashLabError(
                f"steps {steps} must be 1 or more and order {order!r} one of "
                f"{', '.join(ORDERS)}"
            )
        super().__init__(drafter, block_size)
        self.steps, self.order = steps, order

    def start(self, target: Target, batch_size: int, capacity: int):
        return _StepwiseSession(self, target, batch_size, capacity)


class _StepwiseSession(DFlashSession):
    def __init__(self, proposer: StepwiseDFlash, target, batch_size, capacity):
        super().__init__(proposer, target, batch_size, capacity)
        self.steps, self.order = proposer.steps, proposer.order

    def propose(self, texts, num_drafts, sampling, seeds, details) -> Proposal:
        if num_drafts == 0:
            return Proposal.none(len(texts))
        mask = self.drafter.config.mask_token_id
        anchors = torch.tensor([[text[-1]] for text in texts])
        start = torch.tensor([len(text) - 1 for text in texts])
        block = F.pad(anchors, (0, self.block_size - 1), value=mask)  # (B, K)
        for count in tokens_per_step(self.block_size - 1, self.steps):
            hidden = self.passes.draft(self.embed(block), start, self.cache)
            logits = self.logits(hidden[:, 1:]).float()  # (B, K-1, V)
            check_finite(logits, "drafter")
            # The mask itself is never a draft.
            logits[..., mask] = -torch.inf
            sure, tokens = logits.softmax(-1).max(-1)
            if self.order == "left":
                sure = -torch.arange(self.block_size - 1.0).expand_as(sure)
            sure = sure.masked_fill(block[:, 1:] != mask, -torch.inf)
            chosen = sure.topk(count, dim=-1).indices
            filled = block[:, 1:].scatter(-1, chosen, tokens.gather(-1, chosen))
            block = torch.cat([block[:, :1], filled], 1)
        counts = torch.full((len(texts),), num_drafts)
        return Proposal(block[:, 1 : 1 + num_drafts], counts)

"""The verification rules: how much of a draft becomes text.

Both rules leave the target's distribution untouched, whatever the drafter says.

* `accept_matching`: the target samples its own token at every row, greedy or sampled,
  and drafts count as long as they equal the choices. Every emitted token is a choice of
  the target, so only the speed depends on the drafter.
* `accept_speculatively`: the drafter samples from q, and a draft x is kept with
  probability min(1, p(x) / q(x)); the first rejected one is replaced by a draw from the
  normalised excess max(p - q, 0) (Leviathan et al. 2023; Chen et al. 2023). Slots are
  drafted independently here; that costs acceptance, never correctness, because q of a
  slot is fixed before anything of the block is known.

Leaves out: where logits and noise come from (`sampling.py`), and tree drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """What became of one block per row.

    Attributes:
        accepted: (B,) int64, drafts kept, 0..G.
        next_token: (B,) int64, the target's own token behind them (bonus token).
        target_tokens: (B, G+1) int64, the target's token at every row; -1 where the
            rule draws none (speculative sampling past the first rejection).
        next_probs: (B, V), the distribution `next_token` was drawn from; None under
            `accept_matching`.
    """

    accepted: Tensor
    next_token: Tensor
    target_tokens: Tensor
    next_probs: Tensor | None = None


def leading_true(matches: Tensor) -> Tensor:
    """Length of the run of True at the start of each row: (B, G) bool -> (B,)."""
    return matches.long().cumprod(dim=1).sum(dim=1)


def accept_matching(
    draft_tokens: Tensor, target_tokens: Tensor, num_drafts: Tensor | None = None
) -> Verdict:
    """Keep drafts up to the first that differs from the target's own choice.

    Args:
        draft_tokens: (B, G) int64.
        target_tokens: (B, G+1) int64; column j is the target's choice for the place of
            draft j, the last one follows all drafts.
        num_drafts: (B,) int64, real drafts of each row; the rest is padding.
    """
    matches = draft_tokens == target_tokens[:, :-1]
    accepted = leading_true(matches & _is_draft(draft_tokens, num_drafts))
    next_token = target_tokens.gather(1, accepted[:, None])[:, 0]
    return Verdict(accepted, next_token, target_tokens)


def accept_speculatively(
    draft_tokens: Tensor,
    draft_log_probs: Tensor | None,
    target_log_probs: Tensor,
    coins: Tensor,
    noise: Tensor,
    num_drafts: Tensor | None = None,
) -> Verdict:
    """Speculative sampling.

    Args:
        draft_tokens: (B, G) int64, each drawn from its own row of `draft_log_probs`.
        draft_log_probs: (B, G, V), the very distribution the drafts were drawn from;
            None for drafts that were not drawn (argmax, lookup), whose distribution is
            one-hot.
        target_log_probs: (B, G+1, V), normalised, after all warpers.
        coins: (B, G), uniform in (0, 1).
        noise: (B, V), Gumbel noise for the replacement.
        num_drafts: as in `accept_matching`.
    """
    target_probs = target_log_probs.exp()
    if draft_log_probs is None:
        one_hot = torch.nn.functional.one_hot(draft_tokens, target_probs.shape[-1])
        draft_probs = one_hot.to(target_probs.dtype)
    else:
        draft_probs = draft_log_probs.exp().to(target_probs.dtype)
    index = draft_tokens[..., None]
    p = target_probs[:, :-1].gather(-1, index)[..., 0]
    q = draft_probs.gather(-1, index)[..., 0]
    # u * q < p instead of u < p / q: no division by a q that underflowed.
    kept = coins * q < p
    is_draft = _is_draft(draft_tokens, num_drafts)
    accepted = leading_true(kept & is_draft)

    # Where all drafts were kept there is no q to subtract: the bonus is drawn from p.
    draft_probs = draft_probs * is_draft[..., None]
    draft_probs = torch.nn.functional.pad(draft_probs, (0, 0, 0, 1))
    row = accepted[:, None, None].expand(-1, 1, target_probs.shape[-1])
    p_row = target_probs.gather(1, row)[:, 0]
    excess = (p_row - draft_probs.gather(1, row)[:, 0]).clamp(min=0)
    total = excess.sum(dim=-1, keepdim=True)
    # p = q everywhere leaves no excess; rounding can still reject then.
    next_probs = torch.where(total > 0, excess / total, p_row)
    next_token = (next_probs.log() + noise).argmax(dim=-1)

    slots = torch.arange(target_probs.shape[1], device=draft_tokens.device)
    drafts = torch.nn.functional.pad(draft_tokens, (0, 1), value=-1)
    choices = torch.where(slots == accepted[:, None], next_token[:, None], drafts)
    target_tokens = choices.masked_fill(slots > accepted[:, None], -1)
    return Verdict(accepted, next_token, target_tokens, next_probs)


def _is_draft(draft_tokens: Tensor, num_drafts: Tensor | None) -> Tensor:
    slots = torch.arange(draft_tokens.shape[1], device=draft_tokens.device)
    if num_drafts is None:
        return torch.ones_like(draft_tokens, dtype=torch.bool)
    return slots < num_drafts.to(draft_tokens.device)[:, None]

"""What any draft would have won, without decoding: replay on plain decoding's own text.

The text is plain decoding's whatever was drafted, so a drafter can be run behind every
position of it at once, as in training. From that table the acceptance length of every
way to draft follows exactly: walk from anchor to anchor, and see how far the drafts go
along with the text.

Leaves out: ways to draft (`tree_policies.py`), and the cost of rows (`speedup.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_lab.conditioning.masks import block_position_ids, training_masks
from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.errors import DFlashLabError
from dflash_lab.speculative.proposer import check_pair
from dflash_lab.target.target import Target

CANDIDATES = 32
ANCHORS_AT_ONCE = 32


@dataclass(frozen=True)
class ReplayTable:
    """One text, and what the drafter offered behind each of its positions.

    Attributes:
        text: ids of prompt and answer.
        prompt_length: tokens of the prompt.
        budget: most new tokens of the answer.
        candidates: (A, K-1, M) int32; row a belongs to the anchor at position
            `prompt_length + a`, column j to slot j + 1, best first.
        log_probs: (A, K-1, M) float32 of them.
        rank: (A, K-1) int32, rank of the text's own token in its slot, from 0; -1
            behind the end of the text.
        log_prob: (A, K-1) float32 of the text's own token; nan behind the end.
        target_prob: (A,) float32, the target's probability, at temperature 1, of the
            token behind each anchor; nan behind the last.
        target_margin: (A,) float32, difference of the target's two largest logits
            there.
    """

    text: list[int]
    prompt_length: int
    budget: int
    candidates: np.ndarray
    log_probs: np.ndarray
    rank: np.ndarray
    log_prob: np.ndarray
    target_prob: np.ndarray
    target_margin: np.ndarray

    @property
    def answer(self) -> list[int]:
        """The answer's ids."""
        return self.text[self.prompt_length :]


@torch.inference_mode()
def replay_table(
    drafter: DFlashDraftModel,
    target: Target,
    prompt: Sequence[int],
    answer: Sequence[int],
    budget: int | None = None,
    candidates: int = CANDIDATES,
) -> ReplayTable:
    """Run the drafter behind every token of an answer.

    Args:
        drafter: in the target's dtype.
        target: wrote the answer, greedily.
        prompt: ids.
        answer: ids, the stop token included if there was one.
        budget: most new tokens that the answer was allowed; its length if None.
        candidates: M, kept for each slot.

    Raises:
        DFlashLabError: drafter and target do not fit, or an empty answer.
    """
    check_pair(drafter, target)
    if not answer:
        raise DFlashLabError("an answer without tokens cannot be replayed")
    text, start = [*prompt, *answer], len(prompt)
    ids = torch.tensor([text])
    with target.tap(drafter.config.target_layer_ids) as tap:
        positions = torch.arange(len(text) - 1)[None]
        cache = target.new_cache(1, len(text))
        anchors = torch.arange(start, len(text) - 1)
        logits = target.forward(ids[:, :-1], positions, cache, logits_to_keep=anchors)
        features = tap.take()
    assert features is not None  # a drafter taps layers
    parts = [
        _slots(drafter, target, features, ids, anchors, candidates)
        for anchors in torch.arange(start, len(text)).split(ANCHORS_AT_ONCE)
    ]
    kept, log_probs, rank, log_prob = (
        np.concatenate(p) for p in zip(*parts, strict=True)
    )
    return ReplayTable(
        text,
        start,
        budget or len(answer),
        kept,
        log_probs,
        rank,
        log_prob,
        *_target_view(logits[0].float(), ids[0, start + 1 :]),
    )


def _target_view(logits: Tensor, own: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Probability of the text's tokens, and margins, with nan behind the last."""
    probs = logits.softmax(dim=-1).gather(-1, own[:, None].to(logits.device))[:, 0]
    top = logits.topk(2, dim=-1).values
    margin = top[:, 0] - top[:, 1]
    missing = np.array([np.nan], dtype=np.float32)
    return (
        np.concatenate([probs.cpu().numpy(), missing]),
        np.concatenate([margin.cpu().numpy(), missing]),
    )


def _slots(
    drafter: DFlashDraftModel,
    target: Target,
    features: Tensor,
    ids: Tensor,
    anchors: Tensor,
    candidates: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Candidates of some anchors' slots, and where the text's own tokens stand."""
    config, length = drafter.config, ids.shape[1]
    size = config.block_size
    block = F.pad(ids[0, anchors][:, None], (0, size - 1), value=config.mask_token_id)
    embedded = F.embedding(block.to(target.device), target.embedding_table)
    noise = (embedded * config.input_embedding_scale).to(drafter.dtype)
    rows = anchors[None].to(target.device)
    position_ids = torch.cat(
        [
            torch.arange(length - 1, device=rows.device)[None],
            block_position_ids(rows, size),
        ],
        dim=1,
    )
    masks = training_masks(drafter.patterns, rows, length - 1, size, form="split")
    hidden = drafter(noise.flatten(0, 1)[None], features, position_ids, masks)
    hidden = hidden.view(len(anchors), size, -1)[:, 1:]
    logits = drafter.scale_logits(target.logits(hidden.to(target.dtype))).float()
    scores = logits.log_softmax(dim=-1)  # (A, K-1, V)
    top = scores.topk(min(candidates, scores.shape[-1]), dim=-1)
    places = anchors[:, None] + torch.arange(1, size)
    inside = places < length
    own = ids[0, places.clamp(max=length - 1)].to(scores.device)
    log_prob = scores.gather(-1, own[..., None])[..., 0]
    rank = (scores > log_prob[..., None]).sum(-1).cpu()
    return (
        top.indices.int().cpu().numpy(),
        top.values.cpu().numpy(),
        rank.masked_fill(~inside, -1).int().numpy(),
        log_prob.cpu().masked_fill(~inside, torch.nan).numpy(),
    )


# Nodes of a draft in an order in which parents come first: (parent, token), where the
# parent is a number of a node before it, -1 for the anchor.
Tree = Sequence[tuple[int, int]]
# Called once for each text; gives what drafts behind the anchor of row a of the table,
# at most so many nodes deep.
Policy = Callable[[ReplayTable], Callable[[int, int], Tree]]


@dataclass(frozen=True)
class Replay:
    """What a policy won.

    Attributes:
        lengths: acceptance length of each cycle, one list per text.
        rows: rows of each cycle's verification, the anchor's included.
    """

    lengths: list[list[int]]
    rows: list[list[int]]

    @property
    def tau(self) -> float:
        """Mean acceptance length, pooled over cycles, bonus token counted."""
        return float(np.mean([n for lengths in self.lengths for n in lengths]))

    @property
    def mean_rows(self) -> float:
        """Mean rows of a verification."""
        return float(np.mean([n for rows in self.rows for n in rows]))

    def survival(self, slots: int) -> list[float]:
        """Share of cycles whose text reaches slot 1, 2, ..., by accepted drafts."""
        lengths = np.array([n for lengths in self.lengths for n in lengths])
        return [float((lengths > slot).mean()) for slot in range(1, slots + 1)]


def replay(tables: Iterable[ReplayTable], policy: Policy) -> Replay:
    """Walk every text with a policy's drafts.

    A cycle stops where the loop's would: at the last token that the budget allows, and
    with the text.
    """
    lengths, rows = [], []
    for table in tables:
        draft, answer = policy(table), table.answer
        place, mine, used = 0, [], []
        while place < len(answer) - 1:
            most = (
                table.budget - place - 2
            )  # drafts; the target's own token is one more
            tree = draft(place, most)
            kept = walk(tree, answer[place + 1 :])
            length = min(kept + 1, len(answer) - 1 - place)
            mine.append(length)
            used.append(len(tree) + 1)
            place += length
        lengths.append(mine)
        rows.append(used)
    return Replay(lengths, rows)


def walk(tree: Tree, text: Sequence[int]) -> int:
    """How many nodes of a tree lie on the text's way from the anchor."""
    children = {(parent, token): node for node, (parent, token) in enumerate(tree)}
    node, kept = -1, 0
    for token in text:
        found = children.get((node, token))
        if found is None:
            break
        node, kept = found, kept + 1
    return kept

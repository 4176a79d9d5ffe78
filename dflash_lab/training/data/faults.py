"""The known bugs of drafter training, as named switches.

Each has been reported for a real trainer; each trains to fair or excellent figures and
then decodes badly, while the output stays lossless. A fault bends one thing: a training
batch, the tapped layers, or the texts. All are off by default; `training/parity.py`
catches each of them, and the same functions tell which fault a finished drafter was
trained with.

Leaves out: faults of engines that serve a good drafter wrongly.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dflash_lab.conditioning.masks import block_position_ids
from dflash_lab.drafter.config import DFlashConfig
from dflash_lab.errors import DFlashLabError
from dflash_lab.training.data.batch import TrainingBatch
from dflash_lab.training.data.dataset import Example

Bend = Callable[[TrainingBatch, DFlashConfig, Tensor], TrainingBatch]


@dataclass(frozen=True)
class Fault:
    """A bug to switch on.

    Attributes:
        name: of the switch.
        what: what goes wrong, in a sentence.
        fix: what the right code does.
        on_batch: changes a batch, given the drafter's config and the texts' ids (B, S).
        on_scores: changes the scores from which anchors are drawn, given the loss mask
            and K.
        on_layers: changes the tapped layers.
        on_texts: changes the texts.
    """

    name: str
    what: str
    fix: str
    on_batch: Bend = lambda batch, config, ids: batch
    on_scores: Callable[[Tensor, Tensor, int], Tensor] = lambda scores, mask, k: scores
    on_layers: Callable[[Sequence[int]], Sequence[int]] = lambda layers: layers
    on_texts: Callable[[list[Example]], list[Example]] = lambda texts: texts


def _label_shift(batch: TrainingBatch, config: DFlashConfig, ids: Tensor):
    blocks, size = batch.blocks, config.block_size
    position = block_position_ids(blocks.anchor_positions, size) + 1
    inside = (position < ids.shape[1]).view(blocks.labels.shape)
    position = position.clamp(max=ids.shape[1] - 1)
    labels = ids.to(position.device).gather(1, position).view(blocks.labels.shape)
    mask = blocks.label_mask & inside
    return replace(batch, blocks=replace(blocks, labels=labels, label_mask=mask))


def _see_context_until(batch: TrainingBatch, block_size: int, extra: int):
    """Context up to `extra` rows behind the last permitted one."""
    length = batch.target_hidden.shape[1]
    anchors = batch.blocks.anchor_positions.repeat_interleave(block_size, dim=1)
    valid = batch.blocks.valid.repeat_interleave(block_size, dim=1)
    column = torch.arange(length, device=anchors.device)
    sees = (column < anchors[..., None] + extra) & valid[..., None]
    masks = _boolean_masks(batch)
    for mask in masks.values():
        mask[:, 0, :, :length] |= sees
    return replace(batch, masks=masks)


def _context_leak(batch: TrainingBatch, config: DFlashConfig, ids: Tensor):
    return _see_context_until(batch, config.block_size, config.block_size)


def _phantom_anchor(batch: TrainingBatch, config: DFlashConfig, ids: Tensor):
    return _see_context_until(batch, config.block_size, 1)


def _causal_block(batch: TrainingBatch, config: DFlashConfig, ids: Tensor):
    length, size = batch.target_hidden.shape[1], config.block_size
    rows = batch.blocks.anchor_positions.shape[1] * size
    offset = torch.arange(rows, device=batch.position_ids.device) % size
    masks = _boolean_masks(batch)
    for mask in masks.values():
        mask[:, 0, :, length:] &= offset[None, :] <= offset[:, None]
    return replace(batch, masks=masks)


def _spread_scores(scores: Tensor, loss_mask: Tensor, block_size: int) -> Tensor:
    """Anchor scores of `fixed_blocks`: a grid of one block size, best in order.

    Args:
        scores: (B, S) float32, replaced.
        loss_mask: (B, S) bool.
        block_size: K, the grid's step, from each text's first supervised token.
    """
    first = loss_mask.int().argmax(dim=1, keepdim=True)
    place = torch.arange(scores.shape[1]) - first
    on_grid = (place >= 0) & (place % block_size == 0)
    order = 1.0 - place / (2 * scores.shape[1])
    # Places off the grid count as no candidates: select_anchors drops scores below 0.
    return order.masked_fill(~on_grid, -1.0)


def _wrong_rope(batch: TrainingBatch, config: DFlashConfig, ids: Tensor):
    # A linear RoPE scaling of 4 that decoding knows nothing of.
    return replace(batch, position_ids=batch.position_ids / 4)


def _layers_off_by_one(target_layer_ids: Sequence[int]) -> tuple[int, ...]:
    return tuple(max(0, layer - 1) for layer in target_layer_ids)


def _off_policy(examples: list[Example]) -> list[Example]:
    """Every prompt gets the next one's answer: fluent text the target did not write."""
    following = [*examples[1:], *examples[:1]]
    return [
        Example(
            one.input_ids[: one.prompt_length] + two.input_ids[two.prompt_length :],
            one.prompt_length,
        )
        for one, two in zip(examples, following, strict=True)
    ]


def _boolean_masks(batch: TrainingBatch) -> dict[str, Any]:
    """Copies of the masks, which must be tensors."""
    if not all(isinstance(mask, Tensor) for mask in batch.masks.values()):
        raise DFlashLabError(
            "faults change boolean masks; train them with attention: sdpa"
        )
    return copy.deepcopy(batch.masks)


FAULTS = {
    fault.name: fault
    for fault in (
        Fault(
            "label_shift",
            "slot k learns the token at anchor + k + 1, but its draft is taken for the "
            "token at anchor + k",
            "label slot k with the token at its own position, anchor + k",
            on_batch=_label_shift,
        ),
        Fault(
            "context_leak",
            "blocks see target features behind their anchor, which hold their answers",
            "let a block see context strictly before its own anchor only",
            on_batch=_context_leak,
        ),
        Fault(
            "phantom_anchor",
            "blocks see the anchor's own features, which decoding does not have yet",
            "let a block see context strictly before its anchor, not at it",
            on_batch=_phantom_anchor,
        ),
        Fault(
            "causal_block",
            "rows of a block see only earlier rows of it, in decoding they see all",
            "make full-attention layers bidirectional inside the block",
            on_batch=_causal_block,
        ),
        Fault(
            "fixed_blocks",
            "anchors lie on a grid, always the same ones, in place of random ones",
            "draw anchors at random among all supervised tokens, anew every epoch",
            on_scores=_spread_scores,
        ),
        Fault(
            "layer_ids_off_by_one",
            "features come from the layers before those that the config names",
            "tap the output of layer l, which is hidden_states[l + 1]",
            on_layers=_layers_off_by_one,
        ),
        Fault(
            "wrong_rope",
            "positions are rotated by other angles in training than in decoding",
            "use the config's rope settings and absolute positions in both",
            on_batch=_wrong_rope,
        ),
        Fault(
            "off_policy_text",
            "each prompt is followed by the answer to another, which the target would "
            "not have written there",
            "let the target write the answers, with the chat template of deployment",
            on_texts=_off_policy,
        ),
    )
}


def find_faults(names: Sequence[str]) -> list[Fault]:
    """Faults by name.

    Raises:
        DFlashLabError: an unknown name.
    """
    for name in names:
        if name not in FAULTS:
            raise DFlashLabError(
                f"unknown fault {name!r}; choose of {', '.join(sorted(FAULTS))}"
            )
    return [FAULTS[name] for name in names]

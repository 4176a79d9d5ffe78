"""The drafter that a run starts with: fresh, from the target's layers, or trained.

Leaves out: the checkpoint format (`drafter/checkpoint.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dflash_lab.conditioning.taps import find_decoder_layers
from dflash_lab.drafter.config import DFlashConfig
from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.drafter.variants import build_drafter, load_drafter
from dflash_lab.errors import DFlashLabError
from dflash_lab.pairs.pair import Pair
from dflash_lab.speculative.proposer import check_pair
from dflash_lab.training.run.config import TrainConfig

# An unused row of the packaged target's table: `<empty_output>` occurs in no text.
SMOL_MASK_ID = 16


def make_drafter(config: TrainConfig, pair: Pair) -> DFlashDraftModel:
    """The drafter to train: fresh, or that of `init_from`; in float32.

    Raises:
        DFlashLabError: no mask token is known, or drafter and target do not fit.
    """
    settings = config.drafter
    if settings.init_from:
        drafter = load_drafter(settings.init_from, torch.float32)
        check_pair(drafter, pair.target)
        return drafter
    mask_id = settings.mask_token_id
    if mask_id is None:
        mask_id = _own_mask_id(pair)
    chosen = (
        {"target_layer_ids": tuple(settings.target_layer_ids)}
        if settings.target_layer_ids
        else {"num_features": settings.num_features}
    )
    drafter_config = DFlashConfig.for_target(
        pair.target.config,
        mask_token_id=mask_id,
        num_hidden_layers=settings.num_hidden_layers,
        block_size=settings.block_size,
        conditioning="input" if settings.conditioning == "input" else "kv",
        **chosen,
    )
    drafter = build_drafter(drafter_config)
    drafter.init_weights(torch.Generator().manual_seed(config.seed))
    check_pair(drafter, pair.target)
    if settings.init_layers:
        copy_target_layers(drafter, pair, settings.init_layers)
    return drafter


def copy_target_layers(
    drafter: DFlashDraftModel, pair: Pair, layers: Sequence[int]
) -> None:
    """Start drafter layers, and the final norm, with weights of the target.

    Args:
        drafter: changed in place.
        pair: the target.
        layers: a target layer for each drafter layer. What a target layer does not
            have (norms of queries and keys in Llama) stays as it was.

    Raises:
        DFlashLabError: not one for each drafter layer, or no such layer.
    """
    own = find_decoder_layers(pair.target.model)
    if len(layers) != len(drafter.layers) or not all(0 <= i < len(own) for i in layers):
        raise DFlashLabError(
            f"drafter.init_layers {list(layers)} must name one of the target's "
            f"{len(own)} layers for each of the drafter's {len(drafter.layers)}"
        )
    with torch.no_grad():
        for layer, number in zip(drafter.layers, layers, strict=True):
            weights = dict(own[number].named_parameters())
            for name, parameter in layer.named_parameters():
                if name in weights and weights[name].shape == parameter.shape:
                    parameter.copy_(weights[name])
        norm = getattr(pair.target.model.base_model, "norm", None)
        if norm is not None and norm.weight.shape == drafter.norm.weight.shape:
            drafter.norm.weight.copy_(norm.weight)


def _own_mask_id(pair: Pair) -> int:
    if pair.name == "smol":
        return SMOL_MASK_ID
    vocabulary = pair.tokenizer.get_vocab() if pair.tokenizer else {}
    for name in ("<|mask|>", "<|MASK|>", "<mask>", "[MASK]"):
        if name in vocabulary:
            return vocabulary[name]
    rows = pair.target.embedding_table.shape[0]
    if vocabulary and max(vocabulary.values()) + 1 < rows:
        return max(vocabulary.values()) + 1  # the first row without a token
    raise DFlashLabError(
        f"the table of {pair.name} has {rows} rows and no spare one; set "
        "drafter.mask_token_id to a row that no text uses (never padding or end)"
    )

"""What a run trains with, made from its settings: the batches and the objective.

Leaves out: the order in which a run is put together (`train.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.errors import DFlashLabError
from dflash_lab.pairs.pair import Pair
from dflash_lab.training.data.dataset import Example
from dflash_lab.training.data.faults import find_faults
from dflash_lab.training.data.feature_store import cache_features
from dflash_lab.training.data.features import OfflineFeatures, OnlineFeatures
from dflash_lab.training.data.pipeline import Pipeline
from dflash_lab.training.objective import HeadRows, Objective
from dflash_lab.training.run.config import TrainConfig

if TYPE_CHECKING:
    from accelerate import Accelerator


def make_pipeline(
    config: TrainConfig,
    pair: Pair,
    drafter: DFlashDraftModel,
    examples: list[Example],
    accelerator: Accelerator,
) -> Pipeline:
    """Batches of the texts, with what the faults bend."""
    faults = find_faults(config.faults)
    layers: Sequence[int] = drafter.config.target_layer_ids
    for fault in faults:
        layers = fault.on_layers(layers)
    return Pipeline(
        drafter.config,
        examples,
        _features(config, pair, examples, layers, accelerator),
        batch_size=config.data.batch_size,
        num_anchors=config.data.num_anchors,
        seed=config.seed,
        accumulation=config.data.accumulation,
        faults=faults,
        backend=_backend(config, accelerator.device),
        device=accelerator.device,
    )


def make_objective(
    config: TrainConfig,
    drafter: DFlashDraftModel,
    pair: Pair,
    pipeline: Pipeline,
) -> Objective:
    """Drafter and loss; features are scaled by what the pipeline's texts need."""
    wanted, scale = config.objective, pipeline.feature_scale()
    rows = HeadRows(
        pair.target,
        pipeline.examples,
        wanted.head_tokens,
        wanted.extra_negatives,
        config.seed,
    )
    objective = Objective(
        drafter, pair.target, rows, scale, wanted.loss, wanted.gamma, wanted.chunk
    )
    if config.drafter.init_from:
        objective.start_from(drafter)
    if config.drafter.conditioning == "none":
        # Without a projection every context row is a key and value of zero.
        objective.drafter.fc.weight.data.zero_()
        objective.drafter.fc.weight.requires_grad_(False)
    return objective


def _features(
    config: TrainConfig,
    pair: Pair,
    examples: list[Example],
    layers: Sequence[int],
    accelerator: Accelerator,
) -> OnlineFeatures | OfflineFeatures:
    kl = config.objective.loss == "kl"
    if config.data.features == "online":
        return OnlineFeatures(pair.target, layers, kl)
    folder = Path(config.data.feature_folder or Path(config.out) / "features")
    texts = [example.input_ids for example in examples]
    if accelerator.is_main_process:
        cache_features(pair.target, texts, layers, folder, head_inputs=kl)
    accelerator.wait_for_everyone()
    return OfflineFeatures(folder, kl, verify=False)


def _backend(config: TrainConfig, device: torch.device) -> str:
    asked = config.objective.attention
    if asked == "flex" and device.type != "cuda":
        raise DFlashLabError(
            f"FlexAttention trains on CUDA only, not on {device}; use attention: auto"
        )
    if asked != "auto":
        return asked
    if config.faults:
        return "sdpa"  # the only form that faults can bend
    if device.type == "cuda":
        return "flex"
    # Compiled for a CPU, the split products run slower than the ready-made kernel.
    return "sdpa" if config.objective.compile else "split"

"""From the texts to a step's batches, for one process among several.

Leaves out: the order of texts (`dataset.py`) and the layout of blocks (`batch.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

import torch

from dflash_lab.drafter.config import DFlashConfig
from dflash_lab.training.data.anchors import reveal_slots
from dflash_lab.training.data.batch import TrainingBatch, build_batch
from dflash_lab.training.data.dataset import BatchPlan, Example, anchor_scores, collate
from dflash_lab.training.data.faults import Fault
from dflash_lab.training.data.features import (
    OfflineFeatures,
    OnlineFeatures,
    feature_scale,
)


@dataclass
class Pipeline:
    """Batches of a run.

    Args:
        config: the drafter's.
        examples: the texts.
        features: of the same texts in the same order.
        batch_size: texts per step, over all processes and accumulation rounds.
        num_anchors: N, most blocks per text.
        seed: of order and anchors.
        accumulation: passes that a process makes for a step.
        faults: bugs to switch on.
        backend: form of the masks, see `masks.FORMS`; faults need `sdpa`.
        device: where the passes run.

    Attributes:
        reveal: share of blocks that show some of their slots. Set it after the checks,
            which compare with decoding in one step.
    """

    config: DFlashConfig
    examples: Sequence[Example]
    features: OnlineFeatures | OfflineFeatures
    _: KW_ONLY
    batch_size: int
    num_anchors: int
    seed: int = 0
    accumulation: int = 1
    faults: Sequence[Fault] = ()
    backend: str = "sdpa"
    device: torch.device | str = "cpu"
    reveal: float = field(default=0.0, init=False)

    def __post_init__(self):
        lengths = [len(example.input_ids) for example in self.examples]
        self.plan = BatchPlan(lengths, self.batch_size, self.seed)

    def step(self, step: int, rank: int = 0, world: int = 1) -> list[TrainingBatch]:
        """This process's share of a step, one batch for each accumulation round.

        Every process makes as many passes as the others, since they wait for each
        other in each; one that has no text left passes one whose labels do not count.
        """
        epoch, indices = self.plan.batch(step)
        rounds = min(self.accumulation, -(-len(indices) // world))
        mine = indices[rank::world]
        parts = [mine[i::rounds] for i in range(rounds)]
        return [
            self.batch(part or indices[:1], epoch, counts=bool(part)) for part in parts
        ]

    def batch(
        self, indices: Sequence[int], epoch: int, counts: bool = True
    ) -> TrainingBatch:
        """The batch of given texts.

        Args:
            indices: numbers of the texts.
            epoch: decides the anchors.
            counts: False leaves it without anchors.
        """
        ids, loss_mask = collate(self.examples, indices)
        loss_mask &= counts
        scores = anchor_scores(self.seed, epoch, indices, ids.shape[1])
        for fault in self.faults:
            scores = fault.on_scores(scores, loss_mask, self.config.block_size)
        hidden, head_inputs = self.features.batch(indices, ids)
        batch = build_batch(
            self.config,
            ids,
            loss_mask,
            hidden,
            scores,
            self.num_anchors,
            head_inputs=head_inputs,
            backend=self.backend,
            device=self.device,
        )
        if self.reveal:
            size = batch.blocks.labels[0].numel()
            # Other draws than those of the anchors, but functions of the same things.
            draws = anchor_scores(self.seed + 1, epoch, indices, size)
            draws = draws.view(batch.blocks.labels.shape).to(self.device)
            blocks = reveal_slots(batch.blocks, self.reveal, draws)
            batch = replace(batch, blocks=blocks)
        for fault in self.faults:
            batch = fault.on_batch(batch, self.config, ids)
        return batch

    def feature_scale(self, samples: int = 64) -> torch.Tensor:
        """`features.feature_scale` over evenly spaced texts."""
        picked = range(0, len(self.examples), max(1, len(self.examples) // samples))
        parts = []
        for i in picked:
            ids, _ = collate(self.examples, [i])
            parts.append(self.features.batch([i], ids)[0][0].cpu())
        return feature_scale(parts)

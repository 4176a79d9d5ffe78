"""Examines a finished drafter beside its target: does it fit, and how was it trained?

The target answers held-out prompts, and the drafter drafts behind every place of the
answers in one training pass. Three things are read from that: whether walking the
drafts gives the tau that the loop measures, whether the features matter, and whether
the drafter would do better under a convention it should not have been trained with.

Leaves out: training runs that can be looked into (`training/parity.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dflash_lab.conditioning.taps import check_layer_ids
from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.errors import DFlashLabError
from dflash_lab.speculative.generate import speculative_generate
from dflash_lab.speculative.proposer import DFlash, check_pair
from dflash_lab.target.target import Target
from dflash_lab.training.convention_checks import Check, fault_check
from dflash_lab.training.data.batch import TrainingBatch
from dflash_lab.training.data.dataset import Example, collate
from dflash_lab.training.data.faults import FAULTS
from dflash_lab.training.data.features import OnlineFeatures
from dflash_lab.training.data.pipeline import Pipeline
from dflash_lab.training.objective import HeadRows, Objective

# Faults that can be tried on a finished drafter, by changing what it is given.
TRIED = ("label_shift", "context_leak", "phantom_anchor", "causal_block", "wrong_rope")


@dataclass
class _Drafts:
    """Argmax drafts at every candidate anchor of some texts."""

    right: Tensor  # (B, N, K-1) bool
    known: Tensor  # (B, N, K-1) bool, places with a label

    def score(self) -> float:
        """Mean tokens per cycle if each cycle began at a random place."""
        whole = self.known.all(-1)
        reach = self.right[whole].cumprod(-1).sum(-1).float()
        return 1.0 + float(reach.mean()) if len(reach) else float("nan")

    def slot_accuracy(self) -> list[float]:
        total = self.known.sum((0, 1)).clamp(min=1)
        return ((self.right & self.known).sum((0, 1)) / total).tolist()


class Examination:
    """A drafter, a target, and texts that the target wrote.

    Args:
        drafter: in the target's dtype.
        target: its target.
        examples: prompts with the target's greedy answers.
        tau: that the loop measured on them, nan if it did not.

    Raises:
        DFlashLabError: drafter and target do not fit.
    """

    def __init__(
        self,
        drafter: DFlashDraftModel,
        target: Target,
        examples: Sequence[Example],
        tau: float = float("nan"),
    ):
        check_pair(drafter, target)
        self.drafter, self.target, self.tau = drafter, target, tau
        self.examples = list(examples)
        self.objective = Objective(drafter, target, HeadRows(target)).eval()

    @classmethod
    def of_prompts(
        cls,
        drafter: DFlashDraftModel,
        target: Target,
        prompts: Sequence[Sequence[int]],
        stop_token_ids: Sequence[int] = (),
        max_new_tokens: int = 96,
    ) -> Examination:
        """Let the pair answer prompts (token ids) greedily, and examine that.

        Raises:
            DFlashLabError: all answers are shorter than a block.
        """
        check_pair(drafter, target)
        generation = speculative_generate(
            target,
            DFlash(drafter),
            [list(p) for p in prompts],
            max_new_tokens=max_new_tokens,
            stop_token_ids=stop_token_ids,
        )
        examples, lengths = [], []
        for row, answer in enumerate(generation.output_ids):
            if len(answer) > drafter.config.block_size:
                prompt = prompts[row]
                examples.append(Example([*prompt, *answer], len(prompt)))
                lengths += generation.trace.acceptance_lengths[row]
        if not examples:
            raise DFlashLabError(
                "every answer of the target is shorter than a block; give other prompts"
            )
        return cls(drafter, target, examples, sum(lengths) / len(lengths))

    def batch(self, target_layer_ids: Sequence[int] | None = None) -> TrainingBatch:
        """All candidate anchors of all texts, with features of these layers."""
        ids = target_layer_ids or self.drafter.config.target_layer_ids
        pipeline = Pipeline(
            self.drafter.config,
            self.examples,
            OnlineFeatures(self.target, ids),
            batch_size=len(self.examples),
            num_anchors=10**6,
            device=self.target.device,
        )
        return pipeline.batch(range(len(self.examples)), epoch=0)

    @torch.no_grad()
    def drafts(
        self,
        change: Callable[[TrainingBatch], TrainingBatch] = lambda batch: batch,
        target_layer_ids: Sequence[int] | None = None,
    ) -> _Drafts:
        """Drafts under a changed batch."""
        batch = change(self.batch(target_layer_ids))
        hidden = self.objective.hidden(batch)
        labels = batch.blocks.labels[..., 1:]
        right = torch.zeros_like(labels, dtype=torch.bool)
        for row in range(len(hidden)):  # logits of one text at a time
            logits = self.target.head(hidden[row].to(self.target.dtype))
            logits = self.drafter.scale_logits(logits)
            right[row] = logits.argmax(-1) == labels[row]
        return _Drafts(right, batch.blocks.label_mask[..., 1:])

    def score_under(self, fault: str) -> float:
        """Tokens a cycle from a random place, if drafting had this fault's rule.

        Args:
            fault: one of `TRIED`.
        """
        ids, _ = collate(self.examples, range(len(self.examples)))
        bend, config = FAULTS[fault].on_batch, self.drafter.config
        return self.drafts(lambda batch: bend(batch, config, ids)).score()

    def score_without_features(self) -> float:
        """Tokens a cycle from a random place, with all features zeroed."""
        return self.drafts(_without_features).score()

    def score_moved(self, offset: int) -> float | None:
        """The same with the features of layers so far away; None if there are none."""
        ids = self.drafter.config.target_layer_ids
        moved = tuple(layer + offset for layer in ids)
        try:
            check_layer_ids(moved, self.target.num_layers)
        except DFlashLabError:
            return None
        return self.drafts(target_layer_ids=moved).score()

    def walk(self, drafts: _Drafts) -> list[int]:
        """Acceptance lengths of a loop that walks the texts with these drafts."""
        lengths = []
        anchors = self.batch().blocks
        for row, example in enumerate(self.examples):
            place = {
                int(a): n
                for n, a in enumerate(anchors.anchor_positions[row])
                if bool(anchors.valid[row, n])
            }
            position, end = example.prompt_length, len(example.input_ids)
            while position < end - 1:
                if position not in place:
                    break
                n = place[position]
                good = (drafts.right[row, n] & drafts.known[row, n]).int().cumprod(0)
                length = min(int(good.sum()) + 1, end - 1 - position)
                lengths.append(length)
                position += length
        return lengths

    def walked_tau(self, drafts: _Drafts) -> float:
        """Mean of `walk`."""
        lengths = self.walk(drafts)
        return sum(lengths) / max(1, len(lengths))


def examine(examination: Examination) -> list[Check]:
    """All checks of a finished drafter."""
    clean = examination.drafts()
    drafter, score = examination.drafter, clean.score()
    accuracy = " ".join(f"{rate:.2f}" for rate in clean.slot_accuracy())
    checks = [
        Check(
            "finite weights",
            all(bool(w.isfinite().all()) for w in drafter.state_dict().values()),
            "no NaN or infinity in the weights",
            "the checkpoint was saved after an overflow, perhaps in float16",
            "train and export in bfloat16 or float32",
        ),
        Check(
            "learned anything",
            clean.slot_accuracy()[0] > 0.1,
            f"accuracy of slots 1.. on the target's own text: {accuracy}",
            "untrained weights, another target's drafter, or a broken mask token",
            "compare target, tokenizer and mask_token_id with those of training",
        ),
        _walk_check(examination, clean),
        _feature_check(examination, score),
        _rope_check(examination),
    ]
    for name in TRIED:
        other = examination.score_under(name)
        checks.append(_compare(f"not trained with {name}", score, other, name))
    checks.append(_layer_check(examination, score))
    return checks


def _compare(name: str, score: float, other: float, fault: str) -> Check:
    measured = (
        f"{score:.2f} tokens a cycle as decoded, {other:.2f} under the fault's rule"
    )
    return fault_check(name, measured, fault, other <= 1.05 * score + 0.03)


def _walk_check(examination: Examination, clean: _Drafts) -> Check:
    walked = examination.walked_tau(clean)
    gap = abs(walked - examination.tau) / examination.tau
    return Check(
        "training path = decoding path",
        gap < 0.05,
        f"tau {walked:.2f} by walking the drafts of a training pass, "
        f"{examination.tau:.2f} by the loop",
        "the loop gives the drafter other context than training did",
        "compare caches, positions and the order of target_layer_ids",
    )


def _feature_check(examination: Examination, score: float) -> Check:
    deaf = examination.score_without_features()
    return Check(
        "features matter",
        deaf < score - 0.02,
        f"{score:.2f} tokens a cycle, {deaf:.2f} with features zeroed",
        "the drafter has not learned to read the target's features: too little "
        "training, or features of the wrong layers",
        "train longer, with features scaled; check target_layer_ids",
    )


def _rope_check(examination: Examination) -> Check:
    own = examination.drafter.config.rope
    theta = examination.target.config.to_dict().get("rope_parameters") or {}
    theta = theta.get("rope_theta", own["rope_theta"])
    return Check(
        "RoPE settings",
        own["rope_theta"] == theta,
        f"theta {own['rope_theta']:g} in the drafter, {theta:g} in the target",
        "the drafter's config lost the target's RoPE settings, or was trained with "
        "settings of its own",
        "if it was trained so, this is harmless; otherwise write the target's "
        "rope_parameters into config.json",
    )


def _without_features(batch: TrainingBatch) -> TrainingBatch:
    return replace(batch, target_hidden=torch.zeros_like(batch.target_hidden))


def _layer_check(examination: Examination, score: float) -> Check:
    best, found = 0.0, 0
    for offset in (-1, 1):
        other = examination.score_moved(offset)
        if other is not None and other > best:
            best, found = other, offset
    name = f"layer ids not off by one (tried {found:+d})"
    return _compare(name, score, best, "layer_ids_off_by_one")

"""The bug clinic: what a finished drafter shows, beside what its training showed.

    board = [examine_patient(letter, pair, prompts) for letter in PATIENTS]

A patient is a drafter of the family that was trained with a fault, under a letter. Its
symptoms are the accuracies of its last training steps, the same on the target's own
text as decoding sees it, and how it would do under other rules.
`checks_before_training` shows what could have been seen before the first step.

Leaves out: verdicts on finished drafters (`diagnosis.py`); pictures
    (`views/clinic.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash_lab.clinic.diagnosis import TRIED, Examination
from dflash_lab.clinic.family import load_member, member_folder, member_metrics
from dflash_lab.drafter.config import DFlashConfig
from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.errors import DFlashLabError
from dflash_lab.pairs.pair import Pair
from dflash_lab.pairs.prompts import load_prompts
from dflash_lab.speculative.generate import speculative_generate
from dflash_lab.speculative.proposer import Plain
from dflash_lab.training.convention_checks import Check
from dflash_lab.training.data.dataset import Example
from dflash_lab.training.data.faults import find_faults
from dflash_lab.training.data.features import OnlineFeatures
from dflash_lab.training.data.pipeline import Pipeline
from dflash_lab.training.objective import HeadRows, Objective
from dflash_lab.training.parity import check_training

HEALTHY = "healthy"
# Letter to member of the family. Whoever reads this knows the diagnoses.
PATIENTS = {
    "A": "fault-wrong-rope",
    "B": "fault-phantom-anchor",
    "C": "fault-causal-block",
    "D": "fault-context-leak",
    "E": "fault-off-policy-text",
    "F": "fault-layer-ids-off-by-one",
    "G": "fault-label-shift",
    "H": "fault-fixed-blocks",
}


@dataclass(frozen=True)
class Symptoms:
    """What can be seen of a drafter from outside.

    Attributes:
        name: a letter, or `healthy`.
        training: accuracy of slots 1..K-1 at the end of training, on training texts.
        decoding: the same on the target's own held-out text, from every place.
        tau: tokens a cycle when decoding that text.
        score: tokens a cycle from a random place of it.
        under: the score if the drafter were given another input: by a fault's name,
            `features_zeroed`, `layers_before`, `layers_after`.
    """

    name: str
    training: tuple[float, ...]
    decoding: tuple[float, ...]
    tau: float
    score: float
    under: dict[str, float]


def examine_patient(
    name: str, pair: Pair, prompts: Sequence[Sequence[int]], max_new_tokens: int = 96
) -> Symptoms:
    """Let a patient draft, and look.

    Args:
        name: a letter of `PATIENTS`, or `healthy`.
        pair: the tiny pair; only its target is used.
        prompts: token ids, held out.
        max_new_tokens: of each answer.

    Raises:
        DFlashLabError: no such patient.
    """
    if name != HEALTHY and name not in PATIENTS:
        raise DFlashLabError(
            f"no patient {name!r}; there are {', '.join(PATIENTS)} and {HEALTHY!r}"
        )
    member = "base" if name == HEALTHY else PATIENTS[name]
    examination = Examination.of_prompts(
        load_member(member), pair.target, prompts, pair.stop_token_ids, max_new_tokens
    )
    drafts = examination.drafts()
    under = {"features_zeroed": examination.score_without_features()}
    under |= {fault: examination.score_under(fault) for fault in TRIED}
    for where, offset in (("layers_before", -1), ("layers_after", 1)):
        moved = examination.score_moved(offset)
        if moved is not None:
            under[where] = moved
    return Symptoms(
        name,
        tuple(member_metrics(member)[-1]["accuracy"]),
        tuple(drafts.slot_accuracy()),
        examination.tau,
        drafts.score(),
        under,
    )


def checks_before_training(
    fault: str | None, pair: Pair, max_new_tokens: int = 60
) -> list[Check]:
    """What the trainer's checks say before step 1, with a bug switched on.

    Args:
        fault: of `training.faults.FAULTS`; None for sound code.
        pair: the tiny pair; its target writes a few texts to look at.
        max_new_tokens: of each text.

    Raises:
        DFlashLabError: an unknown fault.
    """
    faults = find_faults([fault] if fault else [])
    prompts = [
        pair.encode(prompt.turns[0])
        for name in pair.prompt_sets
        for prompt in load_prompts(name, 2)
    ]
    answers = speculative_generate(
        pair, Plain(), prompts, max_new_tokens=max_new_tokens
    )
    examples = [
        Example([*prompt, *answer], len(prompt))
        for prompt, answer in zip(prompts, answers.output_ids, strict=True)
    ]
    drafter = DFlashDraftModel(DFlashConfig.from_folder(member_folder("base")))
    drafter.init_weights(torch.Generator().manual_seed(0))
    layers: Sequence[int] = drafter.config.target_layer_ids
    for each in faults:
        examples = each.on_texts(examples)
        layers = each.on_layers(layers)
    pipeline = Pipeline(
        drafter.config,
        examples,
        OnlineFeatures(pair.target, layers),
        batch_size=len(examples),
        num_anchors=16,
        faults=faults,
        backend="sdpa",  # the only form that faults can bend
    )
    rows = HeadRows(pair.target)
    objective = Objective(drafter, pair.target, rows, pipeline.feature_scale())
    return check_training(objective, pipeline, pair.target)

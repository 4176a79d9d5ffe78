"""A sound run passes every check; every known fault is caught, and named."""

from __future__ import annotations

import pytest
import torch
from helpers import random_drafter, random_target, run, training_texts

from dflash_lab.clinic.diagnosis import TRIED, Examination, examine
from dflash_lab.clinic.symptoms import SYMPTOMS, symptom_table
from dflash_lab.errors import DFlashLabError
from dflash_lab.target.fused import as_target
from dflash_lab.training.convention_checks import require
from dflash_lab.training.data.faults import FAULTS, find_faults
from dflash_lab.training.data.features import OnlineFeatures
from dflash_lab.training.data.pipeline import Pipeline
from dflash_lab.training.objective import HeadRows, Objective
from dflash_lab.training.parity import check_masks, check_training

CAUGHT_BY = {
    "label_shift": "slot convention",
    "context_leak": "attention mask",
    "phantom_anchor": "attention mask",
    "causal_block": "attention mask",
    "fixed_blocks": "random anchors",
    "layer_ids_off_by_one": "features",
    "wrong_rope": "positions for RoPE",
    "off_policy_text": "the target's own text",
}
# What also goes wrong end to end, whichever convention was broken.
ALSO = {
    "context_leak": {
        "training path = decoding path",
        "no block sees its future or a neighbour",
    },
    "phantom_anchor": {
        "training path = decoding path",
        "no block sees its future or a neighbour",
    },
    "causal_block": {"training path = decoding path"},
    "wrong_rope": {"training path = decoding path"},
}


def setting(faults=(), **overrides):
    target = random_target(0)
    if "off_policy_text" in faults:  # a target that is never sure writes any text
        target.head.weight.data *= 5
        target = as_target(target.model)  # packed anew
    options = {"num_hidden_layers": 2, "target_layer_ids": (1, 2)} | overrides
    drafter = random_drafter(target, **options)
    drafter.init_weights(torch.Generator().manual_seed(0))
    for parameter in drafter.parameters():
        if parameter.dim() > 1:
            parameter.data *= 2
    faults = find_faults(faults)
    examples = training_texts(target)
    ids = drafter.config.target_layer_ids
    for fault in faults:
        examples = fault.on_texts(examples)
        ids = fault.on_layers(ids)
    pipeline = Pipeline(
        drafter.config,
        examples,
        OnlineFeatures(target, ids),
        batch_size=4,
        num_anchors=8,
        faults=faults,
    )
    objective = Objective(drafter, target, HeadRows(target), pipeline.feature_scale())
    return objective, pipeline, target


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4},
        {"final_logit_softcapping": 20.0, "input_embedding_scale": 2.0},
    ],
)
def test_a_sound_run_passes_every_check(overrides):
    checks = check_training(*setting(**overrides))
    assert [str(c) for c in checks if not c.passed] == []
    assert len(checks) == 10
    require(checks)


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_every_fault_is_caught_and_named(name):
    checks = check_training(*setting([name]))
    failed = {c.name: c for c in checks if not c.passed}
    assert CAUGHT_BY[name] in failed
    assert failed.keys() <= {CAUGHT_BY[name], "first loss"} | ALSO.get(name, set())
    assert failed.keys() >= ALSO.get(name, set())
    assert failed[CAUGHT_BY[name]].cause == FAULTS[name].what
    with pytest.raises(DFlashLabError, match="would not match decoding"):
        require(checks)


@pytest.mark.parametrize(
    "part,found", [("context", "2 context and 0 block"), ("block", "0 context and 1")]
)
def test_a_wrong_split_mask_is_caught(part, found):
    _, pipeline, _ = setting()
    pipeline.backend = "split"
    batch = pipeline.batch([0, 1], 0)
    assert check_masks(batch, pipeline).passed
    (mask,) = batch.masks.values()
    getattr(mask, part)[..., -1, -1] ^= True  # of each text, or of all
    check = check_masks(batch, pipeline)
    assert not check.passed and found in check.measured


def test_a_mask_token_that_is_text_is_caught():
    objective, pipeline, target = setting()
    config = pipeline.config
    common = pipeline.examples[0].input_ids[5]
    object.__setattr__(config, "mask_token_id", common)
    failed = {
        c.name for c in check_training(objective, pipeline, target) if not c.passed
    }
    assert "mask token" in failed


def test_a_head_that_is_not_the_targets_is_caught():
    objective, pipeline, target = setting()
    noise = torch.randn(61, 32, generator=torch.Generator().manual_seed(3)) * 20
    objective._frozen[1].head = noise
    failed = {
        c.name for c in check_training(objective, pipeline, target) if not c.passed
    }
    assert failed == {"first loss"}


def test_unknown_faults_are_refused():
    with pytest.raises(DFlashLabError, match="unknown fault 'typo'"):
        find_faults(["typo"])


# --- finished drafters -------------------------------------------------------------


def trained(tmp_path, fault=None, steps=220):
    result = run(
        tmp_path,
        faults=[fault] if fault else [],
        optimizer={"steps": steps, "learning_rate": 1e-2},
        data={"num_anchors": 24},
    )
    target = random_target(0)
    drafter = type(result.drafter).from_pretrained(result.folder, torch.float32)
    prompts = [e.input_ids[:3] for e in training_texts(target)]
    return Examination.of_prompts(drafter, target, prompts, max_new_tokens=24), result


@pytest.mark.slow
def test_a_sound_drafter_passes_the_examination(tmp_path):
    pytest.importorskip("accelerate")
    examination, _ = trained(tmp_path)
    checks = examine(examination)
    assert [str(c) for c in checks if not c.passed] == []
    assert len(checks) == 5 + len(TRIED) + 1
    assert examination.tau > 2.5


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["label_shift", "context_leak", "wrong_rope"])
def test_a_faulty_drafter_is_found_out(tmp_path, fault):
    pytest.importorskip("accelerate")
    examination, result = trained(tmp_path, fault)
    metrics = result.folder.parent / "metrics.jsonl"
    from dflash_lab.training.run.metrics import read_metrics

    # The symptom: right in training, rejected in decoding.
    line = read_metrics(metrics)[-1]
    assert line["accuracy"][0] > 0.6
    assert examination.tau < 0.75 * line["predicted_tau"]
    failed = {c.name: c for c in examine(examination) if not c.passed}
    assert f"not trained with {fault}" in failed
    assert failed[f"not trained with {fault}"].cause == FAULTS[fault].what


def test_walking_the_drafts_gives_the_loops_tau():
    target = random_target(0)
    drafter = random_drafter(target)
    prompts = [e.input_ids[:3] for e in training_texts(target)]
    examination = Examination.of_prompts(drafter, target, prompts, max_new_tokens=24)
    walked = examination.walked_tau(examination.drafts())
    assert walked == pytest.approx(examination.tau, rel=1e-6)


def test_symptoms_are_sentences():
    table = symptom_table()
    assert len(SYMPTOMS) >= 8
    for symptom, causes, test in SYMPTOMS:
        assert symptom in table and causes in table and test in table

"""Fixtures of all tests: the conformance pair, and a random pair."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from helpers import CONFORMANCE, random_drafter, random_target
from transformers import AutoModelForCausalLM

from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.target.target import Target


@pytest.fixture(scope="session")
def conformance_target() -> Target:
    model = AutoModelForCausalLM.from_pretrained(
        CONFORMANCE / "target", dtype=torch.float32
    )
    return Target(model)


@pytest.fixture(scope="session")
def conformance_drafter() -> DFlashDraftModel:
    return DFlashDraftModel.from_pretrained(CONFORMANCE / "drafter")


@pytest.fixture(scope="session")
def target() -> Target:
    return random_target()


@pytest.fixture(scope="session")
def drafter(target) -> DFlashDraftModel:
    return random_drafter(target)

"""Shared fixtures: the reference pair, and random pairs of every size."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dflash_lab.config import DFlashConfig
from dflash_lab.drafter import DFlashDraftModel, build_drafter
from dflash_lab.fused import as_target
from dflash_lab.target import Target

torch.set_num_threads(1)  # models this small only lose time to threads
FIXTURES = Path(__file__).parent / "fixtures"
CONFORMANCE = FIXTURES / "conformance"


def random_target(seed: int = 0, dtype=torch.float32, **overrides) -> Target:
    """A random Qwen3 target whose greedy text does not loop at once."""
    fields = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "eos_token_id": None,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**{**fields, **overrides}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)  # far from ties
    return as_target(model.to(dtype))


def random_drafter(
    target: Target, seed: int = 0, block_size: int = 6, **overrides
) -> DFlashDraftModel:
    """A random drafter that fits a target."""
    fields = {"num_hidden_layers": 2, "target_layer_ids": (1, 2), "mask_token_id": 60}
    config = DFlashConfig.for_target(
        target.config, block_size=block_size, **{**fields, **overrides}
    )
    drafter = build_drafter(config)
    drafter.init_weights(torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return drafter.eval()


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


def training_texts(target: Target, count: int = 8, length: int = 24) -> list:
    """Texts that a random target wrote greedily behind prompts of three tokens."""
    from reference import generate_greedily

    from dflash_lab.training.dataset import Example

    prompts = [[1 + i, 3 + i % 2, 5] for i in range(count)]
    return [Example(p + generate_greedily(target, p, length), 3) for p in prompts]


def write_corpus_file(path: Path, examples, target: Target | None = None) -> Path:
    """A corpus file that holds these texts."""
    import json

    header = {} if target is None else {"target_fingerprint": target.fingerprint()}
    rows = [{"corpus": header}]
    for index, example in enumerate(examples):
        ids, end = example.input_ids, example.prompt_length
        rows.append({"index": index, "prompt_ids": ids[:end], "answer_ids": ids[end:]})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    return path

"""What tests of several rooms share: random models, texts, and a run of seconds.

Slow plain twins are in `reference.py`, pytest's fixtures in `conftest.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from reference import generate_greedily
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_lab.drafter.config import DFlashConfig
from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.drafter.variants import build_drafter
from dflash_lab.pairs.pair import Pair
from dflash_lab.target.fused import as_target
from dflash_lab.target.target import Target
from dflash_lab.training.data.dataset import Example
from dflash_lab.training.run.config import from_dict
from dflash_lab.training.run.train import train

# Also in the processes that tests start: models this small only lose time to threads.
torch.set_num_threads(1)

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
CONFORMANCE = TESTS / "fixtures" / "conformance"


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


def training_texts(target: Target, count: int = 8, length: int = 24) -> list:
    """Texts that a random target wrote greedily behind prompts of three tokens."""
    prompts = [[1 + i, 3 + i % 2, 5] for i in range(count)]
    return [Example(p + generate_greedily(target, p, length), 3) for p in prompts]


def write_corpus_file(path: Path, examples, target: Target | None = None) -> Path:
    """A corpus file that holds these texts."""
    header = {} if target is None else {"target_fingerprint": target.fingerprint()}
    rows = [{"corpus": header}]
    for index, example in enumerate(examples):
        ids, end = example.input_ids, example.prompt_length
        rows.append({"index": index, "prompt_ids": ids[:end], "answer_ids": ids[end:]})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    return path


def bare_pair(seed=0) -> Pair:
    """A random target without tokenizer or prompts."""
    return Pair("random", random_target(seed), None, None, ())


def settings(folder: Path, **changes) -> dict:
    """A run of seconds; the corpus is written on the first call."""
    corpus = folder / "corpus.jsonl"
    if not corpus.exists():
        folder.mkdir(parents=True, exist_ok=True)
        target = random_target(0)
        write_corpus_file(corpus, training_texts(target), target)
    values = {
        "out": str(folder / "run"),
        "target": "random",
        "device": "cpu",
        "drafter": {
            "num_hidden_layers": 2,
            "block_size": 4,
            "target_layer_ids": [1, 2],
            "mask_token_id": 60,
        },
        "data": {"corpus": [str(corpus)], "batch_size": 3, "num_anchors": 8},
        "optimizer": {"learning_rate": 1e-2, "steps": 12},
        "log": {"every": 4},
    }
    for name, value in changes.items():
        if isinstance(value, dict):
            values[name] = values.get(name, {}) | value
        else:
            values[name] = value
    return values


def run(folder: Path, resume: bool = False, **changes):
    """Train as `settings` says."""
    config = from_dict(settings(folder, **changes))
    return train(config, resume=resume, pair=bare_pair())

"""Settings of a training run: one YAML file, every field overridable.

A field is named by its section and name (`optimizer.learning_rate`); unknown fields,
values of the wrong type and values out of range are refused by name. Defaults follow
the paper's appendix A.1 where it gives a value.

Leaves out: what the settings do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    StrictBool,
    StrictInt,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass

from dflash_lab.errors import DFlashLabError
from dflash_lab.training.data.faults import find_faults


def _read_number(value: Any) -> Any:
    """YAML reads 6e-4 as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


# Strict: True is no number, and neither 1 nor 'yes' is a switch.
Number = Annotated[float, Strict(), BeforeValidator(_read_number)]
Positive = Annotated[Number, Field(gt=0)]
Count = Annotated[StrictInt, Field(ge=1)]
_KNOWN_FIELDS = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_KNOWN_FIELDS)
class DrafterSettings:
    """The drafter to train.

    Args:
        num_hidden_layers: drafter layers.
        block_size: K.
        num_features: tapped target layers, placed as the paper does.
        target_layer_ids: tapped target layers, in place of `num_features`.
        mask_token_id: an unused row of the embedding table; the pair's own if None.
        conditioning: `kv` as in the paper; for comparison `input` (features enter at
            the bottom only, see `drafter/input_fusion.py`), or `none` (no features).
        init_from: a drafter folder to go on from; it decides the shape.
        init_layers: target layers, one for each drafter layer, whose weights a fresh
            drafter starts with where their shapes agree.
    """

    num_hidden_layers: StrictInt = 5
    block_size: StrictInt = 16
    num_features: StrictInt = 5
    target_layer_ids: list[StrictInt] | None = None
    mask_token_id: StrictInt | None = None
    conditioning: Literal["kv", "input", "none"] = "kv"
    init_from: str | None = None
    init_layers: list[StrictInt] | None = None


@dataclass(frozen=True, config=_KNOWN_FIELDS)
class CorpusSettings:
    """A corpus that the run writes itself, if `data.corpus` names none.

    Args:
        prompts: `generator`, `self` (written by the target), or a JSON Lines file.
        num_prompts: how many; all of a file, 1000 of the others, if None.
        temperatures: prompt i is answered at `temperatures[i % len]`.
        max_new_tokens: per answer.
        batch_size: rows decoded together.
        seed: of prompts and draws.
    """

    prompts: str = "generator"
    num_prompts: StrictInt | None = None
    temperatures: list[Number] = field(default_factory=lambda: [0.0])
    max_new_tokens: StrictInt = 256
    batch_size: StrictInt = 64
    seed: StrictInt = 0


@dataclass(frozen=True, config=_KNOWN_FIELDS)
class DataSettings:
    """The texts of a run.

    Args:
        corpus: files written by `dflash-lab corpus`; the run writes one if empty.
        max_length: tokens of a text at most.
        features: `offline` (computed once, kept on disk) or `online` (in each step).
        feature_folder: of offline features; inside the run's folder if None.
        batch_size: texts per step, over all processes and accumulation rounds.
        accumulation: passes that a process makes for a step.
        num_anchors: N, most blocks per text.
        reveal: share of blocks in which some slots show their token, for drafters that
            denoise in several steps (see `diffusion/drafting.py`).
    """

    corpus: list[str] = field(default_factory=list)
    max_length: Annotated[StrictInt, Field(ge=3)] = 3072
    features: Literal["offline", "online"] = "offline"
    feature_folder: str | None = None
    batch_size: Count = 16
    accumulation: Count = 1
    num_anchors: Count = 512
    reveal: Annotated[Number, Field(ge=0, le=1)] = 0.0


@dataclass(frozen=True, config=_KNOWN_FIELDS)
class ObjectiveSettings:
    """The loss and the kernels behind it.

    Args:
        loss: `ce`, `kl` or `dpace` (see `training/losses.py`).
        gamma: of the decay; the paper's for the block size if None.
        head_tokens: so many most frequent tokens of the corpus as candidates, the
            whole vocabulary if None.
        extra_negatives: other candidates that join each step, if `head_tokens` is set.
        chunk: rows whose logits exist at a time.
        attention: `sdpa`, `split`, `flex` (CUDA), or `auto` (see
            `conditioning/attention.py`).
        mixed_precision: `no` or `bf16` (autocast; weights and optimiser in float32).
        compile: fuse the drafter's pass with torch.compile, which takes a minute once
            and on a CPU needs a C++ compiler.
    """

    loss: Literal["ce", "kl", "dpace"] = "ce"
    gamma: Number | None = None
    head_tokens: StrictInt | None = None
    extra_negatives: StrictInt = 1024
    chunk: Count = 512
    attention: Literal["auto", "sdpa", "split", "flex"] = "auto"
    mixed_precision: Literal["no", "bf16"] = "no"
    compile: StrictBool = False


@dataclass(frozen=True, config=_KNOWN_FIELDS)
class OptimizerSettings:
    """AdamW with warm-up and cosine, and how long to train.

    Args:
        learning_rate: peak.
        warmup_ratio: share of the run with rising rate; cosine to 0 afterwards.
        weight_decay: of all weights.
        max_grad_norm: gradient clipping.
        epochs: passes over the corpus.
        steps: optimiser steps, in place of `epochs`.
        minutes: budget of time; the schedule then follows the clock, so that a run on
            a busy machine still ends with a small learning rate. Such a run can be
            resumed, but is not repeatable bit by bit.
        clock: of `minutes`: `wall`, or `cpu` for processor time over all threads.
    """

    learning_rate: Positive = 6e-4
    warmup_ratio: Annotated[Number, Field(ge=0, lt=1)] = 0.04
    weight_decay: Number = 0.0
    max_grad_norm: Number = 1.0
    epochs: Positive = 6.0
    steps: Count | None = None
    minutes: Positive | None = None
    clock: Literal["wall", "cpu"] = "wall"


@dataclass(frozen=True, config=_KNOWN_FIELDS)
class LogSettings:
    """What a run reports, and when it saves.

    Args:
        every: steps between metric lines.
        save_minutes: minutes between checkpoints.
        eval_every: steps between measurements of tau; none but the last if None.
        eval_prompts: prompts of each held-out set then.
        eval_tokens: new tokens per prompt then.
        final_prompts: prompts of each set for the card; all if None.
        tracker: name of an `accelerate` tracker such as `tensorboard`, or None.
        keep_drafters: keep the drafter in `kept/` whenever the blocks have doubled.
    """

    every: Count = 50
    save_minutes: Positive = 10.0
    eval_every: StrictInt | None = None
    eval_prompts: Count = 5
    eval_tokens: StrictInt = 128
    final_prompts: StrictInt | None = None
    tracker: str | None = None
    keep_drafters: StrictBool = False


@dataclass(frozen=True, config=_KNOWN_FIELDS)
class TrainConfig:
    """All settings of a run.

    Args:
        out: folder of the run: metrics, checkpoints, the drafter and its card.
        pair: `tiny` or `smol`, for the target; or None.
        target: folder or Hub repository of another target.
        dtype: of the target, `float32` or `bfloat16`.
        device: `cpu`, `cuda`, or `auto`.
        thinking: whether answers were written in thinking mode.
        seed: of weights, order and anchors.
        faults: bugs to switch on (see `training/data/faults.py`), for study.
    """

    out: str = "run"
    pair: str | None = None
    target: str | None = None
    dtype: str = "float32"
    device: str = "auto"
    thinking: StrictBool = False
    seed: StrictInt = 0
    drafter: DrafterSettings = field(default_factory=DrafterSettings)
    corpus: CorpusSettings = field(default_factory=CorpusSettings)
    data: DataSettings = field(default_factory=DataSettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    log: LogSettings = field(default_factory=LogSettings)
    faults: list[str] = field(default_factory=list)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Settings of a YAML file, with overrides such as `optimizer.steps=200`.

    Raises:
        DFlashLabError: no such file, unknown field, wrong type, value out of range.
    """
    path = Path(path)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise DFlashLabError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DFlashLabError(f"{path} is no valid YAML: {error}") from None
    for override in overrides:
        _set(values, override)
    return from_dict(values)


def from_dict(values: dict) -> TrainConfig:
    """Settings of nested dictionaries.

    Raises:
        DFlashLabError: unknown field, wrong type, value out of range.
    """
    try:
        config = TypeAdapter(TrainConfig).validate_python(values)
    except ValidationError as error:
        raise DFlashLabError(_first_problem(error)) from None
    find_faults(config.faults)
    return config


def to_yaml(config: TrainConfig) -> str:
    """The YAML text that `load_config` reads back."""
    return yaml.safe_dump(asdict(config), sort_keys=False)


def _set(values: dict, override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals:
        raise DFlashLabError(f"--set {override!r} has no '='; write section.field=1")
    *sections, last = name.strip().split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise DFlashLabError(f"--set {override!r}: {section} is no section")
    values[last] = yaml.safe_load(text)


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    name = ".".join(map(str, problem["loc"])) or "the config"
    if problem["type"] == "unexpected_keyword_argument":
        *section, _ = map(str, problem["loc"])
        owner = getattr(TrainConfig(), section[0]) if section else TrainConfig
        known = ", ".join(".".join([*section, f.name]) for f in fields(owner))
        return f"unknown field {name}; known are {known}"
    if problem["type"] == "dataclass_type":
        return f"{name} is {problem['input']!r}; it must be a section of fields"
    wanted = problem["msg"].replace("Input should", "it must")
    return f"{name} is {problem['input']!r}; {wanted}"

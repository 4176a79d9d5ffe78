"""Settings of a training run: one YAML file, every field overridable.

A field is named by its section and name (`optimizer.learning_rate`); unknown fields and
values of the wrong type are refused by name. Defaults follow the paper's appendix A.1
where it gives a value.

Leaves out: what the settings do.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path

from dflash_lab.errors import DFlashLabError
from dflash_lab.training.data.faults import find_faults
from dflash_lab.training.losses import LOSSES

PRECISIONS = ("no", "bf16")
CONDITIONINGS = ("kv", "input", "none")


@dataclass(frozen=True)
class DrafterSettings:
    """The drafter to train.

    Args:
        num_hidden_layers: drafter layers.
        block_size: K.
        num_features: tapped target layers, placed as the paper does.
        target_layer_ids: tapped target layers, in place of `num_features`.
        mask_token_id: an unused row of the embedding table; the pair's own if None.
        conditioning: `kv` as in the paper; for comparison `input` (features enter at
            the bottom only, see `input_fusion.py`), or `none` (no features).
        init_from: a drafter folder to go on from; it decides the shape.
        init_layers: target layers, one for each drafter layer, whose weights a fresh
            drafter starts with where their shapes agree.
    """

    num_hidden_layers: int = 5
    block_size: int = 16
    num_features: int = 5
    target_layer_ids: list[int] | None = None
    mask_token_id: int | None = None
    conditioning: str = "kv"
    init_from: str | None = None
    init_layers: list[int] | None = None


@dataclass(frozen=True)
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
    num_prompts: int | None = None
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    max_new_tokens: int = 256
    batch_size: int = 64
    seed: int = 0


@dataclass(frozen=True)
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
    max_length: int = 3072
    features: str = "offline"
    feature_folder: str | None = None
    batch_size: int = 16
    accumulation: int = 1
    num_anchors: int = 512
    reveal: float = 0.0


@dataclass(frozen=True)
class ObjectiveSettings:
    """The loss and the kernels behind it.

    Args:
        loss: `ce`, `kl` or `dpace` (see `losses.py`).
        gamma: of the decay; the paper's for the block size if None.
        head_tokens: so many most frequent tokens of the corpus as candidates, the
            whole vocabulary if None.
        extra_negatives: other candidates that join each step, if `head_tokens` is set.
        chunk: rows whose logits exist at a time.
        attention: `sdpa`, `split`, `flex` (CUDA), or `auto` (see `attention.py`).
        mixed_precision: `no` or `bf16` (autocast; weights and optimiser in float32).
        compile: fuse the drafter's pass with torch.compile, which takes a minute once
            and on a CPU needs a C++ compiler.
    """

    loss: str = "ce"
    gamma: float | None = None
    head_tokens: int | None = None
    extra_negatives: int = 1024
    chunk: int = 512
    attention: str = "auto"
    mixed_precision: str = "no"
    compile: bool = False


@dataclass(frozen=True)
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

    learning_rate: float = 6e-4
    warmup_ratio: float = 0.04
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    epochs: float = 6.0
    steps: int | None = None
    minutes: float | None = None
    clock: str = "wall"


@dataclass(frozen=True)
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

    every: int = 50
    save_minutes: float = 10.0
    eval_every: int | None = None
    eval_prompts: int = 5
    eval_tokens: int = 128
    final_prompts: int | None = None
    tracker: str | None = None
    keep_drafters: bool = False


@dataclass(frozen=True)
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
        faults: bugs to switch on (see `faults.py`), for study.
    """

    out: str = "run"
    pair: str | None = None
    target: str | None = None
    dtype: str = "float32"
    device: str = "auto"
    thinking: bool = False
    seed: int = 0
    drafter: DrafterSettings = field(default_factory=DrafterSettings)
    corpus: CorpusSettings = field(default_factory=CorpusSettings)
    data: DataSettings = field(default_factory=DataSettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    log: LogSettings = field(default_factory=LogSettings)
    faults: list[str] = field(default_factory=list)

    def __post_init__(self):
        for value, name, known in (
            (self.objective.loss, "objective.loss", LOSSES),
            (
                self.objective.attention,
                "objective.attention",
                ("auto", "sdpa", "split", "flex"),
            ),
            (self.objective.mixed_precision, "objective.mixed_precision", PRECISIONS),
            (self.data.features, "data.features", ("offline", "online")),
            (
                self.drafter.conditioning,
                "drafter.conditioning",
                ("kv", "input", "none"),
            ),
            (self.optimizer.clock, "optimizer.clock", ("wall", "cpu")),
        ):
            if value not in known:
                raise DFlashLabError(f"{name} {value!r}; choose {' or '.join(known)}")
        for value, name, least in (
            (self.data.batch_size, "data.batch_size", 1),
            (self.data.accumulation, "data.accumulation", 1),
            (self.data.num_anchors, "data.num_anchors", 1),
            (self.data.max_length, "data.max_length", 3),
            (self.objective.chunk, "objective.chunk", 1),
            (self.log.every, "log.every", 1),
            (self.log.eval_prompts, "log.eval_prompts", 1),
            (_or_one(self.optimizer.steps), "optimizer.steps", 1),
        ):
            if value < least:
                raise DFlashLabError(f"{name} {value} must be {least} or more")
        for value, name in (
            (self.optimizer.epochs, "optimizer.epochs"),
            (self.optimizer.learning_rate, "optimizer.learning_rate"),
            (_or_one(self.optimizer.minutes), "optimizer.minutes"),
            (self.log.save_minutes, "log.save_minutes"),
        ):
            if value <= 0:
                raise DFlashLabError(f"{name} {value} must be above 0")
        if not 0 <= self.optimizer.warmup_ratio < 1:
            raise DFlashLabError(
                f"optimizer.warmup_ratio {self.optimizer.warmup_ratio} must be at "
                "least 0 and below 1"
            )
        if not 0 <= self.data.reveal <= 1:
            raise DFlashLabError(f"data.reveal {self.data.reveal} is outside 0..1")
        find_faults(self.faults)


def _or_one(value: float | None) -> float:
    return 1 if value is None else value


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Settings of a YAML file, with overrides such as `optimizer.steps=200`.

    Raises:
        DFlashLabError: no such file, unknown field, wrong type, value out of range.
    """
    yaml = _yaml()
    path = Path(path)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise DFlashLabError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DFlashLabError(f"{path} is no valid YAML: {error}") from None
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise DFlashLabError(
                f"--set {override!r} has no '='; write section.field=1"
            )
        place = values
        *sections, last = name.strip().split(".")
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise DFlashLabError(f"--set {override!r}: {section} is no section")
        place[last] = yaml.safe_load(text)
    return from_dict(values)


def from_dict(values: dict) -> TrainConfig:
    """Settings of nested dictionaries."""
    return _build(TrainConfig, values, "")


def to_yaml(config: TrainConfig) -> str:
    """The YAML text that `load_config` reads back."""
    return _yaml().safe_dump(asdict(config), sort_keys=False)


def _build(kind, values, where: str):
    if not isinstance(values, dict):
        raise DFlashLabError(f"{where or 'the config'} must be a section of fields")
    hints = typing.get_type_hints(kind)
    known = {f.name for f in fields(kind)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise DFlashLabError(
            f"unknown field {where}{unknown[0]}; known are "
            f"{', '.join(where + name for name in sorted(known))}"
        )
    arguments = {}
    for name, value in values.items():
        if is_dataclass(hints[name]):
            arguments[name] = _build(hints[name], value, f"{where}{name}.")
        else:
            arguments[name] = _typed(value, hints[name], f"{where}{name}")
    return kind(**arguments)


def _typed(value, hint, name: str):
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in kinds:
        plain = typing.get_origin(kind) or kind
        if plain is type(None) and value is None:
            return None
        if plain is float and isinstance(value, (int, float, str)):
            try:  # YAML reads 6e-4 as text
                if not isinstance(value, bool):
                    return float(value)
            except ValueError:
                continue
        if plain is list and isinstance(value, list):
            (item,) = typing.get_args(kind)
            return [_typed(v, item, name) for v in value]
        if plain in (int, bool, str) and type(value) is plain:
            return value
    wanted = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
    raise DFlashLabError(f"{name} is {value!r}; expected {wanted}")


def _yaml():
    try:
        import yaml
    except ImportError:
        raise DFlashLabError(
            "training configs need PyYAML; pip install 'dflash-lab[train]'"
        ) from None
    return yaml

"""Settings: YAML in, every field overridable, mistakes refused by name."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, asdict, replace

import pytest
import yaml
from helpers import ROOT

from dflash_lab.errors import DFlashLabError
from dflash_lab.training.losses import LOSSES
from dflash_lab.training.run.config import TrainConfig, from_dict, load_config, to_yaml

CONFIGS = ROOT / "configs"


def test_every_field_can_be_overridden_and_read_back(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("", encoding="utf-8")
    assert load_config(path) == TrainConfig()
    other = {
        str: "other",
        bool: True,
        int: 7,
        float: 0.5,
        list: [],
        type(None): 3,
    }
    special = {
        "objective.loss": "kl",
        "objective.attention": "sdpa",
        "objective.mixed_precision": "bf16",
        "data.features": "online",
        "drafter.conditioning": "none",
        "pair": "tiny",
        "target": "folder",
        "drafter.target_layer_ids": [1, 2],
        "drafter.init_from": "folder",
        "drafter.init_layers": [0],
        "optimizer.clock": "cpu",
        "data.feature_folder": "folder",
        "log.tracker": "tensorboard",
        "faults": ["label_shift"],
        "data.corpus": ["a.jsonl"],
    }
    tried = 0
    for section, values in asdict(TrainConfig()).items():
        fields = values if isinstance(values, dict) else {None: values}
        for name, default in fields.items():
            full = section if name is None else f"{section}.{name}"
            value = special.get(full, other[type(default)])
            text = yaml.safe_dump(value, default_flow_style=True).split("\n")[0]
            found = asdict(load_config(path, [f"{full}={text}"]))[section]
            found = found if name is None else found[name]
            assert found == value, full
            tried += 1
    assert tried > 40


def test_settings_survive_a_round_trip(tmp_path):
    values = {
        "pair": "tiny",
        "optimizer": {"steps": 5, "learning_rate": "6e-4"},
        "data": {"corpus": ["a.jsonl", "b.jsonl"]},
    }
    config = from_dict(values)
    assert config.optimizer.learning_rate == 6e-4
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(path) == config


@pytest.mark.parametrize("name", sorted(p.name for p in CONFIGS.glob("*.yaml")))
def test_shipped_configs_are_valid(name):
    config = load_config(CONFIGS / name)
    assert config.pair in ("tiny", "smol")


@pytest.mark.parametrize(
    "override,message",
    [
        ("optimizer.lr=1", r"unknown field optimizer\.lr; known are .*learning_rate"),
        ("typo=1", "unknown field typo"),
        ("optimizer=1", "optimizer is 1; it must be a section of fields"),
        ("optimizer.steps=many", r"optimizer\.steps is 'many'; .*valid integer"),
        ("optimizer.steps=true", r"optimizer\.steps is True; .*valid integer"),
        ("optimizer.steps='5'", r"optimizer\.steps is '5'; .*valid integer"),
        ("optimizer.learning_rate=fast", r"learning_rate is 'fast'; .*valid number"),
        ("optimizer.learning_rate=true", r"learning_rate is True; .*valid number"),
        ("optimizer.epochs=.nan", r"epochs is nan; it must be greater than 0"),
        ("objective.compile=1", r"compile is 1; it must be a valid boolean"),
        ("data.corpus=one.jsonl", r"data\.corpus is 'one\.jsonl'; .*valid list"),
        ("data.corpus=[1]", r"data\.corpus\.0 is 1; it must be a valid string"),
        ("objective.loss=mse", "objective.loss is 'mse'; .* 'ce', 'kl' or 'dpace'"),
        ("objective.mixed_precision=fp16", "'fp16'; it must be 'no' or 'bf16'"),
        ("drafter.conditioning=add", "'add'; it must be 'kv', 'input' or 'none'"),
        ("data.batch_size=0", r"data\.batch_size is 0; .* greater .* equal to 1$"),
        ("data.max_length=2", r"data\.max_length is 2; .* greater .* equal to 3$"),
        ("optimizer.steps=0", r"optimizer\.steps is 0; .* greater .* equal to 1$"),
        ("optimizer.epochs=-1", r"optimizer\.epochs is -1; .* greater than 0$"),
        ("optimizer.minutes=0", r"optimizer\.minutes is 0; .* greater than 0$"),
        ("optimizer.warmup_ratio=1", r"warmup_ratio is 1; it must be less than 1$"),
        ("data.reveal=1.5", r"data\.reveal is 1\.5; .* less than or equal to 1$"),
        ("faults=[typo]", "unknown fault 'typo'"),
        ("no-equals-sign", "has no '='"),
    ],
)
def test_mistakes_are_refused_by_name(tmp_path, override, message):
    path = tmp_path / "config.yaml"
    path.write_text("pair: tiny\n", encoding="utf-8")
    with pytest.raises(DFlashLabError, match=message):
        load_config(path, [override])


def test_unreadable_files_are_refused(tmp_path):
    with pytest.raises(DFlashLabError, match="cannot read"):
        load_config(tmp_path / "none.yaml")
    bad = tmp_path / "bad.yaml"
    bad.write_text("a: [1", encoding="utf-8")
    with pytest.raises(DFlashLabError, match="no valid YAML"):
        load_config(bad)
    bad.write_text("a.b: 1\n", encoding="utf-8")
    with pytest.raises(DFlashLabError, match=r"unknown field a\.b; known are out"):
        load_config(bad)
    bad.write_text("- 1\n- 2\n", encoding="utf-8")
    with pytest.raises(DFlashLabError, match=r"the config is .* must be a section"):
        load_config(bad)


def test_every_loss_can_be_chosen():
    for loss in LOSSES:
        assert from_dict({"objective": {"loss": loss}}).objective.loss == loss


def test_settings_do_not_change():
    config = TrainConfig()
    with pytest.raises(FrozenInstanceError):
        config.seed = 1
    with pytest.raises(FrozenInstanceError):
        config.data.batch_size = 1
    assert replace(config, seed=1).seed == 1

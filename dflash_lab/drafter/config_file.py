"""Reading and writing a drafter's `config.json` in all its published forms.

DFlash checkpoints say the same things in several places: the block size at the top or
inside `dflash_config`, RoPE flat or nested, causality as `is_causal` or
`dflash_config.causal`. All are read, and the form that is written is one that the
authors' code, vLLM and SGLang read. Remote code named by `auto_map` is never run.

Leaves out: relatives that share the file format but not the meaning (`relatives.py`).
"""

from __future__ import annotations

from typing import Any

from dflash_lab.compat import rope_settings
from dflash_lab.drafter.relatives import refuse_relatives
from dflash_lab.errors import DFlashLabError


def read_fields(config: dict) -> dict[str, Any]:
    """Fields of `DFlashConfig` from a published `config.json`.

    Raises:
        DFlashLabError: another model family, or a field that cannot be guessed
            (`target_layer_ids`, `mask_token_id`) is missing.
        KeyError: another field is missing.
    """
    own = config.get("dflash_config") or {}
    refuse_relatives(config, own)

    def find(name: str, default=None):
        value = own.get(name)
        return config.get(name, default) if value is None else value

    for name in ("target_layer_ids", "mask_token_id"):
        if find(name) is None:
            raise DFlashLabError(
                f"config.json has no dflash_config.{name}; it cannot be guessed, "
                "add the value the drafter was trained with"
            )
    act = config.get("hidden_act", "silu")
    if act != "silu":
        raise DFlashLabError(f"hidden_act {act!r} is not supported, only 'silu'")
    rope = rope_settings(config)
    if rope.get("partial_rotary_factor", 1) != 1:
        raise DFlashLabError(
            f"RoPE with partial_rotary_factor={rope['partial_rotary_factor']} "
            "rotates a part of each head (MiMo), which is not supported"
        )
    causal = config.get("is_causal")
    heads, width = config["num_attention_heads"], config["hidden_size"]
    return {
        "hidden_size": width,
        "intermediate_size": config["intermediate_size"],
        "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or width // heads,
        "vocab_size": config["vocab_size"],
        "target_layer_ids": tuple(find("target_layer_ids")),
        "mask_token_id": find("mask_token_id"),
        "block_size": find("block_size", 16),
        "num_target_layers": find("num_target_layers"),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope": rope,
        "max_position_embeddings": config.get("max_position_embeddings", 40960),
        "attention_bias": config.get("attention_bias", False),
        "layer_types": _layer_types(config),
        "sliding_window": config.get("sliding_window"),
        "causal": own.get("causal") if causal is None else causal,
        "output_multiplier": find("output_multiplier", 1.0),
        "final_logit_softcapping": find("final_logit_softcapping"),
        "input_embedding_scale": find("input_embedding_scale", 1.0),
        "initializer_range": config.get("initializer_range", 0.02),
        "conditioning": own.get("conditioning", "kv"),
    }


def write_fields(config, dtype: str) -> dict[str, Any]:
    """The `config.json` of a `DFlashConfig`.

    Facts that readers look for in two places (block size, RoPE) are written to both, so
    that old and new readers agree.
    """
    own = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    if config.output_multiplier != 1.0:
        own["output_multiplier"] = config.output_multiplier
    if config.final_logit_softcapping is not None:
        own["final_logit_softcapping"] = config.final_logit_softcapping
    if config.input_embedding_scale != 1.0:
        own["input_embedding_scale"] = config.input_embedding_scale
    if config.conditioning != "kv":
        own["conditioning"] = config.conditioning
    scaling = {k: v for k, v in config.rope.items() if k != "rope_theta"}
    written = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "dflash_config": own,
        "dtype": dtype,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": config.initializer_range,
        "intermediate_size": config.intermediate_size,
        "layer_types": list(config.layer_types),
        "max_position_embeddings": config.max_position_embeddings,
        "max_window_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "num_target_layers": config.num_target_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": config.rope,
        "rope_scaling": None if scaling == {"rope_type": "default"} else scaling,
        "rope_theta": config.rope["rope_theta"],
        "sliding_window": config.sliding_window,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": "sliding_attention" in config.layer_types,
        "vocab_size": config.vocab_size,
    }
    if config.causal is not None:
        written["is_causal"] = config.causal
    return written


def _layer_types(config: dict) -> tuple[str, ...]:
    """Layer types as listed, or as Qwen3 configs imply them."""
    listed = tuple(config.get("layer_types") or ())
    if listed or not (
        config.get("use_sliding_window") and config.get("sliding_window")
    ):
        return listed
    full = config.get("max_window_layers", 28)
    return tuple(
        "full_attention" if i < full else "sliding_attention"
        for i in range(config["num_hidden_layers"])
    )

"""The speculators library's `config.json` for DFlash: to and from ours.

It nests the layers in `transformer_layer_config`, names the target `verifier`, and
counts tapped layers from the embedding: `aux_hidden_state_layer_ids` are our
`target_layer_ids` plus one. A config is translated where it means DFlash v1: slot j
predicts the token at its own position, slot 0 drafts nothing, and the vocabulary is the
target's. Every other variant is refused by the field that says so.

Leaves out: the folder's tensors (`speculators_folder.py`), and the library's other
speculators (EAGLE-3, DSpark, DFlash2, Domino).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dflash_lab.drafter.config import DFlashConfig
from dflash_lab.errors import DFlashLabError

# Fields whose other values mean another slot convention or another network.
# field -> (values that mean DFlash v1, what any other value means).
_V1_VALUES = {
    "sample_from_anchor": (
        (None, False),
        "slot 0 drafts, and each slot the next token",
    ),
    "shift_label": ((None, False), "every slot predicts the position after its own"),
    "projector_type": ((None, "dflash"), "a correction head (Domino) follows"),
    "input_embedding_scale": ((None, 1), "the format has no such field"),
    "output_multiplier": ((None, 1), "the format has no such field"),
    "final_logit_softcapping": ((None,), "the format has no such field"),
}
_SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
# What our `config.json` says beside the layers.
_NOT_LAYERS = {
    "architectures",
    "block_size",
    "dflash_config",
    "dtype",
    "is_causal",
    "num_target_layers",
}


def is_speculators(config: dict) -> bool:
    """Whether a `config.json` is in speculators' format, of whatever algorithm."""
    return "speculators_model_type" in config or "transformer_layer_config" in config


def verifier_name(config: dict) -> str | None:
    """Name or path of the target that a speculators `config.json` names, if any."""
    found: Any = config
    for name in ("speculators_config", "verifier", "name_or_path"):
        found = found.get(name) if isinstance(found, dict) else None
    return found or None


def config_from_speculators(config: dict) -> DFlashConfig:
    """Translate a speculators `config.json`.

    Args:
        config: the whole file.

    Returns:
        The same drafter in our terms; `num_target_layers` is None, since the format
        does not state it.

    Raises:
        DFlashLabError: not DFlash v1, naming the field, or a field that cannot be
            guessed is missing.
    """
    kind = config.get("speculators_model_type")
    if kind != "dflash":
        raise DFlashLabError(
            f"speculators_model_type is {kind!r}: only 'dflash' can be converted"
        )
    for name, (allowed, meaning) in _V1_VALUES.items():
        if config.get(name) not in allowed:
            _refuse(name, config[name], meaning)
    layers = config.get("transformer_layer_config")
    if not isinstance(layers, dict):
        raise DFlashLabError(
            "the speculators config.json has no transformer_layer_config, which holds "
            "the drafter's shape; copy the file from the trained checkpoint again"
        )
    for name in ("block_size", "mask_token_id", "aux_hidden_state_layer_ids"):
        if config.get(name) is None:
            raise DFlashLabError(
                f"the speculators config.json has no {name}; it cannot be guessed, add "
                "the value the drafter was trained with"
            )
    if "rope_theta" not in layers and "rope_parameters" not in layers:
        raise DFlashLabError(
            "transformer_layer_config has neither rope_theta nor rope_parameters, and "
            "readers assume different defaults; add the value it was trained with"
        )
    try:
        _check_widths(config, layers)
        _check_slots(config)
        own = {
            "mask_token_id": config["mask_token_id"],
            "target_layer_ids": _target_layer_ids(config["aux_hidden_state_layer_ids"]),
            "block_size": config["block_size"],
        }
    except (TypeError, AttributeError) as error:
        raise DFlashLabError(
            f"the speculators config.json has a field of the wrong type ({error}); "
            "compare it with a published checkpoint"
        ) from None
    flat = {k: v for k, v in layers.items() if k not in _NOT_LAYERS}
    flat |= {"architectures": ["DFlashDraftModel"], "dflash_config": own}
    found = DFlashConfig.from_dict(flat)
    return replace(found, causal=_causal(config, found))


def config_to_speculators(
    config: DFlashConfig, verifier: str, architectures: list[str], dtype: str
) -> dict:
    """The `config.json` that speculators, and vLLM through it, read.

    Args:
        config: the drafter's.
        verifier: name or path of its target.
        architectures: of the target's `config.json`; may be empty.
        dtype: of the weights, such as `bfloat16`.

    Raises:
        DFlashLabError: a setting this format has no field for, naming it.
    """
    for name in _SCALES:
        if getattr(config, name) not in _V1_VALUES[name][0]:
            raise DFlashLabError(
                f"{name}={getattr(config, name)} has no field in speculators' DFlash "
                "format; export with --for dflash"
            )
    causal = {kind for kind, p in config.attention_patterns.items() if p.causal}
    if "full_attention" in causal:
        raise DFlashLabError(
            "full-attention layers that are causal inside the block have no field in "
            "speculators' DFlash format, where they see the whole block; export with "
            "--for vllm"
        )
    layers = config.to_dict(dtype)
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "block_size": config.block_size,
        "draft_vocab_size": config.vocab_size,
        "dtype": dtype,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": False,
        # Without sliding layers the library ignores it, while vLLM makes one switch
        # for all layers of it, so that False would turn full attention causal.
        "sliding_window_non_causal": "sliding_attention" not in causal,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.block_size - 1,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            k: v for k, v in layers.items() if k not in _NOT_LAYERS
        },
    }


def same_meaning(left: DFlashConfig, right: DFlashConfig) -> bool:
    """Whether two configs are one drafter, as far as speculators' format can say."""

    def plain(config: DFlashConfig) -> tuple:
        causal = [config.causal_in_block(kind) for kind in config.layer_types]
        return replace(config, causal=None, num_target_layers=None), causal

    return plain(left) == plain(right)


def _refuse(name: str, value, meaning: str) -> None:
    raise DFlashLabError(
        f"the speculators config.json sets {name}={value!r}: {meaning}, which is not "
        "DFlash v1, so it cannot be converted"
    )


def _check_widths(config: dict, layers: dict) -> None:
    vocabulary, width = layers.get("vocab_size"), layers.get("hidden_size")
    if config.get("draft_vocab_size") != vocabulary:
        _refuse(
            "draft_vocab_size",
            config.get("draft_vocab_size"),
            f"the drafter has a vocabulary of its own beside the target's {vocabulary}",
        )
    if config.get("target_hidden_size") not in (None, width):
        _refuse(
            "target_hidden_size",
            config["target_hidden_size"],
            f"the features are of another width than the drafter's {width}",
        )
    if layers.get("is_causal") is not None:
        _refuse(
            "transformer_layer_config.is_causal",
            layers["is_causal"],
            "vLLM obeys it and speculators does not",
        )


def _check_slots(config: dict) -> None:
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or []
    drafted = max((m.get("speculative_tokens") or 0 for m in methods), default=0)
    # Checkpoints older than `sample_from_anchor` show their convention only here.
    if config.get("sample_from_anchor") is None and drafted >= config["block_size"]:
        _refuse(
            "speculative_tokens",
            drafted,
            f"a block of {config['block_size']} drafts that many only if slot 0 does",
        )


def _target_layer_ids(aux_ids: list[int]) -> list[int]:
    if not aux_ids or min(aux_ids) < 1:
        raise DFlashLabError(
            f"aux_hidden_state_layer_ids {aux_ids} must be 1 or more: id n is the "
            "state after n layers, so 0 would be the embedding itself"
        )
    return [i - 1 for i in aux_ids]


def _causal(config: dict, found: DFlashConfig) -> bool | None:
    """Our `causal` from the flag that speculators keeps for sliding layers only."""
    if "sliding_attention" not in found.layer_types:
        return None
    flag = config.get("sliding_window_non_causal")
    if flag is None:
        raise DFlashLabError(
            "the drafter has sliding-window layers and the speculators config.json "
            "does not set sliding_window_non_causal; speculators then takes them as "
            "causal and vLLM as bidirectional: add the value it was trained with"
        )
    return False if flag else None

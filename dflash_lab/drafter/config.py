"""Shape and conventions of a drafter, each checked.

Leaves out: where a `config.json` says them (`config_file.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash_lab.compat import rope_settings
from dflash_lab.conditioning.masks import AttentionPattern
from dflash_lab.conditioning.taps import build_target_layer_ids
from dflash_lab.drafter.config_file import read_fields, write_fields
from dflash_lab.errors import DFlashLabError


def check_block_size(block_size: int, trained: int | None = None) -> int:
    """A block size that drafts something, and no more than was trained.

    Args:
        block_size: K, the known token included.
        trained: K of the drafter's training; None for drafters without such a limit.

    Raises:
        DFlashLabError: K is out of range.
    """
    if block_size < 2 or (trained is not None and block_size > trained):
        limit = "below 2" if trained is None else f"outside 2..{trained}"
        raise DFlashLabError(
            f"block_size {block_size} is {limit}: slot 0 is the last known token, so "
            "2 draft one; a drafter drafts at most as many as it was trained for"
        )
    return block_size


@dataclass(frozen=True)
class DFlashConfig:
    """Shape and conventions of a DFlash drafter (paper section 4 and appendix A).

    Args:
        hidden_size: D, equal to the target's.
        intermediate_size: width of the feed-forward layers.
        num_hidden_layers: drafter layers.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads.
        head_dim: width of one head.
        vocab_size: V of the target's embedding table.
        target_layer_ids: tapped target layers, 0-based; the feature of layer l is
            `hidden_states[l + 1]`.
        mask_token_id: embedded (by the target) in slots 1..K-1.
        block_size: K, the anchor included; a block drafts K-1 tokens.
        num_target_layers: N of the target it was trained for; None if not stated.
        rope: `rope_type`, `rope_theta` and the type's own fields.
        layer_types: `full_attention` or `sliding_attention` per layer.
        sliding_window: of sliding layers; counts the row itself.
        causal: causality inside the block for all layers; None leaves full layers
            bidirectional and sliding layers causal.
        output_multiplier: factor on the logits.
        final_logit_softcapping: then cap * tanh(logits / cap); None for no cap.
        input_embedding_scale: factor on the embedded block.
        conditioning: `kv`, the published way, or `input` (see `input_fusion.py`).

    Raises:
        DFlashLabError: a value outside its range.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int = 16
    num_target_layers: int | None = None
    rms_norm_eps: float = 1e-6
    rope: dict = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    max_position_embeddings: int = 40960
    attention_bias: bool = False
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    causal: bool | None = None
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    input_embedding_scale: float = 1.0
    initializer_range: float = 0.02
    conditioning: str = "kv"

    def __post_init__(self):
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        if not self.layer_types:
            kinds = ("full_attention",) * self.num_hidden_layers
            object.__setattr__(self, "layer_types", kinds)
        self._check()

    def _check(self) -> None:
        kind = self.rope.get("rope_type")
        if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
            raise DFlashLabError(
                f"unknown rope_type {kind!r}; known are default, "
                f"{', '.join(sorted(set(ROPE_INIT_FUNCTIONS) - {'default'}))}"
            )
        if kind not in ("default", "dynamic") and "factor" not in self.rope:
            raise DFlashLabError(f"rope_type {kind!r} needs a factor")
        if min(self.num_attention_heads, self.num_key_value_heads, self.head_dim) < 1:
            raise DFlashLabError(
                f"{self.num_attention_heads} query heads, {self.num_key_value_heads} "
                f"key/value heads and head_dim {self.head_dim} must all be 1 or more"
            )
        if self.conditioning not in ("kv", "input"):
            raise DFlashLabError(
                f"conditioning {self.conditioning!r} is unknown; choose kv or input"
            )
        check_block_size(self.block_size)
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise DFlashLabError(
                f"mask_token_id {self.mask_token_id} is outside the embedding table of "
                f"{self.vocab_size} rows; choose an unused row of it"
            )
        unknown = set(self.layer_types) - {"full_attention", "sliding_attention"}
        if unknown or len(self.layer_types) != self.num_hidden_layers:
            raise DFlashLabError(
                f"layer_types {list(self.layer_types)} must name full_attention or "
                f"sliding_attention for each of {self.num_hidden_layers} layers"
            )
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise DFlashLabError("sliding_attention layers need a sliding_window")
        if self.num_attention_heads % self.num_key_value_heads:
            raise DFlashLabError(
                f"{self.num_attention_heads} query heads cannot share "
                f"{self.num_key_value_heads} key/value heads evenly"
            )

    @property
    def attention_patterns(self) -> dict[str, AttentionPattern]:
        """What each kind of layer that occurs may see."""
        return {
            kind: AttentionPattern(self.causal_in_block(kind), self.window_of(kind))
            for kind in sorted(set(self.layer_types))
        }

    def causal_in_block(self, layer_type: str) -> bool:
        """Whether block rows of such a layer see only earlier rows of their block."""
        return layer_type == "sliding_attention" if self.causal is None else self.causal

    def window_of(self, layer_type: str) -> int | None:
        """Sliding window of such a layer, None for full attention."""
        return self.sliding_window if layer_type == "sliding_attention" else None

    @classmethod
    def for_target(
        cls,
        target_config,
        *,
        mask_token_id: int,
        num_hidden_layers: int = 5,
        block_size: int = 16,
        num_features: int = 5,
        target_layer_ids: Sequence[int] | None = None,
        **overrides,
    ) -> DFlashConfig:
        """A drafter with the widths of a target's own layers.

        Args:
            target_config: `transformers` config of the target.
            mask_token_id: unused row of its embedding table.
            num_hidden_layers: drafter layers (paper: 5).
            block_size: K (paper: 16).
            num_features: number of tapped layers (paper: 5).
            target_layer_ids: which; `build_target_layer_ids` if None.
            overrides: any other field.
        """
        depth = target_config.num_hidden_layers
        heads = target_config.num_attention_heads
        width = target_config.hidden_size
        rope = rope_settings(target_config.to_dict())
        rope.pop("partial_rotary_factor", None)  # the drafter rotates whole heads
        if target_layer_ids is None:
            target_layer_ids = build_target_layer_ids(depth, num_features)
        fields = {
            "hidden_size": width,
            "intermediate_size": target_config.intermediate_size,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(target_config, "num_key_value_heads", heads),
            "head_dim": getattr(target_config, "head_dim", None) or width // heads,
            "vocab_size": target_config.vocab_size,
            "rms_norm_eps": getattr(target_config, "rms_norm_eps", 1e-6),
            "rope": rope,
            "max_position_embeddings": target_config.max_position_embeddings,
        }
        return cls(
            **{**fields, **overrides},
            num_hidden_layers=num_hidden_layers,
            block_size=block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=tuple(target_layer_ids),
            num_target_layers=depth,
        )

    @classmethod
    def from_dict(cls, config: dict) -> DFlashConfig:
        """Read a published `config.json`.

        Raises:
            DFlashLabError: another model family, or a field that cannot be guessed
                (`target_layer_ids`, `mask_token_id`) is missing.
        """
        try:
            return cls(**read_fields(config))
        except KeyError as missing:
            raise DFlashLabError(f"config.json has no field {missing}") from None
        except TypeError as error:
            raise DFlashLabError(
                f"config.json has a field of the wrong type ({error}); compare it with "
                "a published checkpoint"
            ) from None

    @classmethod
    def from_folder(cls, folder: Path) -> DFlashConfig:
        """Read `config.json` of a checkpoint folder."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise DFlashLabError(f"no config.json in {folder}; is it a drafter folder?")
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DFlashLabError(f"{path} is not valid JSON: {error}") from None
        if not isinstance(config, dict):
            raise DFlashLabError(f"{path} is not a JSON object")
        return cls.from_dict(config)

    def to_dict(self, dtype: str = "bfloat16") -> dict:
        """The `config.json` that the authors' code, vLLM and SGLang read."""
        return write_fields(self, dtype)

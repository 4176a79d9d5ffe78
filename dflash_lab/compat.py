"""Everything that differs between the supported `transformers` releases (5.15 and up).

Each difference gets one function, so that no other module asks for a version. Leaves
out older releases: below 5.15 decoder layers and caches behave otherwise.
"""

from __future__ import annotations

import inspect

from torch import nn


def cache_kwarg(model: nn.Module) -> str:
    """Name under which `model.forward` takes its key/value cache.

    `past_key_values` was renamed `cache` after 5.15; the old name is an alias that
    will go, so the signature decides.
    """
    names = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def rope_settings(config: dict) -> dict:
    """RoPE settings of a model config, flat (old) or nested (new), as one dictionary.

    Args:
        config: the config as a dictionary, as read from `config.json`.

    Returns:
        `rope_type`, `rope_theta` and the type's own fields (`factor`, ...).
    """
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    # Targets that rotate each kind of layer in its own way nest one level deeper; a
    # drafter has one rotation, that of the full-attention layers.
    rope = dict(rope.get("full_attention") or rope)
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    return rope

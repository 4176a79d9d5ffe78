"""Checkpoints that look like DFlash v1 and mean another thing.

DFlash2, DSpark, Domino, MiMo's variant and speculators' own format share field names
and often tensor shapes with DFlash v1, but their slots predict other positions, or
their layers hold more. Loaded as DFlash v1 they would run and draft nonsense, so they
are refused by name.

Leaves out: converting them; speculators' format is (`interop/export.py`).
"""

from __future__ import annotations

from dflash_lab.errors import DFlashLabError

# Fields that mark a relative of DFlash v1 whose weights would load but mean another
# thing. field -> (family, values that are harmless).
_FOREIGN_FIELDS = {
    "conv_kernel_size": ("DFlash2", ()),
    "conv_group_size": ("DFlash2", ()),
    "selector_rank": ("DFlash2", ()),
    "selector_top_k": ("DFlash2", ()),
    "use_swa": ("MiMo", (False,)),
    "swa_window_size": ("MiMo", ()),
    "attention_sink_bias": ("MiMo", (False,)),
    "attention_value_scale": ("MiMo", (1, 1.0)),
    "v_head_dim": ("MiMo", ()),
    "partial_rotary_factor": ("MiMo", (1, 1.0)),
    "shift_label": ("Domino", (False,)),
    "sample_from_anchor": ("DSpark", (False,)),
    "projector_type": ("Domino or DSpark", ("dflash",)),
    "transformer_layer_config": ("speculators", ()),
    "draft_vocab_size": ("speculators", ()),
}


def refuse_relatives(config: dict, own: dict) -> None:
    """Refuse a `config.json` that belongs to another family than DFlash v1.

    Args:
        config: the whole file.
        own: its `dflash_config`, possibly empty.

    Raises:
        DFlashLabError: naming the family and the field that gave it away.
    """
    architectures = config.get("architectures") or []
    if any(name.startswith("DFlash2") for name in architectures):
        raise DFlashLabError(
            "this is a DFlash2 checkpoint; only DFlash v1 is supported"
        )
    for name, (family, harmless) in _FOREIGN_FIELDS.items():
        for place in (config, own):
            value = place.get(name)
            if value is not None and value not in harmless:
                way_out = (
                    "convert it with `dflash-lab export` first"
                    if family == "speculators"
                    else "its slots or layers mean another thing than those of DFlash "
                    "v1, so it is not supported"
                )
                raise DFlashLabError(
                    f"config.json sets {name}={value!r}, which marks a {family} "
                    f"checkpoint; {way_out}"
                )
    if architectures and "DFlashDraftModel" not in architectures:
        raise DFlashLabError(
            f"architectures is {architectures}, not ['DFlashDraftModel']: this folder "
            "holds another kind of model"
        )
    if not architectures and not own:
        raise DFlashLabError(
            "config.json names no architecture and has no dflash_config: this folder "
            "is not a DFlash drafter"
        )

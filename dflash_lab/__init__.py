"""dflash_lab: learn, train and analyse DFlash speculative decoding.

Shape comments use one legend: B batch, S context, N anchors, K block size, D width,
V vocabulary; n is the number of tapped target layers, T the rows of a target pass.

Leaves out: everything but names; the work is in the modules.
"""

__version__ = "0.1.0"

# Public names and where they live. They are imported when first used, so that
# `import dflash_lab` costs nothing.
_PUBLIC = {
    "DFlash": "speculative.proposer",
    "DFlashConfig": "drafter.config",
    "DFlashDraftModel": "drafter.model",
    "DFlashLabError": "errors",
    "DecodeTrace": "speculative.trace",
    "GenerationResult": "speculative.generation",
    "NGramLookup": "speculative.ngram",
    "Pair": "pairs.pair",
    "Plain": "speculative.proposer",
    "Sampling": "speculative.sampling",
    "Target": "target.target",
    "as_hf_assistant": "interop.hf_assistant",
    "build_target_layer_ids": "conditioning.taps",
    "custom_generate": "interop.hf_generate",
    "load_pair": "pairs.pair",
    "load_prompts": "pairs.prompts",
    "speculative_generate": "speculative.generate",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})

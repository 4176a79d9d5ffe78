"""What vLLM and SGLang need to serve a drafter: the command, and what they ignore.

Both read the published form of `config.json`, but not every setting in it, and each
counts the block in its own way: vLLM the drafted tokens, SGLang with the anchor.

Leaves out: writing the folder (`export.py`) and flags that depend on the hardware.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

from dflash_lab.drafter.config import DFlashConfig
from dflash_lab.errors import DFlashLabError

ENGINES = ("dflash", "vllm", "sglang", "speculators")


def serve_command(config: DFlashConfig, engine: str, folder: str, target: str) -> str:
    """The shell command that uses an exported folder.

    Args:
        config: the drafter's.
        engine: one of `ENGINES`; `dflash` is this package's own command.
        folder: the exported folder, as the command should name it.
        target: name or folder of the target.
    """
    if engine == "dflash":
        words = ["dflash-lab", "generate", "--target", target, "--drafter", folder]
        words += ["--prompt", "Hello"]
    elif engine == "speculators":
        words = ["vllm", "serve", folder]  # the folder names its target itself
    elif engine == "vllm":
        draft = {
            "method": "dflash",
            "model": folder,
            # vLLM counts drafted tokens: the block less its anchor.
            "num_speculative_tokens": config.block_size - 1,
        }
        words = ["vllm", "serve", target, "--speculative-config", json.dumps(draft)]
        words += ["--attention-backend", "flash_attn"]
        words += ["--max-num-batched-tokens", "32768"]
    else:
        words = ["python", "-m", "sglang.launch_server", "--model-path", target]
        words += ["--speculative-algorithm", "DFLASH"]
        words += ["--speculative-draft-model-path", folder]
        # SGLang counts the whole block, the anchor included.
        words += ["--speculative-num-draft-tokens", str(config.block_size)]
    command = shlex.join(words)
    mixed = len(set(config.layer_types)) > 1 and engine in ("vllm", "speculators")
    # Only vLLM's newer runner keeps separate caches for the two kinds of layers.
    return f"VLLM_USE_V2_MODEL_RUNNER=1 {command}" if mixed else command


def check_engine(config: DFlashConfig, engine: str) -> None:
    """Refuse a drafter of which an engine would ignore a setting in silence.

    Raises:
        DFlashLabError: naming the setting and the way out.
    """
    if engine == "dflash":
        return
    if config.conditioning != "kv":
        raise DFlashLabError(
            f"conditioning {config.conditioning!r} is known to no engine: {engine} "
            "would inject the features into every layer; use --for dflash"
        )
    if config.input_embedding_scale != 1.0:
        raise DFlashLabError(
            f"input_embedding_scale={config.input_embedding_scale} is ignored by "
            f"{engine}'s DFlash loader, so its drafts would be wrong; use --for dflash"
        )
    if engine != "sglang":
        return
    usual = replace(config, causal=None)
    for kind in sorted(set(config.layer_types)):
        if config.causal_in_block(kind) != usual.causal_in_block(kind):
            raise DFlashLabError(
                f"is_causal={config.causal} changes how {kind} layers see their block, "
                "which SGLang decides by the kind of layer alone; use --for vllm"
            )
    if config.num_target_layers is None:
        raise DFlashLabError(
            "the drafter's config.json does not state num_target_layers, without "
            "which SGLang rejects target_layer_ids; give the target's folder as "
            "--target"
        )


def engine_notes(config: DFlashConfig, engine: str) -> tuple[str, ...]:
    """What the user of an engine must know about this drafter; often nothing."""
    notes = []
    scaled = config.output_multiplier != 1.0 or config.final_logit_softcapping
    if engine == "vllm" and scaled:
        notes.append(
            "vLLM ignores output_multiplier and final_logit_softcapping; neither "
            "changes which token has the largest logit, so greedy drafts are the same"
        )
    mixed = len(set(config.layer_types)) > 1
    causal = config.causal_in_block("sliding_attention")
    if engine == "speculators" and mixed and causal:
        notes.append(
            "some vLLM releases read sliding_window_non_causal=false as causal for the "
            "full-attention layers too, which costs acceptance; --for vllm avoids it"
        )
    return tuple(notes)

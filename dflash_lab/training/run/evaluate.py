"""Tau of a drafter on held-out prompts, by decoding them.

Leaves out: speed-ups and intervals; a batch of prompts is decoded at a time, which
changes no acceptance length.
"""

from __future__ import annotations

from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.pairs.pair import Pair
from dflash_lab.pairs.prompts import load_prompts
from dflash_lab.speculative.generate import speculative_generate
from dflash_lab.speculative.proposer import DFlash


def held_out_tau(
    pair: Pair,
    drafter: DFlashDraftModel,
    limit: int | None = None,
    max_new_tokens: int = 128,
) -> dict[str, float]:
    """Tau of greedy decoding on each held-out prompt set of a pair (first turns).

    Args:
        pair: target, tokenizer and names of prompt sets.
        drafter: in the published form.
        limit: prompts of each set; all if None.
        max_new_tokens: per answer.

    Returns:
        Set name -> tau pooled over its cycles, and `pooled` over all cycles.
    """
    result, everything = {}, []
    proposer = DFlash(drafter.to(device=pair.target.device, dtype=pair.target.dtype))
    for name in pair.prompt_sets:
        prompts = [pair.encode(p.turns[0]) for p in load_prompts(name, limit)]
        cycles: list[int] = []
        for start in range(0, len(prompts), 22):
            generation = speculative_generate(
                pair.target,
                proposer,
                prompts[start : start + 22],
                max_new_tokens=max_new_tokens,
                stop_token_ids=pair.stop_token_ids,
            )
            cycles += [c.acceptance_length for c in generation.trace.cycles]
        result[name] = sum(cycles) / max(1, len(cycles))
        everything += cycles
    result["pooled"] = sum(everything) / max(1, len(everything))
    return result

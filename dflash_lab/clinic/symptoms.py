"""From what one sees to what is wrong: a table of symptoms.

Collected from reports about public trainers and engines; the order is that in which to
look. Leaves out the measuring (`training/parity.py`, `diagnosis.py`).
"""

from __future__ import annotations

# (symptom, likely causes, how to tell)
SYMPTOMS = (
    (
        "tau is exactly 1.00",
        "NaN from float16; the head is not the target's (vocabulary sizes differ); the "
        "drafter was loaded as an ordinary language model",
        "use bfloat16 or float32; compare the vocabulary sizes; load it as "
        "DFlashDraftModel",
    ),
    (
        "accuracy of 0.9 and more in training, tau near 1",
        "labels shifted by one slot; blocks see context behind their anchor "
        "(overlapping blocks); text the target would not write; another chat template "
        "or thinking mode than in training",
        "dflash-lab check names the slot convention and the mask; compare templates",
    ),
    (
        "tau between 1.5 and 2.5 where 4 was expected",
        "features from far other layers; the anchor has a context row; wrong RoPE "
        "theta or scaling; wrong mask token",
        "dflash-lab check scores the drafter under each of these conventions",
    ),
    (
        "tau 4 to 10 % lower than it should be",
        "tapped layers off by one: the feature of layer l is hidden_states[l + 1]",
        "dflash-lab check compares the layers before and behind",
    ),
    (
        "slot 1 good, later slots fall steeply",
        "a causal mask inside the block; fixed blocks instead of random anchors; no "
        "loss decay; training too short",
        "dflash-lab check scores a causal block; look at the training's anchors",
    ),
    (
        "tau good, then falling with length",
        "trained on shorter texts; a sliding window that is ignored",
        "slice tau by position; read layer_types and sliding_window in config.json",
    ),
    (
        "tau good alone, bad in batches",
        "cache rows of rejected tokens are read; a prefix cache without the drafter's "
        "own rows is reused",
        "decode one prompt alone and in a batch: lengths must be equal",
    ),
    (
        "tau good in one language or task only",
        "the training prompts lack the others",
        "slice tau by prompt set, and widen the corpus",
    ),
    (
        "zeroing the features costs nothing",
        "the drafter has not yet learned to read them: too little training, or "
        "features that are not scaled",
        "watch accuracy with zeroed features while training",
    ),
    (
        "tau good, but no faster than plain decoding",
        "verifying K rows costs much more than one (float32 on a CPU, large batches); "
        "drafting is slow",
        "compare draft, verify and plain times; use bfloat16 or a smaller block",
    ),
)


def symptom_table() -> str:
    """The table as text, one paragraph a symptom."""
    parts = []
    for symptom, causes, test in SYMPTOMS:
        parts.append(f"{symptom}\n    likely: {causes}\n    to tell: {test}")
    return "\n\n".join(parts)

# %% [markdown] tags: slide
# # 05 · Train a DFlash drafter
#
# *Time on two cores: {{time}}. Needs: lessons 03 and 04.*
#
# **Aims.** You can lay out what a training step sees: anchors, blocks, labels, the context
# each block may use, and the weight of each slot. You have trained a drafter from nothing
# and watched it decode.
#
# The target is frozen. Nobody labels anything: the target's own answers are the labels, and
# its own hidden states are the input. What is trained is a small stack that turns both into
# guesses.

# %%
import tempfile
from pathlib import Path

from dflash_lab import load_pair
from dflash_lab.course.checks import training as check
from dflash_lab.course.lessons import pick

pair = load_pair("tiny", with_drafter=False, quiet=True)
decode, MASK = pair.tokenizer.decode, pair.tokenizer.convert_tokens_to_ids("<|mask|>")
work = Path(tempfile.mkdtemp())

# %% [markdown] tags: slide
# ## 1. Text of the target's own
#
# The drafter shall guess what *this target* says, so it learns from what the target has
# said, as the answer to the same prompt. (Other text is one of the classic mistakes: lesson 08.)

# %%
from dflash_lab.training.run.config import from_dict
from dflash_lab.training.run.own_corpus import write_own_corpus

settings = {
    "pair": "tiny",
    "out": str(work / "run"),
    "corpus": {"num_prompts": pick(2500, 40), "max_new_tokens": 160, "batch_size": 250},
    "drafter": {"num_hidden_layers": 1, "block_size": 8, "num_features": 3},
    "data": {"batch_size": 32, "num_anchors": 16, "corpus": [str(work / "c.jsonl")]},
    "optimizer": {"learning_rate": 2e-3, "steps": pick(900, 6)},
    "log": {"every": pick(25, 2), "eval_every": pick(150, 3), "eval_prompts": 5},
}
write_own_corpus(pair, work / "c.jsonl", from_dict(settings).corpus)

# %%
from dflash_lab.training.data.dataset import load_examples

examples, _ = load_examples([work / "c.jsonl"])
ids = list(examples[0].input_ids)
start = examples[0].prompt_length
print("prompt:", decode(ids[:start]))
print("answer:", decode(ids[start:]))

# %% [markdown] tags: slide
# ## 2. Anchors and blocks
#
# A block begins at an *anchor*: a token that is known. The slots behind it are masks. When
# decoding, the anchor is the last token of the text, so it can be any token of an answer
# that has another one behind it.
#
# **Exercise 1 (2 to 3 lines).** Which tokens may be anchors? `answer` says of each token whether it
# belongs to the answer. Return one True or False per token: True if this token *and* the very next
# one belong to the answer. (The target writes an answer's first token itself, when it reads the
# prompt. So the last token of a prompt is no anchor.)


# %%
def may_be_anchor(answer):
    # BEGIN SOLUTION
    behind = [*answer[1:], False]
    return [inside and after for inside, after in zip(answer, behind)]
    # END SOLUTION


check.check_may_be_anchor(may_be_anchor)

# %% [markdown]
# **Exercise 2 (1 line).** The input of a block: its anchor, then masks.


# %%
def block(ids, anchor, block_size, mask):
    # BEGIN SOLUTION
    return [ids[anchor]] + [mask] * (block_size - 1)
    # END SOLUTION


check.check_block(block)

# %% [markdown]
# **Exercise 3 (2 to 3 lines).** The labels of slots 1 to K − 1. A slot predicts the token *at
# its own position*. (A language model predicts the *next* token. Here nothing is shifted.) Past the
# end of the text: None.


# %%
def labels(ids, anchor, block_size):
    # BEGIN SOLUTION
    places = range(anchor + 1, anchor + block_size)
    return [ids[place] if place < len(ids) else None for place in places]
    # END SOLUTION


check.check_labels(labels)

# %% [markdown]
# **Exercise 4 (1 line).** Which positions' target features may a block with this anchor use?
# Return `length` values, True where it may. Think of decoding: the anchor has just been chosen.
# Has the target read it yet?


# %%
def sees_context(anchor, length):
    # BEGIN SOLUTION
    return [place < anchor for place in range(length)]
    # END SOLUTION


check.check_sees_context(sees_context)

# %% [markdown]
# Many blocks go through one pass: each sees the features before its own anchor, and itself. The
# library's mask follows your rules. Move the anchors.

# %%
from dflash_lab.views.widgets.mask_explorer import drafter_mask_explorer

drafter_mask_explorer(12)

# %% [markdown]
# **What to notice.**
# * The staircase ends one short of the anchor: f3 is closed to a block whose anchor is at 3.
# * Blocks never see each other. They are separate exercises that share one text.
# * Within a block everybody sees everybody: mask 1 may look at mask 3, and mask 3 at mask 1.

# %% [markdown]
# **In words.** Why are anchors drawn at random, anew in every epoch, and not at every
# eighth token?

# %% [markdown] tags: answer
# When decoding, a block begins wherever the one before it ended, so every token can be an
# anchor and every distance to the sentence before it occurs. A fixed grid shows the drafter
# one way of cutting each text only, and it sees each token in one slot only. Drawing anew
# gives other blocks from the same texts in every epoch.

# %% [markdown] tags: slide
# ## 3. What a slot counts
#
# A slot is of use only if all slots before it are right. So early slots count more: slot k
# has the weight exp(−(k − 1)/γ). For K = 8 the trainer takes γ = 4.
#
# **Exercise 5 (1 to 2 lines).** The weights of slots 1 to K − 1.

# %%
import math


def slot_weights(block_size, gamma):
    # BEGIN SOLUTION
    return [math.exp(-(slot - 1) / gamma) for slot in range(1, block_size)]
    # END SOLUTION


check.check_slot_weights(slot_weights)

# %% [markdown] tags: slide
# ## 4. Train
#
# Before step 1 the trainer checks what you have just written, on its own tensors: a block's
# logits are the same in training and in decoding, nobody sees the future, and the first loss is
# neither too low (then labels leak in) nor far above that of a drafter that passes its masks on
# unchanged. (ln V is the loss of a uniform guess over V tokens.)
#
# **Before you run the next cell:** which slot will be learnt first? What will tau be in the
# beginning, when no draft is ever right?

# %%
from functools import partial

from dflash_lab.training.run.train import train
from dflash_lab.views.widgets.training_monitor import training_monitor

config = from_dict(settings)
monitor = training_monitor(partial(train, config, pair=pair, resume=True))
monitor

# %% [markdown]
# The run goes on behind the notebook; its curves grow above. The stop button ends it with a
# checkpoint. (If you stopped it, run the cell above once more: it goes on from there.) The next
# cell waits for the end.

# %%
result = await monitor.wait()
print((work / "run" / "checks.txt").read_text())

# %%
monitor.view

# %% [markdown]
# **What to notice.**
# * Slot 1 rises first. Later slots have to guess more, from the same features.
# * Before a draft is ever right tau is 1: the target's own token comes with every cycle, whatever
#   is drafted.
# * The two curves of tau are not the same thing. *Predicted* is 1 + r1 + r1·r2 + ... with the
#   accuracies on training text, as if slots were independent. *Measured* is decoding on prompts
#   never seen, now and then.

# %% [markdown] tags: slide
# ## 5. Watch it decode

# %%
from dflash_lab import DFlash, load_prompts, speculative_generate
from dflash_lab.views.stepper import text_view

prompt = load_prompts("tiny-chat")[1].turns[0]
mine = speculative_generate(
    pair,
    DFlash(result.drafter),
    pair.encode(prompt),
    max_new_tokens=60,
    stop_token_ids=pair.stop_token_ids,
)
text_view(mine, decode)

# %%
tau = result.facts["held_out_tau"]
print(
    "steps:", settings["optimizer"]["steps"], " held-out tau:", round(tau["pooled"], 2)
)

# %% [markdown]
# **What to notice.** Minutes are enough here, because the small world is small. (The shipped drafter has
# 2400 steps behind it, and a held-out tau of 5.75.) A real
# target takes the same recipe and much more text: the shipped `smol` drafter had 4.1
# CPU-hours and has a tau of 1.59; the paper's drafters had GPUs and hundreds of thousands of
# answers.
#
# **Go on:** lesson 06 takes tau apart. The same from a terminal: `dflash-lab train --config
# configs/tiny.yaml`. Code: `dflash_lab/training/`.

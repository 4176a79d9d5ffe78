# %% [markdown] tags: slide
# # 00 · Check your bench
#
# *Time on two cores: {{time}}. Needs: nothing.*
#
# **Aims.** You know that your installation works. You have seen one finished decode with
# coloured tokens, and can read it. You know the letters that shapes are written in.
#
# Nothing is downloaded here: the tiny pair (a target and its drafter, both trained by this
# project) lies in the package.

# %%
from dflash_lab.cli import doctor

status = doctor.run(None)

# %% [markdown]
# `OK` is good, `NOTE` can be lived with, `FAIL` says what to do. The `smol` pair is only
# needed in lesson 10.

# %% [markdown] tags: slide
# ## One finished decode
#
# The *target* is the model whose text is wanted. The *drafter* is a small model that guesses blocks of it ahead. The target checks each
# block in one pass and keeps what it would have written itself.

# %%
from dflash_lab import DFlash, Plain, load_pair, load_prompts, speculative_generate

pair = load_pair("tiny", quiet=True)
prompt = load_prompts("tiny-chat")[1].turns[0]
options = {"max_new_tokens": 60, "stop_token_ids": pair.stop_token_ids}
drafted = speculative_generate(
    pair, DFlash(pair.drafter), pair.encode(prompt), **options
)
plain = speculative_generate(pair, Plain(), pair.encode(prompt), **options)
assert drafted.output_ids == plain.output_ids
print(prompt)

# %%
from dflash_lab.views.stepper import text_view

text_view(drafted, pair.tokenizer.decode)

# %% [markdown]
# **What to notice.**
# * Underlined tokens came from the drafter, several at a time. Boxed and bold ones came
#   from the target: one per cycle.
# * Colours never stand alone: each kind of token has a second mark.
# * Hover a token for its number.

# %%
from dflash_lab.views.view import table_view

cycles = len(drafted.trace.cycles)
tokens = len(drafted.output_ids[0])
table_view(
    ["", "tokens", "passes of the target", "tokens per cycle (tau)"],
    [
        ["plain decoding", tokens, len(plain.trace.cycles) + 1, 1.0],
        ["DFlash", tokens, cycles + 1, drafted.tau],
    ],
)

# %% [markdown]
# **What to notice.** The same tokens, fewer passes. The first token comes from the pass over
# the prompt, so tau is 59 tokens over 12 cycles. The one pass that is not a cycle reads
# the prompt. Whether fewer passes also mean less *time* is the question of lesson 07.

# %% [markdown] tags: slide
# ## The letters
#
# Shapes in code and comments use one legend.
#
# | letter | means | here |
# |---|---|---|
# | B | batch: texts at once | 1 |
# | S | context: tokens so far | grows |
# | N | anchors: blocks of one text in training | up to 512 in the paper |
# | K | block size: the last known token and K − 1 masks | 8 |
# | D | width of a hidden state | 128 |
# | V | vocabulary | 448 |
#
# So `target_hidden (B, S, n·D)` is: for every token so far, the hidden states of n layers
# of the target, side by side.

# %%
config = pair.drafter.config
print("block_size K =", config.block_size)
print("mask_token_id =", config.mask_token_id)
print("target_layer_ids =", config.target_layer_ids)
print("hidden_size D =", config.hidden_size, "  vocab_size V =", config.vocab_size)

# %% [markdown]
# **In words.** Why is it no surprise that the first token of the answer is marked as the
# target's own?

# %% [markdown] tags: answer
# The pass over the prompt already says what comes next, for free. There is nothing to draft
# yet: drafting needs the target's features of the text so far, and that very pass makes
# them.

# %% [markdown]
# **Go on:** lesson 01 explains what a *diffusion* model of text is; lesson 03 goes
# straight to drafting and verifying.

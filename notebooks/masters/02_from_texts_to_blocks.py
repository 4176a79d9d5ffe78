# %% [markdown] tags: slide
# # 02 · From whole texts to blocks
#
# *Time on two cores: {{time}}. Needs: lesson 01.*
#
# **Aims.** You can write the attention mask that trains a block-diffusion model on all
# blocks of a text at once. You know what block size trades against what, and you have
# measured it: likelihood, quality of texts, passes over the model.
#
# Lesson 01 ended with two extremes. Left to right: one pass per token, good texts. All at
# once: few passes, poor texts. **Blocks** lie in between: left to right from block to
# block, all at once within a block.

# %%
import torch

from dflash_lab import load_pair
from dflash_lab.course.checks import blocks as check
from dflash_lab.course.lessons import pick

pair = load_pair("tiny", with_drafter=False, quiet=True)
tokenizer = pair.tokenizer
MASK = tokenizer.convert_tokens_to_ids("<|mask|>")
generator = torch.Generator().manual_seed(0)

# %% [markdown] tags: slide
# ## 1. Who may look at whom
#
# When the model writes block b, all earlier blocks are finished. So in training, block
# b is noisy, and everything before it is clean. One text makes as many exercises as it
# has blocks. To do all of them in *one* pass, the text goes in twice: noisy rows first,
# clean rows behind them. A mask keeps the exercises apart.
#
# **Exercise 1 (1 line).** The block of a place.


# %%
def block_of(place, block_size):
    # BEGIN SOLUTION
    return place // block_size
    # END SOLUTION


check.check_block_of(block_of)

# %% [markdown]
# A *row* is the token that looks, a *column* the token that is looked at; both are given as
# places of the text.
#
# **Exercise 2 (1 line each).** Two rules. Clean rows stand for finished text, whose keys and
# values will lie in a cache. A clean block was finished as one piece, so its rows see all of it.
# (A clean row never sees a noisy one.)


# %%
def clean_sees_clean(row, column, block_size):
    # BEGIN SOLUTION
    return block_of(column, block_size) <= block_of(row, block_size)
    # END SOLUTION


def noisy_sees_clean(row, column, block_size):
    # BEGIN SOLUTION
    return block_of(column, block_size) < block_of(row, block_size)
    # END SOLUTION


check.check_clean_sees(clean_sees_clean)
check.check_noisy_sees_clean(noisy_sees_clean)

# %% [markdown]
# **Exercise 3 (1 line).** And a noisy row and a noisy column?


# %%
def noisy_sees_noisy(row, column, block_size):
    # BEGIN SOLUTION
    return block_of(column, block_size) == block_of(row, block_size)
    # END SOLUTION


check.check_noisy_sees_noisy(noisy_sees_noisy)

# %% [markdown]
# Your three rules, put together, against the library's mask:

# %%
from dflash_lab.diffusion.blocks import block_diffusion_mask


def my_mask(length, size):
    places = range(length)
    noisy = [[noisy_sees_noisy(r, c, size) for c in places] for r in places]
    given = [[noisy_sees_clean(r, c, size) for c in places] for r in places]
    clean = [[clean_sees_clean(r, c, size) for c in places] for r in places]
    top = [a + b for a, b in zip(noisy, given)]
    return top + [[False] * length + row for row in clean]


assert my_mask(6, 2) == block_diffusion_mask(6, 2).tolist()

# %% [markdown]
# **Before you run the next cell:** at block size 1, which picture do you know already? And
# at block size 8 of 8?

# %%
from dflash_lab.views.masks import block_diffusion_picture, mask_view
from dflash_lab.views.widgets.mask_explorer import block_mask_explorer

block_mask_explorer(8)

# %%
from dflash_lab.views.view import stacked

ends = {1: "K = 1; hover a cell: it says why", 8: "K = 8"}
stacked(*(mask_view(block_diffusion_picture(8, k), ends[k]) for k in ends))

# %% [markdown]
# **What to notice.**
# * At K = 1 the clean quarter is the causal triangle, and each noisy row sees what came
#   before it and its own mask: an autoregressive model.
# * At K = 8 the noisy rows see each other and nothing else: masked diffusion, lesson 01.
# * The noisy columns are closed to all clean rows. A cache of clean rows never changes.

# %% [markdown] tags: slide
# ## 2. One size after another
#
# Five models of one size, one corpus, the same number of steps. Only the block size
# differs.

# %%
from dflash_lab.diffusion.objectives import bound
from dflash_lab.diffusion.study import text_batch, train_twin

LENGTH, SIZES = 48, (1, 4, 8, 16, 48)
options = {"length": LENGTH, "kinds": ("chat",), "width": 96, "layers": 3}
options |= {"learning_rate": 4e-3, "steps": pick(300, 8), "batch_size": pick(32, 8)}
models = {
    size: train_twin("block", tokenizer, MASK, block_size=size, **options)
    for size in SIZES
}
held_out = text_batch(tokenizer, 64, LENGTH, seed=1, held_out=True, kinds=("chat",))

# %%
from dflash_lab.views.diffusion import lines_figure
from dflash_lab.views.view import figure_view

nats = [
    (size, bound("block", made.model, held_out, block_size=size, draws=8))
    for size, made in models.items()
]

# %%
made = lines_figure(
    {"bound after the same number of steps": nats},
    x="block size (log axis)",
    y="nats per token, held-out",
    headline="What a larger block costs",
    log_x=True,
    ticks=SIZES,
)
figure_view(made)

# %% [markdown]
# **What to notice.**
# * The bound rises with the block: more places are asked from less context.
# * Much of the rise comes late. Blocks of 4 cost about 0.2 nats here. That looks small;
#   section 3 shows that the texts written with them are much worse.
# * This is after so few steps; large blocks also *learn* more slowly (lesson 01).

# %% [markdown] tags: slide
# ## 3. Counting passes
#
# A pass over 8 rows costs much less than 8 passes over one (lesson 07 measures it), so we count
# *passes*. A block takes its denoising steps, then one pass over its clean rows
# that fills the cache; the last block of a text needs no such pass.
#
# **Exercise 4 (2 to 3 lines).** Passes for a text of `tokens` tokens. A block never takes
# more steps than it has tokens. `tokens` is a whole number of blocks.


# %%
def passes(tokens, block_size, steps):
    # BEGIN SOLUTION
    blocks = tokens // block_size
    return blocks * min(steps, block_size) + blocks - 1
    # END SOLUTION


check.check_passes(passes)

# %% [markdown]
# **In words.** With K = 1 and one step this counts 2 S - 1 passes, although an
# autoregressive model takes S. Where does the other half come from, and how could it be
# saved?

# %% [markdown] tags: answer
# The block is first a mask (a pass to predict it), then clean (a pass to store it). An
# autoregressive model stores token i in the same pass that predicts token i + 1. Saving it
# means one pass that stores the finished block and begins the next. DFlash has the same
# choice to make and avoids the second pass altogether: its drafter stores the *target's*
# features of the accepted tokens, not its own clean rows.

# %%
from dflash_lab.diffusion.blocks import sample_blocks
from dflash_lab.diffusion.study import judge

prompt = torch.zeros(pick(32, 4), 0, dtype=torch.long)


def judged(size, steps):
    texts = sample_blocks(
        models[size].model, prompt, LENGTH, size, steps, generator, order="confidence"
    )
    assert texts.passes == passes(LENGTH, size, steps)
    return texts.passes, judge(pair.target.model, texts.ids, 1)["nats_per_token"]


# %%
plans = {
    1: (1,),
    4: (1, 2, 4),
    8: (1, 2, 4, 8),
    16: (1, 2, 4, 8, 16),
    48: (1, 4, 12, 48),
}
quality = {
    f"K = {size}": sorted(judged(size, steps) for steps in plans[size])
    for size in plans
}

# %%
made = lines_figure(
    quality,
    x="passes over the model for 48 tokens (log axis)",
    y="nats per token under the target",
    headline="Quality against passes",
    log_x=True,
    ticks=(1, 2, 5, 11, 23, 48, 95),
)
figure_view(made)

# %% [markdown]
# **What to notice.**
# * One step per block writes poorly at every size, even at K = 4: its tokens are drawn
#   without knowing of each other.
# * With few passes (up to about 16) the large blocks with several steps are best, with many
#   the small ones.
# * Only K = 1 writes well, and takes a pass for every token, or two.

# %% [markdown] tags: slide
# ## 4. Drafting changes the question
#
# Suppose somebody checks each block at once, keeps what is right up to the first mistake,
# and mends that mistake. Then poor text costs *time*, not quality. The question is no more
# "how good is the text", but: **how many tokens of a block are right, from the left?**
#
# **Exercise 5 (2 to 4 lines).** The number of leading places at which two lists agree.


# %%
def leading(drafts, truth):
    # BEGIN SOLUTION
    agree = [a == b for a, b in zip(drafts, truth)]
    return agree.index(False) if False in agree else len(agree)
    # END SOLUTION


check.check_leading(leading)

# %% [markdown]
# The model with K = 8 continues held-out texts; how far does it agree with the words that
# really come, with 1, 2, 4 and 8 denoising steps?

# %%
size, starts = 8, (16, 24, 32)
rows = []
for steps in (1, 2, 4, 8):
    right = []
    for start in starts:
        texts = sample_blocks(
            models[size].model, held_out[:, :start], size, size, steps, generator,
            order="confidence", greedy=True,
        ).ids  # fmt: skip
        pairs = zip(
            texts[:, start:].tolist(), held_out[:, start : start + size].tolist()
        )
        right += [leading(a, b) for a, b in pairs]
    rows.append([steps, sum(right) / len(right)])

# %%
from dflash_lab.views.view import table_view

table_view(["denoising steps", "leading tokens right, of 8"], rows)

# %% [markdown]
# **What to notice.**
# * Eight steps buy a quarter of a token.
# * A second step costs as much as the first. For drafting, one step is the natural choice.
# * What limits the drafter is what it *knows*. It has to guess what the target will say,
#   and lesson 04 lets it ask.
#
# **Go on:** lesson 03 does the checking. Code: `dflash_lab/diffusion/blocks.py`.

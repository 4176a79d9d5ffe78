# %% [markdown] tags: slide
# # 06 · What does "acceptance" mean?
#
# *Time on two cores: {{time}}. Needs: lesson 03.*
#
# **Aims.** You can compute every number that goes by the name of acceptance from the same
# cycles. You know which of them can be compared between papers, engines and block sizes,
# and how sure a measured one is.
#
# "Acceptance 0.7" can mean: 70 % of drafted tokens are used; or 70 % of first drafts are
# right; or a draft behind right ones is right 70 % of the time. These differ, on the very
# same run.

# %%
from dflash_lab import DFlash, load_pair, load_prompts, speculative_generate
from dflash_lab.course.checks import acceptance as check
from dflash_lab.course.lessons import pick

pair = load_pair("tiny", quiet=True)
proposer = DFlash(pair.drafter)
traces = {}
for name in pair.prompt_sets:
    ids = [pair.encode(p.turns[0]) for p in load_prompts(name, pick(20, 2))]
    options = {"max_new_tokens": 128, "stop_token_ids": pair.stop_token_ids}
    traces[name] = [
        speculative_generate(pair, proposer, i, details=True, **options).trace
        for i in ids
    ]

# %% [markdown] tags: slide
# ## 1. From cycles to a table of right and wrong
#
# For each cycle and slot: does the draft equal what the target chooses behind the drafts
# before it? Only full blocks are used here, so that every list has one length.

# %%
blocks = [
    [draft == own for draft, own in zip(c.draft_tokens, c.target_tokens)]
    for part in traces.values()
    for trace in part
    for c in trace.cycles
    if len(c.draft_tokens) == 7 and c.acceptance_length > sum(c.accepted)
]
for block in blocks[:6]:
    print(" ".join("right" if right else "  -  " for right in block))

# %% [markdown]
# **Exercise 1 (2 to 4 lines).** tau: tokens that a block adds, the bonus token counted, as
# a mean over blocks. A block adds its leading right drafts and one token of the target's.


# %%
def kept(block):
    """Leading right drafts."""
    return (*block, False).index(False)


def tau(blocks):
    # BEGIN SOLUTION
    return sum(kept(block) + 1 for block in blocks) / len(blocks)
    # END SOLUTION


check.check_tau(tau)

# %% [markdown] tags: slide
# ## 2. Three questions to one slot
#
# **Exercise 2 (2 lines).** *Marginal*: how often is the slot right, whatever stood before?
# This is what training logs show.


# %%
def marginal(blocks):
    # BEGIN SOLUTION
    slots = range(len(blocks[0]))
    return [sum(block[slot] for block in blocks) / len(blocks) for slot in slots]
    # END SOLUTION


check.check_marginal(marginal)

# %% [markdown]
# **Exercise 3 (2 lines).** *Survival*: how often does the slot's draft become text? This
# is the "per-position acceptance rate" in vLLM's log.


# %%
def survival(blocks):
    # BEGIN SOLUTION
    slots = range(len(blocks[0]))
    return [sum(kept(block) > slot for block in blocks) / len(blocks) for slot in slots]
    # END SOLUTION


check.check_survival(survival)

# %% [markdown]
# **Exercise 4 (3 to 5 lines).** *Conditional*: how often is it right, of the blocks in
# which all slots before it are right?


# %%
def conditional(blocks):
    # BEGIN SOLUTION
    rates = []
    for slot in range(len(blocks[0])):
        reached = [block for block in blocks if kept(block) >= slot]
        rates.append(sum(block[slot] for block in reached) / len(reached))
    return rates
    # END SOLUTION


check.check_conditional(conditional)

# %% [markdown]
# **Before you run the next cell:** which of the three can rise from one slot to the next?
# Which is the lowest at the last slot?

# %%
from dflash_lab.views.widgets.acceptance_explorer import acceptance_explorer

acceptance_explorer(traces)

# %% [markdown]
# **What to notice.**
# * All three agree at slot 1: nothing stands before it.
# * Survival can only fall. It is the product of the conditional rates up to its slot.
# * The conditional rate falls least. Blocks that are right so far are *easy* places of the
#   text, and go on being easy.
# * One run, and "acceptance at slot 7" can be any of three numbers far from each other.

# %% [markdown]
# **In words.** A paper reports 80 % "acceptance rate per step" for an autoregressive
# drafter that stops at the first rejection. You measure marginal accuracies of a block
# drafter, 80 % at slot 1 and 55 % at slot 7. Can you say which drafts more tokens?

# %% [markdown] tags: answer
# No. Theirs is a conditional rate, averaged over steps that were reached; yours is marginal.
# With a conditional rate of 0.8 at each of 7 slots, tau is 1 + 0.8 + 0.64 + ... = 4.2. Your
# conditional rates are not known from marginals; only survival (or tau itself) compares.
# Ask for tau, with the bonus token or without it said aloud, at the same block size.

# %% [markdown] tags: slide
# ## 3. When slots are not independent
#
# **Exercise 5 (3 to 4 lines).** If slots failed independently, tau would be
# 1 + r1 + r1·r2 + ... Some training logs print this with *marginal* rates, as an estimate.


# %%
def independent(rates):
    # BEGIN SOLUTION
    total = product = 1.0
    for rate in rates:
        product *= rate
        total += product
    return total
    # END SOLUTION


check.check_independent(independent)

# %%
from dflash_lab.views.view import table_view

rows = [
    ["tau, measured", tau(blocks)],
    ["1 + sum of survival", 1 + sum(survival(blocks))],
    ["independent(conditional)", independent(conditional(blocks))],
    ["independent(marginal)", independent(marginal(blocks))],
]
table_view(["", "tokens per cycle"], rows)

# %% [markdown]
# **What to notice.**
# * tau is higher than in the explorer, because only full blocks count here.
# * With conditional rates the formula is no estimate: it *is* tau.
# * With marginal rates it is off. The difference says how dependent the slots are.

# %% [markdown] tags: slide
# ## 4. Means of what?
#
# Pooled over cycles, a long or difficult answer has many cycles and weighs much. As a mean
# over prompts, every prompt weighs the same. The benchmark of DFlash's authors prints the second.

# %%
from dflash_lab.measure.acceptance import acceptance_summary

rows = []
for name, part in traces.items():
    found = acceptance_summary(part)
    names = ("tau", "tau_per_prompt", "tau_without_bonus", "draft_acceptance_rate")
    rows.append([name, *(found[key] for key in names)])
columns = ["prompts", "tau", "mean over prompts", "without bonus", "accepted / drafted"]
table_view(columns, rows)

# %%
import numpy as np

every = [trace for part in traces.values() for trace in part]
counts = [len(trace.cycles) for trace in every]
means = [sum(c.acceptance_length for c in t.cycles) / len(t.cycles) for t in every]
print(
    f"correlation of a prompt's cycles with its tau: {np.corrcoef(counts, means)[0, 1]:.2f}"
)

# %% [markdown]
# **What to notice.** Prompts with a high acceptance tend to need fewer cycles (the correlation is
# negative, and weak), so pooling counts them less: the pooled tau is usually the lower one (here
# in three sets of four).
#
# ## 5. How sure is it?
#
# Cycles of one answer resemble each other, so they are not independent draws. Whole
# prompts are resampled.

# %%
from dflash_lab.measure.intervals import ratio_interval


def interval(count):
    part = [trace for found in traces.values() for trace in found[:count]]
    tokens = [sum(c.acceptance_length for c in trace.cycles) for trace in part]
    return str(ratio_interval(tokens, [len(trace.cycles) for trace in part]))


sizes = (1, 5, 20)
table_view(["prompts per set", "tau [95 %]"], [[n, interval(n)] for n in sizes])

# %% [markdown]
# **What to notice.** Four times as many prompts halve the interval. The first row stands on four
# prompts in all, which are too few even for their own interval to be trusted.

# %% [markdown] tags: slide
# ## 6. Where is the drafter wrong?

# %%
import pandas as pd

from dflash_lab.measure.slices import acceptance_by, acceptance_by_token, token_class

frames = [trace.to_frame() for part in traces.values() for trace in part]
frame = pd.concat(frames, keys=range(len(frames)), names=["set", "row"]).reset_index()
kinds = acceptance_by_token(frame, lambda t: token_class(pair.decode([t])))
margin = acceptance_by(frame, "target_margin", 5)
table_view(list(kinds.columns), kinds.values.tolist(), "by the target's token")

# %% [markdown]
# **What to notice.** Digits are the hardest class. To draft the result of a sum one has to do
# the sum, in one pass, beside everything else in the block.

# %%
from dflash_lab.views.diffusion import lines_figure
from dflash_lab.views.view import figure_view

points = list(zip(margin["target_margin"].tolist(), margin["rate"].tolist()))
made = lines_figure(
    {"drafts behind accepted ones": points},
    x="the target's margin between its two best tokens (logits)",
    y="accepted",
    headline="The smaller the target's margin, the more drafts fail",
)
figure_view(made)

# %% [markdown]
# **What to notice.** Where the target is surest, 95 of 100 drafts are right, in the lowest fifth
# 70. So acceptance also depends on the *text*, and figures for different prompt sets cannot be
# compared.
#
# **Go on:** lesson 07 asks when all this saves time. Definitions with an example by hand:
# `docs/metrics.md`. Code: `dflash_lab/measure/`.

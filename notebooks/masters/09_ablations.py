# %% [markdown] tags: slide
# # 09 · Ablations
#
# *Time on two cores: {{time}}. Needs: lessons 04 to 07.*
#
# **Aims.** You can say whether a change to a drafter is a gain, with what certainty, and
# whether it is more than another seed would have changed. You have written half a page of
# findings from an experiment.
#
# Fourteen drafters of the tiny target, trained on the same 5,000 answers, in the same number
# of steps. Each differs from `base` in one thing, but for one of them. Exercise 1 finds it.

# %%
import torch

from dflash_lab import DFlash, Plain, load_pair, load_prompts
from dflash_lab.clinic.family import load_member, member_facts, names
from dflash_lab.course.checks import ablations as check
from dflash_lab.course.lessons import pick

torch.set_num_threads(1)  # the tiny pair is faster so
pair = load_pair("tiny", with_drafter=False, quiet=True)
members = [name for name in names() if not name.startswith("fault-")]
print(", ".join(members))

# %% [markdown] tags: slide
# ## 1. One thing at a time
#
# **Exercise 1 (1 line).** An ablation is only worth something if you know what was changed.
# Settings are dictionaries with the same names: which of them differ?


# %%
def changes(one, other):
    # BEGIN SOLUTION
    return [name for name in one if one[name] != other[name]]
    # END SOLUTION


check.check_changes(changes)

# %%
from dflash_lab.clinic.family import flat_settings

base = flat_settings("base")
for name in members[1:]:
    mine = flat_settings(name)
    print(f"{name:13}", {key: mine[key] for key in changes(base, mine)})

# %% [markdown]
# What the names stand for: `gamma` is the decay of the loss (lesson 05), and a huge one means
# equal weights. `kl`: learn the target's whole distribution, not only its token. `dpace`: weights that
# follow how far a block survives. `reveal`: some slots are shown in training (lesson 04).
# `input`: features enter at the drafter's input, as in EAGLE, not as keys and values.
#
# **Before you run the next cells:** order these changes by what they will do to tau. Which of
# them changes the time of a cycle?

# %% [markdown] tags: slide
# ## 2. The race
#
# All of them decode the same prompts, in turns.

# %%
from dflash_lab.measure.race import race, standings, tau_differences
from dflash_lab.views.ablations import differences_figure, standings_view
from dflash_lab.views.view import figure_view

proposers = {"plain": Plain()} | {name: DFlash(load_member(name)) for name in members}
sets = [load_prompts(name, pick(8, 1)) for name in pair.prompt_sets]
prompts = [pair.encode(prompt.turns[0]) for part in sets for prompt in part]
results = race(
    pair,
    proposers,
    prompts,
    max_new_tokens=pick(96, 24),
    stop_token_ids=pair.stop_token_ids,
)
standings_view(standings(results, "plain"))

# %% [markdown]
# **What to notice.**
# * The order by tau and the order by speed-up are not the same. `layers-3` keeps the most,
#   `layers-2` is as fast: the third layer costs what it brings.
# * K bounds tau. `block-4` keeps three drafts of four, `block-16` one of seven. Their taus are
#   nearly the same, and the cycle of 4 is shorter.
# * `input-fusion` has three layers too: compare it with `layers-3`, not with `base`. It keeps as
#   much and takes twice as long to draft.

# %% [markdown] tags: slide
# ## 3. Is it a gain?
#
# Some prompts are easy for everybody. So drafters are compared prompt by prompt.
#
# **Exercise 2 (1 to 2 lines).** `added` and `cycles` hold one number for each prompt: tokens
# added, cycles run. Return the drafter's tau minus the base's, each pooled over all cycles. (The
# pairing comes in exercise 3: both get the same drawn prompts.)


# %%
def tau_difference(added, cycles, base_added, base_cycles):
    # BEGIN SOLUTION
    return sum(added) / sum(cycles) - sum(base_added) / sum(base_cycles)
    # END SOLUTION


check.check_tau_difference(tau_difference)

# %% [markdown]
# **Exercise 3 (1 to 3 lines).** How far could it have come out otherwise, with other prompts of
# the same kind? Draw as many prompts as there are, with replacement, and compute again. The
# drawing is done for you: `drawn` lists the prompts, counted from 0, and one may come twice.
# Return the pooled tau of these prompts, for one drafter.


# %%
def resampled(added, cycles, drawn):
    # BEGIN SOLUTION
    return sum(added[i] for i in drawn) / sum(cycles[i] for i in drawn)
    # END SOLUTION


check.check_resampled(resampled)

# %% [markdown]
# Do this thousands of times with the same draws for both drafters, take the difference each
# time, and the middle 95 % of it is the interval. That tells about *prompts*. Another seed in
# training tells about *drafters*: `again` is `base` with another seed. How far the two lie apart is
# a rough idea of that noise, from one pair only. A change should beat it.
#
# **Exercise 4 (2 to 4 lines).** With the interval of a difference and the noise of a seed:
# `"better"` if the whole interval lies above the noise, `"worse"` if it lies below minus the
# noise, else `"not told"`.


# %%
def verdict(low, high, noise):
    # BEGIN SOLUTION
    if low > noise:
        return "better"
    return "worse" if high < -noise else "not told"
    # END SOLUTION


check.check_verdict(verdict)

# %%
differences = tau_differences(results, "base")
differences.pop("plain")
noise = abs(differences["again"].value)
figure_view(differences_figure(differences, "base", noise))

# %%
for name, found in differences.items():
    print(f"{name:13} {found!s:22} {verdict(found.low, found.high, noise)}")

# %% [markdown]
# **What to notice.**
# * More layers are the one clear gain, and a large one: more than half as much again.
#   (`input-fusion` has three as well; its gain comes from them.)
# * Without features, with one feature, with K=4, or with weights that are the same for all
#   slots, tau is clearly lower. So is K=16 here: in the same number of steps it had as many
#   blocks, but each has twice as many slots to learn, with the same one layer.
# * Five features in place of three, the objectives `kl` and `dpace`, and shown slots are not told
#   from the noise. One run each cannot tell more. Three seeds of each would show how much runs
#   differ.

# %% [markdown] tags: slide
# ## 4. What the training runs say
#
# A second look at the same question, from the runs' own lines. Choose other runs, and other
# quantities; your own runs can be browsed like this too: `find_runs("runs")`.

# %%
from dflash_lab.clinic.family import family_root
from dflash_lab.training.run.runs import find_runs
from dflash_lab.views.widgets.run_browser import run_browser

shown = ("base", "again", "layers-3", "loss-uniform", "no-features")
run_browser(find_runs(family_root()), shown)

# %%
for name in members:
    facts = member_facts(name)
    tau = facts["held_out_tau"]["pooled"]
    print(f"{name:13} {facts['parameters']:8,} parameters, held-out tau {tau:.2f}")

# %% [markdown]
# **What to notice.**
# * Without features slot 1 stays lowest, and ends at half of what `base` has.
# * `loss-uniform` learns slot 1 more slowly than `base`: its effort goes to slots that are seldom
#   reached.
# * Accuracy of slot 1 is not tau: `layers-3` is ahead by less here than in tau, since every slot
#   multiplies.
# * The tau of the list is higher than that of the race: it is over all held-out prompts, and
#   answers of up to 128 tokens.

# %% [markdown] tags: slide
# ## 5. Write it down
#
# **In words.** Half a page: the question, what was held equal, what was measured, the result
# with its interval, and what you cannot conclude. Choose one row of the figure.

# %% [markdown] tags: answer
# *An example, for the loss's decay.* Does it help to let early slots count more (weights
# exp(−(k − 1)/γ), γ = 4) than all slots the same? Both drafters have one layer, K = 8, the
# same 5,000 answers, 1,200 steps and the same seed; only the weights differ. Decoding held-out
# prompts of four kinds greedily, the drafter with equal weights has a clearly lower tau (the
# row `loss-uniform`); over all held-out prompts 3.46 against 4.29. Another seed changes tau by
# 0.1 to 0.2, so the effect is larger than the noise that we know of. The paper reports the same
# direction (its figure 5). What this does not tell: whether the gap closes with longer
# training, how it depends on γ, and whether a larger target behaves alike. It is one run each.

# %% [markdown]
# **Go on:** lesson 10 takes a real pair, lesson 11 is a project of your own. The tables of the
# paper in small, one command each: `benchmarks/mini_paper.py` in the repository. Code:
# `measure/race.py`, `intervals.py`.

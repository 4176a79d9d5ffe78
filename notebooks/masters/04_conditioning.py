# %% [markdown] tags: slide
# # 04 · Listening to the target
#
# *Time on two cores: {{time}}. Needs: lesson 03; for section 4 also
# lesson 01.*
#
# **Aims.** You can say what a DFlash drafter hears of its target: which layers, from which
# places, and how it gets into attention. You have measured what that is worth, and why one
# denoising step is enough once one listens.
#
# A small model that only reads the text would have to understand it all over again. But the
# target has just read it. Its hidden states hold what it understood, and part of what it is
# about to say. They are there anyway. DFlash hands them to the drafter.

# %%
import math

import torch

from dflash_lab import DFlash, Plain, load_pair, load_prompts
from dflash_lab.clinic.family import load_member
from dflash_lab.course.checks import conditioning as check
from dflash_lab.course.lessons import pick

torch.set_num_threads(1)  # the tiny pair is faster so
pair = load_pair("tiny", quiet=True)
drafter = load_member("base")
print(pair.target.num_layers, "layers; tapped:", drafter.config.target_layer_ids)

# %% [markdown] tags: slide
# ## 1. Which layers
#
# Low layers know the words, high layers the next token. DFlash takes some of each: `n` layers,
# evenly spaced from layer 1 to layer N − 3 of a target with N layers, rounded by Python's `round`.
#
# **Exercise 1 (2 lines).** Their ids, counted from 0, for n ≥ 2.


# %%
def layer_ids(num_layers, n):
    # BEGIN SOLUTION
    step = (num_layers - 4) / (n - 1)
    return [round(1 + i * step) for i in range(n)]
    # END SOLUTION


check.check_layer_ids(layer_ids)

# %% [markdown]
# **Exercise 2 (1 to 3 lines).** The feature of a place: the states *after* these layers, one
# behind the other, as one flat list of n·D numbers. `hidden_states[i][place]` is a list of D
# numbers. As in `transformers`, entry i = 0 is the embedding, and i = 1 the state after layer 0.
# (This off-by-one is a classic: lesson 08.)


# %%
def features(hidden_states, layer_ids, place):
    # BEGIN SOLUTION
    return [x for layer in layer_ids for x in hidden_states[layer + 1][place]]
    # END SOLUTION


check.check_features(features)

# %% [markdown]
# Yours against the library's, which copies these layers with hooks and frees the others:

# %%
from dflash_lab.conditioning.taps import HiddenStateTap

model, ids = pair.target.model, drafter.config.target_layer_ids
prompt = torch.tensor([pair.encode(load_prompts("tiny-chat")[0].turns[0])])
with torch.inference_mode(), HiddenStateTap(model, ids) as tap:
    states = model(prompt, output_hidden_states=True).hidden_states
    target_hidden = tap.take()  # (B, S, n*D)
mine = torch.tensor(features([s[0].tolist() for s in states], ids, place=5))
print("features:", tuple(target_hidden.shape))
print("largest difference:", float((mine - target_hidden[0, 5]).abs().max()))

# %% [markdown] tags: slide
# ## 2. From features to keys and values
#
# One matrix `fc` brings the n·D numbers down to D, and a norm makes their size 1. The result
# is a *context row*. It is made once for every token of the text.
#
# **Exercise 3 (2 to 3 lines).** The context row: `fc` times the feature, divided by the root
# of the mean of its squares.


# %%
def context_row(feature, fc):
    # BEGIN SOLUTION
    row = [sum(w * x for w, x in zip(line, feature)) for line in fc]
    size = math.sqrt(sum(x * x for x in row) / len(row))
    return [x / size for x in row]
    # END SOLUTION


check.check_context_row(context_row)

# %%
with torch.inference_mode():
    fused = drafter.fuse(target_hidden)[0, 5]  # (D,)
row = context_row(target_hidden[0, 5].tolist(), drafter.fc.weight.tolist())
weight = drafter.hidden_norm.weight  # of the norm, learnt
print("largest difference:", float((torch.tensor(row) * weight - fused).abs().max()))

# %% [markdown] tags: slide
# Every layer of the drafter makes keys and values of the context row, with its own two
# matrices. Context rows have no queries: they are looked at, and never look. So a token of
# context costs two small matrices per layer, once, and then lies in the drafter's cache.
#
# The block's rows begin as the target's embeddings of the anchor and of the mask token. They make
# queries, keys and values, and a query sees both kinds of keys at once. Behind the last layer the
# target's own output head turns each row into logits. Embeddings and head are frozen.
#
# Before the dot product queries and keys are rotated by angles that grow with their place (RoPE,
# rotary position embedding), so that a score depends on distance. Exercise 4 leaves that out.
#
# **Exercise 4 (2 to 4 lines).** The weights of one query: scores are q·k/√d, over context keys
# and block keys in *one* softmax.


# %%
def attention_weights(query, context_keys, block_keys):
    # BEGIN SOLUTION
    keys = [*context_keys, *block_keys]
    dots = [sum(q * k for q, k in zip(query, key)) for key in keys]
    powers = [math.exp(dot / math.sqrt(len(query))) for dot in dots]
    return [power / sum(powers) for power in powers]
    # END SOLUTION


check.check_attention_weights(attention_weights)

# %% [markdown]
# **Exercise 5 (1 line).** The drafter's cache grows with every cycle. The target has just read
# a block that starts at `anchor`, and `accepted` drafts were right. Of which places are the
# features now valid context? (The bonus token has been chosen. Has it been read?)


# %%
def new_context(anchor, accepted):
    # BEGIN SOLUTION
    return list(range(anchor, anchor + accepted + 1))
    # END SOLUTION


check.check_new_context(new_context)

# %% [markdown] tags: slide
# ## 3. What is it worth?
#
# Five drafters on the same prompts, in turns: the healthy one; the same one *without features* (its
# `fc` is zero, so all context rows are); one that was trained without features; and two that
# hear one layer of the target, or five. All have one layer themselves.
#
# Columns: tau with its 95 % interval over prompts, milliseconds of drafting and of a whole cycle,
# speed over plain decoding. *Survival* of slot k: the share of cycles in which drafts 1 to k were
# all right.
#
# **Before you run the next cell:** which is worse, a drafter that never could hear, or one
# whose features were set to zero?

# %%
import copy

from dflash_lab.measure.race import race, standings
from dflash_lab.views.ablations import standings_view

zeroed = copy.deepcopy(drafter)
torch.nn.init.zeros_(zeroed.fc.weight)
drafters = {"3 layers heard": drafter, "features zeroed": zeroed}
for name in ("no-features", "features-1", "features-5"):
    drafters[name] = load_member(name)
proposers = {"plain": Plain()} | {n: DFlash(d) for n, d in drafters.items()}

# %%
sets = [load_prompts(name, pick(6, 1)) for name in pair.prompt_sets]
prompts = [pair.encode(p.turns[0]) for part in sets for p in part]
options = {"max_new_tokens": pick(96, 24), "stop_token_ids": pair.stop_token_ids}
results = race(pair, proposers, prompts, **options)
standings_view(standings(results, "plain"))

# %%
from dflash_lab.measure.acceptance import acceptance_per_position
from dflash_lab.views.diffusion import lines_figure
from dflash_lab.views.view import figure_view

series = {}
for name in drafters:
    rates, _ = acceptance_per_position([r.trace for r in results[name]])
    series[name] = list(enumerate(rates, start=1))
figure_view(
    lines_figure(series, x="slot", y="survival", headline="Who hears, guesses further")
)

# %% [markdown]
# **What to notice.**
# * Without its features the drafter is at 1 token per cycle and a little: it never learnt to
#   read the text, and it did not have to.
# * The one that was trained without features does better than the zeroed one, and far worse than
#   those that hear.
# * Hearing one layer (the middle one) is most of it. From three to five layers there is no gain
#   to be seen here: the interval of the difference would have to tell (lesson 09).
# * All texts are equal to plain decoding's. Whoever guesses badly is slow, not wrong.

# %% [markdown]
# **In words.** The features of a place enter every layer as keys and values. One could also
# add them to the drafter's input once, as EAGLE does. What does that cost, and what might be
# lost?

# %% [markdown] tags: answer
# Rows that enter at the input pass through all layers like other rows: queries, attention and
# MLP for each context token, where injection has two matrices per layer. And deep layers see
# only what the layers below have passed on; with injection every layer can look at the
# features themselves. We trained two drafters with three layers of their own (those above have
# one). Over all held-out prompts they have tau 6.98 with injection and 6.96 with input fusion,
# which takes more than twice as long to draft. In the paper's comparison on a large target
# injection has the higher tau too.

# %% [markdown] tags: slide
# ## 4. Why one step is enough
#
# In lesson 01 a denoiser with one step wrote gibberish. Here one step writes most of a
# block. The difference is what it listens to: the target has all but decided what comes next.
#
# Would more steps pay? `StepwiseDFlash` drafts a block in several: write some slots, look at
# the block again, write the next. A drafter has to learn that: `shown-slots` had some slots
# shown in half of its training blocks.
#
# **Exercise 6 (1 line).** The price: how many drafter rows are computed for each new token, those
# of the first pass included? Each of `steps` passes has K rows, a cycle adds `tau` tokens.


# %%
def rows_per_token(block_size, tau, steps):
    # BEGIN SOLUTION
    return block_size * steps / tau
    # END SOLUTION


check.check_rows_per_token(rows_per_token)

# %%
from dflash_lab.diffusion.drafting import StepwiseDFlash

shown = load_member("shown-slots")
steps = {"plain": Plain()} | {
    f"{count} step{'s' if count > 1 else ''}": StepwiseDFlash(shown, count)
    for count in (1, 2, 4, 7)
}
results = race(pair, steps, prompts, loop="host", **options)  # all in the plain loop
standings_view(standings(results, "plain"))

# %%
from dflash_lab.measure.race import tau_differences

taus = {s.name: s.tau.value for s in standings(results, "plain")}
for name, found in list(tau_differences(results, "1 step").items())[1:]:
    rows = rows_per_token(8, taus[name], int(name.split()[0]))
    print(f"{name:8} {rows:5.1f} rows per token, tau more than in one step: {found}")

# %% [markdown]
# **What to notice.**
# * A second step adds nothing that could be told from zero. Seven add 0.4, and cost six times the
#   rows for each token. (This is another drafter than above, so its one step has another tau.)
# * The speed-up falls from the second step on. One step is best.
# * A drafter that has never seen shown slots gains nothing at all from more steps (measured in
#   [results](../docs/results.md)).
# * This is where the drafter differs from a writer: a writer's mistakes stay, a drafter's are
#   caught. So it can afford to guess once, quickly.
#
# **Go on:** lesson 05 trains such a drafter. Words: [glossary](../docs/glossary.md). Code:
# `conditioning/taps.py`, `drafter/model.py`, `diffusion/drafting.py`.

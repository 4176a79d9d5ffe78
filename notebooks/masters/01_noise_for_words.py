# %% [markdown] tags: slide
# # 01 · Noise for words
#
# *Time on two cores: {{time}}. Needs: lesson 00 or nothing.*
#
# **Aims.** You can put noise on a text and say how much. You can compute the loss that a
# denoiser is trained on, and have seen that it bounds the likelihood. You have trained one and
# watched it write.
#
# Diffusion models for images add Gaussian noise. Words cannot be made a little louder. So
# what is noise for words? The answer of *masked* (absorbing) diffusion: a token is either
# itself or a mask. The more noise, the more masks.

# %%
import torch

from dflash_lab import load_pair
from dflash_lab.course.checks import noise as check
from dflash_lab.course.lessons import pick

pair = load_pair("tiny", with_drafter=False, quiet=True)
tokenizer = pair.tokenizer
MASK = tokenizer.convert_tokens_to_ids("<|mask|>")
text = "<|user|>Tell Mia about the owl.<|bot|>Hello Mia! The owl is brown."
ids = tokenizer.encode(text)
print(len(ids), "tokens of", len(tokenizer), "in the vocabulary; the mask is", MASK)

# %% [markdown] tags: slide
# ## 1. The forward process
#
# At time t a token is still itself with the chance α(t), else it is a mask. At t = 0
# everything is clean, at t = 1 everything is masked. Each token has its own fate;
# one uniform draw per token decides.
#
# **Exercise 1 (1 line).** A token stays if its draw is below `alpha`.


# %%
def mask_words(ids, alpha, draws, mask):
    """ids and draws are lists of one length; returns the noisy list."""
    # BEGIN SOLUTION
    return [token if u < alpha else mask for token, u in zip(ids, draws)]
    # END SOLUTION


check.check_mask_words(mask_words)

# %% [markdown]
# The same draws at five times, the noisiest on top. Read upwards, a mask that has come stays.

# %%
from dflash_lab.views.diffusion import film_strip

generator = torch.Generator().manual_seed(0)
draws = torch.rand(len(ids), generator=generator).tolist()
states = [mask_words(ids, alpha, draws, MASK) for alpha in (0.0, 0.25, 0.5, 0.75, 1.0)]
film_strip([torch.tensor([state]) for state in states], MASK, tokenizer.decode)

# %% [markdown]
# **What to notice.** Read upwards, this is noise; read downwards, it is what a sampler
# does. In a noisy text nothing is *wrong*: a token is right or open. That is what makes
# masks easier than replacing words by other words (uniform noise).

# %% [markdown] tags: slide
# ## 2. Schedules, and the weight of a masked token
#
# A schedule is the function α(t), with derivative α′(t) below zero. The objective weights
# each masked token by
#
# > w(t) = −α′(t) / (1 − α(t)).
#
# For the linear schedule α(t) = 1 − t this is 1/t.
#
# **Exercise 2 (2 lines).** The weight of the cosine schedule, α(t) = cos(π t / 2).

# %%
import math


def weight(t):
    # BEGIN SOLUTION
    slope = -math.pi / 2 * math.sin(math.pi / 2 * t)
    return -slope / (1 - math.cos(math.pi / 2 * t))
    # END SOLUTION


check.check_weight(weight)

# %% [markdown]
# **Before you run the next cell:** with few masks (small t) the weight is large. Which
# schedule has the larger weight at t = 0.1: linear (1/t), or cosine?

# %%
from dflash_lab.diffusion.schedules import Schedule
from dflash_lab.views.diffusion import lines_figure
from dflash_lab.views.view import figure_view

times = torch.linspace(0.05, 1, 39)
curves = {
    name: list(zip(times.tolist(), Schedule(name).weight(times).tolist()))
    for name in ("linear", "cosine")
}
made = lines_figure(
    curves, x="time t", y="weight", headline="What a masked token counts"
)
figure_view(made)

# %% [markdown]
# **What to notice.**
# * Both have a pole at t = 0: with one mask left, all depends on it.
# * Cosine is twice as high there, because few tokens are masked by then.

# %% [markdown]
# **In words.** A text of 10 tokens is masked at a time with 1 − α(t) = 0.1. How many masks
# are there on average, and what does the whole text count under the linear schedule? And
# at 1 − α(t) = 0.5?

# %% [markdown] tags: answer
# One mask on average, weight 1/0.1 = 10: together 10. At one half: five masks of weight 2,
# together 10 again. Under the linear schedule every time counts the same for the text as a
# whole; a mask counts more when it has to carry the loss of the text alone.

# %% [markdown] tags: slide
# ## 3. The loss, and what it bounds
#
# **Exercise 3 (2 lines).** Nats per token of one noisy text: the weighted sum over
# masked places, divided by the number of *all* places.


# %%
def text_loss(nats, masked, weight):
    """nats: loss of each place; masked: whether it was hidden."""
    # BEGIN SOLUTION
    counted = [weight * loss for loss, hidden in zip(nats, masked) if hidden]
    return sum(counted) / len(nats)
    # END SOLUTION


check.check_text_loss(text_loss)

# %% [markdown]
# Its mean over times and masks is an upper bound on the negative log-likelihood per token. The
# same with the sign turned, for the whole text, is the *evidence lower bound* (ELBO): a lower
# bound on log p. The steps of the sampler that a denoiser makes are the *chain*; its *distribution* is the
# chance with which it writes each text. On a toy of three letters and three places we need not believe it: all
# texts can be listed. `ideal_denoiser` is the best denoiser there is for a known distribution.

# %%
from dflash_lab.diffusion.forward import Process
from dflash_lab.diffusion.toy import (
    exact_elbo,
    exact_law,
    ideal_denoiser,
    masked_elbo,
    reverse_kernels,
)

probs = torch.zeros(4, 4, 4, dtype=torch.float64)
probs[:3, :3, :3] = torch.rand(3, 3, 3, generator=generator).double() ** 3
probs = (probs / probs.sum()).flatten()
process = Process("absorbing", 4, mask_token_id=3)
ideal = ideal_denoiser(probs, size=4, length=3, mask_token_id=3)

# %%
import itertools

words = list(itertools.product(range(3), repeat=3))
places = [16 * a + 4 * b + c for a, b, c in words]  # of a word in the list of all texts


def mean(values):
    """Over words, weighted by their true chances."""
    return sum(probs[place].item() * v for place, v in zip(places, values))


true = mean([math.log(probs[place]) for place in places])

# %%
from dflash_lab.views.view import table_view

rows = []
for steps in (1, 2, 4, 16, 64):
    alphas = [1 - k / steps for k in range(steps)] + [0.0]
    kernels = reverse_kernels(process, ideal, 3, alphas)
    chain = exact_law(process, kernels, 3)
    likelihood = mean([math.log(chain[place]) for place in places])
    elbo = mean([exact_elbo(process, kernels, word, alphas) for word in words])
    rows.append([steps, elbo, likelihood, true])
rows.append(["continuous", mean([masked_elbo(ideal, w, 3) for w in words]), true, true])
table_view(["steps", "ELBO", "log p of the chain", "log p of the truth"], rows, "means")

# %% [markdown]
# **What to notice.**
# * The ELBO is never above the chain's own log-likelihood, at any number of steps.
# * No chain beats the truth, and few steps hurt even the ideal denoiser: it writes several tokens at once, each right
#   given the context, but not given each other. This is the price of parallel writing, and
#   the whole course is about paying less of it.
# * In continuous time one token is written at a time. The ELBO, computed on its own, equals the
#   true log-likelihood: nothing is lost.

# %% [markdown] tags: slide
# ## 4. Train one
#
# One small transformer, no causal mask, trained on stories of our small world. Beside it
# its *autoregressive twin*: the same layers with a causal mask, asked for the next token.

# %%
from dflash_lab.diffusion.objectives import bound
from dflash_lab.diffusion.study import text_batch, train_twin

LENGTH = 48
options = {"length": LENGTH, "kinds": ("chat",), "width": 96, "layers": 3}
options |= {"learning_rate": 4e-3}
masked = train_twin("masked", tokenizer, MASK, steps=pick(1500, 12), **options)
twin = train_twin("autoregressive", tokenizer, MASK, steps=pick(400, 12), **options)

# %%
held_out = text_batch(tokenizer, 64, LENGTH, seed=1, held_out=True, kinds=("chat",))
table_view(
    ["model", "steps", "seconds", "nats per token, held-out"],
    [
        [t.kind, len(t.losses), t.seconds, bound(t.kind, t.model, held_out)]
        for t in (masked, twin)
    ],
)


# %%
def smooth(losses, width=25):
    chunks = [losses[i : i + width] for i in range(0, len(losses), width)]
    return [(width * (i + 1), sum(c) / len(c)) for i, c in enumerate(chunks)]


made = lines_figure(
    {"masked (bound)": smooth(masked.losses), "autoregressive": smooth(twin.losses)},
    x="training step",
    y="nats per token",
    headline="Twins of one size on one corpus",
)
figure_view(made)

# %% [markdown]
# **What to notice.**
# * The twin learns sooner: it is asked one kind of question.
# * The denoiser is asked every question: any place from any context.
# * Each step draws new times and masks, so the raw loss is noisy; the curves are means over 25
#   steps.

# %% [markdown] tags: slide
# ## 5. Write: the reverse process
#
# Going from time t back to an earlier time s, a masked token is written with the chance
# (α(s) − α(t)) / (1 − α(t)). What is written stays.
#
# **Exercise 4 (about 5 lines).** One step back. `proposals` are tokens drawn from the
# model, one for each place.


# %%
def reverse_step(ids, proposals, draws, alpha_s, alpha_t, mask):
    # BEGIN SOLUTION
    share = (alpha_s - alpha_t) / (1 - alpha_t)
    return [
        new if old == mask and u < share else old
        for old, new, u in zip(ids, proposals, draws)
    ]
    # END SOLUTION


check.check_reverse_step(reverse_step)

# %%
from dflash_lab.diffusion.samplers import ancestral_sample
from dflash_lab.views.diffusion import player

blank = torch.full((8, LENGTH), MASK)
alphas = [1 - k / 16 for k in range(16)] + [0.0]


def predict(noisy):
    return masked.model(noisy)[0]


history = ancestral_sample(predict, blank, MASK, alphas, generator)
player(history.frames, MASK, tokenizer.decode)

# %% [markdown]
# **What to notice.** Move the slider. Early tokens are guesses from nothing; they stand, and
# later ones must fit them.
#
# The chance does not ask where the model is sure. A sampler may: write the surest places
# first.
#
# **Exercise 5 (2 to 3 lines).** The masked places with the highest confidence, surest
# first, at most `count`.


# %%
def surest(confidence, masked, count):
    # BEGIN SOLUTION
    places = [place for place, hidden in enumerate(masked) if hidden]
    return sorted(places, key=lambda place: -confidence[place])[:count]
    # END SOLUTION


check.check_surest(surest)

# %% [markdown]
# **Before you run the next cell:** the target of our pair knows this world and judges the
# texts (lower is better). Which is better with 8 passes: places at random, or the surest
# first? And how many passes does the denoiser need to be as good as its twin, which takes
# one per token?

# %%
from dflash_lab.diffusion.samplers import fill_masks
from dflash_lab.diffusion.study import judge, write_left_to_right

start = torch.full((pick(32, 4), LENGTH), MASK)


def judged(passes, order):
    texts = fill_masks(predict, start, MASK, passes, generator, order=order)
    return passes, judge(pair.target.model, texts.ids, 1)["nats_per_token"]


quality = {
    order: [judged(passes, order) for passes in (2, 4, 8, 16, 48)]
    for order in ("random", "confidence")
}

# %%
left_to_right = write_left_to_right(twin.model, start[:, :0], LENGTH, generator)
best = judge(pair.target.model, left_to_right.ids, 1)["nats_per_token"]
quality["autoregressive twin"] = [(LENGTH, best)]

# %%
made = lines_figure(
    quality,
    x="passes over the model for 48 tokens (log axis)",
    y="nats per token under the target",
    headline="Quality against passes",
    log_x=True,
    ticks=(2, 4, 8, 16, 48),
)
figure_view(made)

# %% [markdown]
# **What to notice.**
# * More passes, better texts, in any order.
# * The surest first is better than random places at every number.
# * The twin is far better at the same number of passes. No number up to 48 is enough for the
#   denoiser, though it had nearly four times as many training steps.
# * Low nats do not mean varied texts: writing the surest first also favours common words.

# %% [markdown] tags: slide
# ## What this has to do with DFlash
#
# Parallel writing is cheap and makes mistakes. Speculative decoding is a way of using
# cheap text that makes mistakes: draft it, and let the target check. So a denoiser need
# not write well. It has to be right about the *next few* tokens, in **one** pass, and it
# may listen to the target while it does. Lesson 02 cuts texts into blocks; lesson 04 makes
# the drafter listen.
#
# **Go on:** code in `dflash_lab/diffusion/`; terms in `docs/glossary.md`.

# %% [markdown] tags: slide
# # 11 · Your own drafter
#
# *Time on two cores: {{time}}. Needs: lessons 03, 06 and 07.*
#
# **Aims.** You have put a drafter of your own into the loop, tested that it changes no text,
# and measured it against the shipped ones. You have a place to start a project from.
#
# The loop does not care who drafts. Whatever offers a few tokens behind a text will do; the
# target judges. So a bad idea costs time and nothing else, and you may try everything.

# %%
import torch

from dflash_lab import DFlash, Plain, load_pair, load_prompts
from dflash_lab.course.checks import own_drafter as check
from dflash_lab.course.lessons import pick

torch.set_num_threads(1)  # the tiny pair is faster so
pair = load_pair("tiny", quiet=True)
sets = [load_prompts(name, pick(6, 1)) for name in pair.prompt_sets]
prompts = [pair.encode(prompt.turns[0]) for part in sets for prompt in part]
options = {"max_new_tokens": pick(96, 24), "stop_token_ids": pair.stop_token_ids}

# %% [markdown] tags: slide
# ## 1. A drafter in ten lines
#
# First we need text of the target's own, not of the prompts that we shall measure with.

# %%
import tempfile
from pathlib import Path

from dflash_lab.training.data.dataset import load_examples
from dflash_lab.training.run.config import from_dict
from dflash_lab.training.run.own_corpus import write_own_corpus

corpus = Path(tempfile.mkdtemp()) / "corpus.jsonl"
settings = {"num_prompts": pick(1000, 40), "max_new_tokens": 160, "batch_size": 250}
write_own_corpus(pair, corpus, from_dict({"corpus": settings}).corpus)
texts = [list(example.input_ids) for example in load_examples([corpus])[0]]
print(len(texts), "texts,", sum(len(text) for text in texts), "tokens")

# %% [markdown]
# **Exercise 1 (3 to 6 lines).** Count which token follows which: a dictionary from token to a
# dictionary from follower to count, so that `table[2][5]` is how often 5 came behind 2.


# %%
from itertools import pairwise


def followers(texts):
    # BEGIN SOLUTION
    table = {}
    for text in texts:
        for token, after in pairwise(text):
            row = table.setdefault(token, {})
            row[after] = row.get(after, 0) + 1
    return table
    # END SOLUTION


check.check_followers(followers)

# %% [markdown]
# **Exercise 2 (4 to 6 lines).** Draft from it: the likeliest follower of the last token, then
# *its* likeliest follower, at most `limit` of them. Return the drafts without `last` itself. Stop
# early where nothing is known: a token may be missing from the table, or have an empty row. Of
# equals take the lower id.


# %%
def chain(table, last, limit):
    # BEGIN SOLUTION
    drafts = []
    while len(drafts) < limit and table.get(last):
        row = table[last]
        last = min(row, key=lambda token: (-row[token], token))
        drafts.append(last)
    return drafts
    # END SOLUTION


check.check_chain(chain)

# %%
from dflash_lab import speculative_generate
from dflash_lab.speculative.own_drafters import FromFunction
from dflash_lab.views.stepper import text_view

table = followers(texts)
mine = FromFunction(lambda text, limit: chain(table, text[-1], limit), name="mine")
result = speculative_generate(pair, mine, prompts[-1], **options)
text_view(result, pair.tokenizer.decode)

# %% [markdown]
# **What to notice.** Your drafter runs. Where one word nearly always follows another it saves
# passes, and elsewhere its drafts are thrown away.

# %% [markdown] tags: slide
# ## 2. Test it
#
# The proof is lesson 03's argument: the loop keeps only what the target itself chose. A test finds
# bugs in the loop, or in the drafter's code.
#
# **Exercise 3 (1 to 3 lines).** Every text must be plain decoding's, token for token. Return the
# index, from 0, of the first *text* that is not, or None.


# %%
def first_wrong(texts, plain):
    # BEGIN SOLUTION
    pairs = enumerate(zip(texts, plain))
    return next((i for i, (a, b) in pairs if a != b), None)
    # END SOLUTION


check.check_first_wrong(first_wrong)

# %%
from dflash_lab.measure.race import race, standings
from dflash_lab.speculative.ngram import NGramLookup

results = race(
    pair, {"plain": Plain(), "mine": mine, "n-gram": NGramLookup(8)}, prompts, **options
)
outputs = {name: [r.output_ids[0] for r in part] for name, part in results.items()}
assert all(first_wrong(part, outputs["plain"]) is None for part in outputs.values())
print(len(prompts), "texts of each proposer, equal to plain decoding's")

# %% [markdown]
# **In words.** Somebody shows you a drafter whose texts differ from plain decoding's in one
# prompt of a hundred. Name two harmless reasons and one that is not, and say how you would
# tell them apart.

# %% [markdown] tags: answer
# Harmless: in bfloat16 (or with another number of rows per pass) two nearly equal logits can
# swap, and the texts part there. That is a tie and can be certified (lesson 10). And with
# sampling, two runs may draw differently if the random numbers do not belong to positions. Not
# harmless: a cache that keeps rows of rejected drafts, so that the target itself reads another
# text. Look at the first place that differs: at a tie the two logits differ by a rounding;
# with a wrong cache they do not, or the same place comes out right when the prefix is computed
# afresh.

# %% [markdown] tags: slide
# ## 3. Two ideas on top of DFlash
#
# **Offer only what is sure.** Verifying a row that will be rejected is work for nothing.
#
# **Exercise 4 (2 to 4 lines).** The drafter's probabilities of its drafts, slot by slot. How
# many drafts stand before the first whose probability is below `least`?


# %%
def sure_drafts(confidence, least):
    # BEGIN SOLUTION
    for slot, chance in enumerate(confidence):
        if chance < least:
            return slot
    return len(confidence)
    # END SOLUTION


check.check_sure_drafts(sure_drafts)

# %% [markdown]
# **Let slots listen to each other.** A block is written in one pass: slot 3 does not know what
# slot 2 chose. "New York" and "Los Angeles" can become "New Angeles". A table of followers can
# mend that after the pass, nearly for nothing.
#
# **Exercise 5 (4 to 6 lines).** From left to right: slot k takes the token with the highest
# `scores[k][token] + weight * table[before][token]`. Here `table` is another one: a list of rows,
# one for each token, and `table[a][b]` is the log-probability that b follows a. `before` is the
# token that you have just chosen; for the first slot it is `last`. Return the chosen tokens.


# %%
def corrected(scores, table, last, weight):
    # BEGIN SOLUTION
    tokens = []
    for row in scores:
        sums = [score + weight * table[last][v] for v, score in enumerate(row)]
        last = sums.index(max(sums))
        tokens.append(last)
    return tokens
    # END SOLUTION


check.check_corrected(corrected)

# %% [markdown]
# The library has both, on tensors: `ConfidenceCut` and `BigramDFlash`.
#
# **Before you run the next cell:** which of the two raises tau, which lowers it, and what will
# each do to the speed-up?

# %%
from dflash_lab.speculative.own_drafters import (
    BigramDFlash,
    ConfidenceCut,
    bigram_table,
)
from dflash_lab.views.ablations import standings_view

chances = bigram_table(texts, pair.target.vocab_size)
entered = {"plain": Plain(), "DFlash": DFlash(pair.drafter)}
for least in (0.2, 0.5, 0.8):
    entered[f"cut at {least}"] = ConfidenceCut(DFlash(pair.drafter), least)
for weight in (0.25, 0.5, 1.0):
    entered[f"bigram {weight}"] = BigramDFlash(pair.drafter, chances, weight)
results = race(pair, entered, prompts, loop="host", **options)
standings_view(standings(results, "plain"))

# %%
from dflash_lab.measure.race import tau_differences
from dflash_lab.views.ablations import differences_figure
from dflash_lab.views.view import figure_view

differences = tau_differences(results, "DFlash")
differences.pop("plain")
figure_view(differences_figure(differences, "DFlash"))

# %% [markdown]
# **What to notice.**
# * At 0.2 the cut changes no tau; at 0.8 it costs two tokens a cycle and makes the cycle a little
#   shorter. No cut is faster than DFlash: here a row more or less hardly changes what a pass costs.
#   Where rows are dear, as in a server with many requests, it is otherwise.
# * The table adds 0.6 tokens a cycle, and the interval does not touch zero. The slots of a block do
#   contradict each other, and to listen to the neighbour helps. The speed-up is higher too, by a few
#   per cent; its intervals overlap, so look at a paired one before you claim it.
# * Between the weights 0.5 and 1 there is no difference to speak of in tau. If one of the speed-ups
#   has a very wide interval, something else ran on the machine then.

# %% [markdown] tags: slide
# ## 4. The leaderboard
#
# What drafts for the tiny target, on the same prompts, sorted by speed-up. *EAGLE-3-style*: a
# small head that drafts one token after the other. *Medusa-style*: one head for each slot, and
# the slots do not see each other. They were not trained equally: one layer 2,400 steps, three
# layers 1,200, the heads three minutes. So this ranks what is shipped, not the methods.

# %%
from dflash_lab.baselines.eagle import EagleHead
from dflash_lab.baselines.eagle_proposer import Eagle
from dflash_lab.baselines.medusa import MedusaHeads
from dflash_lab.baselines.medusa_proposer import Medusa
from dflash_lab.clinic.family import load_member
from dflash_lab.files import data_root

shipped = data_root() / "checkpoints"
entered = {"plain": Plain(), "mine": mine, "n-gram": NGramLookup(8)}
entered["DFlash, 1 layer"] = DFlash(pair.drafter)
entered["the same, bigram 0.5"] = BigramDFlash(pair.drafter, chances, 0.5)
entered["DFlash, 3 layers"] = DFlash(load_member("layers-3"))
entered["EAGLE-3-style"] = Eagle(EagleHead.from_pretrained(shipped / "tiny-eagle"))
entered["Medusa-style"] = Medusa(MedusaHeads.from_pretrained(shipped / "tiny-medusa"))

# %%
results = race(pair, entered, prompts, loop="host", **options)
ranked = sorted(standings(results, "plain"), key=lambda s: -s.speedup.value)
standings_view(ranked, "all by the plain Python loop (host loop), so that it is fair")

# %% [markdown]
# **What to notice.**
# * The order by tau is another one. The EAGLE-3-style head keeps more than the one-layer
#   DFlash, and pays for it: it drafts its tokens one after the other.
# * Places whose intervals overlap cannot be told apart, and may swap when you run it again.
# * Medusa's heads cost least of all models and keep least of them: each slot guesses alone.
# * Your table of followers, made in a second, is level with looking up n-grams. That is what a
#   model has to beat.
# * This is a small world with short words. On a real target the order can be another one.

# %% [markdown]
# ## 5. Projects
#
# * **A third idea of your own.** `FromFunction` gives you the text only. For the target's features
#   write a proposer with `start`, `observe`, `propose` and `keep_rows`: copy `_FunctionSession` in
#   `speculative/own_drafters.py` and name layers in `target_layer_ids`. What they promise each other
#   is in `speculative/proposer.py`.
# * **Another objective.** `objective.loss: kl` or `dpace` in the training settings (lesson 05),
#   or a function of your own in `dflash_lab/training/losses.py`. Compare with three seeds each
#   (lesson 09).
# * **A learnt chain.** Replace the table by a small model that sees the hidden state of the slot.
#   What must its training see?
# * **A drafter for your own target.** `dflash-lab corpus`, `dflash-lab train`, `dflash-lab check`,
#   `dflash-lab bench`, `dflash-lab export`: [training](../docs/training.md).
#
# Hand in: the race's table with intervals and the test that no text changed, and half a page that
# says what you expected, what came, and what it does not tell.

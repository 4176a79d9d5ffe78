# %% [markdown] tags: slide
# # 03 · Draft and verify
#
# *Time on two cores: {{time}}. Needs: nothing but an idea of a language model.*
#
# **Aims.** You can write the rule that turns drafts into text without changing the text,
# and the loop around it. You have checked that greedy text is the target's own, and that a
# sampled token follows the target's distribution. You have built a first drafter that needs no model.
#
# A language model writes one token per pass. But one pass can *check* many tokens: fed
# with a text, it says for every place what it would have written next. So: guess a few
# tokens cheaply, check them all in one pass, keep the good start.

# %%
import torch

from dflash_lab import load_pair, load_prompts
from dflash_lab.course.checks import verify as check
from dflash_lab.course.lessons import pick

pair = load_pair("tiny", quiet=True)
model, tokenizer = pair.target.model, pair.tokenizer
prompt = pair.encode(load_prompts("tiny-rewrite")[0].turns[0])
print(tokenizer.decode(prompt))

# %% [markdown] tags: slide
# ## 1. The rule
#
# The *target's tokens*: its own choice for the place of each draft, and one more choice
# for the place behind the last draft.
#
# **Exercise 1 (2 to 4 lines).** How many drafts stand before the first that differs from
# the target's token?


# %%
def accepted(drafts, target_tokens):
    """target_tokens is one longer than drafts."""
    # BEGIN SOLUTION
    count = 0
    while count < len(drafts) and drafts[count] == target_tokens[count]:
        count += 1
    return count
    # END SOLUTION


check.check_accepted(accepted)

# %% [markdown]
# **Exercise 2 (1 line).** What does the cycle add to the text? Mind the place of the first
# difference: there the target has said what it wants. And if all drafts were right?


# %%
def emitted(drafts, target_tokens):
    # BEGIN SOLUTION
    return target_tokens[: accepted(drafts, target_tokens) + 1]
    # END SOLUTION


check.check_emitted(emitted)

# %% [markdown]
# **In words.** Every emitted token is the *target's own*, never a draft as such. Why does that prove
# that the text is the one that plain decoding writes? Where does the argument need that a
# target token behind a wrong draft is thrown away?

# %% [markdown] tags: answer
# A target token is the target's choice given the text before it. For the first that text is
# the real one. For each later one the text before it holds drafts, which are equal to
# target tokens as long as all before were accepted; so it is the real text too, by induction. A
# token behind a wrong draft was made in the light of a token that is not in the text, so it
# says nothing about what the target would choose there.

# %% [markdown] tags: slide
# ## 2. A drafter without a model
#
# Texts repeat themselves. **Exercise 3 (4 to 6 lines).** Look where the last `n` tokens
# stood before (the last such place), and return at most `count` of the tokens that
# followed. The end of the text itself is no find.
# Nothing found: an empty list.


# %%
def lookup(text, n, count):
    # BEGIN SOLUTION
    key = text[-n:]
    for end in range(len(text) - 1, n - 1, -1):
        if text[end - n : end] == key:
            return text[end : end + count]
    return []
    # END SOLUTION


check.check_lookup(lookup)

# %% [markdown] tags: slide
# ## 3. The loop


# %%
@torch.inference_mode()
def choices(ids):
    """The target's greedy choice behind every place."""
    return model(input_ids=torch.tensor([ids])).logits[0].argmax(-1).tolist()


def speculate(prompt, new_tokens, draft, end=0):
    answer, passes = choices(prompt)[-1:], 1
    while len(answer) < new_tokens and end not in answer:
        drafts = draft(prompt + answer)
        target_tokens = choices(prompt + answer + drafts)[len(prompt + answer) - 1 :]
        answer, passes = answer + emitted(drafts, target_tokens), passes + 1
    answer = answer[:new_tokens]
    return answer[: answer.index(end) + 1] if end in answer else answer, passes


# %% [markdown]
# **Before you run the next cell:** will the lookup save more passes where a list of words is
# reworked (`tiny-rewrite`), or where a story is told (`tiny-chat`)? Five prompts of each.

# %%
from dflash_lab.views.view import table_view

NEW = pick(40, 12)
rows = []
for name in ("tiny-rewrite", "tiny-chat", "tiny-code", "tiny-math"):
    slow = fast = 0
    for one in load_prompts(name, pick(5, 1)):
        ids = pair.encode(one.turns[0])
        plain, passes = speculate(ids, NEW, lambda text: [])
        drafted, fewer = speculate(ids, NEW, lambda text: lookup(text, 2, 7))
        assert plain == drafted
        slow, fast = slow + passes, fast + fewer
    rows.append([name, slow, fast, slow / fast])
table_view(["prompts", "passes, plain", "passes, lookup", "ratio"], rows)

# %% [markdown]
# **What to notice.**
# * Equal on these prompts, says the `assert`; equal always, says the argument above. Only the
#   number of passes differs.
# * Working on a list gains most: it repeats the prompt. A drafter is as good as what it knows.
# * This loop runs every pass over the whole text. The library's loop keeps keys and values
#   and feeds only the block. Its rule is yours.

# %% [markdown] tags: slide
# ## 4. Watch DFlash do it

# %%
from dflash_lab import DFlash, speculative_generate
from dflash_lab.views.widgets.decode_stepper import decode_stepper

result = speculative_generate(
    pair, DFlash(pair.drafter), prompt, max_new_tokens=NEW, stop_token_ids=(0,)
)
assert result.output_ids[0] == speculate(prompt, NEW, lambda text: [])[0]
decode_stepper(result, tokenizer.decode)

# %%
from dflash_lab.views.stepper import cycles_view

cycles_view(result.trace, tokenizer.decode)

# %% [markdown]
# **What to notice.**
# * A cycle adds its accepted drafts and **one token of the target's own**: a correction
#   where a draft was wrong, a bonus where none was.
# * So a cycle never adds less than one token, and at most K, the rows of a block (8 here: the last
#   known token, called the anchor, and 7 slots for drafts). The mean is tau, the acceptance length.
# * The first cycle warms up; ignore its times.
# * Greyed drafts stand behind a wrong one. Nobody knows whether they were good.

# %% [markdown] tags: slide
# ## 5. Sampling
#
# At a temperature the target has a probability for each token, its *distribution* p, not a choice. Two
# rules keep the distribution. Below, p and q are lists over a vocabulary of four.
#
# * **Match**: the target *samples* a token at each place, and a draft counts if it equals
#   that token. The argument of exercise 2 holds unchanged. This is what DFlash does.
# * **Speculative sampling**: the drafter samples x from its distribution q. Keep x with the chance
#   min(1, p(x)/q(x)), else draw a replacement from what p has more than q.
#
# **Exercise 4 (1 line).** How often does speculative sampling keep a draft?


# %%
def keep_chance(p, q):
    # BEGIN SOLUTION
    return sum(min(a, b) for a, b in zip(p, q))
    # END SOLUTION


check.check_keep_chance(keep_chance)

# %% [markdown]
# **Exercise 5 (2 lines).** The distribution of the replacement: what p has more than q, made to sum
# to one.


# %%
def excess(p, q):
    # BEGIN SOLUTION
    over = [max(a - b, 0.0) for a, b in zip(p, q)]
    return [x / sum(over) for x in over]
    # END SOLUTION


check.check_excess(excess)

# %% [markdown]
# Count: does the rule really draw from p?

# %%
import random

p, q = [0.5, 0.3, 0.15, 0.05], [0.2, 0.2, 0.2, 0.4]
rng, draws = random.Random(0), pick(100_000, 2_000)


def speculative_draw():
    x = rng.choices(range(4), q)[0]
    if rng.random() < min(1.0, p[x] / q[x]):
        return x, True
    return rng.choices(range(4), excess(p, q))[0], False


seen = [speculative_draw() for _ in range(draws)]
shares = [sum(x == token for x, _ in seen) / draws for token in range(4)]

# %%
rows = [[t, p[t], q[t], shares[t]] for t in range(4)]
kept = sum(k for _, k in seen) / draws
caption = f"kept {kept:.3f}; by your formula {keep_chance(p, q):.3f}"
matched = sum(a * b for a, b in zip(p, q))
caption += f"; the rule 'match' with drafts from q would keep {matched:.3f}"
table_view(["token", "p, the target", "q, the drafter", "drawn"], rows, caption)

# %% [markdown]
# **What to notice.**
# * Bad drafts (token 3) are drafted far too often, and still the output has the distribution p.
# * Speculative sampling keeps as many drafts as any lossless rule can. `match` keeps fewer
#   when the drafts are drawn too. With one fixed draft it keeps p of that token: much if the
#   drafter's favourite is also the target's, little if not (token 3: 0.05).
# * `match` needs no q. So it serves drafters that cannot say how sure they are.
#
# **Go on:** lesson 04 builds the drafter that you have just watched. Code:
# `speculative/acceptance.py`, `speculative/ngram.py`, `speculative/host_loop.py`.

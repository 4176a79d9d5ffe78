# %% [markdown] tags: slide
# # 07 · When does it pay?
#
# *Time on two cores: {{time}}. Needs: lesson 06.*
#
# **Aims.** You can say from four measured times and one acceptance length whether
# drafting saves time, by how much, and with which block size. You can tell a fair
# speed-up from an unfair one.
#
# A good tau is not a speed-up. A cycle has to be paid: the draft, a pass over K rows
# instead of one, and the bookkeeping.

# %%
import torch

from dflash_lab import DFlash, Plain, load_pair, load_prompts
from dflash_lab.course.checks import speedup as check
from dflash_lab.course.lessons import pick

torch.set_num_threads(1)  # the tiny pair is faster so
pair = load_pair("tiny", quiet=True)

# %% [markdown] tags: slide
# ## 1. The arithmetic
#
# **Exercise 1 (1 to 2 lines).** A cycle takes `draft + verify + other` milliseconds and adds
# `tau` tokens. A plain token takes `plain` milliseconds. What is the speed-up?


# %%
def speedup(draft, verify, other, plain, tau):
    # BEGIN SOLUTION
    per_token = (draft + verify + other) / tau
    return plain / per_token
    # END SOLUTION


check.check_speedup(speedup)

# %% [markdown]
# **Exercise 2 (1 line).** The tau from which on a cycle pays.


# %%
def break_even(draft, verify, other, plain):
    # BEGIN SOLUTION
    return (draft + verify + other) / plain
    # END SOLUTION


check.check_break_even(break_even)

# %% [markdown]
# Turn the knobs. Costs are in units of one plain token, so they can be compared between
# machines. The start is a guess for a GPU: verifying 16 rows costs little more than one.

# %%
from dflash_lab.views.widgets.speedup_calculator import speedup_calculator

speedup_calculator()

# %% [markdown]
# **What to notice.**
# * The line through the origin has the slope 1 / (cost of a cycle). Cheaper cycles turn it up.
# * Set `verify` to 3, as where arithmetic and not memory limits a pass. Now a tau of 3 is
#   worth nothing.
# * With these numbers the draft is a ninth of the cycle: making it free gains 13 % at most.
#   Section 2 measures yours.

# %% [markdown] tags: slide
# ## 2. Measure the costs
#
# `measure_costs` times cycles of several block sizes *in turns*, so a busy machine slows
# all of them alike. It needs no text: costs depend on the number of rows, not on words.
#
# **Before you run the next cell:** by how much is a cycle of 8 rows slower than one of 2, here?

# %%
from dflash_lab.measure.speedup import measure_costs
from dflash_lab.views.view import table_view

SIZES = (2, 4, 6, 8)
costs = measure_costs(pair.target, pair.drafter, SIZES, rounds=pick(60, 3))
table_view(
    ["K", "plain ms", "draft ms", "verify ms", "other ms", "break-even tau"],
    [
        [k, c.plain_ms, c.draft_ms, c.verify_ms, c.other_ms, c.break_even_tau]
        for k, c in costs.items()
    ],
)

# %%
from dflash_lab.views.speedup import speedup_figure
from dflash_lab.views.view import figure_view

figure_view(speedup_figure(costs))

# %% [markdown]
# **What to notice.** A cycle of 8 rows costs little more than one of 2 (a tenth to a quarter, on the
# machines that we tried), and can add four times as many tokens. So the largest block is the best,
# if its late slots are right at least now and then.

# %% [markdown] tags: slide
# ## 3. Foretell, then measure
#
# **Exercise 3 (1 line).** From the survival curve of the full block (lesson 06): what would
# tau be if only the first `block_size - 1` tokens were drafted? `survival[0]` is slot 1.


# %%
def smaller_block(survival, block_size):
    # BEGIN SOLUTION
    return 1 + sum(survival[: block_size - 1])
    # END SOLUTION


check.check_smaller_block(smaller_block)

# %%
from dflash_lab.measure.acceptance import acceptance_per_position
from dflash_lab.measure.race import race

sets = [load_prompts(name, pick(6, 1)) for name in pair.prompt_sets]
prompts = [pair.encode(prompt.turns[0]) for part in sets for prompt in part]
entered = {size: DFlash(pair.drafter, size) for size in SIZES} | {"plain": Plain()}
options = {"max_new_tokens": pick(96, 24), "stop_token_ids": pair.stop_token_ids}
results = race(pair, entered, prompts, **options)  # in turns, prompt by prompt

# %%
full = results[SIZES[-1]]
survival, _ = acceptance_per_position(result.trace for result in full)
print([round(share, 2) for share in survival])

# %% [markdown]
# From this curve and the costs of section 2 comes the foretold speed-up. Beside it the measured
# one, by the clock of the *cycles*, since the pass over the prompt is the same for all.


# %%
def per_token(results):
    cycles = [cycle for result in results for cycle in result.trace.cycles]
    spent = sum(c.draft_ms + c.verify_ms + c.other_ms for c in cycles)
    added = sum(c.acceptance_length for c in cycles)
    return spent / added, added / len(cycles)


plain, _ = per_token(results["plain"])
rows = []
for size in SIZES:
    drafted, tau = per_token(results[size])
    foretold = costs[size].speedup(smaller_block(survival, size))
    rows.append([size, smaller_block(survival, size), tau, foretold, plain / drafted])

# %%
table_view(["K", "tau foretold", "tau", "speed-up foretold", "speed-up measured"], rows)

# %% [markdown]
# **What to notice.**
# * Two measurements that know nothing of each other, times without text and text without
#   times, give the speed-up. So the model holds what matters.
# * All sizes fall a little short of the foretold tau: the last cycle of an answer is often cut,
#   and adds no token of the target's own. At K = 4 and 6 the gap is larger; the drafter was
#   trained on blocks of 8 only.

# %% [markdown]
# **Exercise 4 (1 to 2 lines).** Which block size is best? Take the time of a cycle and tau,
# both by block size.


# %%
def best(cycle_ms, taus):
    # BEGIN SOLUTION
    return min(cycle_ms, key=lambda size: cycle_ms[size] / taus[size])
    # END SOLUTION


check.check_best(best)
best({k: c.cycle_ms for k, c in costs.items()}, {row[0]: row[2] for row in rows})

# %% [markdown] tags: slide
# ## 4. Fair and unfair
#
# A speed-up is a ratio, and there are many ways to a good one: a slow baseline, prompts
# that suit the drafter, a clock that starts late. On this pair:

# %%
import time


def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def generate():
    for ids in prompts:
        pair.target.model.generate(
            torch.tensor([ids]), max_new_tokens=pick(96, 24), do_sample=False
        )


# %%
generate()  # warm up: the other two have run before
clock = {"generate": seconds(generate)}
for name, entry in (("plain, our loop", "plain"), ("DFlash", SIZES[-1])):
    clock[name] = sum(result.seconds for result in results[entry])
table_view(
    ["", "seconds", "DFlash is faster by"],
    [[name, spent, spent / clock["DFlash"]] for name, spent in clock.items()],
)

# %% [markdown]
# **What to notice.** The same drafter, two "speed-ups". The difference between the two is
# all baseline: a loop with less overhead. Say which baseline, and give both.

# %% [markdown]
# **In words.** A colleague measured 3x on one prompt at batch size 1 and wants to serve 64
# users at once. What changes in the cost model, and in which direction?

# %% [markdown] tags: answer
# With 64 users a pass has 64 rows without drafting and 64·K with it. Weights are then read
# once for many rows anyway, and the arithmetic starts to count: verify(K) / plain rises
# towards K, while tau stays. The break-even tau rises with it. The gain shrinks, and can
# become a loss; a smaller K is then better. Measure at the batch size that is served.

# %% [markdown]
# **Go on:** lesson 08 is about drafters that train well and decode badly. Code:
# `measure/speedup.py`; many more figures in `docs/results.md`.

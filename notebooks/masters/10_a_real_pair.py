# %% [markdown] tags: slide
# # 10 · A real pair
#
# *Time on two cores: {{time}}. Needs: lessons 06 and 07, and the target of the `smol` pair
# (93 MB, fetched once when you first load it).*
#
# **Aims.** You can run the cells of the earlier lessons on a real instruct model, and say
# honestly what drafting brings there. You can tell a tie from an error. You know what to
# change for a published pair on a GPU. You can read the logs of other programs in the
# terms of this project.
#
# So far the target was a toy of 1.6 million parameters. Nothing in the code knows that. Here
# the target is SmolLM2-135M-Instruct, and its drafter was trained by this project in hours
# on a CPU, where the paper's drafters had GPUs.

# %%
import torch

from dflash_lab import DFlash, Plain, load_pair, load_prompts
from dflash_lab.course.checks import real_pair as check
from dflash_lab.course.lessons import pick

torch.set_num_threads(2)  # this target is faster so; the tiny one was not
QWEN = False  # True: downloads both models once, and needs a GPU that holds them
if QWEN:
    names = {"target": "Qwen/Qwen3-8B", "drafter": "z-lab/Qwen3-8B-DFlash-b16"}
    pair = load_pair(**names, dtype="bfloat16", device="cuda")
else:
    pair = load_pair("smol", dtype="bfloat16", quiet=True)
decode = pair.tokenizer.decode

# %% [markdown]
# That switch is all. Every cell below takes either pair. The published one has not been run
# by this project; `docs/reproduce.md` lists the figures to expect. On a processor without
# bfloat16 arithmetic (`dflash-lab doctor` tells) write `dtype="float32"`.
#
# ## 1. The same cells as before
#
# One prompt of each kind, decoded plainly and with drafts, in turns.

# %%
from dflash_lab.measure.race import race, standings

prompts = [load_prompts(name)[0].turns[0] for name in pair.prompt_sets]
ids = [pair.encode(prompt) for prompt in prompts]
options = {"max_new_tokens": pick(64, 12), "stop_token_ids": pair.stop_token_ids}
results = race(pair, {"plain": Plain(), "dflash": DFlash(pair.drafter)}, ids, **options)
for prompt in prompts:
    print("*", prompt.split("\n")[0])

# %% [markdown]
# **Before you run the next cell:** tau was 5 and more on the tiny pair. Its drafter had seen
# nearly everything that its small world can say. What do you expect here?

# %% tags: slide
from dflash_lab.views.stepper import text_view

text_view(results["dflash"][0], decode)

# %%
from dflash_lab.views.widgets.decode_stepper import decode_stepper

decode_stepper(results["dflash"][0], decode)

# %% [markdown]
# **What to notice.**
# * The first cycle adds eight tokens: seven drafts behind "To", and "calculate", the bonus. Many
#   of this target's answers to sums begin so, and the drafter knows its habits.
# * After that most cycles add one token or two. Words like "the" and "is" are often guessed, the
#   words and digits that carry the question seldom.
# * The sum comes out wrong. That is the target's doing: every token here is its own choice. Is it
#   the text of plain decoding? Section 2 looks.

# %% [markdown] tags: slide
# ## 2. Is it the same text?
#
# In float32 a drafted text equals the plain one. In bfloat16 a pass over K rows rounds
# otherwise than a pass over one row. Where the two best tokens are nearly equal, either may
# win. From there on the texts differ, and both are the target's own.

# %%
from dflash_lab.views.view import table_view


def first_difference(mine, plain):
    places = range(min(len(mine), len(plain)))
    return next((i for i in places if mine[i] != plain[i]), None)


texts = [
    (d.output_ids[0], p.output_ids[0])
    for d, p in zip(results["dflash"], results["plain"])
]
places = [first_difference(mine, plain) for mine, plain in texts]

# %%
rows = []
for name, (mine, plain), place in zip(pair.prompt_sets, texts, places):
    if place is None:
        rows.append([name, "equal", "", ""])
    else:
        here = slice(place, place + 8)
        rows.append(
            [name, f"differs at {place}", decode(mine[here]), decode(plain[here])]
        )
table_view(["prompt", "", "with drafts it goes on", "plain decoding goes on"], rows)

# %% [markdown]
# A difference needs a proof that it is harmless. One number of bfloat16 has a relative
# precision of epsilon = 1/128. Two roundings can lie two epsilons apart.
#
# **Exercise 1 (3 to 5 lines).** Find the first place where the texts differ. It is a tie if
# the logits of the two tokens there differ by at most 2 · epsilon · (the larger of the two in
# absolute value). Return True for a tie, else False. Differences behind it do not matter: they
# stand in other texts. (The texts do differ.)


# %%
def differs_at_tie(mine, plain, logits, epsilon):
    """logits[i]: the target's, for the place that mine[i] and plain[i] fill."""
    # BEGIN SOLUTION
    place = first_difference(mine, plain)
    one, other = logits[place][mine[place]], logits[place][plain[place]]
    return abs(one - other) <= 2 * epsilon * max(abs(one), abs(other))
    # END SOLUTION


check.check_differs_at_tie(differs_at_tie)

# %%
rows = []
for name, prompt, (mine, plain), place in zip(pair.prompt_sets, ids, texts, places):
    if place is None:
        continue
    whole = torch.tensor([prompt + plain], device=pair.target.device)
    with torch.inference_mode():
        logits = pair.model(input_ids=whole).logits[0, len(prompt) - 1 :].float()
    two = sorted(logits[place, [mine[place], plain[place]]].tolist())
    tie = bool(differs_at_tie(mine, plain, logits, 1 / 128))
    verdict = "tie" if tie else "NOT a tie"
    rows.append([name, place, f"{two[1]:.3f}", f"{two[1] - two[0]:.3f}", verdict])
table_view(["prompt", "first difference at", "larger logit", "gap", "verdict"], rows)

# %% [markdown]
# **What to notice.**
# * Texts part where two tokens are a rounding apart, and the words there are ordinary ones. Which
#   words they are depends on the machine. Behind them each text goes on by itself.
# * 0.125 is one step of bfloat16 for logits between 16 and 32. Every difference here is a tie. If
#   one were not, something would be broken.

# %% [markdown] tags: slide
# ## 3. What does it buy?
#
# **Before you run the next cell:** in what share of cycles does the draft of slot 1 become
# text? And that of slot 3?

# %%
from dflash_lab.measure.acceptance import acceptance_per_position
from dflash_lab.views.curves import acceptance_figure
from dflash_lab.views.view import figure_view

traces = [result.trace for result in results["dflash"]]
figure_view(acceptance_figure(*acceptance_per_position(traces)))

# %%
rows = [
    [s.name, str(s.tau), s.draft_ms, s.cycle_ms, str(s.speedup)]
    for s in standings(results, "plain")
]
columns = ["", "tau", "draft ms", "cycle ms", "speed-up over plain"]
table_view(columns, rows, "brackets: 95 %, over four prompts only")

# %% [markdown]
# **What to notice.**
# * The draft of slot 1 becomes text in two of five cycles, that of slot 3 in one of fifteen or
#   twenty. So tau is about 1.6: this drafter had 4 CPU-hours and 10,000 answers, where the paper's
#   had GPUs and hundreds of thousands.
# * A cycle costs a fifth to a quarter more than a plain token, although it verifies eight rows: in
#   bfloat16 reading the weights takes the time, as on a GPU. So even a tau of 1.6 pays.
# * Four prompts give a wide interval. `dflash-lab bench --pair smol` asks more.

# %% [markdown]
# **Exercise 2 (3 to 6 lines).** A table has runs of both methods in two dtypes: (method, dtype, tokens,
# seconds). Return the speed-up of `dflash` over `plain` in one dtype: tokens per second, from
# sums over the runs.


# %%
def speedup(runs, dtype):
    # BEGIN SOLUTION
    speeds = []
    for method in ("dflash", "plain"):
        mine = [run for run in runs if run[:2] == (method, dtype)]
        speeds.append(sum(run[2] for run in mine) / sum(run[3] for run in mine))
    return speeds[0] / speeds[1]
    # END SOLUTION


check.check_speedup(speedup)
runs = [
    (name, "bfloat16", len(result.output_ids[0]), result.seconds)
    for name, part in results.items()
    for result in part
]
print(f"{speedup(runs, 'bfloat16'):.2f}")

# %% [markdown]
# **In words.** A report says: "DFlash in bfloat16 is 1.4 times as fast as `generate` in
# float32." What does this number mix, and what would you ask for?

# %% [markdown] tags: answer
# It mixes three things: the dtype, the loop (`generate` has more overhead than our plain
# loop), and drafting. Only the last one is what DFlash claims. Ask for plain decoding by the
# same loop, in the same dtype, on the same prompts, in the same process, and beside it for
# `generate` in the same dtype, since that is what users have.

# %% [markdown] tags: slide
# ## 4. A larger target
#
# A drafter names the target's layers that it listens to. They are spread evenly from layer 1
# to layer N − 3, counted from 0, and rounded as Python's `round` does. `transformers` returns
# `hidden_states` with one entry more: entry 0 is the embedding, and what layer l leaves
# behind is entry l + 1. Reading entry l is the classic mistake. Nothing crashes, and the
# drafter is only a little worse.
#
# **Exercise 3 (2 lines).** The entries of `hidden_states` for a target of N layers and n ≥ 2
# features. Both ends, layers 1 and N − 3, are among them.


# %%
def state_indices(num_layers, num_features):
    # BEGIN SOLUTION
    step = (num_layers - 4) / (num_features - 1)
    return [round(1 + feature * step) + 1 for feature in range(num_features)]
    # END SOLUTION


check.check_state_indices(state_indices)

# %%
config = pair.drafter.config
mine = [pair.target.num_layers, config.block_size, len(config.target_layer_ids)]
rows = [
    ["this pair", *mine, str(state_indices(mine[0], mine[2]))],
    ["Qwen3-8B, published drafter", 36, 16, 5, str(state_indices(36, 5))],
]
assert [i + 1 for i in config.target_layer_ids] == state_indices(mine[0], mine[2])
table_view(["", "target layers", "K", "features", "entries of hidden_states"], rows)

# %% [markdown]
# **What to notice.**
# * The same rule gives the ids of this drafter and of the published one (layers 1, 9, 17,
#   25, 33).
# * The published drafters were trained on answers without thinking. `load_pair` switches
#   thinking off in the chat template; with it on, expect less.
# * What a GPU changes is the cost model of lesson 07. With few requests, rows are cheaper still
#   beside reading the weights, so the tau at which drafting pays should fall towards 1. (This
#   project has not measured it.) And the paper's drafters have a tau of 6 and more on sums and code
#   (table 1).

# %% [markdown] tags: slide
# ## 5. Other people's logs
#
# vLLM and SGLang are programs that serve models, and print counters. The lines below are
# **examples of the shape, not measurements**.

# %%
import tempfile
from pathlib import Path

folder = Path(tempfile.mkdtemp())
_ = (folder / "server.log").write_text("""\
INFO SpecDecoding metrics: Mean acceptance length: 2.50, Accepted: 150 tokens, \
Drafted: 400 tokens, Per-position acceptance rate: 0.700, 0.450, 0.250, 0.100, \
Avg Draft acceptance rate: 37.5%
INFO SpecDecoding metrics: Mean acceptance length: 1.75, Accepted: 30 tokens, \
Drafted: 160 tokens, Per-position acceptance rate: 0.450, 0.200, 0.075, 0.025, \
Avg Draft acceptance rate: 18.8%
Decode batch, #running-req: 1, #token: 90, accept len: 2.10, accept rate: 0.28, \
gen throughput (token/s): 55.50, #queue-req: 0
""")

# %% [markdown]
# **Exercise 4 (1 to 2 lines).** The first two lines have the shape of vLLM's: drafts accepted and
# drafted in some stretch of time. Each cycle drafts `slots` tokens. What is tau?


# %%
def tau_from_counters(accepted, drafted, slots):
    # BEGIN SOLUTION
    cycles = drafted / slots
    return 1 + accepted / cycles
    # END SOLUTION


check.check_tau_from_counters(tau_from_counters)

# %%
from dflash_lab.interop.importers import pooled_log, read_log

log = read_log(folder / "server.log")
rows = [
    [r.source, r.tau, r.accepted, r.drafted, str(r.survival)] for r in log.itertuples()
]
pooled = pooled_log(log[log.source == "vllm"])
shown = [round(share, 3) for share in pooled["survival"]]
rows.append(["both vLLM lines", pooled["tau"], 180.0, 560.0, str(shown)])
print([tau_from_counters(*counts, 4) for counts in ((150, 400), (30, 160), (180, 560))])
table_view(["source", "tau", "accepted", "drafted", "per position"], rows)

# %% [markdown]
# **What to notice.**
# * Your formula gives the tau of each line. vLLM counts the bonus token, as we do, and its
#   per-position rates are *survival* (lesson 06).
# * Stretches with many cycles weigh more in the pooled row. The mean of the two taus would be
#   2.12, the pooled one is 2.29.
# * The third line has SGLang's shape: a mean over recent steps. It does not say how much was
#   drafted, so it cannot be pooled.
#
# The benchmark of DFlash's authors prints a summary. Spec-Bench, a benchmark of speculative
# decoding, writes one answer per line. Again: shapes, not measurements.

# %%
_ = (folder / "run.txt").write_text("""\
Baseline throughput: 40.00 tok/s
DFlash throughput:  100.00 tok/s
Decoding speedup: 2.50
Average Acceptance length: 2.75
Acceptance length histogram: ['0.0%', '25.0%', '25.0%', '12.5%', '37.5%']
""")

# %%
import json

answers = [
    {"new_tokens": [9], "wall_time": [0.5], "accept_lengths": [4, 3, 2]},
    {"new_tokens": [8], "wall_time": [0.9], "accept_lengths": [1, 2, 1, 1, 1, 2]},
]
with open(folder / "answers.jsonl", "w", encoding="utf-8") as file:
    for number, answer in enumerate(answers):
        row = {"question_id": number, "category": "example", "choices": [answer]}
        file.write(json.dumps(row) + "\n")

# %% [markdown]
# **Exercise 5 (2 to 3 lines).** tau from lists of lengths, one list for each response. Some programs
# count the bonus token in a length, others do not; ours does. `bonus_counted` says whether these
# lengths hold it. Return tau *with* the bonus token, pooled over cycles.


# %%
def tau_of(responses, bonus_counted):
    # BEGIN SOLUTION
    lengths = [length for response in responses for length in response]
    return sum(lengths) / len(lengths) + (0 if bonus_counted else 1)
    # END SOLUTION


check.check_tau_of(tau_of)

# %%
from dflash_lab.interop.authors_benchmark import read_authors_benchmark
from dflash_lab.interop.importers import read_spec_bench
from dflash_lab.measure.acceptance import pooled_tau

trace, facts = read_spec_bench(folder / "answers.jsonl")
printed = read_authors_benchmark(folder / "run.txt").iloc[0]
own = [c for result in traces for c in result.acceptance_lengths]
rows = [
    ["this lesson's run", pooled_tau(traces), tau_of(own, True)],
    ["Spec-Bench's shape", trace.tau, tau_of(trace.acceptance_lengths, True)],
    ["the authors' shape", float(printed.tau), float(printed.mean_tau)],
]
table_view(["", "tau, pooled", "by your function, or as printed"], rows)

# %% [markdown]
# The authors print a mean over responses (2.75). The pooled tau comes from their histogram:
# 0.25 · 1 + 0.25 · 2 + 0.125 · 3 + 0.375 · 4 = 2.62. Lesson 06, section 4, says why they differ.
#
# What is in our terms can go into our figures. The same call as for our own run:

# %%
from dflash_lab.views.curves import length_histogram

lengths = [length for answer in trace.acceptance_lengths for length in answer]
figure_view(length_histogram(lengths, 4))

# %%
figure_view(acceptance_figure(pooled["survival"], [round(pooled["cycles"])] * 4))

# %% [markdown]
# **What to notice.**
# * The bars of somebody else's log are survival, drawn as in lesson 06. Nine cycles make a
#   histogram that nobody should trust: look at the number of cycles first.
#
# **Go on:** lesson 11 plugs a drafter of your own into the same loop. Code:
# `pairs/pair.py`, `speculative/certify.py`, `interop/importers.py`,
# `measure/race.py`. Every definition: `docs/metrics.md`.

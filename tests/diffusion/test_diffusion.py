"""Discrete diffusion against enumeration, simulation and plain loops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from reference import block_diffusion_mask as slow_block_mask
from reference import orders_distribution, posterior_by_counting

from dflash_lab.diffusion.blocks import (
    block_diffusion_mask,
    block_logits,
    sample_blocks,
)
from dflash_lab.diffusion.drafting import StepwiseDFlash
from dflash_lab.diffusion.forward import Process
from dflash_lab.diffusion.model import TextModel, TextModelConfig
from dflash_lab.diffusion.objectives import (
    KINDS,
    autoregressive_loss,
    bound,
    diffusion_loss,
    loss_of,
)
from dflash_lab.diffusion.samplers import (
    ancestral_sample,
    fill_masks,
    tokens_per_step,
)
from dflash_lab.diffusion.schedules import EPS, Schedule, spread_times
from dflash_lab.diffusion.study import (
    judge,
    text_batch,
    train_twin,
    write_left_to_right,
)
from dflash_lab.diffusion.toy import (
    all_texts,
    exact_elbo,
    exact_law,
    ideal_denoiser,
    masked_elbo,
    reverse_kernels,
)
from dflash_lab.errors import DFlashLabError
from dflash_lab.pairs.pair import load_pair
from dflash_lab.speculative.generate import speculative_generate
from dflash_lab.speculative.proposer import DFlash, Plain
from dflash_lab.training.data.anchors import Blocks, reveal_slots

SCHEDULES = [Schedule(), Schedule("cosine"), Schedule("power", 3.0)]
MASK = 3  # of the toy: three words and a mask
PROCESSES = [Process("absorbing", 4, MASK), Process("uniform", 3)]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def small_model(vocab_size=4, mask_token_id=MASK, width=16, seed=0):
    torch.manual_seed(seed)
    model = TextModel(TextModelConfig(vocab_size, mask_token_id, width, 2, 2))
    for (
        parameter
    ) in model.parameters():  # far from uniform, so that distributions differ
        torch.nn.init.normal_(parameter, std=0.6)
    return model.eval()


def model_denoiser(model):
    @torch.no_grad()
    def denoise(noisy):
        return model(noisy)[0].double().softmax(-1)

    return denoise


def random_denoiser(process, length, seed):
    """Any distributions at all, other ones for every noisy text; the mask gets none."""
    size = process.size
    table = torch.randn(size**length, length, size, generator=generator(seed)).double()
    if process.kind == "absorbing":
        table[..., process.mask_token_id] = -torch.inf
    probs = table.softmax(-1)
    place = size ** torch.arange(length - 1, -1, -1)
    return lambda noisy: probs[(noisy * place).sum(-1)]


def grid(steps, schedule=SCHEDULES[0]):
    times = torch.linspace(0, 1, steps + 1, dtype=torch.float64)
    alphas = schedule.alpha(times).clamp(0, 1).tolist()
    return [1.0, *alphas[1:-1], 0.0]


# --- schedules and forward processes --------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_fall_from_one_to_nought_at_the_rate_they_say(schedule):
    t = torch.linspace(0.01, 0.99, 50, dtype=torch.float64)
    step = 1e-6
    slope = (schedule.alpha(t + step) - schedule.alpha(t - step)) / (2 * step)
    torch.testing.assert_close(schedule.derivative(t), slope, rtol=1e-6, atol=1e-8)
    ends = schedule.alpha(torch.tensor([0.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(ends, torch.tensor([1.0, 0.0], dtype=torch.float64))
    weight = -slope / (1 - schedule.alpha(t))
    torch.testing.assert_close(schedule.weight(t), weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("length", [1, 3])
def test_the_weight_of_a_pattern_does_not_depend_on_the_schedule(schedule, length):
    t = torch.linspace(1e-5, 1 - 1e-9, 400_001, dtype=torch.float64)
    alpha = schedule.alpha(t)
    for m in range(1, length + 1):
        chance = (1 - alpha) ** m * alpha ** (length - m)
        rate = -schedule.derivative(t) / (1 - alpha)
        found = torch.trapezoid(rate * chance, t).item()
        exact = math.factorial(m - 1) * math.factorial(length - m)
        assert found == pytest.approx(exact / math.factorial(length), abs=2e-3)


def test_times_are_one_in_each_interval():
    times = spread_times(8, generator())
    assert sorted((times * 8).int().tolist()) == list(range(8))
    assert times.min() >= EPS


@pytest.mark.parametrize("process", PROCESSES, ids=lambda p: p.kind)
def test_forward_marginals_match_simulation(process):
    ids = torch.arange(3).repeat(20_000, 1)
    alpha = 0.35
    noisy = process.sample(ids, torch.tensor([[alpha]]), generator())
    probs = process.matrix(alpha)
    for word in range(3):
        counts = noisy[:, word].bincount(minlength=process.size) / len(ids)
        sigma = (probs[word] * (1 - probs[word]) / len(ids)).sqrt()
        assert ((counts - probs[word]).abs() <= 4.5 * sigma + 1e-12).all()


@pytest.mark.parametrize("process", PROCESSES, ids=lambda p: p.kind)
def test_steps_make_up_the_whole_way_and_the_posterior_is_bayes(process):
    early, late = 0.7, 0.2
    two = process.matrix(early) @ process.matrix(late / early)
    torch.testing.assert_close(two, process.matrix(late))
    found = process.posterior(early, late)
    for x0, xt, xs in itertools.product(range(process.size), repeat=3):
        slow = posterior_by_counting(process, early, late, x0, xt, xs)
        assert float(found[x0, xt, xs]) == pytest.approx(slow, abs=1e-12)


# --- likelihood and its bound ---------------------------------------------------------


@pytest.mark.parametrize("process", PROCESSES, ids=lambda p: p.kind)
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_the_elbo_bounds_the_likelihood(process, steps):
    alphas = grid(steps)
    for seed in range(3):
        denoiser = random_denoiser(process, 2, seed)
        kernels = reverse_kernels(process, denoiser, 2, alphas)
        probs = exact_law(process, kernels, 2)
        assert probs.sum().item() == pytest.approx(1)
        gaps = []
        for text in itertools.product(range(3), repeat=2):
            row = text[0] * process.size + text[1]
            gaps.append(
                math.log(probs[row]) - exact_elbo(process, kernels, text, alphas)
            )
        assert min(gaps) >= -1e-9
        if steps == 1 and process.kind == "absorbing":
            # All noisy texts are one text, so nothing is lost.
            assert max(gaps) == pytest.approx(0, abs=1e-9)
        else:
            assert max(gaps) > 1e-4


def true_law():
    """Chances of three words of three letters whose places depend on each other."""
    probs = torch.zeros(4, 4, 4, dtype=torch.float64)
    probs[:3, :3, :3] = torch.rand(3, 3, 3, generator=generator(5)).double() ** 3
    return (probs / probs.sum()).flatten()


def test_the_bound_is_tight_for_the_ideal_denoiser_in_the_limit():
    probs, process = true_law(), PROCESSES[0]
    denoiser = ideal_denoiser(probs, 4, 3, MASK)
    words = [w for w in itertools.product(range(3), repeat=3)]
    row = {w: w[0] * 16 + w[1] * 4 + w[2] for w in words}
    for word in words:
        exact = math.log(probs[row[word]])
        assert masked_elbo(denoiser, word, MASK) == pytest.approx(exact, abs=1e-9)
    gaps = []
    for steps in (1, 4, 16, 64):
        kernels = reverse_kernels(process, denoiser, 3, grid(steps))
        chain = exact_law(process, kernels, 3)
        gaps.append(
            sum(
                probs[row[w]]
                * (
                    math.log(probs[row[w]])
                    - exact_elbo(process, kernels, w, grid(steps))
                )
                for w in words
            ).item()
        )
        # Fewer steps write tokens together that depend on each other.
        assert (chain - probs).abs().sum() < 2 * gaps[-1] ** 0.5 + 1e-6
    assert gaps == sorted(gaps, reverse=True) and gaps[-1] < 0.02 < gaps[0]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_many_steps_approach_the_bound_of_continuous_time(schedule):
    process, text = PROCESSES[0], (2, 0)
    denoiser = random_denoiser(process, 2, 1)
    limit = masked_elbo(denoiser, text, MASK)
    errors = []
    for steps in (8, 32, 128):
        kernels = reverse_kernels(process, denoiser, 2, grid(steps, schedule))
        found = exact_elbo(process, kernels, text, grid(steps, schedule))
        errors.append(abs(found - limit))
    assert errors[2] < errors[1] < errors[0] and errors[2] < 0.03


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_training_loss_is_an_estimate_of_the_exact_bound(schedule):
    model, text = small_model(), (2, 0, 1)
    exact = -masked_elbo(model_denoiser(model), text, MASK) / 3
    ids = torch.tensor([text]).repeat(4096, 1)
    with torch.no_grad():
        found = [diffusion_loss(model, ids, schedule, generator(s)) for s in range(6)]
    assert torch.stack(found).mean().item() == pytest.approx(exact, rel=0.03)


def test_impossible_requests_are_refused():
    with pytest.raises(DFlashLabError, match="limit is 4096"):
        all_texts(10, 5)
    with pytest.raises(DFlashLabError, match="choose linear"):
        Schedule("steep")
    with pytest.raises(DFlashLabError, match="exponent is 0"):
        Schedule("power", 0)
    with pytest.raises(DFlashLabError, match="choose absorbing"):
        Process("gaussian", 3)
    with pytest.raises(DFlashLabError, match="mask_token_id is None"):
        Process("absorbing", 3)
    with pytest.raises(DFlashLabError, match="alpha rises"):
        PROCESSES[0].posterior(0.2, 0.7)
    with pytest.raises(DFlashLabError, match="must run from 1 to 0"):
        ancestral_sample(None, torch.zeros(1, 1), MASK, [1.0, 0.5], generator())
    with pytest.raises(DFlashLabError, match="no order"):
        fill_masks(None, torch.zeros(1, 1), MASK, 1, generator(), order="left")
    with pytest.raises(DFlashLabError, match="0 to 1 masks"):
        fill_masks(None, torch.tensor([[0], [MASK]]), MASK, 1, generator())
    with pytest.raises(DFlashLabError, match="divides the length"):
        block_diffusion_mask(6, 4)
    with pytest.raises(DFlashLabError, match="no kind 'block'"):
        loss_of("block", small_model(), torch.zeros(1, 2).long(), generator())


# --- samplers -------------------------------------------------------------------------


def shares(ids, size):
    place = size ** torch.arange(ids.shape[1] - 1, -1, -1)
    counts = (ids * place).sum(-1).bincount(minlength=size ** ids.shape[1])
    return counts.double() / len(ids)


def predictor(model):
    return lambda ids: model(ids)[0]


@pytest.mark.parametrize("steps", [1, 3])
def test_the_ancestral_sampler_has_the_distribution_of_the_chain(steps):
    model, count = small_model(), 40_000
    alphas = grid(steps, Schedule("cosine"))
    kernels = reverse_kernels(PROCESSES[0], model_denoiser(model), 2, alphas)
    probs = exact_law(PROCESSES[0], kernels, 2)
    start = torch.full((count, 2), MASK)
    found = ancestral_sample(predictor(model), start, MASK, alphas, generator())
    assert len(found.frames) == steps + 1 and (found.ids != MASK).all()
    sigma = (probs * (1 - probs) / count).sqrt()
    assert ((shares(found.ids, 4) - probs).abs() <= 4.5 * sigma + 1e-9).all()


def test_one_token_a_pass_in_random_order_has_the_distribution_of_all_orders():
    model, count = small_model(), 40_000
    start = torch.full((count, 3), MASK)
    found = fill_masks(predictor(model), start, MASK, 3, generator(), order="random")
    probs = orders_distribution(model_denoiser(model), 4, 3, MASK)
    sigma = (probs * (1 - probs) / count).sqrt()
    assert found.passes == 3
    assert ((shares(found.ids, 4) - probs).abs() <= 4.5 * sigma + 1e-9).all()


@pytest.mark.parametrize("steps", [1, 2, 5, 9])
def test_greedy_filling_by_confidence_equals_a_plain_loop(steps):
    model = small_model(9, 8)
    start = torch.full((1, 5), 8)
    found = fill_masks(predictor(model), start, 8, steps, generator(), greedy=True)
    ids = [8] * 5
    for count in tokens_per_step(5, steps):
        probs = model(torch.tensor([ids]))[0][0].softmax(-1)
        ranked = sorted(
            (i for i in range(5) if ids[i] == 8), key=lambda i: -probs[i].max().item()
        )
        for i in ranked[:count]:
            ids[i] = int(probs[i].argmax())
    assert found.ids[0].tolist() == ids
    assert found.passes == min(steps, 5) == len(found.frames) - 1
    assert sum(tokens_per_step(5, steps)) == 5 and min(tokens_per_step(5, steps)) > 0


# --- blocks ---------------------------------------------------------------------------


@pytest.mark.parametrize("length,size", [(6, 1), (6, 2), (6, 3), (6, 6)])
def test_the_block_mask_equals_its_slow_twin(length, size):
    found = block_diffusion_mask(length, size)
    assert found.tolist() == slow_block_mask(length, size)


def test_one_block_is_masked_diffusion():
    model = small_model(9, 8)
    ids = torch.randint(8, (4, 6), generator=generator())
    whole = diffusion_loss(model, ids, Schedule(), generator(1))
    block = diffusion_loss(model, ids, Schedule(), generator(1), block_size=6)
    torch.testing.assert_close(whole, block)
    start = torch.full((4, 6), 8)
    alone = fill_masks(predictor(model), start, 8, 3, generator(2))
    blocks = sample_blocks(
        model, start[:, :0], 6, 6, 3, generator(2), order="confidence"
    )
    assert torch.equal(alone.ids, blocks.ids) and blocks.passes == 3


def test_blocks_of_one_are_autoregressive():
    model = small_model(9, 8)
    ids = torch.randint(8, (2, 5), generator=generator())
    nats = []
    for row, place in itertools.product(range(2), range(5)):
        # The clean prefix, then one mask: the distribution of the next token.
        prefix = ids[row, :place].tolist()
        rows = torch.tensor([[*prefix, 8]])
        causal = torch.ones(place + 1, place + 1, dtype=torch.bool).tril()
        logits = model(rows, causal)[0][0, -1]
        nats.append(-logits.log_softmax(-1)[ids[row, place]])
    exact = torch.stack(nats).mean()
    noisy = torch.full_like(ids, 8)
    logits = block_logits(model, noisy, ids, 1)
    fast = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids)
    torch.testing.assert_close(fast, exact)
    # A mask's chance times its weight is 1 at any time, so the loss estimates this.
    many = ids.repeat(512, 1)
    with torch.no_grad():
        estimate = diffusion_loss(model, many, Schedule(), generator(), 1)
    assert estimate.item() == pytest.approx(exact.item(), rel=0.1)
    # And so is the writing: the most likely next token, again and again.
    written = sample_blocks(model, ids[:, :2], 3, 1, 1, generator(), greedy=True)
    for row in range(2):
        text = ids[row, :2].tolist()
        for _ in range(3):
            rows = torch.tensor([[*text, 8]])
            causal = torch.ones(len(text) + 1, len(text) + 1, dtype=torch.bool).tril()
            text.append(int(model(rows, causal)[0][0, -1].argmax()))
        assert written.ids[row].tolist() == text


@pytest.mark.parametrize("size,steps", [(2, 1), (2, 2), (4, 3)])
def test_writing_with_a_cache_equals_writing_without(size, steps):
    model = small_model(9, 8)
    prompt = torch.randint(8, (3, 4), generator=generator())
    found = sample_blocks(
        model, prompt, 8, size, steps, generator(), order="confidence", greedy=True
    )
    ids = prompt
    for _ in range(8 // size):
        noisy = torch.full((3, size), 8)
        for count in tokens_per_step(size, steps):
            clean = torch.cat([ids, torch.zeros_like(noisy)], 1)
            rows = torch.cat([torch.full_like(ids, 8), noisy], 1)
            logits = block_logits(model, rows, clean, size)[:, -size:]
            probs = logits.softmax(-1)
            score = probs.max(-1).values.masked_fill(noisy != 8, -1)
            chosen = score.topk(count).indices
            tokens = probs.argmax(-1)
            noisy = noisy.scatter(1, chosen, tokens.gather(1, chosen))
        ids = torch.cat([ids, noisy], 1)
    assert torch.equal(found.ids, ids)
    assert found.passes == (8 // size) * (steps + 1) - 1
    assert len(found.frames) == 1 + (8 // size) * steps


# --- training and judging -------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    return load_pair("tiny", quiet=True, with_drafter=False)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_learns(tiny, kind):
    mask_id = tiny.tokenizer.convert_tokens_to_ids("<|mask|>")
    options = {"steps": 40, "length": 32, "width": 32, "layers": 1, "batch_size": 16}
    size = 8 if kind == "block" else None
    trained = train_twin(
        kind, tiny.tokenizer, mask_id, block_size=size, learning_rate=1e-2, **options
    )
    again = train_twin(
        kind, tiny.tokenizer, mask_id, block_size=size, learning_rate=1e-2, **options
    )
    assert trained.losses == again.losses
    held = text_batch(tiny.tokenizer, 16, 32, seed=1, held_out=True)
    nats = bound(kind, trained.model, held, block_size=size, draws=4)
    assert nats < 0.88 * math.log(len(tiny.tokenizer))
    assert nats == bound(kind, trained.model, held, block_size=size, draws=4)


def test_the_autoregressive_twin_writes_its_most_likely_text(tiny):
    model = small_model(9, 8)
    prompt = torch.randint(8, (2, 3), generator=generator())
    found = write_left_to_right(model, prompt, 4, generator(), greedy=True)
    for row in range(2):
        text = [8, *prompt[row].tolist()]
        for _ in range(4):
            causal = torch.ones(len(text), len(text), dtype=torch.bool).tril()
            logits = model(torch.tensor([text]), causal)[0][0, -1]
            text.append(int(logits.argmax()))
        assert found.ids[row].tolist() == text[1:]
    nats = autoregressive_loss(model, found.ids)
    assert nats < autoregressive_loss(model, (found.ids + 1) % 8)


def test_the_judge_is_the_targets_likelihood(tiny):
    ids = text_batch(tiny.tokenizer, 2, 12, seed=3)
    found = judge(tiny.target.model, ids, 5)
    nats, entropy = [], []
    for row in ids:
        probs = tiny.target.model(input_ids=row[None]).logits[0].log_softmax(-1)
        nats += [-probs[i - 1, row[i]].item() for i in range(5, 12)]
        words = row[5:].tolist()
        shares = [words.count(w) / 7 for w in set(words)]
        entropy.append(-sum(s * math.log(s) for s in shares))
    assert found["nats_per_token"] == pytest.approx(sum(nats) / 14, rel=1e-4)
    assert found["entropy"] == pytest.approx(sum(entropy) / 2)


# --- drafting in several steps --------------------------------------------------------


@pytest.fixture(scope="module")
def drafting_pair():
    return load_pair("tiny", quiet=True)


def decode_with(pair, proposer, prompt, **options):
    return speculative_generate(
        pair, proposer, pair.encode(prompt), max_new_tokens=40, loop="host", **options
    )


def test_one_step_is_dflash(drafting_pair):
    pair = drafting_pair
    for order in ("left", "confidence"):
        found = decode_with(
            pair, StepwiseDFlash(pair.drafter, 1, order), "Tell Mia about the fox."
        )
        right = decode_with(pair, DFlash(pair.drafter), "Tell Mia about the fox.")
        assert found.output_ids == right.output_ids
        drafts = [c.draft_tokens for c in found.trace.cycles]
        assert drafts == [c.draft_tokens for c in right.trace.cycles]


@pytest.mark.parametrize("order", ["left", "confidence"])
def test_several_steps_equal_a_plain_loop_and_stay_lossless(drafting_pair, order):
    pair = drafting_pair
    prompt = "Sort the list: table, candle, yarn."
    found = decode_with(pair, StepwiseDFlash(pair.drafter, 3, order), prompt)
    plain = decode_with(pair, Plain(), prompt)
    assert found.output_ids == plain.output_ids
    # The first cycle's drafts once more, with the drafter's own modules.
    config, ids = pair.drafter.config, pair.encode(prompt)
    size, mask = config.block_size, config.mask_token_id
    with torch.inference_mode():
        outputs = pair.target.model(
            input_ids=torch.tensor([ids]), output_hidden_states=True
        )
    hidden = [outputs.hidden_states[i + 1] for i in config.target_layer_ids]
    block = [int(outputs.logits[0, -1].argmax())] + [mask] * (size - 1)
    for count in tokens_per_step(size - 1, 3):
        rows = torch.nn.functional.embedding(
            torch.tensor([block]), pair.target.embedding_table
        )
        with torch.inference_mode():
            out = pair.drafter(
                rows * config.input_embedding_scale,
                torch.cat(hidden, -1),
                torch.arange(len(ids) + size)[None],
            )
            logits = pair.drafter.scale_logits(pair.target.logits(out))
        probs = logits[0, 1:].clone()
        probs[:, mask] = -torch.inf
        probs = probs.softmax(-1)
        left = [k for k in range(size - 1) if block[k + 1] == mask]
        if order == "confidence":
            left.sort(key=lambda k: -probs[k].max().item())
        for k in left[:count]:
            block[k + 1] = int(probs[k].argmax())
    assert found.trace.cycles[0].draft_tokens == block[1:]


def test_stepwise_mistakes_are_named(drafting_pair):
    with pytest.raises(DFlashLabError, match="steps 0 must be 1"):
        StepwiseDFlash(drafting_pair.drafter, 0)
    with pytest.raises(DFlashLabError, match="'right'"):
        StepwiseDFlash(drafting_pair.drafter, 2, "right")


def test_revealed_slots_equal_a_plain_loop():
    shape = (2, 40, 5)
    labels = torch.randint(50, shape, generator=generator(1))
    asked = torch.ones(shape, dtype=torch.bool)
    asked[..., 0] = False
    asked[1, :, 3:] = False
    masks = torch.full(shape, 99)
    masks[..., 0] = labels[..., 0]
    blocks = Blocks(
        torch.zeros(shape[:2]).long(),
        torch.ones(shape[:2]).bool(),
        masks,
        labels,
        asked,
    )
    draws = torch.rand(shape, generator=generator(2))
    found = reveal_slots(blocks, 0.5, draws)
    counts = []
    for b, n in itertools.product(range(2), range(40)):
        own = draws[b, n, 0].item()
        slots = [k for k in range(1, 5) if asked[b, n, k]]
        last = max(slots, key=lambda k: draws[b, n, k])
        shown = [
            k
            for k in slots
            if own < 0.5 and draws[b, n, k].item() < own / 0.5 and k != last
        ]
        for k in range(5):
            value = labels[b, n, k] if k in shown or k == 0 else 99
            assert found.input_ids[b, n, k] == value
            assert found.label_mask[b, n, k] == (k in slots and k not in shown)
        counts.append(len(shown))
    assert 0.4 < sum(c == 0 for c in counts) / len(counts) < 0.9 and max(counts) == 3
    assert reveal_slots(blocks, 0.0, draws) is blocks

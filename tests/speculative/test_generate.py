"""The loop against the target's own `generate`, whatever the drafter says."""

from __future__ import annotations

import random

import pytest
import torch
from helpers import random_drafter, random_target
from reference import ScriptedProposer, generate_greedily

from dflash_lab.errors import DFlashLabError
from dflash_lab.speculative.generate import speculative_generate
from dflash_lab.speculative.ngram import NGramLookup
from dflash_lab.speculative.proposer import DFlash, Plain
from dflash_lab.speculative.sampling import Sampling
from dflash_lab.target.fused import as_target
from dflash_lab.target.target import Target

SHAPES = [
    {},
    {"num_hidden_layers": 7, "num_key_value_heads": 4, "tie_word_embeddings": True},
    {"hidden_size": 48, "head_dim": 12, "num_key_value_heads": 1},
    {"vocab_size": 97, "attention_bias": True},
]


def oracle(target, wrong_at=None):
    """Drafts the target's own greedy text, wrong from slot `wrong_at` on."""

    def script(text, count):
        if count == 0:
            return []
        truth = generate_greedily(target, text, count)
        if wrong_at is not None:
            truth[wrong_at:] = [(t + 1) % target.vocab_size for t in truth[wrong_at:]]
        return truth

    return script


def random_prompt(rng, vocabulary, longest=20):
    return [rng.randrange(vocabulary) for _ in range(rng.randint(1, longest))]


@pytest.mark.parametrize("case", range(40))
def test_greedy_equals_generate(case):
    """40 cases x 6 proposers = 240 combinations of seed, shape, prompt and block."""
    rng = random.Random(case)
    target = random_target(case, **SHAPES[case % len(SHAPES)])
    prompt = random_prompt(rng, target.vocab_size)
    size = rng.randint(2, 9)
    limit = rng.randint(1, 30)
    expected = generate_greedily(target, prompt, limit)
    adversary = random.Random(case)
    proposers = [
        Plain(),
        NGramLookup(size, max_ngram=rng.randint(1, 3)),
        DFlash(random_drafter(target, case, block_size=9), block_size=size),
        ScriptedProposer(oracle(target), size, (1, 2)),
        ScriptedProposer(oracle(target, wrong_at=rng.randrange(size)), size),
        ScriptedProposer(
            lambda text, n: [adversary.choice((0, 60, text[-1])) for _ in range(n)],
            size,
        ),
    ]
    for proposer in proposers:
        result = speculative_generate(target, proposer, prompt, max_new_tokens=limit)
        assert result.output_ids == [expected], proposer.name
        emitted = 1 + sum(result.trace.acceptance_lengths[0])
        assert emitted == len(expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", range(8))
def test_batch_rows_get_what_they_get_alone(case):
    rng = random.Random(100 + case)
    target = random_target(case, **SHAPES[case % len(SHAPES)])
    prompts = [random_prompt(rng, target.vocab_size) for _ in range(5)]
    drafter = random_drafter(target, case)
    for proposer in (Plain(), NGramLookup(5), DFlash(drafter)):
        result = speculative_generate(target, proposer, prompts, max_new_tokens=24)
        for b, prompt in enumerate(prompts):
            assert result.output_ids[b] == generate_greedily(target, prompt, 24)
            alone = speculative_generate(target, proposer, prompt, max_new_tokens=24)
            together = result.trace.acceptance_lengths[b]
            assert together == alone.trace.acceptance_lengths[0]


def test_batch_with_stops_at_different_times(target):
    rng = random.Random(5)
    prompts = [random_prompt(rng, target.vocab_size) for _ in range(6)]
    texts = [generate_greedily(target, prompt, 20) for prompt in prompts]
    stop = (texts[0][3], texts[1][9])
    proposer = ScriptedProposer(oracle(target, wrong_at=3), 6, (1,))
    result = speculative_generate(
        target, proposer, prompts, max_new_tokens=20, stop_token_ids=stop
    )
    for b, prompt in enumerate(prompts):
        assert result.output_ids[b] == generate_greedily(target, prompt, 20, stop)


def same_seed_cases():
    temperatures = (0.3, 0.7, 1.0, 1.5)
    warpers = ({}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 12, "top_p": 0.9})
    return [(t, w) for t in temperatures for w in warpers]


@pytest.mark.parametrize(("temperature", "warpers"), same_seed_cases())
def test_same_seed_same_text(temperature, warpers):
    """16 settings x 13 prompts = 208 prompts, each alone, drafted and in a batch."""
    target = random_target(1, dtype=torch.float64)
    drafter = random_drafter(target, 1).double()
    rng = random.Random(0)
    prompts = [random_prompt(rng, target.vocab_size) for _ in range(13)]
    seeds = [rng.randrange(2**40) for _ in prompts]
    settings = {"temperature": temperature, **warpers}
    together = speculative_generate(
        target,
        DFlash(drafter),
        prompts,
        max_new_tokens=12,
        sampling=Sampling(**settings),
        seeds=seeds,
    )
    for b, prompt in enumerate(prompts):
        sampling = Sampling(**settings, seed=seeds[b])
        outputs = [
            speculative_generate(
                target, proposer, prompt, max_new_tokens=12, sampling=sampling
            ).output_ids[0]
            for proposer in (Plain(), DFlash(drafter), NGramLookup(4))
        ]
        assert outputs[0] == outputs[1] == outputs[2] == together.output_ids[b]


def test_another_seed_gives_another_text(target):
    outputs = {
        tuple(
            speculative_generate(
                target, Plain(), [1], max_new_tokens=8, sampling=Sampling(1.5, seed=s)
            ).output_ids[0]
        )
        for s in range(6)
    }
    assert len(outputs) > 1


def test_speculative_rule_is_the_same_alone_and_in_a_batch(target, drafter):
    prompts = [[3, 4, 5], [9], [7, 7, 7, 7, 1, 2]]
    sampling = Sampling(1.2, top_k=20, seed=11, rule="speculative")
    run = {"max_new_tokens": 15, "sampling": sampling}
    together = speculative_generate(target, DFlash(drafter), prompts, **run)
    for b, prompt in enumerate(prompts):
        alone = speculative_generate(target, DFlash(drafter), prompt, **run)
        assert alone.output_ids[0] == together.output_ids[b]


@pytest.mark.slow
def test_speculative_rule_through_the_loop_keeps_the_distribution():
    """Whole loop, distribution of two tokens against plain decoding, by seeds."""
    target = random_target(2, vocab_size=5, dtype=torch.float64)
    drafter = random_drafter(target, 2, block_size=3, mask_token_id=4).double()
    counts = {}
    runs = 2000
    for name, proposer, rule in (
        ("plain", Plain(), "match"),
        ("dflash", DFlash(drafter), "speculative"),
    ):
        sampling = Sampling(2.5, rule=rule)
        result = speculative_generate(
            target,
            proposer,
            [[1, 2]] * runs,
            max_new_tokens=3,
            sampling=sampling,
            seeds=range(runs),
        )
        seen = torch.zeros(125)
        for a, b, c in result.output_ids:
            seen[25 * a + 5 * b + c] += 1
        counts[name] = seen
    a, b = counts["plain"], counts["dflash"]
    both = a + b
    busy = both >= 10
    chi2 = float((((a - b) ** 2) / both)[busy].sum())
    freedom = int(busy.sum()) - 1
    assert freedom >= 8
    assert chi2 < freedom + 4.5 * (2 * freedom) ** 0.5


def test_every_stop_token_offset_equals_generate(target):
    prompt = [5, 9, 2]
    text = generate_greedily(target, prompt, 24)
    for proposer in (Plain(), ScriptedProposer(oracle(target), 7)):
        for token in dict.fromkeys(text):
            result = speculative_generate(
                target, proposer, prompt, max_new_tokens=24, stop_token_ids=[token]
            )
            expected = text[: text.index(token) + 1]
            assert result.output_ids == [expected]
            assert result.stop_reasons == ["stop_token"]
            assert expected == generate_greedily(target, prompt, 24, [token])


def test_every_length_limit_inside_a_block(target):
    prompt = [5, 9, 2]
    text = generate_greedily(target, prompt, 20)
    for limit in range(1, 20):
        for wrong in (None, 2):
            proposer = ScriptedProposer(oracle(target, wrong), 6)
            result = speculative_generate(
                target, proposer, prompt, max_new_tokens=limit
            )
            assert result.output_ids == [text[:limit]]
            assert result.stop_reasons == ["length"]


def test_first_token_may_stop(target, drafter):
    prompt = [5, 9, 2]
    first = generate_greedily(target, prompt, 1)[0]
    result = speculative_generate(
        target, DFlash(drafter), prompt, max_new_tokens=9, stop_token_ids=[first]
    )
    assert result.output_ids == [[first]] and not result.trace.cycles


def test_stop_token_in_the_prompt_does_not_stop(target, drafter):
    text = generate_greedily(target, [5, 9, 2], 9)
    unused = next(t for t in range(target.vocab_size) if t not in text)
    prompt = [unused, 5, 9, 2]
    result = speculative_generate(
        target, DFlash(drafter), prompt, max_new_tokens=9, stop_token_ids=[unused]
    )
    assert result.output_ids[0] == generate_greedily(target, prompt, 9, [unused])


def test_mask_id_is_legal_text(target, drafter):
    mask = drafter.config.mask_token_id
    prompt = [mask, 3, mask, mask]
    expected = generate_greedily(target, prompt, 12)
    result = speculative_generate(target, DFlash(drafter), prompt, max_new_tokens=12)
    assert result.output_ids == [expected]
    # And as a token that the target itself says.
    with torch.no_grad():
        saying = random_target(3)
        bias = torch.zeros(saying.vocab_size)
        bias[60] = 50.0
        saying.head.bias = torch.nn.Parameter(bias)
        saying = as_target(saying.model)
    result = speculative_generate(
        saying, DFlash(random_drafter(saying)), [1, 2], max_new_tokens=5
    )
    assert result.output_ids == [[60] * 5]


def test_position_limit_cuts_the_answer(drafter):
    target = random_target(0, max_position_embeddings=30)
    prompt = [1 + i % 50 for i in range(25)]
    result = speculative_generate(target, DFlash(drafter), prompt, max_new_tokens=20)
    assert len(result.output_ids[0]) == 5
    assert result.stop_reasons == ["position_limit"]
    assert result.output_ids[0] == generate_greedily(target, prompt, 5)
    with pytest.raises(DFlashLabError, match="30 positions"):
        speculative_generate(target, Plain(), [1] * 30, max_new_tokens=1)


@pytest.mark.parametrize("length", range(6))
def test_caches_after_every_acceptance_length(length, target):
    """After a cycle that keeps `length` drafts, the caches equal a fresh prefill."""
    prompt = [4, 8, 15]
    text = generate_greedily(target, prompt, 12)
    done = []

    def script(so_far, count):
        truth = text[len(so_far) - len(prompt) :][:count]
        if not done:
            done.append(True)
            truth[length:] = [(t + 1) % 61 for t in truth[length:]]
        return truth

    proposer = ScriptedProposer(script, 6, (1, 3))
    result = speculative_generate(target, proposer, prompt, max_new_tokens=12)
    assert result.output_ids == [text]
    assert result.trace.cycles[0].acceptance_length == length + 1
    # Every committed token but the last was observed once, with its true features.
    positions = [position for _, position, _ in proposer.seen]
    assert positions == sorted(set(positions))
    cache = target.new_cache(1, 32)
    with torch.inference_mode(), target.tap((1, 3)) as tap:
        ids = torch.tensor([prompt + text])
        target.forward(ids, torch.arange(15)[None], cache)
        fresh = tap.take()[0]
    for _, position, feature in proposer.seen:
        torch.testing.assert_close(feature, fresh[position], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("fused", [True, False])
def test_context_rows_are_projected_once(target, drafter, fused):
    proposer = DFlash(drafter, fused=fused)
    proposer.passes.context_rows = 0
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    result = speculative_generate(
        target, proposer, prompts, max_new_tokens=20, loop="host"
    )
    drafts = sum(len(c.draft_tokens) > 0 for c in result.trace.cycles)
    assert drafts > 10
    committed = sum(
        len(p) + len(o) for p, o in zip(prompts, result.output_ids, strict=True)
    )
    # Each text's last token never enters a cache.
    assert proposer.passes.context_rows == committed - len(prompts)


def test_prompts_as_lists_and_tensors_are_the_same(target):
    forms = [
        [[1, 2], [3, 4]],
        ((1, 2), (3, 4)),
        torch.tensor([[1, 2], [3, 4]]),
        [torch.tensor([1, 2]), torch.tensor([3, 4])],
    ]
    outputs = [
        speculative_generate(target, Plain(), form, max_new_tokens=5).output_ids
        for form in forms
    ]
    assert all(output == outputs[0] for output in outputs)
    one = speculative_generate(target, Plain(), torch.tensor([1, 2]), max_new_tokens=5)
    assert one.output_ids == outputs[0][:1]


def test_streaming_gives_exactly_the_output(target, drafter):
    streams = {0: [], 1: []}
    result = speculative_generate(
        target,
        DFlash(drafter),
        [[3, 1], [2]],
        max_new_tokens=17,
        on_tokens=lambda row, tokens: streams[row].extend(tokens),
    )
    assert [streams[0], streams[1]] == result.output_ids


def test_interrupt_returns_what_was_made(target, drafter):
    def stop(row, tokens):
        made.extend(tokens)
        if len(made) >= 5:
            raise KeyboardInterrupt

    made = []
    result = speculative_generate(
        target, DFlash(drafter), [3, 1], max_new_tokens=50, on_tokens=stop
    )
    assert result.stop_reasons == ["interrupted"]
    assert result.output_ids == [made]
    assert made == generate_greedily(target, [3, 1], len(made))


def test_interrupt_leaves_no_hooks(target, drafter):
    def stop(row, tokens):
        raise KeyboardInterrupt

    layers = target.model.model.layers

    def hooks():
        return [len(layer._forward_hooks) for layer in layers]

    before = hooks()
    for one in (target, Target(target.model)):
        speculative_generate(one, DFlash(drafter), [3], on_tokens=stop)
        assert hooks() == before
    assert not target._taps


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "empty"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([61], {}, "61"),
        ([-1], {}, "-1"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens 0"),
        ([1], {"stop_strings": ["x"]}, "tokenizer"),
        ([1], {"seeds": [1, 2]}, "2 seeds for 1"),
        ([1], {"seeds": [2**63]}, "64 bits"),
    ],
)
def test_bad_input_is_refused(target, prompt, settings, message):
    with pytest.raises(DFlashLabError, match=message):
        speculative_generate(target, Plain(), prompt, **settings)


def test_nan_weights_are_refused():
    target = random_target(4)
    with torch.no_grad():
        target.head.weight[3] = float("nan")
    with pytest.raises(DFlashLabError, match="target's logits contain NaN"):
        speculative_generate(target, Plain(), [1], max_new_tokens=2)


def test_nan_drafter_is_refused(target):
    drafter = random_drafter(target)
    with torch.no_grad():
        drafter.norm.weight.fill_(float("nan"))
    with pytest.raises(DFlashLabError, match="drafter's logits contain NaN"):
        speculative_generate(target, DFlash(drafter), [1], max_new_tokens=4)


def test_details_are_the_targets_own_probabilities(target, drafter):
    prompt = [3, 1, 4]
    result = speculative_generate(
        target, DFlash(drafter), prompt, max_new_tokens=10, details=True
    )
    text = prompt + result.output_ids[0]
    with torch.inference_mode():
        logits = target.model(torch.tensor([text])).logits[0]
    for cycle in result.trace.cycles:
        probs = logits[cycle.start].softmax(-1)
        assert cycle.target_tokens[0] == int(probs.argmax())
        if not cycle.draft_tokens:
            continue
        assert cycle.target_probs[0] == pytest.approx(
            float(probs[cycle.draft_tokens[0]]), abs=1e-4
        )
        entropy = -float((probs * probs.clamp(min=1e-30).log()).sum())
        assert cycle.target_entropy[0] == pytest.approx(entropy, abs=1e-3)
        best = logits[cycle.start].topk(2).values
        assert cycle.target_margin[0] == pytest.approx(
            float(best[0] - best[1]), abs=1e-3
        )
        assert all(0 <= p <= 1 for p in cycle.draft_probs)

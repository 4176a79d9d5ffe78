"""Exact enumeration of the acceptance rules, and rules broken on purpose.

The distribution of the emitted text is computed without sampling: every draft, every
side of every coin and every target pick is fed to the real rule with its probability,
and the result must be the target's autoregressive distribution. Each mutant must miss
it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
import torch
from reference import accept
from torch.nn import functional as F

from dflash_lab.speculative import acceptance
from dflash_lab.speculative.acceptance import (
    accept_matching,
    accept_speculatively,
    leading_true,
)
from dflash_lab.speculative.sampling import Sampling, warped_log_probs

VOCAB, DRAFTS = 3, 2
WARPERS = [
    Sampling(1.0),
    Sampling(0.7),
    Sampling(1.0, top_k=2),
    Sampling(1.3, top_p=0.8),
    Sampling(0.9, top_k=2, top_p=0.9),
]


def target_logits(prefix):
    """Arbitrary but fixed logits of the token behind a prefix."""
    seed = 17 + sum((t + 1) * 7**i for i, t in enumerate(prefix))
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(VOCAB, generator=noise, dtype=torch.float64) * 1.5


def law_of(prefix, sampling):
    return warped_log_probs(target_logits(prefix), sampling).exp()


def autoregressive_law(sampling, length):
    probs = {(): 1.0}
    for _ in range(length):
        probs = {
            (*text, token): mass * float(law_of(text, sampling)[token])
            for text, mass in probs.items()
            for token in range(VOCAB)
        }
    return probs


def draft_log_probs(sampling, seed=5):
    """q of each slot: independent of the block, as a DFlash drafter's."""
    noise = torch.Generator().manual_seed(seed)
    logits = torch.randn(DRAFTS, VOCAB, generator=noise, dtype=torch.float64)
    return warped_log_probs(logits, sampling)


def finish(probs, text, mass, sampling):
    """Continue autoregressively to the full length; texts cut there add up."""
    for rest, extra in autoregressive_law_behind(text, sampling).items():
        probs[(*text, *rest)[: DRAFTS + 1]] += mass * extra


def autoregressive_law_behind(text, sampling):
    probs = {(): 1.0}
    for _ in range(DRAFTS + 1 - len(text)):
        probs = {
            (*rest, token): mass * float(law_of((*text, *rest), sampling)[token])
            for rest, mass in probs.items()
            for token in range(VOCAB)
        }
    return probs


def distance(probs, other):
    return 0.5 * sum(abs(probs[k] - other.get(k, 0.0)) for k in set(probs) | set(other))


def speculative_law(rule, sampling, q, draws=None, one_hot=False):
    """Distribution of a cycle under a rule with coins.

    Args:
        rule: `accept_speculatively` or a mutant.
        q: (G, V) log-probabilities handed to the rule.
        draws: (G, V) distribution the drafts are really drawn from; q if None.
    """
    probs = defaultdict(float)
    really = (q if draws is None else draws).exp()
    for drafts in itertools.product(range(VOCAB), repeat=DRAFTS):
        mass = 1.0
        for j, token in enumerate(drafts):
            mass *= float(really[j, token])
        if mass == 0:
            continue
        p = torch.stack([law_of(drafts[:j], sampling) for j in range(DRAFTS + 1)])
        # The coin's outcome is constant between the thresholds any rule could use, so
        # the middle of each interval stands for all of it.
        cuts = {0.0, 1.0}
        for j, x in enumerate(drafts):
            for top in (float(p[j, x]), float(p[j].max())):
                for bottom in (float(q[j, x].exp()), float(really[j, x]), 1.0):
                    if bottom > 0 and 0 < top / bottom < 1:
                        cuts.add(top / bottom)
        cuts = sorted(cuts)
        coins = [((a + b) / 2, b - a) for a, b in itertools.pairwise(cuts)]
        for pick in itertools.product(coins, repeat=DRAFTS):
            weight = mass
            for _, width in pick:
                weight *= width
            verdict = rule(
                torch.tensor([drafts]),
                None if one_hot else q[None],
                p.log()[None],
                torch.tensor([[u for u, _ in pick]], dtype=torch.float64),
                torch.zeros(1, VOCAB, dtype=torch.float64),
            )
            kept = drafts[: int(verdict.accepted)]
            for token, chance in enumerate(verdict.next_probs[0].tolist()):
                if chance > 0:
                    finish(probs, (*kept, token), weight * chance, sampling)
    return probs


def matching_law(rule, sampling, drafts):
    """Distribution of a cycle under exact matching, the target's choices enumerated."""
    probs = defaultdict(float)
    p = [law_of(drafts[:j], sampling) for j in range(DRAFTS + 1)]
    for choices in itertools.product(range(VOCAB), repeat=DRAFTS + 1):
        mass = 1.0
        for j, token in enumerate(choices):
            mass *= float(p[j][token])
        if mass == 0:
            continue
        verdict = rule(torch.tensor([drafts]), torch.tensor([choices]))
        kept = drafts[: int(verdict.accepted)]
        finish(probs, (*kept, int(verdict.next_token)), mass, sampling)
    return probs


@pytest.mark.parametrize("sampling", WARPERS, ids=str)
def test_speculative_sampling_has_the_targets_distribution(sampling):
    q = draft_log_probs(sampling)
    probs = speculative_law(accept_speculatively, sampling, q)
    assert distance(probs, autoregressive_law(sampling, DRAFTS + 1)) < 1e-12


@pytest.mark.parametrize("sampling", WARPERS, ids=str)
def test_speculative_sampling_with_argmax_drafts(sampling):
    best = draft_log_probs(sampling).argmax(dim=-1)
    one_hot = F.one_hot(best, VOCAB).double().log()
    probs = speculative_law(accept_speculatively, sampling, one_hot, one_hot=True)
    assert distance(probs, autoregressive_law(sampling, DRAFTS + 1)) < 1e-12


def test_a_drafter_with_other_warpers_changes_nothing():
    sampling = Sampling(0.9, top_k=2)
    q = draft_log_probs(Sampling(0.3))
    probs = speculative_law(accept_speculatively, sampling, q)
    assert distance(probs, autoregressive_law(sampling, DRAFTS + 1)) < 1e-12


@pytest.mark.parametrize("sampling", WARPERS, ids=str)
def test_matching_has_the_targets_distribution(sampling):
    for drafts in itertools.product(range(VOCAB), repeat=DRAFTS):
        probs = matching_law(accept_matching, sampling, drafts)
        assert distance(probs, autoregressive_law(sampling, DRAFTS + 1)) < 1e-12


# --- rules broken on purpose -------------------------------------------------------


def _residual_is_p(*args):
    """Replacement drawn from p instead of the excess over q."""
    verdict = accept_speculatively(*args)
    row = int(verdict.accepted)
    return acceptance.Verdict(
        verdict.accepted,
        verdict.next_token,
        verdict.target_tokens,
        args[2].exp()[:, row],
    )


def _residual_keeps_rejected(drafts, q, p, coins, noise):
    """One-hot drafts, but the rejected token stays among the replacements."""
    verdict = accept_speculatively(drafts, q, p, coins, noise)
    row = int(verdict.accepted)
    probs = verdict.next_probs.clone()
    if row < DRAFTS:
        probs[0, drafts[0, row]] = p[0, row, drafts[0, row]].exp()
        probs /= probs.sum()
    return acceptance.Verdict(
        verdict.accepted, verdict.next_token, verdict.target_tokens, probs
    )


def _coin_is_reversed(drafts, q, p, coins, noise):
    return accept_speculatively(drafts, q, p, 1 - coins, noise)


def _ignores_q(drafts, q, p, coins, noise):
    """Accepts with p(x) although x was drawn from q; excess as usual."""
    ones = torch.zeros_like(q)
    kept = accept_speculatively(drafts, ones, p, coins, noise).accepted
    row = int(kept)
    p_row = p.exp()[0, row]
    excess = (p_row - q.exp()[0, row]).clamp(min=0) if row < DRAFTS else p_row
    excess = excess if excess.sum() > 0 else p_row
    probs = (excess / excess.sum())[None]
    return acceptance.Verdict(kept, kept, kept[:, None], probs)


def _q_off_by_one(drafts, q, p, coins, noise):
    return accept_speculatively(drafts, q.roll(1, dims=1), p, coins, noise)


def _p_off_by_one(drafts, q, p, coins, noise):
    return accept_speculatively(drafts, q, p.roll(1, dims=1), coins, noise)


def _bonus_from_the_row_before(drafts, q, p, coins, noise):
    verdict = accept_speculatively(drafts, q, p, coins, noise)
    row = max(0, int(verdict.accepted) - 1)
    return acceptance.Verdict(
        verdict.accepted, verdict.next_token, verdict.target_tokens, p.exp()[:, row]
    )


def _excess_also_after_all_accepted(drafts, q, p, coins, noise):
    """Subtracts the last q from the bonus row."""
    verdict = accept_speculatively(drafts, q, p, coins, noise)
    if int(verdict.accepted) < DRAFTS:
        return verdict
    excess = (p.exp()[:, -1] - q.exp()[:, -1]).clamp(min=0)
    return acceptance.Verdict(
        verdict.accepted,
        verdict.next_token,
        verdict.target_tokens,
        excess / excess.sum(),
    )


@pytest.mark.parametrize(
    "mutant",
    [
        _residual_is_p,
        _coin_is_reversed,
        _ignores_q,
        _q_off_by_one,
        _p_off_by_one,
        _bonus_from_the_row_before,
        _excess_also_after_all_accepted,
    ],
)
def test_broken_speculative_rules_are_seen(mutant):
    sampling = Sampling(1.0)
    probs = speculative_law(mutant, sampling, draft_log_probs(sampling))
    assert distance(probs, autoregressive_law(sampling, DRAFTS + 1)) > 1e-3


def test_broken_one_hot_residual_is_seen():
    sampling = Sampling(1.0)
    best = draft_log_probs(sampling).argmax(dim=-1)
    one_hot = F.one_hot(best, VOCAB).double().log()
    probs = speculative_law(_residual_keeps_rejected, sampling, one_hot)
    assert distance(probs, autoregressive_law(sampling, DRAFTS + 1)) > 1e-3


def test_drafts_drawn_from_another_distribution_than_the_one_tested_are_seen():
    sampling = Sampling(1.0)
    q = draft_log_probs(sampling)
    argmax = F.one_hot(q.argmax(dim=-1), VOCAB).double().log()
    unfiltered = draft_log_probs(Sampling(0.4))
    for draws in (argmax, unfiltered):
        probs = speculative_law(accept_speculatively, sampling, q, draws=draws)
        assert distance(probs, autoregressive_law(sampling, DRAFTS + 1)) > 1e-3


def _counts_any_match(drafts, choices):
    accepted = (drafts == choices[:, :-1]).sum(dim=1)
    return acceptance.Verdict(
        accepted, choices.gather(1, accepted[:, None])[:, 0], choices
    )


def _one_too_many(drafts, choices):
    accepted = (accept_matching(drafts, choices).accepted + 1).clamp(max=DRAFTS)
    return acceptance.Verdict(
        accepted, choices.gather(1, accepted[:, None])[:, 0], choices
    )


def _bonus_is_the_last_pick(drafts, choices):
    return acceptance.Verdict(
        accept_matching(drafts, choices).accepted, choices[:, -1], choices
    )


def _compares_with_the_next_pick(drafts, choices):
    accepted = leading_true(drafts == choices[:, 1:])
    return acceptance.Verdict(
        accepted, choices.gather(1, accepted[:, None])[:, 0], choices
    )


@pytest.mark.parametrize(
    "mutant",
    [
        _counts_any_match,
        _one_too_many,
        _bonus_is_the_last_pick,
        _compares_with_the_next_pick,
    ],
)
def test_broken_matching_rules_are_seen(mutant):
    sampling = Sampling(1.0)
    worst = max(
        distance(
            matching_law(mutant, sampling, drafts),
            autoregressive_law(sampling, DRAFTS + 1),
        )
        for drafts in itertools.product(range(VOCAB), repeat=DRAFTS)
    )
    assert worst > 1e-3


# --- plain twins and shapes --------------------------------------------------------


def test_matching_equals_its_plain_twin_with_padding():
    noise = torch.Generator().manual_seed(0)
    drafts = torch.randint(3, (200, 4), generator=noise)
    choices = torch.randint(3, (200, 5), generator=noise)
    counts = torch.randint(5, (200,), generator=noise)
    verdict = accept_matching(drafts, choices, counts)
    for row in range(200):
        count = int(counts[row])
        expected = accept(drafts[row, :count].tolist(), choices[row].tolist())
        assert (int(verdict.accepted[row]), int(verdict.next_token[row])) == expected


def test_speculative_rule_judges_each_row_of_a_batch_alone():
    sampling = Sampling(1.0)
    noise = torch.Generator().manual_seed(1)
    p = torch.randn(6, DRAFTS + 1, VOCAB, generator=noise).double().log_softmax(-1)
    q = draft_log_probs(sampling).expand(6, -1, -1)
    drafts = torch.randint(VOCAB, (6, DRAFTS), generator=noise)
    coins = torch.rand(6, DRAFTS, generator=noise).double()
    gumbel = torch.randn(6, VOCAB, generator=noise).double()
    counts = torch.tensor([0, 1, 2, 2, 1, 2])
    together = accept_speculatively(drafts, q, p, coins, gumbel, counts)
    for b in range(6):
        n = int(counts[b])
        alone = accept_speculatively(
            drafts[b : b + 1, :n],
            q[b : b + 1, :n],
            p[b : b + 1, : n + 1],
            coins[b : b + 1, :n],
            gumbel[b : b + 1],
        )
        assert int(alone.accepted) == int(together.accepted[b])
        assert int(alone.next_token) == int(together.next_token[b])
        torch.testing.assert_close(alone.next_probs[0], together.next_probs[b])


def test_no_excess_falls_back_to_p():
    p = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]], dtype=torch.float64)
    coins = torch.ones(1, 1, dtype=torch.float64)  # only rounding can bring this about
    verdict = accept_speculatively(
        torch.tensor([[1]]), p[:, :1].log(), p.log(), coins, torch.zeros(1, 2)
    )
    assert int(verdict.accepted) == 0
    torch.testing.assert_close(verdict.next_probs[0], p[0, 0])

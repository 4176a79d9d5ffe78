"""Checks accept what is right, refuse three wrong answers each, and say where."""

from __future__ import annotations

import math

import pytest

from dflash_lab.clinic.patients import PATIENTS
from dflash_lab.course.checks import (
    ablations,
    acceptance,
    blocks,
    clinic,
    conditioning,
    noise,
    own_drafter,
    real_pair,
    speedup,
    training,
    verify,
)
from dflash_lab.course.checks.core import CheckFailed

HALF = math.pi / 2


def z(*lists):
    return zip(*lists, strict=True)


def blank(*_):
    raise NotImplementedError("about 2 lines")


def passes(tokens, size, steps):
    return tokens // size * min(steps, size) + tokens // size - 1


def leading(a, b):
    return next((i for i, (x, y) in enumerate(z(a, b)) if x != y), len(a))


def count(drafts, target_tokens):
    return next(
        (i for i, (d, t) in enumerate(z(drafts, target_tokens[:-1])) if d != t),
        len(drafts),
    )


def look(text, n, limit, ends):
    for end in ends:
        if text[end - n : end] == text[-n:]:
            return text[end : end + limit]
    return []


def dot(a, b):
    return sum(x * y for x, y in z(a, b))


def rms(row):
    return math.sqrt(dot(row, row) / len(row))


def soft(scores):
    return normed([math.exp(score) for score in scores])


def fault(letter):
    return PATIENTS[letter].removeprefix("fault-").replace("-", "_")


def gap(a, b):
    return max(abs(x - y) for x, y in z(a, b))


def tie(mine, plain, logits, epsilon):
    place = next(i for i, (a, b) in enumerate(z(mine, plain)) if a != b)
    a, b = logits[place][mine[place]], logits[place][plain[place]]
    return abs(a - b) <= epsilon * max(abs(a), abs(b))


def largest_tie(mine, plain, logits, epsilon):
    place = next(i for i, (a, b) in enumerate(z(mine, plain)) if a != b)
    gap = logits[place][mine[place]] - logits[place][plain[place]]
    return abs(gap) <= epsilon * max(map(abs, logits[place]))


def speed(runs, method, dtype):
    mine = [run for run in runs if run[:2] == (method, dtype)]
    return sum(run[2] for run in mine) / sum(run[3] for run in mine)


def pairs(texts, step):
    table = {}
    for text in texts:
        for a, b in zip(text, text[step:], strict=False):
            row = table.setdefault(a, {})
            row[b] = row.get(b, 0) + 1
    return table


def walk(table, last, limit, choose):
    found = []
    while len(found) < limit and table.get(last):
        last = choose(table[last], key=lambda t: (-table[last][t], t))
        found.append(last)
    return found


def first_favourites(table, last, limit):
    found = []
    while len(found) < limit and table.get(last):
        last = max(table[last], key=table[last].get)  # of equals the one met first
        found.append(last)
    return found


def markov(scores, table, last, weight, listen):
    found = []
    for row in scores:
        sums = [s + weight * table[last][v] for v, s in enumerate(row)]
        found.append(sums.index(max(sums)))
        last = found[-1] if listen else last
    return found


def normed(shares):
    return [share / sum(shares) for share in shares]


def kept(block):
    return [*block, False].index(False)


def given(table, slot, least):
    reached = [b for b in table if kept(b) >= least]
    return sum(b[slot] for b in reached) / len(reached)


# check -> (right answer, wrong answers)
ANSWERS = {
    noise.check_mask_words: (
        lambda ids, a, us, m: [t if u < a else m for t, u in z(ids, us)],
        (
            lambda ids, a, us, m: [m if u < a else t for t, u in z(ids, us)],
            lambda ids, a, us, m: [m] * len(ids),
            lambda ids, a, us, m: [t for t, u in z(ids, us) if u < a],
        ),
    ),
    noise.check_weight: (
        lambda t: HALF * math.sin(HALF * t) / (1 - math.cos(HALF * t)),
        (
            lambda t: -HALF * math.sin(HALF * t) / (1 - math.cos(HALF * t)),
            lambda t: math.sin(HALF * t) / (1 - math.cos(HALF * t)),
            lambda t: 1 / t,
        ),
    ),
    noise.check_text_loss: (
        lambda nats, masked, w: sum(w * n * m for n, m in z(nats, masked)) / len(nats),
        (
            lambda nats, masked, w: sum(w * n for n in nats) / len(nats),
            lambda nats, masked, w: (
                sum(w * n * m for n, m in z(nats, masked)) / max(1, sum(masked))
            ),
            lambda nats, masked, w: sum(n * m for n, m in z(nats, masked)) / len(nats),
        ),
    ),
    noise.check_reverse_step: (
        lambda ids, new, us, s, t, m: [
            b if a == m and u < (s - t) / (1 - t) else a for a, b, u in z(ids, new, us)
        ],
        (
            lambda ids, new, us, s, t, m: [
                b if a == m and u < s - t else a for a, b, u in z(ids, new, us)
            ],
            lambda ids, new, us, s, t, m: [
                b if u < (s - t) / (1 - t) else a for a, b, u in z(ids, new, us)
            ],
            lambda ids, new, us, s, t, m: [b if a == m else a for a, b in z(ids, new)],
        ),
    ),
    noise.check_surest: (
        lambda c, h, n: sorted((i for i in range(len(c)) if h[i]), key=lambda i: -c[i])[
            :n
        ],
        (
            lambda c, h, n: sorted(range(len(c)), key=lambda i: -c[i])[:n],
            lambda c, h, n: sorted(
                (i for i in range(len(c)) if h[i]), key=lambda i: c[i]
            )[:n],
            lambda c, h, n: [i for i in range(len(c)) if h[i]][:n],
        ),
    ),
    blocks.check_block_of: (
        lambda i, k: i // k,
        (lambda i, k: i % k, lambda i, k: i // k + 1, lambda i, k: i / k),
    ),
    blocks.check_clean_sees: (
        lambda r, c, k: c // k <= r // k,
        (
            lambda r, c, k: c <= r,
            lambda r, c, k: c // k < r // k,
            lambda r, c, k: c // k == r // k,
        ),
    ),
    blocks.check_noisy_sees_clean: (
        lambda r, c, k: c // k < r // k,
        (
            lambda r, c, k: c < r,
            lambda r, c, k: c // k <= r // k,
            lambda r, c, k: c // k != r // k,
        ),
    ),
    blocks.check_noisy_sees_noisy: (
        lambda r, c, k: c // k == r // k,
        (
            lambda r, c, k: c == r,
            lambda r, c, k: c // k <= r // k,
            lambda r, c, k: c <= r and c // k == r // k,
        ),
    ),
    blocks.check_passes: (
        passes,
        (
            lambda n, k, s: passes(n, k, s) + 1,
            lambda n, k, s: n // k * s + n // k - 1,
            lambda n, k, s: n // k * min(s, k),
        ),
    ),
    blocks.check_leading: (
        leading,
        (
            lambda a, b: sum(x == y for x, y in z(a, b)),
            lambda a, b: leading(a, b) + 1,
            lambda a, b: min(leading(a, b), len(a) - 1),
        ),
    ),
    verify.check_accepted: (
        count,
        (
            lambda d, t: sum(a == b for a, b in zip(d, t, strict=False)),
            lambda d, t: count(d, t) + 1,
            lambda d, t: len(d),
        ),
    ),
    verify.check_emitted: (
        lambda d, t: t[: count(d, t) + 1],
        (
            lambda d, t: d[: count(d, t)],
            lambda d, t: t[: count(d, t)],
            lambda d, t: t,
        ),
    ),
    verify.check_lookup: (
        lambda text, n, c: look(text, n, c, range(len(text) - 1, n - 1, -1)),
        (
            lambda text, n, c: look(text, n, c, range(n, len(text))),
            lambda text, n, c: look(text, n, c, range(len(text), n - 1, -1)),
            lambda text, n, c: look(text, n, 99, range(len(text) - 1, n - 1, -1)),
        ),
    ),
    verify.check_keep_chance: (
        lambda p, q: sum(map(min, p, q)),
        (
            lambda p, q: sum(a * b for a, b in z(p, q)),
            lambda p, q: sum(min(1, a / b) for a, b in z(p, q)) / len(p),
            lambda p, q: 1 - sum(map(min, p, q)),
        ),
    ),
    verify.check_excess: (
        lambda p, q: normed([max(a - b, 0) for a, b in z(p, q)]),
        (
            lambda p, q: [max(a - b, 0) for a, b in z(p, q)],
            lambda p, q: normed([max(b - a, 0) for a, b in z(p, q)]),
            lambda p, q: p,
        ),
    ),
    acceptance.check_tau: (
        lambda bs: sum(kept(b) + 1 for b in bs) / len(bs),
        (
            lambda bs: sum(map(kept, bs)) / len(bs),
            lambda bs: sum(sum(b) + 1 for b in bs) / len(bs),
            lambda bs: 1 + kept(bs[0]),
        ),
    ),
    acceptance.check_marginal: (
        lambda bs: [sum(b[k] for b in bs) / len(bs) for k in range(len(bs[0]))],
        (
            lambda bs: [
                sum(kept(b) > k for b in bs) / len(bs) for k in range(len(bs[0]))
            ],
            lambda bs: [sum(b[k] for b in bs) for k in range(len(bs[0]))],
            lambda bs: [sum(b) / len(b) for b in bs],
        ),
    ),
    acceptance.check_survival: (
        lambda bs: [sum(kept(b) > k for b in bs) / len(bs) for k in range(len(bs[0]))],
        (
            lambda bs: [sum(b[k] for b in bs) / len(bs) for k in range(len(bs[0]))],
            lambda bs: [
                sum(kept(b) >= k for b in bs) / len(bs) for k in range(len(bs[0]))
            ],
            lambda bs: [
                sum(kept(b) == k for b in bs) / len(bs) for k in range(len(bs[0]))
            ],
        ),
    ),
    acceptance.check_conditional: (
        lambda bs: [given(bs, k, k) for k in range(len(bs[0]))],
        (
            lambda bs: [given(bs, k, 0) for k in range(len(bs[0]))],
            lambda bs: [given(bs, k, max(0, k - 1)) for k in range(len(bs[0]))],
            lambda bs: [
                sum(kept(b) > k for b in bs) / len(bs) for k in range(len(bs[0]))
            ],
        ),
    ),
    acceptance.check_independent: (
        lambda rs: 1 + sum(math.prod(rs[: i + 1]) for i in range(len(rs))),
        (
            lambda rs: 1 + sum(rs),
            lambda rs: sum(math.prod(rs[: i + 1]) for i in range(len(rs))),
            lambda rs: 1 + math.prod(rs),
        ),
    ),
    speedup.check_speedup: (
        lambda d, v, o, p, tau: p * tau / (d + v + o),
        (
            lambda d, v, o, p, tau: (d + v + o) / p / tau,
            lambda d, v, o, p, tau: p * tau / (d + v),
            lambda d, v, o, p, tau: tau,
        ),
    ),
    speedup.check_break_even: (
        lambda d, v, o, p: (d + v + o) / p,
        (
            lambda d, v, o, p: p / (d + v + o),
            lambda d, v, o, p: (d + v) / p,
            lambda d, v, o, p: 1 + (d + o) / p,
        ),
    ),
    speedup.check_smaller_block: (
        lambda s, k: 1 + sum(s[: k - 1]),
        (
            lambda s, k: 1 + sum(s[:k]),
            lambda s, k: sum(s[: k - 1]),
            lambda s, k: 1 + sum(s),
        ),
    ),
    speedup.check_best: (
        lambda ms, taus: min(ms, key=lambda k: ms[k] / taus[k]),
        (
            lambda ms, taus: max(taus, key=taus.get),
            lambda ms, taus: min(ms, key=ms.get),
            lambda ms, taus: max(ms, key=lambda k: ms[k] / taus[k]),
        ),
    ),
    training.check_may_be_anchor: (
        lambda a: [x and y for x, y in z(a, [*a[1:], False])],
        (
            lambda a: a,
            lambda a: [x and y for x, y in z(a, [False, *a[:-1]])],
            lambda a: [x and y for x, y in z(a, [*a[1:], True])],
        ),
    ),
    training.check_block: (
        lambda ids, a, k, m: [ids[a]] + [m] * (k - 1),
        (
            lambda ids, a, k, m: [m] * k,
            lambda ids, a, k, m: [ids[a]] + [m] * k,
            lambda ids, a, k, m: ids[a : a + k],
        ),
    ),
    training.check_labels: (
        lambda ids, a, k: (ids[a + 1 : a + k] + [None] * k)[: k - 1],
        (
            lambda ids, a, k: (ids[a : a + k - 1] + [None] * k)[: k - 1],
            lambda ids, a, k: (ids[a + 2 : a + k + 1] + [None] * k)[: k - 1],
            lambda ids, a, k: ids[a + 1 : a + k + 9],
        ),
    ),
    training.check_sees_context: (
        lambda a, n: [i < a for i in range(n)],
        (
            lambda a, n: [i <= a for i in range(n)],
            lambda a, n: [True] * n,
            lambda a, n: [i < a - 1 for i in range(n)],
        ),
    ),
    training.check_slot_weights: (
        lambda k, g: [math.exp(-i / g) for i in range(k - 1)],
        (
            lambda k, g: [math.exp(-i / g) for i in range(1, k)],
            lambda k, g: [math.exp(-i * g) for i in range(k - 1)],
            lambda k, g: [1.0] * (k - 1),
        ),
    ),
    conditioning.check_layer_ids: (
        lambda layers, n: [round(1 + i * (layers - 4) / (n - 1)) for i in range(n)],
        (
            lambda layers, n: [round(i * (layers - 1) / (n - 1)) for i in range(n)],
            lambda layers, n: [1 + i * (layers - 4) // n for i in range(n)],
            lambda layers, n: [round(2 + i * (layers - 4) / (n - 1)) for i in range(n)],
        ),
    ),
    conditioning.check_features: (
        lambda hs, ids, p: [x for i in ids for x in hs[i + 1][p]],
        (
            lambda hs, ids, p: [x for i in ids for x in hs[i][p]],
            lambda hs, ids, p: (
                [x for d in (0, 1) for x in [hs[i + 1][p][d] for i in ids]] + [0.0]
            ),
            lambda hs, ids, p: [hs[i + 1][p] for i in ids],
        ),
    ),
    conditioning.check_context_row: (
        lambda f, fc: [dot(w, f) / rms([dot(v, f) for v in fc]) for w in fc],
        (
            lambda f, fc: [dot(w, f) for w in fc],
            lambda f, fc: [dot(w, f) / rms(f) for w in fc],
            lambda f, fc: f,
        ),
    ),
    conditioning.check_attention_weights: (
        lambda q, c, b: soft([dot(q, k) / math.sqrt(len(q)) for k in [*c, *b]]),
        (
            lambda q, c, b: soft([dot(q, k) for k in [*c, *b]]),
            lambda q, c, b: soft([dot(q, k) / math.sqrt(len(q)) for k in [*b, *c]]),
            lambda q, c, b: (
                soft([dot(q, k) / math.sqrt(len(q)) for k in c])
                + soft([dot(q, k) / math.sqrt(len(q)) for k in b])
            ),
        ),
    ),
    conditioning.check_new_context: (
        lambda a, n: list(range(a, a + n + 1)),
        (
            lambda a, n: list(range(a + 1, a + n + 1)),
            lambda a, n: list(range(a, a + n + 2)),
            lambda a, n: list(range(a + 1, a + n + 2)),
        ),
    ),
    conditioning.check_rows_per_token: (
        lambda k, tau, steps: k * steps / tau,
        (
            lambda k, tau, steps: k / tau,
            lambda k, tau, steps: k * steps * tau,
            lambda k, tau, steps: steps / tau,
        ),
    ),
    clinic.check_shifted: (
        lambda ds, t, a, s: sum(
            d in t[a + k + s : a + k + s + 1] for k, d in enumerate(ds, 1)
        ),
        (
            lambda ds, t, a, s: sum(
                d in t[a + k : a + k + 1] for k, d in enumerate(ds, 1)
            ),
            lambda ds, t, a, s: sum(
                d in t[a + k + s : a + k + s + 1] for k, d in enumerate(ds)
            ),
            lambda ds, t, a, s: sum(d in t for d in ds),
        ),
    ),
    clinic.check_first_leak: (
        lambda sees, a: next((i for i in range(a, len(sees)) if sees[i]), None),
        (
            lambda sees, a: next((i for i in range(len(sees)) if sees[i]), None),
            lambda sees, a: next((i for i in range(a + 1, len(sees)) if sees[i]), None),
            lambda sees, a: next((i for i in range(a, len(sees)) if not sees[i]), None),
        ),
    ),
    clinic.check_first_difference: (
        lambda t, d, tol: next(
            (i for i, (x, y) in enumerate(z(t, d)) if gap(x, y) > tol), None
        ),
        (
            lambda t, d, tol: next(
                (i for i, (x, y) in enumerate(z(t, d)) if x != y), None
            ),
            lambda t, d, tol: max(range(len(t)), key=lambda i: gap(t[i], d[i])),
            lambda t, d, tol: next(
                (i for i, (x, y) in enumerate(z(t, d)) if x[0] - y[0] > tol), None
            ),
        ),
    ),
    clinic.check_suspect: (
        lambda s, u, m: max(u, key=u.get) if max(u.values()) > s + m else None,
        (
            lambda s, u, m: max(u, key=u.get),
            lambda s, u, m: min(u, key=u.get) if max(u.values()) > s + m else None,
            lambda s, u, m: next((r for r, x in u.items() if x > s), None),
        ),
    ),
    clinic.check_diagnose: (
        fault,
        (
            lambda letter: fault("A"),
            lambda letter: fault(chr(ord("A") + ord("H") - ord(letter))),
            lambda letter: PATIENTS[letter],
        ),
    ),
    ablations.check_changes: (
        lambda a, b: [name for name in a if a[name] != b[name]],
        (
            lambda a, b: [name for name in a if a[name] == b[name]],
            lambda a, b: [a[name] for name in a if a[name] != b[name]],
            lambda a, b: [n for n in a if a[n] and b[n] and a[n] != b[n]],
        ),
    ),
    ablations.check_tau_difference: (
        lambda a, c, ba, bc: sum(a) / sum(c) - sum(ba) / sum(bc),
        (
            lambda a, c, ba, bc: sum(ba) / sum(bc) - sum(a) / sum(c),
            lambda a, c, ba, bc: (
                sum(x / y for x, y in z(a, c)) / len(a)
                - sum(x / y for x, y in z(ba, bc)) / len(ba)
            ),
            lambda a, c, ba, bc: sum(a) / sum(c) / (sum(ba) / sum(bc)),
        ),
    ),
    ablations.check_resampled: (
        lambda a, c, picks: sum(a[i] for i in picks) / sum(c[i] for i in picks),
        (
            lambda a, c, picks: sum(a) / sum(c),
            lambda a, c, picks: sum(a[i] / c[i] for i in picks) / len(picks),
            lambda a, c, picks: (
                sum(a[i] for i in set(picks)) / sum(c[i] for i in set(picks))
            ),
        ),
    ),
    ablations.check_verdict: (
        lambda lo, hi, n: "better" if lo > n else "worse" if hi < -n else "not told",
        (
            lambda lo, hi, n: "better" if lo > 0 else "worse" if hi < 0 else "not told",
            lambda lo, hi, n: "better" if lo + hi > 0 else "worse",
            lambda lo, hi, n: "worse" if lo > n else "better",
            lambda lo, hi, n: (
                "better" if lo > n else "worse" if lo < -n else "not told"
            ),
        ),
    ),
    real_pair.check_differs_at_tie: (
        lambda a, b, ls, e: tie(a, b, ls, 2 * e),
        (
            lambda a, b, ls, e: tie(a, b, ls, 0.0),
            lambda a, b, ls, e: tie(a, b, ls, 16 * e),
            lambda a, b, ls, e: largest_tie(a, b, ls, 2 * e),
            lambda a, b, ls, e: tie(a[::-1], b[::-1], ls[::-1], 2 * e),
        ),
    ),
    real_pair.check_speedup: (
        lambda runs, d: speed(runs, "dflash", d) / speed(runs, "plain", d),
        (
            lambda runs, d: speed(runs, "plain", d) / speed(runs, "dflash", d),
            lambda runs, d: speed(runs, "dflash", d) / speed(runs, "plain", "float32"),
            lambda runs, d: speed(runs, "dflash", d),
        ),
    ),
    real_pair.check_state_indices: (
        lambda n, k: [round(1 + i * (n - 4) / (k - 1)) + 1 for i in range(k)],
        (
            lambda n, k: [round(1 + i * (n - 4) / (k - 1)) for i in range(k)],
            lambda n, k: [round(1 + i * (n - 3) / (k - 1)) + 1 for i in range(k)],
            lambda n, k: [i + 1 for i in range(k)],
        ),
    ),
    real_pair.check_tau_from_counters: (
        lambda a, d, s: 1 + a * s / d,
        (
            lambda a, d, s: a * s / d,
            lambda a, d, s: 1 + a / d,
            lambda a, d, s: 1 + a / s,
        ),
    ),
    real_pair.check_tau_of: (
        lambda rs, bonus: sum(map(sum, rs)) / sum(map(len, rs)) + (not bonus),
        (
            lambda rs, bonus: sum(map(sum, rs)) / sum(map(len, rs)),
            lambda rs, bonus: sum(map(sum, rs)) / sum(map(len, rs)) + 1,
            lambda rs, bonus: sum(sum(r) / len(r) for r in rs) / len(rs) + (not bonus),
        ),
    ),
    own_drafter.check_followers: (
        lambda texts: pairs(texts, 1),
        (
            lambda texts: pairs([t[::-1] for t in texts], 1),
            lambda texts: pairs(texts, 2),
            lambda texts: {a: dict.fromkeys(r, 1) for a, r in pairs(texts, 1).items()},
        ),
    ),
    own_drafter.check_chain: (
        lambda t, last, n: walk(t, last, n, min),
        (
            lambda t, last, n: walk(t, last, n, max),
            lambda t, last, n: first_favourites(t, last, n),
            lambda t, last, n: [last, *walk(t, last, n, min)][:n],
            lambda t, last, n: walk(t, last, 1, min) * n,
        ),
    ),
    own_drafter.check_sure_drafts: (
        lambda c, least: kept([x >= least for x in c]),
        (
            lambda c, least: sum(x >= least for x in c),
            lambda c, least: kept(
                [math.prod(c[: i + 1]) >= least for i in range(len(c))]
            ),
            lambda c, least: kept([x > least for x in c]),
            lambda c, least: kept([x >= least for x in c]) + 1,
        ),
    ),
    own_drafter.check_corrected: (
        lambda s, t, last, w: markov(s, t, last, w, True),
        (
            lambda s, t, last, w: markov(s, t, last, w, False),
            lambda s, t, last, w: markov(s, t, last, 0.0, True),
            lambda s, t, last, w: markov(s, t, last, -w, True),
        ),
    ),
    own_drafter.check_first_wrong: (
        lambda a, b: next((i for i, (x, y) in enumerate(z(a, b)) if x != y), None),
        (
            lambda a, b: next(
                (i for i, (x, y) in enumerate(z(a, b)) if x[0] != y[0]), None
            ),
            lambda a, b: sum(x != y for x, y in z(a, b)),
            lambda a, b: max(
                (i for i, (x, y) in enumerate(z(a, b)) if x != y), default=None
            ),
            lambda a, b: next(
                (i for i, (x, y) in enumerate(z(a, b)) if sorted(x) != sorted(y)), None
            ),
            lambda a, b: next(
                (i for i, (x, y) in enumerate(z(a, b)) if len(x) != len(y)), None
            ),
        ),
    ),
}


@pytest.mark.parametrize("check", ANSWERS, ids=lambda c: c.__name__)
def test_a_check_accepts_the_right_answer_and_refuses_wrong_ones(check, capsys):
    right, wrong = ANSWERS[check]
    check(right)
    assert "✓" in capsys.readouterr().out
    assert len(wrong) >= 3
    for answer in wrong:
        with pytest.raises(CheckFailed, match=r"expected .*, got "):
            check(answer)
    with pytest.raises(CheckFailed, match="still blank"):
        check(blank)
    with pytest.raises(CheckFailed, match="expected"):
        check(lambda *_: None)
    with pytest.raises(CheckFailed, match="raised ZeroDivisionError"):
        check(lambda *_: 1 / 0)


def test_every_check_is_tried():
    for module in (
        noise,
        blocks,
        verify,
        acceptance,
        speedup,
        training,
        conditioning,
        clinic,
        ablations,
        real_pair,
        own_drafter,
    ):
        names = {n for n in vars(module) if n.startswith("check_")}
        assert names == {c.__name__ for c in ANSWERS if c.__module__ == module.__name__}


@pytest.mark.parametrize("check", ANSWERS, ids=lambda c: c.__name__)
def test_what_an_answer_does_to_its_arguments_harms_no_other_case(check):
    def spoiling(*arguments):
        found = right(*arguments)
        for argument in arguments:
            if isinstance(argument, (list, dict)):
                for inner in argument:
                    if isinstance(inner, list):
                        inner.clear()
                argument.clear()
        return found

    right, _ = ANSWERS[check]
    check(spoiling)
    check(right)

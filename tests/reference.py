"""Slow plain twins of everything fast: loops over positions, nothing clever."""

from __future__ import annotations

import math

import torch

from dflash_lab.speculative.proposer import Proposal


def generate_greedily(target, prompt, max_new_tokens, stop_token_ids=()):
    """The target's own `generate`."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=list(stop_token_ids) or None,
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()


def block_mask(anchors, valid, context_length, block_size, causal, window):
    """`anchor_block_mask`, one cell at a time."""
    batch, blocks = len(anchors), len(anchors[0])
    rows, columns = blocks * block_size, context_length + blocks * block_size
    mask = torch.zeros(batch, 1, rows, columns, dtype=torch.bool)
    for b in range(batch):
        for row in range(rows):
            n, i = divmod(row, block_size)
            if not valid[b][n]:
                continue
            for column in range(columns):
                if column < context_length:
                    seen = column < anchors[b][n]
                    if window is not None:
                        seen = seen and anchors[b][n] + i - column < window
                else:
                    m, j = divmod(column - context_length, block_size)
                    seen = m == n and (not causal or j <= i)
                mask[b, 0, row, column] = seen
    return mask


def accept(drafts, choices):
    """How many leading drafts equal the choices, and the pick behind them."""
    count = 0
    while count < len(drafts) and drafts[count] == choices[count]:
        count += 1
    return count, choices[count]


def decayed_loss(logits, labels, mask, gamma):
    """Weighted cross entropy of one batch: lists of blocks of slots 1..K-1."""
    total = weight_sum = 0.0
    for block_logits, block_labels, block_mask_ in zip(
        logits, labels, mask, strict=True
    ):
        for k, (row, label, counts) in enumerate(
            zip(block_logits, block_labels, block_mask_, strict=True)
        ):
            if counts:
                weight = math.exp(-k / gamma)
                normaliser = math.log(sum(math.exp(x) for x in row))
                total += weight * (normaliser - row[label])
                weight_sum += weight
    return total / weight_sum


class ScriptedProposer:
    """Drafts what a function of the text says; taps layers if asked to.

    `script(text, count)` returns up to `count` tokens.
    """

    name = "scripted"

    def __init__(self, script, block_size, target_layer_ids=()):
        self.script, self.block_size = script, block_size
        self.target_layer_ids = tuple(target_layer_ids)
        self.seen = []  # (row, position, feature) of every observed token

    def start(self, target, batch_size, capacity):
        return _ScriptedSession(self)


class _ScriptedSession:
    def __init__(self, proposer):
        self.proposer = proposer

    def observe(self, target_hidden, positions, rows):
        for r, row in enumerate(rows.tolist()):
            for s, position in enumerate(positions[r].tolist()):
                feature = None if target_hidden is None else target_hidden[r, s].clone()
                self.proposer.seen.append((row, position, feature))

    def propose(self, texts, num_drafts, sampling, seeds, details):
        drafts = [self.proposer.script(list(t), num_drafts)[:num_drafts] for t in texts]
        counts = torch.tensor([len(d) for d in drafts])
        tokens = torch.zeros(len(texts), int(counts.max()), dtype=torch.long)
        for row, draft in enumerate(drafts):
            tokens[row, : len(draft)] = torch.tensor(draft, dtype=torch.long)
        return Proposal(tokens, counts)

    def keep_rows(self, rows):
        pass


def dpace_weights_plainly(losses, mask, alpha=0.5):
    """Weights of D-PACE, slot by slot."""
    result = []
    for row, counts in zip(losses, mask, strict=True):
        weights = []
        for j in range(len(row)):
            total = 0.0
            for m in range(j, len(row)):
                reach = 1.0
                for i in range(m + 1):
                    smooth = (1 - alpha) * math.exp(-row[i]) + alpha
                    reach *= smooth if counts[i] else 0.0
                total += reach
            weights.append(total if counts[j] else 0.0)
        result.append(weights)
    return result


def slot_rates(cycles, slot):
    """Marginal, conditional and survival rate of one slot, cycle by cycle."""
    marginal, conditional, survival = [], [], []
    for cycle in cycles:
        if len(cycle.draft_tokens) < slot:
            continue
        survival.append(cycle.accepted[slot - 1])
        kept = 0
        while kept < len(cycle.accepted) and cycle.accepted[kept]:
            kept += 1
        ended_inside = kept > 0 and cycle.acceptance_length == kept
        if ended_inside and slot > kept:
            continue
        marginal.append(cycle.draft_tokens[slot - 1] == cycle.target_tokens[slot - 1])
        if kept >= slot - 1:
            conditional.append(cycle.accepted[slot - 1])
    rates = {"marginal": marginal, "conditional": conditional, "survival": survival}
    return {
        name: sum(flags) / len(flags) if flags else math.nan
        for name, flags in rates.items()
    }


def acceptance_numbers(traces):
    """The one-number definitions, by loops."""
    lengths, accepted, drafted, means = [], 0, 0, []
    for trace in traces:
        for prompt in range(trace.header["num_prompts"]):
            own = [c.acceptance_length for c in trace.cycles if c.prompt == prompt]
            lengths += own
            if own:
                means.append(sum(own) / len(own))
        for cycle in trace.cycles:
            accepted += sum(cycle.accepted)
            drafted += len(cycle.draft_tokens)
    cycles = len(lengths)
    return {
        "tau": sum(lengths) / cycles if cycles else math.nan,
        "tau_without_bonus": accepted / cycles if cycles else math.nan,
        "tau_per_prompt": sum(means) / len(means) if means else math.nan,
        "draft_acceptance_rate": accepted / drafted if drafted else math.nan,
        "cycles": cycles,
        "tokens": sum(lengths),
    }


def block_diffusion_mask(length, block_size):
    """Who sees whom in a pass over noisy and clean text, one cell at a time."""
    rows = []
    for row in range(2 * length):
        cells = []
        for column in range(2 * length):
            mine, theirs = (x % length // block_size for x in (row, column))
            noisy_row, noisy_column = row < length, column < length
            if noisy_row and noisy_column:
                seen = mine == theirs
            elif noisy_row:
                seen = theirs < mine
            elif noisy_column:
                seen = False
            else:
                seen = theirs <= mine
            cells.append(seen)
        rows.append(cells)
    return rows


def posterior_by_counting(process, early, late, x0, xt, xs):
    """q(x_s | x_t, x_0) as a share of two-step walks, written out."""

    def chance(start, end, kept):
        noise = (
            1 / process.size
            if process.kind == "uniform"
            else float(end == process.mask_token_id)
        )
        return kept * (start == end) + (1 - kept) * noise

    walks = [
        chance(x0, middle, early) * chance(middle, xt, late / early)
        for middle in range(process.size)
    ]
    return walks[xs] / sum(walks) if sum(walks) > 0 else 0.0


def orders_distribution(denoiser, size, length, mask_token_id):
    """Chances of texts written one token a pass, at a place drawn among those left."""
    chances = torch.zeros(size**length, dtype=torch.float64)

    def write(ids, chance):
        open_places = [i for i, token in enumerate(ids) if token == mask_token_id]
        if not open_places:
            row = 0
            for token in ids:
                row = row * size + token
            chances[row] += chance
            return
        probs = denoiser(torch.tensor([ids]))[0]
        for place in open_places:
            for token in range(size):
                share = float(probs[place, token])
                if share > 0:
                    after = [*ids[:place], token, *ids[place + 1 :]]
                    write(after, chance * share / len(open_places))

    write([mask_token_id] * length, 1.0)
    return chances

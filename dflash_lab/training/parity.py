"""Does the drafter decode as it trains? Checks to run before the first step.

A drafter that is right in 98 % of training and accepted in 10 % of decoding has been
trained on another task than the one it is given. Each check compares one convention of
a `Pipeline` with what decoding does, on the run's own texts, and names the suspected
cause and the fix if they differ.

Leaves out: finished drafters whose training cannot be looked into
    (`clinic/diagnosis.py`).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from dflash_lab.conditioning.masks import SplitMask, training_masks
from dflash_lab.speculative.proposer import DFlash
from dflash_lab.target.target import Target
from dflash_lab.training.convention_checks import Check, fault_check
from dflash_lab.training.data.anchors import anchor_candidates
from dflash_lab.training.data.batch import TrainingBatch
from dflash_lab.training.data.dataset import collate
from dflash_lab.training.data.pipeline import Pipeline
from dflash_lab.training.objective import Objective


def check_training(
    objective: Objective,
    pipeline: Pipeline,
    target: Target,
    *,
    fresh: bool = True,
) -> list[Check]:
    """All checks of a run that is about to start.

    Args:
        objective: holds the drafter.
        pipeline: the run's batches.
        target: the run's target.
        fresh: the drafter has just been initialised, so its loss can be predicted.
    """
    last = len(pipeline.examples) - 1
    indices = sorted({0, last // 2, last})
    ids, loss_mask = collate(pipeline.examples, indices)
    batch = pipeline.batch(indices, epoch=0)
    checks = [
        check_labels(batch, ids),
        check_masks(batch, pipeline),
        check_positions(batch),
        check_anchors(pipeline, indices, loss_mask),
        check_features(pipeline, target, indices, ids, batch),
        check_texts(target, pipeline, indices),
        check_mask_token(pipeline, target),
        check_paths(objective, target, batch, pipeline),
        check_independence(objective, batch),
    ]
    if fresh:
        checks.append(check_first_loss(objective, target, batch))
    return checks


def check_labels(batch: TrainingBatch, ids: Tensor) -> Check:
    """Slot convention: slot k is labelled with the token at anchor + k."""
    b, n, k = batch.blocks.label_mask.cpu().nonzero(as_tuple=True)
    position = batch.blocks.anchor_positions.cpu()[b, n] + k
    wrong = int((batch.blocks.labels.cpu()[b, n, k] != ids[b, position]).sum())
    measured = f"{wrong} of {len(k)} labels are not the token at anchor + slot"
    return fault_check("slot convention", measured, "label_shift", wrong == 0)


def check_masks(batch: TrainingBatch, pipeline: Pipeline) -> Check:
    """Every mask is the rule that decoding follows."""
    name, length = "attention mask", batch.target_hidden.shape[1]
    anchors, valid = batch.blocks.anchor_positions, batch.blocks.valid
    patterns, size = pipeline.config.attention_patterns, pipeline.config.block_size
    right = training_masks(patterns, anchors, length, size, valid, pipeline.backend)
    context, block, ahead = 0, 0, False
    rows = anchors.repeat_interleave(size, dim=1)[:, None, :, None]
    behind = torch.arange(length, device=anchors.device) > rows  # (B, 1, N*K, S)
    for kind, mask in batch.masks.items():
        rule = right[kind]
        if isinstance(mask, SplitMask) and isinstance(rule, SplitMask):
            wrong = (mask.context ^ rule.context)[:, None]
            wrong_block = mask.block ^ rule.block
        elif isinstance(mask, Tensor) and isinstance(rule, Tensor):
            both = mask ^ rule
            wrong, wrong_block = both[..., :length], both[..., length:]
        else:
            # A FlexAttention mask is a function; what it does shows in the logits.
            return Check(name, True, "not compared entry by entry, see the logits")
        context, block = context + int(wrong.sum()), block + int(wrong_block.sum())
        ahead |= bool((wrong & behind).any())
    measured = f"{context} context and {block} block entries differ from the rule"
    fault = "context_leak" if ahead else "phantom_anchor"
    fault = "causal_block" if block else fault
    return fault_check(name, measured, fault, not (context or block))


def check_positions(batch: TrainingBatch) -> Check:
    """Context rows and block rows are rotated by their absolute positions."""
    length = batch.target_hidden.shape[1]
    size = batch.blocks.input_ids.shape[-1]
    offset = torch.arange(size, device=batch.position_ids.device)
    right = (batch.blocks.anchor_positions[..., None] + offset).flatten(1)
    context = torch.arange(length, device=right.device).expand(len(right), -1)
    wrong = int((batch.position_ids != torch.cat([context, right], 1)).sum())
    measured = f"{wrong} of {batch.position_ids.numel()} positions differ"
    return fault_check("positions for RoPE", measured, "wrong_rope", wrong == 0)


def check_anchors(pipeline: Pipeline, indices: list[int], loss_mask: Tensor) -> Check:
    """All candidates can be anchors, and each epoch draws anew."""
    candidates = anchor_candidates(loss_mask).sum(1).tolist()
    wanted = [min(pipeline.num_anchors, count) for count in candidates]
    first, second = (pipeline.batch(indices, epoch).blocks for epoch in (0, 1))
    found = first.valid.sum(1).tolist()
    same = torch.equal(first.anchor_positions, second.anchor_positions)
    # Where nearly all candidates are drawn, epochs may well be alike.
    same = same and any(count > pipeline.num_anchors + 3 for count in candidates)
    measured = f"{found} anchors of {wanted} possible"
    measured += ", the same in two epochs" if same else ""
    passed = found == wanted and not same
    return fault_check("random anchors", measured, "fixed_blocks", passed)


@torch.no_grad()
def check_features(
    pipeline: Pipeline,
    target: Target,
    indices: list[int],
    ids: Tensor,
    batch: TrainingBatch,
) -> Check:
    """Training features are the tapped states that decoding will see."""
    worst = 0.0
    with target.tap(pipeline.config.target_layer_ids) as tap:
        for row, i in enumerate(indices):
            length = len(pipeline.examples[i].input_ids)
            positions = torch.arange(length)[None]
            cache = target.new_cache(1, length)
            target.forward(ids[row : row + 1, :length], positions, cache)
            decoded = tap.take()
            assert decoded is not None  # layers are tapped
            worst = max(worst, _gap(batch.target_hidden[row, :length], decoded[0]))
    # Features are stored in bfloat16; another order of sums costs as much again.
    limit = 0.05 if target.dtype == torch.bfloat16 else 0.01
    measured = f"relative difference {worst:.4f} (limit {limit})"
    return fault_check("features", measured, "layer_ids_off_by_one", worst <= limit)


@torch.no_grad()
def check_texts(target: Target, pipeline: Pipeline, indices: list[int]) -> Check:
    """The target could have written the answers: they surprise it as its own would.

    A text sampled from the target has a mean surprise near the mean entropy, a greedy
    one less.
    """
    surprise, entropy, count = 0.0, 0.0, 0
    for i in indices:
        example = pipeline.examples[i]
        ids = torch.tensor([example.input_ids])
        cache = target.new_cache(1, ids.shape[1])
        logits = target.forward(ids, torch.arange(ids.shape[1])[None], cache)
        log_probs = logits[0, example.prompt_length - 1 : -1].float().log_softmax(-1)
        labels = ids[0, example.prompt_length :].to(log_probs.device)
        surprise -= float(log_probs.gather(-1, labels[:, None]).sum())
        entropy -= float((log_probs.exp() * log_probs).sum())
        count += len(labels)
    surprise, entropy = surprise / count, entropy / count
    limit = 1.2 * entropy + 0.3
    measured = (
        f"{surprise:.2f} nats of surprise a token, {entropy:.2f} of entropy "
        f"(limit {limit:.2f})"
    )
    return fault_check(
        "the target's own text", measured, "off_policy_text", surprise <= limit
    )


def check_mask_token(pipeline: Pipeline, target: Target) -> Check:
    """The mask id is a row of the table that no text uses."""
    mask_id = pipeline.config.mask_token_id
    used = sum(mask_id in example.input_ids for example in pipeline.examples)
    share = used / len(pipeline.examples)
    return Check(
        "mask token",
        share < 0.01 and mask_id < target.embedding_table.shape[0],
        f"id {mask_id} occurs in {used} of {len(pipeline.examples)} texts",
        "the mask token is an ordinary token, such as padding or the end of text, so "
        "a masked slot looks like text",
        "set drafter.mask_token_id to an unused row of the embedding table",
    )


@torch.no_grad()
def check_paths(
    objective: Objective, target: Target, batch: TrainingBatch, pipeline: Pipeline
) -> Check:
    """Logits of the training pass equal those of a decoding pass, block by block."""
    trained = objective.eval().hidden(batch)
    drafter = objective.export(dtype=torch.float32).to(target.device)
    blocks, worst = batch.blocks, 0.0
    picked = blocks.valid.nonzero()
    picked = picked[:: max(1, len(picked) // 12)]
    for b, n in picked.tolist():
        anchor = int(blocks.anchor_positions[b, n])
        session = DFlash(drafter).start(target, 1, anchor + pipeline.config.block_size)
        features = batch.target_hidden[b : b + 1, :anchor].float()
        positions = torch.arange(anchor)[None]
        session.observe(features, positions, torch.tensor([0]))
        embedded = session.embed(blocks.input_ids[b : b + 1, n])
        decoded = drafter.draft(embedded, torch.tensor([anchor]), session.cache)[0, 1:]
        worst = max(worst, _gap(trained[b, n], decoded))
    objective.train()
    limit = 2e-3
    return Check(
        "training path = decoding path",
        worst <= limit,
        f"relative difference of hidden states {worst:.1e} (limit {limit:.0e})",
        "mask, positions, feature scale or embedding differ between the two paths",
        "see the checks of mask, positions and features; each path must use the "
        "drafter's own config",
    )


@torch.no_grad()
def check_independence(objective: Objective, batch: TrainingBatch) -> Check:
    """No block reads features at or behind its anchor, or another block."""
    objective.eval()
    before = objective.hidden(batch)
    blocks, length = batch.blocks, batch.target_hidden.shape[1]
    leaks = tested = 0
    for n in range(0, blocks.valid.shape[1], max(1, blocks.valid.shape[1] // 6)):
        anchors = blocks.anchor_positions[:, n : n + 1]
        behind = torch.arange(length, device=anchors.device) >= anchors
        changed = batch.target_hidden + behind[..., None].to(batch.target_hidden.dtype)
        ids = (blocks.input_ids + 1) % objective._frozen[0].shape[0]
        ids[:, n] = blocks.input_ids[:, n]
        other = replace(
            batch, target_hidden=changed, blocks=replace(blocks, input_ids=ids)
        )
        after = objective.hidden(other)
        valid = blocks.valid[:, n]
        gap = (before[:, n] - after[:, n]).flatten(1).norm(dim=1)
        gap = gap / before[:, n].flatten(1).norm(dim=1).clamp(min=1e-9)
        leaks += int((gap[valid] > 1e-4).sum())
        tested += int(valid.sum())
    objective.train()
    return fault_check(
        "no block sees its future or a neighbour",
        f"{leaks} of {tested} blocks changed with what they must not see",
        "context_leak",
        leaks == 0,
    )


@torch.no_grad()
def check_first_loss(
    objective: Objective, target: Target, batch: TrainingBatch
) -> Check:
    """The first loss is a fresh drafter's: nothing leaks, the head is the target's.

    A fresh drafter passes its input on, so slots say what the mask token's own row says
    through the head. That costs ln V if rows are small, more if they are large or the
    head is the table itself; the cost is measured, on the batch's own labels.
    """
    kind, objective.kind = objective.kind, "ce"
    loss = objective(batch)
    objective.kind = kind
    measured = float(loss.loss / loss.weight.clamp(min=1e-9))
    drafter = objective.drafter
    row = target.embedding_table[drafter.config.mask_token_id].float()
    passed_on = drafter.norm(row * drafter.config.input_embedding_scale)
    logits = target.head(passed_on.to(target.dtype)).float()
    log_probs = drafter.scale_logits(logits).log_softmax(-1)
    labels = batch.blocks.labels[batch.blocks.label_mask]
    blind = -float(log_probs[labels].mean())
    uniform = math.log(target.vocab_size)
    low, high = 0.6 * uniform, 1.3 * max(blind, uniform)
    return Check(
        "first loss",
        low <= measured <= high,
        f"{measured:.2f}; masks passed on unchanged cost {blind:.2f}, ln V is "
        f"{uniform:.2f}",
        "below ln V: labels reach the block; far above: the head is not the target's "
        "or the hidden states are not normed",
        "check labels, masks and that the head is the target's own, frozen",
    )


def _gap(trained: Tensor, decoded: Tensor) -> float:
    """Relative difference of two tensors of one shape."""
    trained, decoded = trained.float(), decoded.float()
    return float((trained - decoded).norm() / decoded.norm())

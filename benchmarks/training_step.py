"""One training step of the smol pair: ours against a plain implementation.

    python benchmarks/training_step.py [--anchors 64] [--texts 8] [--steps 3]

Both compute the same loss and gradient of the same batch (checked first). The plain one
is what one writes down first: an additive float mask, all logits of the whole
vocabulary at once, cross entropy by autograd. Each runs in a process of its own, so
that peak memory is its own; times are interleaved over repetitions. Written to
`benchmarks/results/training_step.json`.

Leaves out: features and the optimiser, which are the same for both.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn import functional as F

from dflash_lab.drafter.config import DFlashConfig
from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.files import environment, write_text_atomically
from dflash_lab.pairs.pair import load_pair
from dflash_lab.training.data.dataset import Example
from dflash_lab.training.data.features import OnlineFeatures
from dflash_lab.training.data.pipeline import Pipeline
from dflash_lab.training.objective import HeadRows, Objective
from dflash_lab.training.run.first_drafter import SMOL_MASK_ID

RESULTS = Path(__file__).parent / "results" / "training_step.json"


def make(arguments):
    """Objective and batch of random texts, the same in every process."""
    pair = load_pair("smol", dtype="bfloat16", with_drafter=False, quiet=True)
    config = DFlashConfig.for_target(
        pair.target.config,
        mask_token_id=SMOL_MASK_ID,
        num_hidden_layers=2,
        block_size=8,
        num_features=5,
    )
    drafter = DFlashDraftModel(config)
    drafter.init_weights(torch.Generator().manual_seed(0))
    noise = torch.Generator().manual_seed(1)
    texts = torch.randint(
        17, 49152, (arguments.texts, arguments.tokens), generator=noise
    )
    examples = [Example(row, 40) for row in texts.tolist()]
    pipeline = Pipeline(
        config,
        examples,
        OnlineFeatures(pair.target, config.target_layer_ids),
        batch_size=arguments.texts,
        num_anchors=arguments.anchors,
    )
    (batch,) = pipeline.step(0)
    limit = 16384 if arguments.mode == "cut" else None
    rows = HeadRows(pair.target, examples, limit, 1024)
    return Objective(drafter, pair.target, rows), pair.target, batch


def plain_loss(objective, target, batch):
    """The step as first written down."""
    masks = {
        kind: torch.zeros(mask.shape).masked_fill(~mask, float("-inf")).bfloat16()
        for kind, mask in batch.masks.items()
    }
    # Rows of invalid blocks would see nothing and give NaN: let them see everything.
    for kind, mask in masks.items():
        masks[kind] = mask.masked_fill(mask.isinf().all(-1, keepdim=True), 0.0)
    hidden = objective.hidden(replace(batch, masks=masks))
    logits = F.linear(hidden.bfloat16(), target.head.weight).float()
    labels, counts = batch.blocks.labels[..., 1:], batch.blocks.label_mask[..., 1:]
    losses = F.cross_entropy(
        logits.flatten(0, 2), labels.flatten(), reduction="none"
    ).view(labels.shape)
    weight = counts * objective.decay
    return (losses * weight).sum(), weight.sum()


def measure(arguments) -> None:
    """Run one mode and print its figures as JSON."""
    torch.set_num_threads(arguments.threads)
    objective, target, batch = make(arguments)
    times = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(arguments.steps + 1):
        objective.zero_grad()
        started = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16):
            if arguments.mode == "plain":
                loss, weight = plain_loss(objective, target, batch)
            else:
                loss, weight, _, _ = objective(batch)
        loss.backward()
        times.append(time.perf_counter() - started)
    norm = torch.cat([p.grad.flatten() for p in objective.parameters()]).norm()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {
        "seconds": times[1:],  # the first one warms up
        "loss": float(loss.detach() / weight),
        "gradient_norm": float(norm / weight),
        "peak_mb": peak / 1024,
        "peak_above_start_mb": (peak - before) / 1024,
        "blocks": int(batch.blocks.valid.sum()),
    }
    print(json.dumps(found))


def main() -> None:
    """Parse the command line; measure all modes in turn."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mode", choices=["plain", "ours", "cut"])
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--anchors", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.mode:
        measure(arguments)
        return
    runs: dict[str, list] = {"plain": [], "ours": [], "cut": []}
    for _ in range(arguments.rounds):
        for mode, found in runs.items():
            command = [sys.executable, __file__, "--mode", mode, *sys.argv[1:]]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    summary = {"settings": vars(arguments), "environment": environment()}
    for mode, found in runs.items():
        seconds = min(min(run["seconds"]) for run in found)
        summary[mode] = {
            "seconds": seconds,
            "blocks_per_second": found[0]["blocks"] / seconds,
            "peak_above_start_mb": min(run["peak_above_start_mb"] for run in found),
            "loss": found[0]["loss"],
            "gradient_norm": found[0]["gradient_norm"],
        }
    for mode in ("ours", "cut"):
        summary[mode]["times_faster"] = (
            summary["plain"]["seconds"] / summary[mode]["seconds"]
        )
        summary[mode]["memory_share"] = (
            summary[mode]["peak_above_start_mb"]
            / summary["plain"]["peak_above_start_mb"]
        )
    gap = abs(summary["plain"]["loss"] / summary["ours"]["loss"] - 1)
    assert gap < 0.01, f"the two steps differ in their loss by {gap:.3f}"
    write_text_atomically(RESULTS, json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()

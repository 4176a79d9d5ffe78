"""Why one denoising step: tau and its price against the number of steps per block.

    python benchmarks/denoising_steps.py --work W [--steps 1500] [--limit 6]

Trains two tiny drafters on one corpus for the same number of steps: one as DFlash does,
one with shown slots in half of its blocks (`data.reveal: 0.5`), which is what several
steps need. Both then draft in 1, 2, 4 and 7 steps per block, in turns on every prompt,
and plain decoding with them. Lines go to `benchmarks/results/denoising_steps.jsonl`.

Leaves out: other pairs and seeds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tqdm import tqdm

from dflash_lab.diffusion.drafting import StepwiseDFlash
from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.files import environment
from dflash_lab.measure.intervals import paired_ratio_interval, ratio_interval
from dflash_lab.pairs.pair import load_pair
from dflash_lab.pairs.prompts import load_prompts
from dflash_lab.speculative.generate import speculative_generate
from dflash_lab.speculative.proposer import Plain
from dflash_lab.training.run.config import load_config
from dflash_lab.training.run.train import train

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "denoising_steps.jsonl"
SHARES = {"one-step": 0.0, "shown": 0.5}


def train_both(work: Path, steps: int) -> None:
    """Leave both drafters in the work folder; finished ones are kept."""
    for name, share in SHARES.items():
        if (work / name / "drafter" / "config.json").exists():
            continue
        overrides = [
            f"out={work / name}",
            f"optimizer.steps={steps}",
            f"data.reveal={share}",
            f"data.feature_folder={work / 'features'}",
        ]
        if name != "one-step":
            overrides.append(f"data.corpus=[{work / 'one-step' / 'corpus.jsonl'}]")
        train(load_config(ROOT / "configs" / "tiny.yaml", overrides), resume=True)


def main() -> None:
    """Parse the command line, train what is missing, measure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--limit", type=int, default=6)
    arguments = parser.parse_args()
    train_both(arguments.work, arguments.steps)
    torch.set_num_threads(1)
    pair = load_pair("tiny", with_drafter=False, quiet=True)
    methods = {("plain", 1, ""): Plain()}
    for name in SHARES:
        folder = arguments.work / name / "drafter"
        drafter = DFlashDraftModel.from_pretrained(folder, torch.float32)
        for steps in (1, 2, 4, 7):
            for order in ("left", "confidence") if steps > 1 else ("left",):
                methods[name, steps, order] = StepwiseDFlash(drafter, steps, order)
    prompts = [p for s in pair.prompt_sets for p in load_prompts(s, arguments.limit)]
    found: dict = {key: [] for key in methods}
    for number, prompt in enumerate(tqdm([prompts[0], *prompts], desc="prompts")):
        ids = pair.encode(prompt.turns[0])
        outputs = []
        for key, proposer in methods.items():
            result = speculative_generate(
                pair,
                proposer,
                ids,
                max_new_tokens=128,
                stop_token_ids=pair.stop_token_ids,
                loop="host",
            )
            outputs.append(result.output_ids)
            if number:  # the first prompt warms up
                found[key].append(result)
        assert all(output == outputs[0] for output in outputs)
    plain = found["plain", 1, ""]
    lines = []
    for (name, steps, order), results in found.items():
        cycles = [c for r in results for c in r.trace.cycles]
        added = [sum(r.trace.acceptance_lengths[0]) for r in results]
        tau = ratio_interval(added, [len(r.trace.cycles) for r in results])
        gain = paired_ratio_interval(
            [len(r.output_ids[0]) for r in results],
            [r.seconds for r in results],
            [len(r.output_ids[0]) for r in plain],
            [r.seconds for r in plain],
        )
        lines.append(
            {
                "drafter": name,
                "steps": steps,
                "order": order,
                "prompts": len(results),
                "tau": [tau.value, tau.low, tau.high],
                "draft_ms": sum(c.draft_ms for c in cycles) / len(cycles),
                "verify_ms": sum(c.verify_ms for c in cycles) / len(cycles),
                "speedup": [gain.value, gain.low, gain.high],
                "environment": environment(),
            }
        )
        print({k: v for k, v in lines[-1].items() if k != "environment"})
    RESULTS.write_text("".join(json.dumps(x) + "\n" for x in lines), encoding="utf-8")


if __name__ == "__main__":
    main()

"""The family of tiny drafters that the lessons compare: alike but for one thing each.

    python benchmarks/tiny_family.py --work W [--steps 1200] [--only NAME ...]

All share `configs/tiny.yaml`, one corpus and the same number of blocks. Each member is
left in `data/checkpoints/tiny-family/NAME` with card and metrics, and its held-out tau
goes to `benchmarks/results/tiny_family.jsonl`. Members that have a line are skipped.

Leaves out: repetitions with other seeds, but for one (`again`).
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from dflash_lab.training.data.faults import FAULTS
from dflash_lab.training.run.config import load_config
from dflash_lab.training.run.train import train

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "tiny_family.jsonl"
SHIPPED = ROOT / "data" / "checkpoints" / "tiny-family"

# name -> (what is different, overrides)
MEMBERS = {
    "base": ("1 layer, K=8, features as keys and values", []),
    "again": ("another seed", ["seed=1"]),
    "layers-2": ("2 layers", ["drafter.num_hidden_layers=2"]),
    "layers-3": ("3 layers", ["drafter.num_hidden_layers=3"]),
    "block-4": ("K=4", ["drafter.block_size=4"]),
    "block-16": ("K=16", ["drafter.block_size=16"]),
    "no-features": ("no target features", ["drafter.conditioning=none"]),
    "input-fusion": (
        "3 layers, features at the input only",
        ["drafter.num_hidden_layers=3", "drafter.conditioning=input"],
    ),
    "features-1": ("1 target layer as context", ["drafter.num_features=1"]),
    "features-5": ("5 target layers as context", ["drafter.num_features=5"]),
    "loss-uniform": ("all slots weigh the same", ["objective.gamma=1e9"]),
    "shown-slots": ("some slots shown in half of the blocks", ["data.reveal=0.5"]),
    "loss-kl": ("the target's whole distribution", ["objective.loss=kl"]),
    "loss-dpace": ("D-PACE weights", ["objective.loss=dpace"]),
} | {
    f"fault-{name.replace('_', '-')}": (fault.what, [f"faults=[{name}]"])
    for name, fault in FAULTS.items()
}

# Members whose features (or texts, or what is kept of them) differ from the others'.
OWN_FEATURES = ("layer-ids", "off-policy", "loss-kl", "features-1", "features-5")


def main() -> None:
    """Parse the command line and train the members that are missing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--only", nargs="*")
    arguments = parser.parse_args()
    done = set()
    if RESULTS.exists():
        lines = RESULTS.read_text(encoding="utf-8").splitlines()
        done = {json.loads(line)["name"] for line in lines}
    corpus = arguments.work / "base" / "corpus.jsonl"
    for name in arguments.only or MEMBERS:
        if name in done:
            continue
        what, changes = MEMBERS[name]
        overrides = [
            f"out={arguments.work / name}",
            f"optimizer.steps={arguments.steps}",
        ]
        if name != "base":  # the first member writes the corpus
            overrides.append(f"data.corpus=[{corpus}]")
        if not any(word in name for word in OWN_FEATURES):
            overrides.append(f"data.feature_folder={arguments.work / 'features'}")
        config = load_config(ROOT / "configs" / "tiny.yaml", overrides + changes)
        result = train(config, resume=True)
        folder = SHIPPED / name
        shutil.copytree(result.folder, folder, dirs_exist_ok=True)
        shutil.copy(Path(config.out) / "metrics.jsonl", folder / "metrics.jsonl")
        card = folder / "README.md"
        text = card.read_text(encoding="utf-8")
        place = str(folder.relative_to(ROOT))
        card.write_text(text.replace(str(result.folder), place), encoding="utf-8")
        line = {
            "name": name,
            "what": what,
            "steps": result.facts["steps"],
            "blocks": result.facts["blocks_seen"],
            "parameters": result.facts["parameters"],
            "cpu_hours": result.facts["training_cpu_hours"],
            "held_out_tau": result.facts["held_out_tau"],
        }
        with open(RESULTS, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

"""DFlash, an EAGLE-3-style head and Medusa-style heads: same texts, same training time.

    python benchmarks/eagle_vs_dflash.py --work W --cpu-minutes 3
    python benchmarks/eagle_vs_dflash.py --work W --methods dflash,eagle,medusa

All have the tiny target's width and K = 8; DFlash and EAGLE have one layer and features
tapped their own way (five layers, three layers), Medusa reads the last hidden state.
Each gets the same processor time on one corpus that the target wrote. Then all decode
the held-out prompts in turns beside plain decoding; tau, draft time and speed-up are
compared with paired intervals. The line goes to
`benchmarks/results/eagle_vs_dflash.jsonl`.

Leaves out: trees of drafts, and other seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from dataclasses import replace
from pathlib import Path

import torch

from dflash_lab.baselines.eagle import EagleConfig, EagleHead
from dflash_lab.baselines.eagle_proposer import Eagle
from dflash_lab.baselines.eagle_training import EagleTraining, train_eagle
from dflash_lab.baselines.medusa import MedusaHeads
from dflash_lab.baselines.medusa_proposer import Medusa
from dflash_lab.baselines.medusa_training import MedusaTraining, train_medusa
from dflash_lab.files import environment
from dflash_lab.measure.intervals import paired_ratio_interval, ratio_interval
from dflash_lab.pairs.pair import load_pair
from dflash_lab.pairs.prompts import load_prompts
from dflash_lab.speculative.generate import speculative_generate
from dflash_lab.speculative.proposer import DFlash, Plain
from dflash_lab.training.data.dataset import load_examples
from dflash_lab.training.data.feature_store import cache_features
from dflash_lab.training.data.features import OfflineFeatures
from dflash_lab.training.run.config import load_config
from dflash_lab.training.run.own_corpus import write_own_corpus
from dflash_lab.training.run.train import train

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "eagle_vs_dflash.jsonl"


def trained_head(pair, corpus: Path, work: Path, minutes: float) -> EagleHead:
    """The head, trained once and kept."""
    folder = work / "eagle"
    if (folder / "config.json").is_file():
        return EagleHead.from_pretrained(folder)
    examples, _ = load_examples([corpus])
    taps = EagleConfig.for_target(pair.target.config).target_layer_ids
    texts = [example.input_ids for example in examples]
    cache_features(pair.target, texts, taps, work / "eagle-features")
    settings = EagleTraining(cpu_minutes=minutes, learning_rate=2e-3, places=32)
    lines = []
    head = train_eagle(
        pair.target,
        examples,
        OfflineFeatures(work / "eagle-features"),
        settings,
        on_step=lines.append,
    )
    _say("eagle", lines)
    head.save_pretrained(folder)
    return head


def trained_heads(pair, corpus: Path, work: Path, minutes: float) -> MedusaHeads:
    """The heads, trained once and kept."""
    folder = work / "medusa"
    if (folder / "config.json").is_file():
        return MedusaHeads.from_pretrained(folder)
    examples, _ = load_examples([corpus])
    texts = [example.input_ids for example in examples]
    # The heads read head inputs alone; a store wants a tapped layer beside them.
    store = work / "medusa-features"
    features = cache_features(pair.target, texts, (0,), store, head_inputs=True)
    settings = MedusaTraining(cpu_minutes=minutes, learning_rate=2e-2)
    lines = []
    heads = train_medusa(
        pair.target, examples, features, settings, on_step=lines.append
    )
    _say("medusa", lines)
    heads.save_pretrained(folder)
    return heads


def _say(name: str, lines: list[dict]) -> None:
    last = lines[-200:]
    slots = [sum(line["accuracy"][k] for line in last) / len(last) for k in range(7)]
    print(f"{name}: {len(lines)} steps, accuracy {[round(x, 2) for x in slots]}")


def main() -> None:
    """Parse the command line, train both, measure, append."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--cpu-minutes", type=float, default=3.0)
    parser.add_argument("--limit", type=int, default=12, help="prompts of each set")
    parser.add_argument("--corpus", type=Path, help="written first if none is given")
    parser.add_argument(
        "--methods",
        default="dflash,eagle",
        help="comma-separated, of dflash, eagle, medusa (default: %(default)s)",
    )
    arguments = parser.parse_args()
    asked = arguments.methods.split(",")
    if not set(asked) <= {"dflash", "eagle", "medusa"} or len(set(asked)) < len(asked):
        parser.error("--methods must name dflash, eagle or medusa, each at most once")
    torch.set_num_threads(1)
    pair = load_pair("tiny", with_drafter=False, quiet=True)
    overrides = [
        f"out={arguments.work / 'dflash'}",
        "optimizer.steps=null",
        "optimizer.clock=cpu",
        f"optimizer.minutes={arguments.cpu_minutes}",
        "drafter.num_hidden_layers=1",
        "log.eval_every=null",
        "log.final_prompts=1",
    ]
    if arguments.corpus is not None:
        overrides.append(f"data.corpus=[{arguments.corpus}]")
    config = load_config(ROOT / "configs" / "tiny.yaml", overrides)
    methods: dict = {"ar": Plain()}
    models: dict = {}
    line: dict = {"cpu_minutes": arguments.cpu_minutes}
    corpus = arguments.corpus or arguments.work / "dflash" / "corpus.jsonl"
    if "dflash" in asked:
        started = time.monotonic()
        result = train(config, resume=True, pair=replace(pair, prompt_sets=()))
        line["dflash_steps"] = result.facts["steps"]
        print(
            f"dflash: {line['dflash_steps']} steps, {time.monotonic() - started:.0f} s"
        )
        models["dflash"] = result.drafter
        methods["dflash"] = DFlash(result.drafter)
    elif arguments.corpus is None:
        write_own_corpus(pair, corpus, config.corpus)
    common = (pair, corpus, arguments.work, arguments.cpu_minutes)
    if "eagle" in asked:
        models["eagle"] = trained_head(*common)
        methods["eagle"] = Eagle(models["eagle"])
    if "medusa" in asked:
        models["medusa"] = trained_heads(*common)
        methods["medusa"] = Medusa(models["medusa"])
    # The host loop for all: heads have no other.
    runs = {name: [] for name in methods}
    prompts = [
        pair.encode(prompt.turns[0])
        for name in pair.prompt_sets
        for prompt in load_prompts(name, arguments.limit)
    ]
    for number, ids in enumerate(prompts):
        order = list(methods)
        shift = number % len(order)
        for name in order[shift:] + order[:shift]:
            made = speculative_generate(
                pair,
                methods[name],
                ids,
                max_new_tokens=128,
                stop_token_ids=pair.stop_token_ids,
                loop="host",
            )
            runs[name].append(made)
    equal = {
        name: sum(
            a.output_ids == b.output_ids for a, b in zip(made, runs["ar"], strict=True)
        )
        for name, made in runs.items()
    }

    def sums(name: str, what: str) -> list[float]:
        if what == "tokens":
            return [len(r.output_ids[0]) for r in runs[name]]
        if what == "seconds":
            return [r.seconds for r in runs[name]]
        cycles = [r.trace.cycles for r in runs[name]]
        if what == "cycles":
            return [len(c) for c in cycles]
        if what == "draft_ms":
            return [sum(x.draft_ms for x in c) for c in cycles]
        return [sum(x.acceptance_length for x in c) for c in cycles]

    line["prompts"] = len(prompts)
    for name in models:
        line[name] = {
            "tau": str(ratio_interval(sums(name, "added"), sums(name, "cycles"))),
            "draft_ms": str(
                ratio_interval(sums(name, "draft_ms"), sums(name, "cycles"))
            ),
            "speedup": str(
                paired_ratio_interval(
                    sums(name, "tokens"),
                    sums(name, "seconds"),
                    sums("ar", "tokens"),
                    sums("ar", "seconds"),
                )
            ),
            "equal_to_plain": equal[name],
        }
    for one, other in itertools.combinations(models, 2):
        for what, top, bottom in (
            ("tau", "added", "cycles"),
            ("draft_ms", "draft_ms", "cycles"),
            ("speed", "tokens", "seconds"),
        ):
            found = paired_ratio_interval(
                sums(one, top), sums(one, bottom), sums(other, top), sums(other, bottom)
            )
            line[f"{one}_over_{other}_{what}"] = str(found)
    line |= {
        "parameters": {
            name: sum(p.numel() for p in model.parameters())
            for name, model in models.items()
        },
        "environment": environment(),
    }
    print(json.dumps(line, indent=1))
    with open(RESULTS, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()

"""How the shipped drafters were made: one command per pair.

    python -m dflash_lab.training.recipe smol --work W --out data/checkpoints/smol-dflash
    python -m dflash_lab.training.recipe tiny --work W --out data/checkpoints/tiny

The target answers training prompts, its features are cached, a drafter is trained on
them, and its acceptance is measured on held-out prompts. Answers and features are kept
in the work folder and used again if the command is repeated; training starts anew. A
card records what was done.

Leaves out: searching for good settings.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from dflash_lab.config import DFlashConfig
from dflash_lab.drafter import DFlashDraftModel
from dflash_lab.packaged import TARGET_NAME, sha256_of
from dflash_lab.pairs import Pair, load_pair
from dflash_lab.prompts import load_prompts
from dflash_lab.proposers import DFlash
from dflash_lab.speculative import speculative_generate
from dflash_lab.trace import environment, write_text_atomically
from dflash_lab.training.corpus import (
    read_corpus,
    self_written_prompts,
    write_corpus,
)
from dflash_lab.training.features import cache_features
from dflash_lab.training.prompts import too_close, training_prompts, word_triples
from dflash_lab.training.tiny import (
    MASK,
    build_target,
    build_tokenizer,
    save_target,
    train_target,
)
from dflash_lab.training.tiny_text import tiny_texts
from dflash_lab.training.trainer import Example, TrainConfig, Trainer

SELF_DRAWS, SELF_PROMPTS = 3000, 1800
SMOL_MASK_ID = 16  # `<empty_output>`, which occurs in no text of the target


def held_out_tau(
    pair: Pair, drafter: DFlashDraftModel, limit: int | None, max_new_tokens: int = 128
) -> dict[str, float]:
    """Pooled tau of greedy decoding on each held-out prompt set (first turns)."""
    result = {}
    for name in pair.prompt_sets:
        prompts = [pair.encode(p.turns[0]) for p in load_prompts(name, limit)]
        cycles: list[int] = []
        for start in range(0, len(prompts), 22):
            generation = speculative_generate(
                pair.target,
                DFlash(drafter.to(pair.target.dtype)),
                prompts[start : start + 22],
                max_new_tokens=max_new_tokens,
                stop_token_ids=pair.stop_token_ids,
            )
            cycles += [c.acceptance_length for c in generation.trace.cycles]
        result[name] = sum(cycles) / len(cycles)
    return result


def train_drafter(
    pair: Pair,
    corpora: Sequence[Path],
    config: DFlashConfig,
    settings: TrainConfig,
    work: Path,
    init_from: Path | None = None,
) -> tuple[DFlashDraftModel, dict]:
    """Features, training and measuring; returns the drafter and its card's facts.

    Args:
        pair: the target and its tokenizer.
        corpora: files of answers.
        config: of the drafter.
        settings: of the training.
        work: features, metrics and checkpoints are kept here.
        init_from: a drafter of an earlier stage to go on from, with its
            `training.json`.
    """
    rows = [row for path in corpora for row in read_corpus(path)[1]]
    rows = [row for row in rows if len(row["answer_ids"]) > 1]
    examples = [
        Example(row["prompt_ids"] + row["answer_ids"], len(row["prompt_ids"]))
        for row in rows
    ]
    sequences = [example.input_ids for example in examples]
    path = work / "features.bin"
    features = cache_features(pair.target, sequences, config.target_layer_ids, path)
    earlier = []
    if init_from is None:
        drafter = DFlashDraftModel(config)
        drafter.init_weights(torch.Generator().manual_seed(settings.seed))
    else:
        drafter = DFlashDraftModel.from_pretrained(init_from, torch.float32)
        note = json.loads((init_from / "training.json").read_text("utf-8"))
        earlier = [*note.pop("earlier_stages", []), note]
    fresh = init_from is None
    trainer = Trainer(drafter, pair.target, examples, features, settings, work, fresh)

    def evaluate(exported: DFlashDraftModel) -> dict:
        return {"held_out_tau": held_out_tau(pair, exported, limit=5)}

    wall, cpu = time.monotonic(), time.process_time()
    trained = trainer.run(evaluate)
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    # Once more from the file that is shipped, in the dtype that decodes.
    trained = DFlashDraftModel.from_pretrained(work / "drafter", pair.target.dtype)
    facts = {
        "earlier_stages": earlier,
        "corpora": {p.name: sha256_of(p) for p in corpora},
        "answers": len(examples),
        "answer_tokens": sum(len(e.input_ids) - e.prompt_length for e in examples),
        "steps": trainer.steps_done,
        "blocks_seen": trainer.blocks_seen,
        "training_wall_minutes": round(wall / 60, 1),
        "training_cpu_hours": round(cpu / 3600, 2),
        "parameters": sum(p.numel() for p in trained.parameters()),
        "measured_in": str(pair.target.dtype).removeprefix("torch."),
        "held_out_tau": held_out_tau(pair, trained, limit=None),
        "settings": asdict(settings),
        "environment": environment(),
    }
    return trained, facts


def make_smol(
    work: Path, out: Path, minutes: float, num_prompts: int, init_from: Path | None
) -> None:
    """Corpora, drafter and card of the smol pair.

    The target answers prompts of our grammar, and prompts that it writes itself, which
    are more varied; `more_corpus.jsonl` in the work folder joins them if it is there.
    """
    pair = load_pair("smol", dtype="bfloat16", with_drafter=False)
    held_out = tuple(
        turn
        for name in pair.prompt_sets
        for p in load_prompts(name)
        for turn in p.turns
    )
    grammar = itertools.islice(training_prompts(0, held_out=held_out), num_prompts)
    header = _user_header(pair)
    written = self_written_prompts(
        pair.target,
        header,
        work / "self_prompts.jsonl",
        count=SELF_DRAWS,
        stop_token_ids=pair.stop_token_ids,
        decode=pair.decode,
    )
    triples = [word_triples(turn) for turn in held_out]
    own = [
        {"kind": "self", "prompt": text}
        for text in written
        if not too_close(text, triples)
    ][:SELF_PROMPTS]
    corpora = []
    for name, prompts, source in (
        ("corpus", list(grammar), {"prompts_seed": 0}),
        ("self_corpus", own, {"prompts": "written by the target"}),
    ):
        for prompt in prompts:
            prompt["prompt_ids"] = pair.encode(prompt["prompt"])
        corpora.append(work / f"{name}.jsonl")
        # More prompts extend a corpus, so their number is no setting of it.
        write_corpus(
            pair.target,
            prompts,
            corpora[-1],
            stop_token_ids=pair.stop_token_ids,
            header={"target": TARGET_NAME, "dtype": "bfloat16", **source},
            temperatures=(0.0, 0.0, 0.0, 0.0, 0.7),
            max_new_tokens=256 if name == "corpus" else 192,
            batch_size=256,
        )
    more = work / "more_corpus.jsonl"
    if more.exists():
        corpora.insert(1, more)
    config = DFlashConfig.for_target(
        pair.target.config,
        mask_token_id=SMOL_MASK_ID,
        num_hidden_layers=2,
        block_size=8,
        num_features=5,
    )
    settings = TrainConfig(
        steps=1_000_000,
        minutes=minutes,
        batch_size=16,
        num_anchors=32,
        learning_rate=1e-3,
    )
    drafter, facts = train_drafter(pair, corpora, config, settings, work, init_from)
    drafter.to(torch.bfloat16).save_pretrained(out)
    write_card(out, f"DFlash drafter for {TARGET_NAME}", "smol", facts)


def _user_header(pair: Pair) -> list[int]:
    """Ids of the chat template up to where the user's words begin."""
    marker = "@@@@"
    text = pair.tokenizer.decode(pair.encode(marker))
    return pair.tokenizer.encode(text[: text.index(marker)])


def make_tiny(work: Path, out: Path, target_steps: int, drafter_steps: int) -> None:
    """Target, corpus, drafter and card of the tiny pair."""
    folder = out / "target"
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        tokenizer = build_tokenizer()
        model = build_target(len(tokenizer))
        started = time.monotonic()
        losses = train_target(model, tokenizer, target_steps)
        minutes = (time.monotonic() - started) / 60
        save_target(model, tokenizer, folder)
        note = {
            "steps": target_steps,
            "final_loss": sum(losses[-50:]) / len(losses[-50:]),
            "wall_minutes": round(minutes, 1),
        }
        text = json.dumps(note, indent=2) + "\n"
        write_text_atomically(folder / "training.json", text)
    pair = load_pair(target=folder)
    pair.prompt_sets = tuple(
        f"tiny-{kind}" for kind in ("math", "code", "chat", "rewrite")
    )
    corpus = work / "corpus.jsonl"
    texts = {t["prompt"]: t for t in itertools.islice(tiny_texts(1), 6000)}
    prompts = [{"kind": t["kind"], "prompt": t["prompt"]} for t in texts.values()]
    for prompt in prompts:
        prompt["prompt_ids"] = pair.encode(prompt["prompt"])
    write_corpus(
        pair.target,
        prompts,
        corpus,
        stop_token_ids=pair.stop_token_ids,
        header={"target": "tiny", "prompts_seed": 1},
        temperatures=(0.0, 0.7),
        max_new_tokens=160,
        batch_size=256,
    )
    config = DFlashConfig.for_target(
        pair.target.config,
        mask_token_id=pair.tokenizer.convert_tokens_to_ids(MASK),
        num_hidden_layers=1,
        block_size=8,
        num_features=3,
    )
    settings = TrainConfig(
        steps=drafter_steps,
        batch_size=32,
        num_anchors=16,
        learning_rate=2e-3,
        bfloat16=False,
    )
    drafter, facts = train_drafter(pair, [corpus], config, settings, work)
    drafter.to(torch.bfloat16).save_pretrained(out / "drafter")
    facts["target"] = json.loads((folder / "training.json").read_text("utf-8"))
    write_card(out / "drafter", "DFlash drafter of the tiny pair", "tiny", facts)


def write_card(folder: Path, title: str, pair: str, facts: dict) -> None:
    """`README.md` and `training.json` beside the weights."""
    taus = "\n".join(
        f"| {name} | {tau:.2f} |" for name, tau in facts["held_out_tau"].items()
    )
    env, settings = facts["environment"], facts["settings"]
    stages = [*facts.get("earlier_stages", []), facts]

    def total(name: str) -> float:
        return round(sum(stage[name] for stage in stages), 2)

    card = f"""# {title}

A first drafter for `load_pair("{pair}")`, trained by this project with
`python -m dflash_lab.training.recipe {pair}`. MIT licence. It holds no target weights.

| | |
|---|---|
| data | {facts["answers"]} answers, {facts["answer_tokens"]} answer tokens, written by the target itself |
| training | {total("steps")} steps, {total("blocks_seen")} blocks, in {len(stages)} stage(s) |
| peak learning rate, batch, anchors | {settings["learning_rate"]}, {settings["batch_size"]}, {settings["num_anchors"]} |
| time | {total("training_wall_minutes")} minutes, {total("training_cpu_hours")} CPU-hours |
| machine | {env["machine"]}, {env["threads"]} threads, torch {env["torch"]}, transformers {env["transformers"]} |
| parameters | {facts["parameters"]} |

Acceptance length tau (bonus token counted, pooled over cycles) on held-out prompts,
greedy, first turns, 128 new tokens, {facts["measured_in"]}:

| prompt set | tau |
|---|---|
{taus}

All settings and hashes are in `training.json`.
"""
    write_text_atomically(folder / "README.md", card)
    write_text_atomically(folder / "training.json", json.dumps(facts, indent=2) + "\n")


def main() -> None:
    """Parse the command line and make a pair."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("pair", choices=["tiny", "smol"])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=75, help="training of smol")
    parser.add_argument("--init-from", type=Path, help="an earlier stage, for smol")
    parser.add_argument("--num-prompts", type=int, default=6500, help="for smol")
    parser.add_argument("--target-steps", type=int, default=1000, help="for tiny")
    parser.add_argument("--drafter-steps", type=int, default=1200, help="for tiny")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    if arguments.pair == "smol":
        make_smol(
            arguments.work,
            arguments.out,
            arguments.minutes,
            arguments.num_prompts,
            arguments.init_from,
        )
    else:
        make_tiny(
            arguments.work,
            arguments.out,
            arguments.target_steps,
            arguments.drafter_steps,
        )


if __name__ == "__main__":
    main()

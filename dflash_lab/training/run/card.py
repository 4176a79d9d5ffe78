"""The card of a trained drafter: what was done, with what, and what came out.

`training.json` holds every setting, the hashes of the data, versions and the state of
the source tree; `README.md` says the same to a reader.

Leaves out: the weights.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from dflash_lab.files import environment, write_text_atomically
from dflash_lab.pairs.packaged_target import sha256_of
from dflash_lab.training.data.dataset import Example
from dflash_lab.training.run.config import TrainConfig
from dflash_lab.training.run.progress import Progress


def run_facts(
    config: TrainConfig,
    corpora: Sequence[str],
    examples: Sequence[Example],
    headers: Sequence[dict],
) -> dict:
    """What is known before training: settings, data, versions, source tree."""
    return {
        "settings": asdict(config),
        "corpora": {
            Path(path).name: {"sha256": sha256_of(Path(path)), "header": header}
            for path, header in zip(corpora, headers, strict=True)
        },
        "answers": len(examples),
        "answer_tokens": sum(len(e.input_ids) - e.prompt_length for e in examples),
        "environment": environment(),
        "git": git_state(),
    }


def run_results(progress: Progress, parameters: int, tau: dict, measured_in) -> dict:
    """What came out of training."""
    return {
        "steps": progress.step,
        "blocks_seen": progress.blocks,
        "training_wall_minutes": round(progress.seconds / 60, 1),
        "training_cpu_hours": round(progress.cpu_seconds / 3600, 2),
        "parameters": parameters,
        "measured_in": str(measured_in).removeprefix("torch."),
        "held_out_tau": tau,
    }


def git_state() -> str | None:
    """Commit of the source tree, with a mark if it was changed; None outside one."""
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def write_card(folder: Path, title: str, load_as: str, facts: dict) -> None:
    """`README.md` and `training.json` beside the weights.

    Args:
        folder: of the drafter.
        title: of the card.
        load_as: how a reader loads it.
        facts: of `run_facts` and `run_results`; those of earlier stages in
            `earlier_stages`.
    """
    taus = "\n".join(
        f"| {name} | {tau:.2f} |" for name, tau in facts["held_out_tau"].items()
    )
    table = "\n".join(f"| {name} | {value} |" for name, value in _rows(facts))
    tokens = facts["settings"]["log"]["eval_tokens"]
    card = f"""# {title}

Load it with `{load_as}`. It holds no weights of its target.

| | |
|---|---|
{table}

Acceptance length tau (bonus token counted, pooled over cycles) on held-out prompts,
greedy, first turns, {tokens} new tokens, {facts["measured_in"]}:

| prompt set | tau |
|---|---|
{taus}

All settings and hashes are in `training.json`.
"""
    write_text_atomically(folder / "README.md", card)
    write_text_atomically(folder / "training.json", json.dumps(facts, indent=2) + "\n")


def _rows(facts: dict) -> list[tuple[str, object]]:
    """Names and values of the card's table."""
    env, settings = facts["environment"], facts["settings"]
    data, stages = settings["data"], [*facts.get("earlier_stages", []), facts]

    def total(name: str) -> float:
        return round(sum(stage[name] for stage in stages), 2)

    minutes, hours = total("training_wall_minutes"), total("training_cpu_hours")
    machine = f"{env['machine']}, {env['threads']} threads, torch {env['torch']}"
    return [
        ("data", f"{facts['answers']} answers, {facts['answer_tokens']} answer tokens"),
        ("training", f"{total('steps')} steps, {total('blocks_seen')} blocks of text"),
        ("stages", len(stages)),
        ("time", f"{minutes} minutes, {hours} CPU-hours"),
        ("machine", machine),
        ("peak learning rate", settings["optimizer"]["learning_rate"]),
        ("texts and anchors per step", f"{data['batch_size']}, {data['num_anchors']}"),
        ("loss", settings["objective"]["loss"]),
        ("faults switched on", ", ".join(settings["faults"]) or "none"),
        ("parameters", facts["parameters"]),
        ("source tree", facts["git"] or "not under git"),
    ]

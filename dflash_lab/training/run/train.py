"""A training run from its settings: target, texts, features, checks, loop, card.

    result = train(load_config("configs/tiny.yaml"))

Everything lands in the folder `out`: `config.yaml`, `metrics.jsonl`, `checkpoints/`,
and at the end `drafter/` in the published form with its card.

Leaves out: the parts themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.drafter.variants import load_drafter
from dflash_lab.errors import DFlashLabError
from dflash_lab.files import write_text_atomically
from dflash_lab.pairs.pair import Pair, load_pair
from dflash_lab.training.convention_checks import require
from dflash_lab.training.corpus.processes import Processes
from dflash_lab.training.data.dataset import Example, load_examples
from dflash_lab.training.data.faults import find_faults
from dflash_lab.training.data.pipeline import Pipeline
from dflash_lab.training.objective import Objective
from dflash_lab.training.parity import check_training
from dflash_lab.training.run.card import run_facts, run_results, write_card
from dflash_lab.training.run.checkpoints import latest_checkpoint
from dflash_lab.training.run.config import TrainConfig, to_yaml
from dflash_lab.training.run.devices import make_accelerator
from dflash_lab.training.run.evaluate import held_out_tau
from dflash_lab.training.run.first_drafter import make_drafter
from dflash_lab.training.run.guards import (
    check_same_run,
    check_same_texts,
    check_texts_fit,
)
from dflash_lab.training.run.own_corpus import write_own_corpus
from dflash_lab.training.run.parts import make_objective, make_pipeline
from dflash_lab.training.run.progress import Progress
from dflash_lab.training.run.trainer import Trainer

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class TrainResult:
    """What a run left.

    Attributes:
        finished: False if it was interrupted; the same call with `resume` goes on.
        drafter: in the published form, in the target's dtype; None if interrupted.
        facts: of the card.
        folder: of the drafter.
    """

    finished: bool
    drafter: DFlashDraftModel | None
    facts: dict
    folder: Path


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    pair: Pair | None = None,
    on_line: Callable[[dict], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    quiet: bool = False,
) -> TrainResult:
    """Train a drafter as the settings say.

    Args:
        config: the settings.
        resume: go on from the checkpoint in `config.out`; start anew if there is none.
        pair: a target that is loaded already, in place of the one in the settings.
        on_line: gets each metric line, in the first process.
        should_stop: asked behind every step; True ends the run with a checkpoint.
        quiet: no progress line.

    Raises:
        DFlashLabError: settings, texts, features or checks that do not hold; nothing
            that was done is lost.
    """
    out = Path(config.out)
    going_on = _check_past(config, out, resume)
    accelerator = make_accelerator(config)
    pair = pair or load_pair(
        config.pair,
        target=config.target,
        dtype=config.dtype,
        device=accelerator.device,
        with_drafter=False,
        thinking=config.thinking,
    )
    drafter = make_drafter(config, pair)
    examples, facts = _texts(config, pair, accelerator)
    if going_on:
        check_same_texts(out, facts)
    _write_settings(config, facts, accelerator)
    pipeline = make_pipeline(config, pair, drafter, examples, accelerator)
    objective = make_objective(config, drafter, pair, pipeline)
    _make_ready(config, objective, pipeline, pair, accelerator)
    trainer = Trainer(
        objective,
        pipeline,
        config,
        accelerator,
        _evaluation(config, pair),
        on_line=on_line,
        should_stop=should_stop,
        quiet=quiet,
    )
    if resume:
        trainer.resume()
    progress = trainer.run()
    # Before the processes part: sharded weights are gathered from all of them.
    exported = trainer.export() if trainer.finished else None
    accelerator.end_training()
    if exported is None:
        return TrainResult(trainer.finished, None, facts, out / "drafter")
    return _ship(config, pair, exported, facts, progress)


def _check_past(config: TrainConfig, out: Path, resume: bool) -> bool:
    """Whether a run goes on here; refuses what would lose one, or is wrong at sight."""
    existing = latest_checkpoint(out)
    if existing is not None and not resume:
        raise DFlashLabError(
            f"{out} holds a run ({existing.name}); go on with --resume, or choose "
            "another folder with out"
        )
    check_same_run(config, out)
    # What is wrong with a named corpus is said before the target is loaded.
    if config.data.corpus:
        load_examples(config.data.corpus, config.data.max_length)
    return existing is not None


def _texts(
    config: TrainConfig, pair: Pair, accelerator: Accelerator
) -> tuple[list[Example], dict]:
    """Texts of the named corpora, or of one that the target writes now, and facts."""
    corpora = list(config.data.corpus)
    if not corpora:
        path = Path(config.out) / "corpus.jsonl"
        processes = Processes(
            accelerator.process_index,
            accelerator.num_processes,
            accelerator.local_process_index,
            accelerator.wait_for_everyone,
        )
        write_own_corpus(pair, path, config.corpus, processes)
        corpora = [str(path)]
    examples, headers = load_examples(corpora, config.data.max_length)
    check_texts_fit(pair, headers)
    for fault in find_faults(config.faults):
        examples = fault.on_texts(examples)
    return examples, run_facts(config, corpora, examples, headers)


def _write_settings(config: TrainConfig, facts: dict, accelerator: Accelerator) -> None:
    if not accelerator.is_main_process:
        return
    out = Path(config.out)
    write_text_atomically(out / "config.yaml", to_yaml(config))
    write_text_atomically(out / "corpora.json", json.dumps(facts["corpora"]) + "\n")
    if config.log.tracker:
        flat = {"out": config.out, "settings": to_yaml(config)}
        accelerator.init_trackers("dflash_lab", flat)


def _make_ready(
    config: TrainConfig,
    objective: Objective,
    pipeline: Pipeline,
    pair: Pair,
    accelerator: Accelerator,
) -> None:
    """Check the conventions, then switch on what the checks know nothing of."""
    objective.to(accelerator.device)
    if accelerator.is_main_process:
        fresh = config.drafter.init_from is None
        checks = check_training(objective, pipeline, pair.target, fresh=fresh)
        text = "\n".join(str(check) for check in checks)
        write_text_atomically(Path(config.out) / "checks.txt", text + "\n")
        # A fault that was asked for must not stop the run that studies it.
        require([] if config.faults else checks)
    # After the checks, which compare with decoding in one step.
    pipeline.reveal = config.data.reveal
    if config.objective.compile:
        objective.compile_pass()


def _evaluation(
    config: TrainConfig, pair: Pair
) -> Callable[[DFlashDraftModel], dict[str, float]] | None:
    if not (pair.prompt_sets and pair.tokenizer):
        return None
    prompts, tokens = config.log.eval_prompts, config.log.eval_tokens
    return lambda exported: held_out_tau(pair, exported, prompts, tokens)


def _ship(
    config: TrainConfig,
    pair: Pair,
    exported: DFlashDraftModel,
    facts: dict,
    progress: Progress,
) -> TrainResult:
    """Write the drafter, and measure what was written, in the dtype that decodes."""
    folder = Path(config.out) / "drafter"
    exported.save_pretrained(folder)
    shipped = load_drafter(folder, pair.target.dtype)
    tau = {}
    if pair.prompt_sets and pair.tokenizer:
        tau = held_out_tau(
            pair, shipped, config.log.final_prompts, config.log.eval_tokens
        )
    parameters = sum(p.numel() for p in shipped.parameters())
    facts |= run_results(progress, parameters, tau, pair.target.dtype)
    if config.drafter.init_from:
        facts["earlier_stages"] = _stages(Path(config.drafter.init_from))
    load_as = f"{type(shipped).__name__}.from_pretrained({str(folder)!r})"
    write_card(folder, f"DFlash drafter for {pair.name}", load_as, facts)
    return TrainResult(True, shipped, facts, folder)


def _stages(folder: Path) -> list[dict]:
    path = folder / "training.json"
    if not path.is_file():
        return []
    note = json.loads(path.read_text(encoding="utf-8"))
    return [*note.pop("earlier_stages", []), note]

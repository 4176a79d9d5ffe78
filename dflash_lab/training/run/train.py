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

import torch

from dflash_lab.drafter.model import DFlashDraftModel
from dflash_lab.drafter.variants import load_drafter
from dflash_lab.errors import DFlashLabError
from dflash_lab.files import write_text_atomically
from dflash_lab.pairs.pair import Pair, load_pair
from dflash_lab.training.convention_checks import require
from dflash_lab.training.corpus.processes import Processes
from dflash_lab.training.data.dataset import load_examples
from dflash_lab.training.data.faults import find_faults
from dflash_lab.training.data.feature_store import cache_features
from dflash_lab.training.data.features import OfflineFeatures, OnlineFeatures
from dflash_lab.training.data.pipeline import Pipeline
from dflash_lab.training.objective import HeadRows, Objective
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
from dflash_lab.training.run.trainer import Trainer


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
    existing = latest_checkpoint(out)
    if existing is not None and not resume:
        raise DFlashLabError(
            f"{out} holds a run ({existing.name}); go on with --resume, or choose "
            "another folder with out"
        )
    check_same_run(config, out)
    # What is wrong with a named corpus is said before the target is loaded.
    corpora = list(config.data.corpus)
    if corpora:
        load_examples(corpora, config.data.max_length)
    accelerator = make_accelerator(config)
    if pair is None:
        pair = _load_target(config, accelerator.device)
    drafter = make_drafter(config, pair)
    if not corpora:
        corpora = [str(out / "corpus.jsonl")]
        write_own_corpus(pair, Path(corpora[0]), config.corpus, _processes(accelerator))
    examples, headers = load_examples(corpora, config.data.max_length)
    check_texts_fit(pair, headers)
    faults = find_faults(config.faults)
    for fault in faults:
        if fault.on_texts is not None:
            examples = fault.on_texts(examples)
    facts = run_facts(config, corpora, examples, headers)
    if existing is not None:
        check_same_texts(out, facts)
    if accelerator.is_main_process:
        write_text_atomically(out / "config.yaml", to_yaml(config))
        write_text_atomically(out / "corpora.json", json.dumps(facts["corpora"]) + "\n")
        if config.log.tracker:
            flat = {"out": config.out, "settings": to_yaml(config)}
            accelerator.init_trackers("dflash_lab", flat)
    layers = drafter.config.target_layer_ids
    for fault in faults:
        layers = fault.on_layers(layers) if fault.on_layers else layers
    pipeline = Pipeline(
        drafter.config,
        examples,
        _features(config, pair, examples, layers, accelerator),
        batch_size=config.data.batch_size,
        num_anchors=config.data.num_anchors,
        seed=config.seed,
        accumulation=config.data.accumulation,
        faults=faults,
        backend=_backend(config, accelerator.device),
        device=accelerator.device,
    )
    objective = _objective(config, drafter, pair, examples, pipeline)
    objective.to(accelerator.device)
    if config.drafter.init_from:
        facts["earlier_stages"] = _stages(Path(config.drafter.init_from))
    if accelerator.is_main_process:
        fresh = config.drafter.init_from is None
        checks = check_training(objective, pipeline, pair.target, fresh=fresh)
        text = "\n".join(str(check) for check in checks)
        write_text_atomically(out / "checks.txt", text + "\n")
        # A fault that was asked for must not stop the run that studies it.
        require([] if faults else checks)

    pipeline.reveal = config.data.reveal
    if config.objective.compile:
        objective.compile_pass()

    def evaluate(exported: DFlashDraftModel) -> dict[str, float]:
        return held_out_tau(
            pair, exported, config.log.eval_prompts, config.log.eval_tokens
        )

    trainer = Trainer(
        objective,
        pipeline,
        config,
        accelerator,
        evaluate if pair.prompt_sets and pair.tokenizer else None,
        on_line=on_line,
        should_stop=should_stop,
        quiet=quiet,
    )
    if resume:
        trainer.resume()
    progress = trainer.run()
    folder = out / "drafter"
    # Before the processes part: sharded weights are gathered from all of them.
    exported = trainer.export() if trainer.finished else None
    accelerator.end_training()
    if exported is None:
        return TrainResult(trainer.finished, None, facts, folder)
    shipped, results = _ship(config, pair, exported, folder, progress)
    facts |= results
    load_as = f"{type(shipped).__name__}.from_pretrained({str(folder)!r})"
    write_card(folder, f"DFlash drafter for {pair.name}", load_as, facts)
    return TrainResult(True, shipped, facts, folder)


def _objective(config, drafter, pair: Pair, examples, pipeline: Pipeline) -> Objective:
    rows = HeadRows(
        pair.target,
        examples,
        config.objective.head_tokens,
        config.objective.extra_negatives,
        config.seed,
    )
    objective = Objective(
        drafter,
        pair.target,
        rows,
        pipeline.feature_scale(),
        config.objective.loss,
        config.objective.gamma,
        config.objective.chunk,
    )
    if config.drafter.init_from:
        objective.start_from(drafter)
    if config.drafter.conditioning == "none":
        # Without a projection every context row is a key and value of zero.
        objective.drafter.fc.weight.data.zero_()
        objective.drafter.fc.weight.requires_grad_(False)
    return objective


def _ship(config, pair: Pair, exported: DFlashDraftModel, folder: Path, progress):
    """Write the drafter, and measure what was written, in the dtype that decodes."""
    exported.save_pretrained(folder)
    shipped = load_drafter(folder, pair.target.dtype)
    tau = {}
    if pair.prompt_sets and pair.tokenizer:
        tau = held_out_tau(
            pair, shipped, config.log.final_prompts, config.log.eval_tokens
        )
    parameters = sum(p.numel() for p in shipped.parameters())
    return shipped, run_results(progress, parameters, tau, pair.target.dtype)


def _load_target(config: TrainConfig, device: torch.device) -> Pair:
    return load_pair(
        config.pair,
        target=config.target,
        dtype=config.dtype,
        device=device,
        with_drafter=False,
        thinking=config.thinking,
    )


def _processes(accelerator) -> Processes:
    return Processes(
        accelerator.process_index,
        accelerator.num_processes,
        accelerator.local_process_index,
        accelerator.wait_for_everyone,
    )


def _features(config, pair: Pair, examples, layers, accelerator):
    kl = config.objective.loss == "kl"
    if config.data.features == "online":
        return OnlineFeatures(pair.target, layers, kl)
    folder = Path(config.data.feature_folder or Path(config.out) / "features")
    texts = [example.input_ids for example in examples]
    if accelerator.is_main_process:
        cache_features(pair.target, texts, layers, folder, head_inputs=kl)
    accelerator.wait_for_everyone()
    return OfflineFeatures(folder, kl, verify=False)


def _backend(config: TrainConfig, device: torch.device) -> str:
    asked = config.objective.attention
    if asked == "flex" and device.type != "cuda":
        raise DFlashLabError(
            f"FlexAttention trains on CUDA only, not on {device}; use attention: auto"
        )
    if asked != "auto":
        return asked
    if config.faults:
        return "sdpa"  # the only form that faults can bend
    if device.type == "cuda":
        return "flex"
    # Compiled for a CPU, the split products run slower than the ready-made kernel.
    return "sdpa" if config.objective.compile else "split"


def _stages(folder: Path) -> list[dict]:
    path = folder / "training.json"
    if not path.is_file():
        return []
    note = json.loads(path.read_text(encoding="utf-8"))
    return [*note.pop("earlier_stages", []), note]

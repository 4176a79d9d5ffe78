"""Proposers side by side on the same prompts, and how they stand.

Every prompt is decoded with every proposer, one after the other, in an order that
changes from prompt to prompt, after a warm-up that is not counted. So a busy machine
slows all of them alike, and each can be compared with a base prompt by prompt.

Leaves out: files, methods that are no proposer, and prompt sets (`bench.py`).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dflash_lab.errors import DFlashLabError
from dflash_lab.measure.intervals import (
    Interval,
    paired_ratio_interval,
    ratio_interval,
)
from dflash_lab.speculative.generate import speculative_generate
from dflash_lab.speculative.generation import GenerationResult
from dflash_lab.speculative.proposer import Proposer

WARM_UP = 8  # tokens


@dataclass(frozen=True)
class Standing:
    """How a proposer did.

    Attributes:
        name: as given to `race`.
        tau: tokens per cycle, with its interval over prompts.
        speedup: tokens per second over the base's, paired by prompt, prefill included.
        draft_ms: drafting, per cycle.
        cycle_ms: the whole cycle.
        equal: prompts whose text is the base's, token for token.
        prompts: of the race.
    """

    name: str
    tau: Interval
    speedup: Interval
    draft_ms: float
    cycle_ms: float
    equal: int
    prompts: int


def race(
    target,
    proposers: Mapping[str, Proposer],
    prompts: Sequence[Sequence[int]],
    **options,
) -> dict[str, list[GenerationResult]]:
    """Decode every prompt with every proposer, in turns.

    Args:
        target: as for `speculative_generate`.
        proposers: by name.
        prompts: token ids.
        options: of `speculative_generate`, the same for all.

    Returns:
        For each name one result per prompt, in the order of the prompts.

    Raises:
        DFlashLabError: no proposer or no prompt.
    """
    if not proposers or not prompts:
        raise DFlashLabError(
            f"{len(proposers)} proposers and {len(prompts)} prompts; a race needs one "
            "of each at least"
        )
    names = list(proposers)
    few = options | {"max_new_tokens": WARM_UP}
    for name in names:
        speculative_generate(target, proposers[name], list(prompts[0]), **few)
    results: dict[str, list[GenerationResult]] = {name: [] for name in names}
    with short_collections():
        for number, ids in enumerate(prompts):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                made = speculative_generate(
                    target, proposers[name], list(ids), **options
                )
                if "interrupted" in made.stop_reasons:
                    raise KeyboardInterrupt  # half an answer must not be counted
                results[name].append(made)
    return results


@contextlib.contextmanager
def short_collections() -> Iterator[None]:
    """Keep Python's garbage collector from what exists already, for fair timing.

    A full collection looks at every object there is, a tenth of a second beside torch.
    Work in the same order lets it fall on the same method each time, which then looks
    slower than it is.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def standings(
    results: Mapping[str, Sequence[GenerationResult]], base: str
) -> list[Standing]:
    """Every proposer of a race against a base.

    Args:
        results: of `race`.
        base: name of the one that the others are compared with.

    Raises:
        DFlashLabError: a base that did not run, or answers without any cycle.
    """
    if base not in results:
        raise DFlashLabError(f"base {base!r} did not run; {', '.join(results)} did")
    found = []
    for name, mine in results.items():
        cycles = [c for result in mine for c in result.trace.cycles]
        if not cycles:
            raise DFlashLabError(f"{name} has no cycle; decode more tokens")
        parts = [_of(cycles, part) for part in ("draft", "verify", "other")]
        pairs = zip(mine, results[base], strict=True)
        found.append(
            Standing(
                name,
                ratio_interval(*_taus(mine)),
                paired_ratio_interval(*_speed(mine), *_speed(results[base])),
                parts[0],
                sum(parts),
                sum(a.output_ids == b.output_ids for a, b in pairs),
                len(mine),
            )
        )
    return found


def tau_differences(
    results: Mapping[str, Sequence[GenerationResult]], base: str
) -> dict[str, Interval]:
    """Every other proposer's tau minus the base's, paired by prompt.

    Args:
        results: of `race`.
        base: name of the one that the others are compared with.

    Raises:
        DFlashLabError: a base that did not run.
    """
    if base not in results:
        raise DFlashLabError(f"base {base!r} did not run; {', '.join(results)} did")
    return {
        name: paired_ratio_interval(
            *_taus(mine), *_taus(results[base]), difference=True
        )
        for name, mine in results.items()
        if name != base
    }


def _taus(results: Sequence[GenerationResult]) -> tuple[list[int], list[int]]:
    lengths = [[c.acceptance_length for c in r.trace.cycles] for r in results]
    return [sum(x) for x in lengths], [len(x) for x in lengths]


def _of(cycles, part: str) -> float:
    return sum(getattr(c, f"{part}_ms") for c in cycles) / len(cycles)


def _speed(results: Sequence[GenerationResult]) -> tuple[list[int], list[float]]:
    tokens = [sum(len(ids) for ids in r.output_ids) for r in results]
    return tokens, [r.seconds for r in results]

"""Why was this draft lost, and what would have saved it?

The first wrong slot of each cycle of today's chain is looked up in the replay's table:
the right token may have been the drafter's second choice, or its third, or nowhere; it
may have stood in the text before; the target itself may have been near a tie. Slots
behind it were lost although they may have been right. `levers` replays what each remedy
would win.

Leaves out: printing (`cli/explain.py`), and the cost of rows (`speedup.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dflash_lab.errors import DFlashLabError
from dflash_lab.measure.replay import Policy, Replay, ReplayTable, Tree, replay, walk
from dflash_lab.measure.tree_policies import (
    TreePolicy,
    best_lookup,
    chain,
    step_table,
)
from dflash_lab.speculative.suffix_index import SuffixIndex

if TYPE_CHECKING:
    import pandas as pd

# Rank of the right token in its slot, from 0 -> what is said of it.
RANKS = (
    (0, "first choice"),
    (1, "second choice"),
    (2, "third choice"),
    (9, "choice 4 to 10"),
    (31, "choice 11 to 32"),
)
NOWHERE = "further down"
NEAR_TIE = 0.5  # logits; a target this undecided is as good as drawing lots


def reason_of(rank: int) -> str:
    """What is said of a right token that stood at this rank, from 0."""
    for last, name in RANKS:
        if rank <= last:
            return name
    return NOWHERE


def lost_slots(tables: Sequence[ReplayTable], block_size: int) -> pd.DataFrame:
    """One row for every slot that the chain lost.

    Args:
        tables: of `replay_table`.
        block_size: K of the chain.

    Returns:
        `text` and `place` (number of the table, and of the anchor in its answer),
        `slot` (1..K-1), `first` (whether no slot before it was wrong), `rank` of the
        right token, `reason`, `draft_prob` of it, `target_prob` and `target_margin`
        where the target chose it, `near_tie`, and `in_lookup`: whether one of the
        lookup's matches behind the accepted drafts goes on with it.
    """
    import pandas as pd

    rows = []
    walked = replay(tables, chain(block_size))
    for number, (table, lengths) in enumerate(zip(tables, walked.lengths, strict=True)):
        index, place = SuffixIndex(), 0
        index.extend(table.text[: table.prompt_length])
        draft = chain(block_size)(table)
        for length in lengths:
            end = table.prompt_length + place + 1
            index.extend(table.text[len(index.text) : end])
            tree = draft(place, table.budget - place - 2)
            kept = walk(tree, table.answer[place + 1 :])
            for slot in range(kept + 1, len(tree) + 1):
                if table.rank[place, slot - 1] < 0:
                    break  # behind the end of the text
                row = _row(table, index, place, slot, slot == kept + 1)
                rows.append({"text": number, **row})
            place += length
    if not rows:
        raise DFlashLabError("no draft was lost; there is nothing to explain")
    return pd.DataFrame(rows)


def _row(
    table: ReplayTable, index: SuffixIndex, place: int, slot: int, first: bool
) -> dict:
    rank = int(table.rank[place, slot - 1])
    own = table.answer[place + slot]
    accepted = table.answer[place + 1 : place + slot]
    margin = float(table.target_margin[place + slot - 1])
    return {
        "place": place,
        "slot": slot,
        "first": first,
        "rank": rank,
        "reason": reason_of(rank),
        "draft_prob": math.exp(table.log_prob[place, slot - 1]),
        "target_prob": float(table.target_prob[place + slot - 1]),
        "target_margin": margin,
        "near_tie": margin < NEAR_TIE,
        "in_lookup": any(
            index.text[match.place] == own for match in index.matches(accepted)
        ),
    }


def reasons_by_slot(lost: pd.DataFrame) -> pd.DataFrame:
    """Share of each reason among the lost drafts of each slot.

    Args:
        lost: of `lost_slots`.

    Returns:
        Rows are slots, columns reasons in the order of `RANKS`; rows add up to 1. A
        first choice can only be lost behind a slot that was wrong.
    """
    counts = lost.groupby(["slot", "reason"]).size().unstack(fill_value=0)
    names = [name for _, name in RANKS] + [NOWHERE]
    counts = counts.reindex(columns=names, fill_value=0)
    return counts.div(counts.sum(axis=1), axis=0)


def levers(tables: Sequence[ReplayTable], block_size: int) -> dict[str, Replay]:
    """What each remedy would win, by replay with the same number of rows.

    Lookup's probabilities are counted on one half of the texts and used on the other,
    both ways.

    Args:
        tables: of `replay_table`, two at least.
        block_size: K, the rows of a verification.
    """
    if len(tables) < 2:
        raise DFlashLabError(f"{len(tables)} text; explain needs two or more")
    halves = [list(tables[0::2]), list(tables[1::2])]
    steps = [step_table(half) for half in reversed(halves)]

    def crossed(make: Callable[[int], Policy]) -> Replay:
        parts = [replay(half, make(fold)) for fold, half in enumerate(halves)]
        return Replay(
            [x for part in parts for x in part.lengths],
            [x for part in parts for x in part.rows],
        )

    return {
        "chain": replay(tables, chain(block_size)),
        "lookup alone": replay(tables, best_lookup(block_size)),
        "+ siblings": replay(tables, TreePolicy(block_size)),
        "+ siblings and lookup": crossed(
            lambda fold: TreePolicy(block_size, steps[fold])
        ),
        "slot 1 always right": replay(tables, perfect_first(block_size)),
        "slots as good as slot 1": replay(tables, dependent(block_size)),
    }


def perfect_first(block_size: int) -> Policy:
    """The chain, with the right token in slot 1."""

    def start(table: ReplayTable) -> Callable[[int, int], Tree]:
        draft = chain(block_size)(table)

        def better(place: int, most: int) -> Tree:
            found = list(draft(place, most))
            if found:
                found[0] = (-1, table.answer[place + 1])
            return found

        return better

    return start


def dependent(block_size: int) -> Policy:
    """A chain whose every slot is drafted as slot 1 is, with all before it known.

    A bound on what a head can win that lets slots depend on each other.
    """

    def start(table: ReplayTable) -> Callable[[int, int], Tree]:
        def draft(place: int, most: int) -> Tree:
            end = min(block_size - 1, most, len(table.answer) - 1 - place)
            tokens = table.candidates[place : place + end, 0, 0]
            return [(node - 1, int(token)) for node, token in enumerate(tokens)]

        return draft

    return start


def advice(lost: pd.DataFrame, won: dict[str, Replay]) -> list[str]:
    """What to do about it, the figures in words.

    Args:
        lost: of `lost_slots`.
        won: of `levers`.
    """
    first = lost[lost["first"]]
    ended = (first["slot"] == 1).mean()
    near = first["rank"].isin([1, 2]).mean()
    chain_tau = won["chain"].tau
    tree = max(("+ siblings", "+ siblings and lookup"), key=lambda n: won[n].tau)
    said = [
        f"The right token was second or third in {near:.0%} of the slots that ended a "
        f"cycle, and stood in the text before in {first['in_lookup'].mean():.0%}."
    ]
    if ended > 0.4:
        said.append(
            f"{ended:.0%} of these were slot 1, where the drafter sees all that a "
            "causal head would see: more training or a wider drafter helps, a head "
            "that lets slots depend on each other does not."
        )
    if won[tree].tau > 1.05 * chain_tau:
        said.append(
            f"A tree ({tree}) in the same rows would give tau {won[tree].tau:.2f} in "
            f"place of {chain_tau:.2f}."
        )
    else:
        said.append("A tree in the same rows would win less than a twentieth.")
    dependent_tau = won["slots as good as slot 1"].tau
    if dependent_tau > 1.1 * chain_tau:
        said.append(
            "A head that knows the tokens before each slot could reach tau "
            f"{dependent_tau:.2f} at most."
        )
    return said

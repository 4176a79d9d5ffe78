"""Ways to draft, for the replay: a chain, lookup, and one tree of both.

A tree is grown best first: the node whose path is most likely to be the text's own way
is added next, so it is ancestor-closed and the rows are spent where they win most. The
drafter's slots are drafted independently of each other, so a path's probability is the
product of its slots'. A lookup path's steps have probabilities that were counted on
other texts (`step_table`), by length and rank of the match and by depth.

Leaves out: verifying trees while decoding.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from dflash_lab.measure.replay import Policy, ReplayTable, Tree
from dflash_lab.speculative.suffix_index import (
    LONGEST,
    REMEMBERED,
    Match,
    SuffixIndex,
)

DEPTHS = 3  # of the step table: the first, the second, and all later steps


def chain(block_size: int) -> Policy:
    """Today's DFlash: the first choice of each slot, one behind the other."""

    def start(table: ReplayTable) -> Callable[[int, int], Tree]:
        def draft(place: int, most: int) -> Tree:
            tokens = table.candidates[place, : min(block_size - 1, most), 0]
            return [(node - 1, int(token)) for node, token in enumerate(tokens)]

        return draft

    return start


def best_lookup(rows: int) -> Policy:
    """Lookup alone: what followed the longest match, as far as the rows go."""

    def start(table: ReplayTable) -> Callable[[int, int], Tree]:
        index = SuffixIndex()
        index.extend(table.text[: table.prompt_length])

        def draft(place: int, most: int) -> Tree:
            index.extend(table.text[len(index.text) : table.prompt_length + place + 1])
            matches = index.matches(most=1)
            if not matches:
                return []
            at = matches[0].place
            tokens = index.text[at : at + min(rows - 1, most)]
            return [(node - 1, token) for node, token in enumerate(tokens)]

        return draft

    return start


@dataclass(frozen=True)
class TreePolicy:
    """One tree of the drafter's candidates and of lookup, best first.

    Attributes:
        rows: of a verification, the anchor's included.
        steps: (longest, REMEMBERED, DEPTHS) of `step_table`; None leaves lookup out.
        drafter: whether the drafter's candidates take part.
        calibration: exponents on the drafter's log-probabilities by slot; none if
            empty.
        behind_draft: look up behind the drafter's first choices too.
        least: a node less likely than this is not added.
    """

    rows: int
    steps: np.ndarray | None = None
    drafter: bool = True
    calibration: tuple[float, ...] = ()
    behind_draft: bool = False
    least: float = 0.0

    def __call__(self, table: ReplayTable) -> Callable[[int, int], Tree]:
        index = SuffixIndex()
        index.extend(table.text[: table.prompt_length])

        def draft(place: int, most: int) -> Tree:
            end = table.prompt_length + place + 1
            index.extend(table.text[len(index.text) : end])
            return _Growth(self, table, place, index, most).tree()

        return draft


@dataclass
class _Growth:
    """A tree on its way."""

    policy: TreePolicy
    table: ReplayTable
    place: int
    index: SuffixIndex
    most: int
    nodes: list[tuple[int, int]] = field(default_factory=list)

    def tree(self) -> Tree:
        heap: list[tuple] = []
        count = 0

        def push(parent: int, depth: int, prob: float, live: list[Match]) -> None:
            nonlocal count
            if depth == self.most:
                return
            for token, (share, followed) in self._children(depth, live).items():
                if prob * share > self.policy.least:
                    count += 1  # earlier nodes first among equals
                    entry = (-prob * share, count, parent, token, depth + 1, followed)
                    heapq.heappush(heap, entry)

        steps = self.policy.steps
        push(-1, 0, 1.0, [] if steps is None else self.index.matches())
        while heap and len(self.nodes) < self.policy.rows - 1:
            prob, _, parent, token, depth, followed = heapq.heappop(heap)
            self.nodes.append((parent, token))
            if depth == 1 and self.policy.behind_draft and steps is not None:
                later = self.index.matches((token,))
                followed = followed or [m._replace(place=m.place - 1) for m in later]
            push(len(self.nodes) - 1, depth, -prob, followed)
        return self.nodes

    def _children(
        self, depth: int, live: list[Match]
    ) -> dict[int, tuple[float, list[Match]]]:
        """Token -> its probability behind the path, and matches that go along."""
        found: dict[int, tuple[float, list[Match]]] = {}
        policy, steps = self.policy, self.policy.steps
        if policy.drafter and depth < self.table.candidates.shape[1]:
            keep = policy.rows - 1
            tokens = self.table.candidates[self.place, depth, :keep].tolist()
            scores = self.table.log_probs[self.place, depth, :keep]
            if policy.calibration:
                scores = scores * policy.calibration[depth]
            for token, share in zip(tokens, np.exp(scores).tolist(), strict=True):
                found[token] = (share, [])
        for match in live:
            at = match.place + depth
            if steps is None or at >= len(self.index.text):
                continue
            token = self.index.text[at]
            share = float(steps[match.length - 1, match.rank, min(depth, DEPTHS - 1)])
            before, along = found.get(token, (0.0, []))
            # Two reasons for one token: it is wrong only if both are.
            joined = 1 - (1 - before) * (1 - share)
            found[token] = (joined, [*along, match])
        return found


def step_table(tables: Iterable[ReplayTable]) -> np.ndarray:
    """How often a lookup path's next step is right, where all before were.

    Counted behind every token of the answers, by length of the match (1..longest), rank
    and depth (1, 2, later), each cell starting from one right and one wrong.

    Returns:
        (longest, REMEMBERED, DEPTHS) float64.
    """
    right = np.ones((LONGEST, REMEMBERED, DEPTHS))
    total = 2 * right
    for table in tables:
        index, text = SuffixIndex(), table.text
        index.extend(text[: table.prompt_length])
        for end in range(table.prompt_length + 1, len(text)):
            index.extend(text[len(index.text) : end])
            for match in index.matches():
                for depth in range(LONGEST * 2):
                    at, own = match.place + depth, end + depth
                    if at >= end or own >= len(text):
                        break
                    cell = match.length - 1, match.rank, min(depth, DEPTHS - 1)
                    total[cell] += 1
                    if text[at] != text[own]:
                        break
                    right[cell] += 1
    return right / total


def calibration(tables: Iterable[ReplayTable]) -> tuple[float, ...]:
    """Exponents by slot that make the drafter's probabilities honest.

    With p ** e in place of p, the mean of the first choice's probability is the share
    in which it is right; e is found by bisection.
    """
    tables = list(tables)
    first = np.concatenate([t.log_probs[:, :, 0] for t in tables])
    rank = np.concatenate([t.rank for t in tables])
    exponents = []
    for slot in range(first.shape[1]):
        inside = rank[:, slot] >= 0
        wanted = (rank[inside, slot] == 0).mean()
        low, high = 0.1, 10.0
        for _ in range(40):
            middle = (low + high) / 2
            if np.exp(middle * first[inside, slot]).mean() > wanted:
                low = middle
            else:
                high = middle
        exponents.append(middle)
    return tuple(exponents)

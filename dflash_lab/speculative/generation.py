"""What goes into a generation and what comes out of it.

Leaves out: the loop between the two (`generate.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from dflash_lab.errors import DFlashLabError
from dflash_lab.speculative.proposer import Proposer
from dflash_lab.speculative.sampling import Sampling
from dflash_lab.speculative.stopping import StopRules
from dflash_lab.speculative.trace import DecodeTrace
from dflash_lab.target.target import Target


@dataclass
class GenerationResult:
    """What a generation returned.

    Attributes:
        output_ids: generated ids, one list per prompt.
        stop_reasons: per prompt: `stop_token`, `stop_string`, `criterion`,
            `length`, `position_limit` or `interrupted`.
        trace: every cycle.
        seconds: wall-clock time, prefill included.
        time_to_first_token: seconds until the first prompt's first token.
        scores: per prompt, for each of its tokens the (V,) logits it was chosen from,
            after the processors; None unless asked for.
        logits: the same before the processors.
    """

    output_ids: list[list[int]]
    stop_reasons: list[str]
    trace: DecodeTrace
    seconds: float
    time_to_first_token: float
    scores: list[list[Tensor]] | None = None
    logits: list[list[Tensor]] | None = None

    @classmethod
    def of(cls, request: Request, seconds: float, first: float) -> GenerationResult:
        """What a finished request returned, and when.

        Args:
            request: its rows hold what was generated.
            seconds: of all of it.
            first: seconds until the first token.
        """
        rows, kept = request.rows, request.keep_scores
        return cls(
            [row.output for row in rows],
            [row.stop_reason or "" for row in rows],
            request.trace,
            seconds,
            first,
            [row.scores for row in rows] if kept else None,
            [row.logits for row in rows] if kept else None,
        )

    @property
    def tau(self) -> float:
        """Mean acceptance length over all cycles, bonus token counted."""
        return self.trace.tau

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all prompts per second, prefill included."""
        return sum(map(len, self.output_ids)) / self.seconds


@dataclass
class Row:
    """A prompt on its way through a generation."""

    index: int  # place among the prompts
    prompt: list[int]
    budget: int
    capped: bool  # whether the position limit cut the budget
    output: list[int]
    cycle: int = 0
    stop_reason: str | None = None  # None while it goes on
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    @property
    def text(self) -> list[int]:
        return self.prompt + self.output

    @property
    def remaining(self) -> int:
        return self.budget - len(self.output)

    def reason(self, rules: StopRules) -> str | None:
        """Why the row ends with its latest token, None if it goes on."""
        reason = rules.reason(self.prompt, self.output, self.budget)
        return "position_limit" if reason == "length" and self.capped else reason


@dataclass(frozen=True)
class Request:
    """A generation as both loops take it; fields as in `speculative_generate`.

    Attributes:
        rows: the prompts with their budgets.
        seeds: one per row.
        rules: when a row ends.
        trace: where cycles are recorded.
        keep_scores: whether the logits of every token are kept.
    """

    target: Target
    proposer: Proposer
    rows: list[Row]
    sampling: Sampling
    seeds: list[int]
    rules: StopRules
    trace: DecodeTrace
    on_tokens: Callable[[int, list[int]], None] | None = None
    details: bool = False
    processors: Sequence[Callable] = ()
    keep_scores: bool = False

    @property
    def is_plain_text(self) -> bool:
        """Whether tokens, times and lengths are all that is wanted."""
        custom = self.processors or self.keep_scores or self.details
        return not custom and not self.rules.look_at_text


def longest_text(rows: Sequence[Row]) -> int:
    """Positions of the longest text, prompt and answer, that the rows may reach."""
    return max(len(row.prompt) + row.budget for row in rows)


def drafts_that_fit(remaining: Tensor, block_size: int) -> Tensor:
    """(B,) tokens that rows may still get -> (B,) drafts that a cycle may use.

    A cycle adds its accepted drafts and one token of the target's own, so a row that
    may get r tokens uses at most r - 1 drafts, and nothing overshoots.
    """
    return (remaining - 1).clamp(0, block_size - 1)


def as_prompts(input_ids, target: Target, max_new_tokens: int) -> list[list[int]]:
    """Prompts as lists of ids; every bad one is refused before any work.

    Raises:
        DFlashLabError: empty prompt, id outside the vocabulary, `max_new_tokens` < 1.
    """
    if max_new_tokens < 1:
        raise DFlashLabError(f"max_new_tokens {max_new_tokens} must be 1 or more")
    ids = input_ids.tolist() if isinstance(input_ids, Tensor) else input_ids
    ids = [row.tolist() if isinstance(row, Tensor) else row for row in ids]
    ids = [list(row) if isinstance(row, Sequence) else row for row in ids]
    prompts = ids if ids and isinstance(ids[0], list) else [ids]
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise DFlashLabError(f"prompt {i} is empty; give at least one token")
        worst = max(prompt, key=lambda t: max(t, -t))
        if min(prompt) < 0 or max(prompt) >= target.embedding_table.shape[0]:
            raise DFlashLabError(
                f"prompt {i} has token id {worst}, outside the vocabulary "
                f"0..{target.embedding_table.shape[0] - 1}; was it made by this "
                "target's tokenizer?"
            )
    return prompts


def new_row(index: int, prompt: list[int], max_new_tokens: int, target: Target) -> Row:
    """A row with the budget that the target's positions leave it.

    Raises:
        DFlashLabError: no position is left for an answer.
    """
    limit = target.max_positions
    room = max_new_tokens if limit is None else limit - len(prompt)
    if room < 1:
        raise DFlashLabError(
            f"prompt {index} has {len(prompt)} tokens, but the target has only {limit} "
            "positions for prompt and answer; shorten the prompt"
        )
    budget = min(max_new_tokens, room)
    return Row(index, prompt, budget, budget < max_new_tokens, [])

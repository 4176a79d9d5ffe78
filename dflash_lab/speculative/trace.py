"""What happened in a generation, cycle by cycle and slot by slot.

A `DecodeTrace` is plain data: a header that says what ran, and one record per cycle.
It goes to JSON Lines and back without loss, and to a DataFrame with one row per drafted
slot. Every analysis and picture starts from it.

Leaves out: any judgement (`measure/`), and the text itself beyond token ids.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dflash_lab.errors import DFlashLabError
from dflash_lab.files import write_text_atomically

FORMAT = "dflash-lab trace 1"


@dataclass
class CycleRecord:
    """One cycle of one prompt: a block drafted, verified and partly kept.

    Attributes:
        prompt: row of the generation, from 0.
        cycle: counted per prompt, from 0.
        start: absolute position of the anchor.
        acceptance_length: tokens the cycle added, kept drafts and bonus; less only
            where a stop rule cut the block.
        draft_tokens: G drafted ids, slots 1..G.
        target_tokens: the target's own id for each slot and one more; -1 where the
            rule drew none.
        accepted: G flags, True for drafts that became text.
        draft_ms, verify_ms, other_ms: milliseconds; a batch's time is shared out
            evenly over its rows.
        draft_probs: G, the drafter's probability of its draft.
        target_probs: G, the target's probability of the draft (temperature 1).
        target_entropy: G, entropy of the target's distribution in nats.
        target_margin: G, difference of the target's two largest logits.

    The last four are empty unless details were asked for; `draft_probs` also for
    proposers that give no probabilities.
    """

    prompt: int
    cycle: int
    start: int
    acceptance_length: int
    draft_tokens: list[int]
    target_tokens: list[int]
    accepted: list[bool]
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    other_ms: float = 0.0
    draft_probs: list[float] = field(default_factory=list)
    target_probs: list[float] = field(default_factory=list)
    target_entropy: list[float] = field(default_factory=list)
    target_margin: list[float] = field(default_factory=list)


@dataclass
class DecodeTrace:
    """Header and cycles of one generation.

    Attributes:
        header: proposer, block size, sampling, seed, dtype, versions, prompts.
        cycles: in the order in which they ran.
    """

    header: dict
    cycles: list[CycleRecord] = field(default_factory=list)

    @property
    def acceptance_lengths(self) -> list[list[int]]:
        """Tokens per cycle, one list per prompt (bonus counted)."""
        lengths: list[list[int]] = [[] for _ in range(self.header["num_prompts"])]
        for cycle in self.cycles:
            lengths[cycle.prompt].append(cycle.acceptance_length)
        return lengths

    @property
    def tau(self) -> float:
        """Mean acceptance length, pooled over all cycles; nan without cycles."""
        if not self.cycles:
            return float("nan")
        return sum(c.acceptance_length for c in self.cycles) / len(self.cycles)

    def to_frame(self):
        """pandas DataFrame with one row per drafted slot.

        Columns: prompt, cycle, start, slot (1..G), draft_token, target_token,
        accepted, draft_prob, target_prob, target_entropy, target_margin, and the
        cycle's acceptance_length, draft_ms, verify_ms and other_ms. Cycles without
        drafts have no row; `cycles_frame` has them.
        """
        import pandas as pd

        rows = []
        for c in self.cycles:
            for j, token in enumerate(c.draft_tokens):
                rows.append(
                    {
                        "prompt": c.prompt,
                        "cycle": c.cycle,
                        "start": c.start,
                        "slot": j + 1,
                        "draft_token": token,
                        "target_token": c.target_tokens[j],
                        "accepted": c.accepted[j],
                        "draft_prob": _at(c.draft_probs, j),
                        "target_prob": _at(c.target_probs, j),
                        "target_entropy": _at(c.target_entropy, j),
                        "target_margin": _at(c.target_margin, j),
                        "acceptance_length": c.acceptance_length,
                        "draft_ms": c.draft_ms,
                        "verify_ms": c.verify_ms,
                        "other_ms": c.other_ms,
                    }
                )
        return pd.DataFrame(rows)

    def cycles_frame(self):
        """pandas DataFrame with one row per cycle."""
        import pandas as pd

        names = ("prompt", "cycle", "start", "acceptance_length")
        times = ("draft_ms", "verify_ms", "other_ms")
        return pd.DataFrame(
            [
                {n: getattr(c, n) for n in names}
                | {"num_drafts": len(c.draft_tokens)}
                | {n: getattr(c, n) for n in times}
                for c in self.cycles
            ]
        )

    def to_jsonl(self, path: str | Path) -> None:
        """Write the header and one line per cycle, atomically."""
        lines = [json.dumps({"format": FORMAT, **self.header}, ensure_ascii=False)]
        lines += [json.dumps(asdict(cycle)) for cycle in self.cycles]
        write_text_atomically(Path(path), "\n".join(lines) + "\n")

    @classmethod
    def from_jsonl(cls, path: str | Path) -> DecodeTrace:
        """Read what `to_jsonl` wrote.

        Raises:
            DFlashLabError: another kind of file.
        """
        try:
            # Not splitlines(): JSON strings may hold other line separators than \n.
            lines = Path(path).read_text(encoding="utf-8").rstrip("\n").split("\n")
            header = json.loads(lines[0]) if lines[0] else {}
            if header.pop("format") != FORMAT:
                raise KeyError
            return cls(header, [CycleRecord(**json.loads(line)) for line in lines[1:]])
        except OSError as error:
            raise DFlashLabError(f"cannot read {path}: {error.strerror}") from None
        except (KeyError, TypeError, AttributeError):
            raise DFlashLabError(
                f"{path} is not a trace of format {FORMAT!r}"
            ) from None
        except ValueError as error:
            raise DFlashLabError(f"{path} is damaged: {error}") from None


def _at(values: list[float], index: int) -> float | None:
    return values[index] if index < len(values) else None

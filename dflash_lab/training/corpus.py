"""The target writes the drafter's training text.

A drafter is worth what it knows of its own target, so the answers it learns from are
the target's, greedy or sampled. `write_corpus` decodes many prompts at a time: rows
that finish give their place to the next prompts, and every finished answer is one
JSON line, flushed at once, so a killed run loses only the answers in flight and the
same call goes on where it stopped.

Leaves out: where prompts come from (`prompts.py`), and several processes or servers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from dflash_lab.errors import DFlashLabError
from dflash_lab.sampling import (
    STREAM_TARGET,
    Sampling,
    inverse_cdf_pick,
    uniform_noise,
    warped_log_probs,
)
from dflash_lab.target import Target


def write_corpus(
    target: Target,
    prompts: Sequence[dict],
    path: Path,
    *,
    stop_token_ids: Sequence[int],
    header: dict,
    temperatures: Sequence[float] = (0.0,),
    max_new_tokens: int = 256,
    batch_size: int = 64,
    time_limit: float | None = None,
) -> int:
    """Let the target answer prompts in batches; resume if the file exists.

    Args:
        target: writes the answers.
        prompts: each with `prompt_ids` (list of ids); other fields are kept.
        path: JSON Lines file; its first line is the header.
        stop_token_ids: an answer ends with the first of these (it is kept).
        header: what made the corpus (target, template, seed, ...).
        temperatures: prompt i is answered at `temperatures[i % len]`.
        max_new_tokens: longest answer.
        batch_size: rows decoded together.
        time_limit: seconds after which the call returns with what it has.

    Returns:
        Answers in the file.

    Raises:
        DFlashLabError: the file was made with another header or other prompts.
    """
    header = {
        **header,
        "target_fingerprint": target.fingerprint(),
        "stop_token_ids": list(stop_token_ids),
        "temperatures": list(temperatures),
        "max_new_tokens": max_new_tokens,
    }
    done = _open_for_resume(path, header, prompts)
    todo = [i for i in range(len(prompts)) if i not in done]
    started, tokens = time.monotonic(), 0
    progress = tqdm(total=len(prompts), initial=len(done), unit="answer", desc="corpus")
    with open(path, "a", encoding="utf-8") as file:

        def finish(index: int, answer: list[int], truncated: bool) -> None:
            nonlocal tokens
            row = {"index": index, **prompts[index], "answer_ids": answer}
            row["temperature"] = temperatures[index % len(temperatures)]
            row["truncated"] = truncated
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            done.add(index)
            tokens += len(answer)
            rate = tokens / (time.monotonic() - started)
            progress.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
            progress.update()

        writer = _BatchWriter(
            target, prompts, temperatures, set(stop_token_ids), max_new_tokens, finish
        )
        writer.run(todo, batch_size, lambda: _time_is_up(started, time_limit))
    progress.close()
    return len(done)


def self_written_prompts(
    target: Target,
    pair_header: Sequence[int],
    path: Path,
    count: int,
    *,
    stop_token_ids: Sequence[int],
    decode: Callable[[Sequence[int]], str],
    batch_size: int = 256,
) -> list[str]:
    """Prompts that the target writes when it is given only the user's header.

    An instruct target was trained on what users ask, and sampling behind the opening
    of a user's turn gives a varied picture of it (Magpie, arXiv:2406.08464).

    Args:
        target: an instruct model.
        pair_header: ids of its chat template up to where the user's words begin.
        path: corpus file of the raw draws, kept for resuming.
        count: how many to draw.
        stop_token_ids: end of the user's turn.
        decode: ids to text, without special tokens.
        batch_size: rows decoded together.

    Returns:
        Distinct prompts of three words or more that ended by themselves.
    """
    draws = [{"kind": "self", "prompt_ids": list(pair_header)} for _ in range(count)]
    write_corpus(
        target,
        draws,
        path,
        stop_token_ids=stop_token_ids,
        header={"self_written_prompts": True},
        temperatures=(1.0,),
        max_new_tokens=72,
        batch_size=batch_size,
    )
    rows = sorted(read_corpus(path)[1], key=lambda row: row["index"])
    texts = [decode(row["answer_ids"]).strip() for row in rows if not row["truncated"]]
    return [text for text in dict.fromkeys(texts) if len(text.split()) >= 3]


def read_corpus(path: Path) -> tuple[dict, list[dict]]:
    """Header and rows of a corpus file; a half-written last line is left out.

    Raises:
        DFlashLabError: no such file, or no header in it.
    """
    if not Path(path).is_file():
        raise DFlashLabError(f"no corpus at {path}; write one with write_corpus")
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    # A killed writer can leave a last line without its end; it is not a row.
    rows = [json.loads(line) for line in lines[:-1] if line]
    if not rows or "corpus" not in rows[0]:
        raise DFlashLabError(f"{path} does not start with a corpus header")
    return rows[0]["corpus"], rows[1:]


def _time_is_up(started: float, limit: float | None) -> bool:
    return limit is not None and time.monotonic() - started > limit


def _open_for_resume(path: Path, header: dict, prompts: Sequence[dict]) -> set[int]:
    """Indices already answered; writes the header of a new file."""
    path = Path(path)
    if not path.exists() or "\n" not in path.read_text(encoding="utf-8"):
        path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"corpus": header}, ensure_ascii=False)
        path.write_text(line + "\n", encoding="utf-8")
        return set()
    found, rows = read_corpus(path)
    if found != json.loads(json.dumps(header)):
        raise DFlashLabError(
            f"{path} was written with other settings ({found}); choose another file "
            "or delete it"
        )
    for row in rows:
        index = row["index"]
        same = index < len(prompts) and row["prompt_ids"] == list(
            prompts[index]["prompt_ids"]
        )
        if not same:
            raise DFlashLabError(
                f"{path} holds an answer to another prompt {index} than it is to get "
                "now; the prompts have changed, choose another file or delete it"
            )
    text = path.read_text(encoding="utf-8")
    if not text.endswith("\n"):
        path.write_text(text[: text.rindex("\n") + 1], encoding="utf-8")
    return {row["index"] for row in rows}


class _BatchWriter:
    """Plain batched decoding in which finished rows take the next prompts."""

    def __init__(
        self,
        target: Target,
        prompts: Sequence[dict],
        temperatures: Sequence[float],
        stop_ids: set[int],
        max_new_tokens: int,
        finish: Callable[[int, list[int], bool], None],
    ):
        self.target, self.prompts, self.temperatures = target, prompts, temperatures
        self.stop_ids, self.limit, self.finish = stop_ids, max_new_tokens, finish

    @torch.inference_mode()
    def run(self, todo: list[int], batch_size: int, stop: Callable[[], bool]) -> None:
        # Similar lengths together: the longest row decides what attention costs.
        queue = sorted(todo, key=lambda i: -len(self.prompts[i]["prompt_ids"]))
        if not queue:
            return
        size = min(batch_size, len(queue))
        longest = len(self.prompts[queue[0]]["prompt_ids"])
        cache = self.target.new_cache(size, longest + self.limit + 1)
        # Each slot is None (free) or [prompt index, tokens so far].
        slots: list[tuple[int, list[int]] | None] = [None] * size
        while not stop():
            free = [row for row, slot in enumerate(slots) if slot is None]
            # Refilling one row at a time would hold up the others at every finish.
            if queue and len(free) >= max(1, len(slots) // 16):
                self._refill(slots, free, queue, cache)
                self._release(slots)
                continue
            if len(free) == len(slots):
                return
            if not queue and len(free) > len(slots) // 2:
                busy = [row for row, slot in enumerate(slots) if slot is not None]
                cache.keep_rows(torch.tensor(busy))
                slots = [slots[row] for row in busy]
            self._step(slots, cache)
            self._release(slots)

    def _refill(self, slots: list, free: list[int], queue: list[int], cache) -> None:
        """Give free rows the next prompts; those of one length share a pass."""
        groups: dict[int, list[tuple[int, int]]] = {}
        for row in free[: len(queue)]:
            index = queue.pop()
            length = len(self.prompts[index]["prompt_ids"])
            groups.setdefault(length, []).append((row, index))
        for length, members in groups.items():
            rows = torch.tensor([row for row, _ in members])
            indices = [index for _, index in members]
            ids = torch.tensor([self.prompts[i]["prompt_ids"] for i in indices])
            positions = torch.arange(length).expand(len(members), -1)
            logits = self.target.forward(ids, positions, cache, rows, logits_to_keep=1)
            first = self._pick(logits, positions[:, -1:] + 1, indices)
            for row, index, token in zip(rows.tolist(), indices, first, strict=True):
                slots[row] = (index, [token])

    def _step(self, slots: list, cache) -> None:
        # Free rows compute along, at their position 0, which is overwritten later:
        # leaving them out would copy the other rows' whole cache.
        indices = [slot[0] if slot else 0 for slot in slots]
        ids = torch.tensor([[slot[1][-1] if slot else 0] for slot in slots])
        positions = torch.tensor(
            [
                [len(self.prompts[slot[0]]["prompt_ids"]) + len(slot[1]) - 1]
                if slot
                else [0]
                for slot in slots
            ]
        )
        logits = self.target.forward(ids, positions, cache)
        tokens = self._pick(logits, positions + 1, indices)
        for slot, token in zip(slots, tokens, strict=True):
            if slot:
                slot[1].append(token)

    def _pick(self, logits: Tensor, positions: Tensor, indices: list[int]) -> list[int]:
        """One token per row; rows at one temperature are drawn together."""
        temperatures = [self.temperatures[i % len(self.temperatures)] for i in indices]
        picked = torch.zeros(len(indices), dtype=torch.long)
        for temperature in set(temperatures):
            rows = torch.tensor([t == temperature for t in temperatures])
            if temperature == 0:
                chosen = logits[rows, 0].argmax(dim=-1)
            else:
                log_probs = warped_log_probs(logits[rows, 0], Sampling(temperature))
                seeds = torch.tensor(indices)[rows]
                noise = uniform_noise(seeds, positions[rows], 1, STREAM_TARGET)
                uniform = noise[:, 0, 0].to(log_probs.device)
                chosen = inverse_cdf_pick(log_probs, uniform)
            picked[rows] = chosen.cpu()
        return picked.tolist()

    def _release(self, slots: list) -> None:
        """Hand over finished answers and free their rows."""
        for row, slot in enumerate(slots):
            if slot is None:
                continue
            index, answer = slot
            ended = answer[-1] in self.stop_ids
            if ended or len(answer) >= self.limit:
                self.finish(index, answer, not ended)
                slots[row] = None

"""Plain decoding of many prompts at once: finished rows take the next prompts.

A prompt's tokens but the last enter the cache in one padded pass, together with those
of prompts of similar length; from then on every row takes one token a step, its
prompt's last one first. What padding leaves in the cache lies behind the row's own
position, where the mask hides it until it is written over.

Leaves out: files (`corpus_file.py`), and speculation: it pays for few rows, not for
hundreds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dflash_lab.conditioning.cache import PositionCache
from dflash_lab.speculative.sampling import (
    STREAM_TARGET,
    Sampling,
    check_finite,
    inverse_cdf_sample,
    most_likely,
    uniform_noise,
    warped_log_probs,
)
from dflash_lab.target.target import Target

# Tokens of one prefill pass, padding included: enough to keep the processor busy, and
# a bound for its memory.
PREFILL_TOKENS = 8192
# A row of the batch: free (None), or a prompt's index and its answer so far.
Slot = tuple[int, list[int]] | None


class BatchWriter:
    """Decodes prompts in a batch of rows.

    Args:
        target: the model.
        prompts: rows with `prompt_ids`.
        samplings: prompt i is answered with `samplings[i % len]`.
        stop_ids: an answer ends with the first of these.
        max_new_tokens: longest answer.
        finish: called with index, answer ids and whether the limit cut the answer.
    """

    def __init__(
        self,
        target: Target,
        prompts: Sequence[dict],
        samplings: Sequence[Sampling],
        stop_ids: set[int],
        max_new_tokens: int,
        finish: Callable[[int, list[int], bool], None],
    ):
        self.target, self.samplings = target, samplings
        self.prompt_ids = [prompt["prompt_ids"] for prompt in prompts]
        self.stop_ids, self.limit, self.finish = stop_ids, max_new_tokens, finish

    @torch.inference_mode()
    def run(
        self, todo: Sequence[int], batch_size: int, stop: Callable[[], bool]
    ) -> None:
        """Answer the prompts `todo`, `batch_size` at a time, until done or `stop()`."""
        # Similar lengths together: the longest row decides what attention costs.
        queue = sorted(todo, key=lambda i: -len(self.prompt_ids[i]))
        if not queue:
            return
        size = min(batch_size, len(queue))
        longest = len(self.prompt_ids[queue[0]])
        cache = self.target.new_cache(size, longest + self.limit)
        slots: list[Slot] = [None] * size
        while not stop():
            free = [row for row, slot in enumerate(slots) if slot is None]
            # Refilling one row at a time would hold up the others at every finish.
            if queue and len(free) >= max(1, len(slots) // 16):
                self._refill(slots, free, queue, cache)
            elif len(free) == len(slots):
                return
            elif not queue and len(free) > len(slots) // 2:
                busy = [row for row, slot in enumerate(slots) if slot is not None]
                cache.keep_rows(torch.tensor(busy))
                slots = [slots[row] for row in busy]
            self._step(slots, cache)
            self._release(slots)

    def _refill(
        self, slots: list[Slot], free: list[int], queue: list[int], cache: PositionCache
    ) -> None:
        """Give free rows the next prompts."""
        taken = [(row, queue.pop()) for row in free[: len(queue)]]
        for row, index in taken:
            slots[row] = (index, [])
        while taken:
            # The queue yields longer and longer prompts: the last one sets the width.
            count, width = 0, 0
            for _, index in taken:
                width = len(self.prompt_ids[index]) - 1
                if count and (count + 1) * width > PREFILL_TOKENS:
                    break
                count += 1
            self._prefill(taken[:count], cache)
            taken = taken[count:]

    def _prefill(self, members: list[tuple[int, int]], cache: PositionCache) -> None:
        contexts = [self.prompt_ids[index][:-1] for _, index in members]
        width = max(map(len, contexts))
        if width == 0:
            return
        ids = torch.tensor([[*c, *[0] * (width - len(c))] for c in contexts])
        positions = torch.arange(width).expand(len(members), -1)
        rows = torch.tensor([row for row, _ in members])
        self.target.forward(ids, positions, cache, rows, logits_to_keep=1)

    def _step(self, slots: list[Slot], cache: PositionCache) -> None:
        """One token for every row."""
        # Free rows compute along, at their position 0, which is overwritten later:
        # leaving them out would copy the other rows' whole cache.
        indices, last, positions = [], [], []
        for slot in slots:
            index, answer = slot or (0, [])
            prompt = self.prompt_ids[index]
            indices.append(index)
            last.append(answer[-1] if answer else prompt[-1])
            positions.append(len(prompt) + len(answer) - 1 if slot else 0)
        at = torch.tensor(positions)[:, None]
        logits = self.target.forward(torch.tensor(last)[:, None], at, cache)
        tokens = self._choose(logits[:, 0], at + 1, indices)
        for slot, token in zip(slots, tokens, strict=True):
            if slot:
                slot[1].append(token)

    def _choose(
        self, logits: Tensor, positions: Tensor, indices: list[int]
    ) -> list[int]:
        """One token per row: (B, V) logits, (B, 1) positions being chosen."""
        # One search over the logits as they are; only sampled rows are copied and
        # turned into probabilities.
        tokens = most_likely(logits)
        check_finite(logits)
        by_row = [self.samplings[i % len(self.samplings)] for i in indices]
        for sampling in {s for s in by_row if not s.greedy}:
            rows = torch.tensor([n for n, s in enumerate(by_row) if s == sampling])
            log_probs = warped_log_probs(logits[rows.to(logits.device)], sampling)
            # The prompt's number in the lower half and the corpus' seed in the upper.
            keys = torch.tensor(indices)[rows] + (sampling.seed << 32)
            noise = uniform_noise(keys, positions[rows], 1, STREAM_TARGET)[:, 0, 0]
            chosen = inverse_cdf_sample(log_probs, noise.to(log_probs.device))
            tokens[rows.to(tokens.device)] = chosen
        return tokens.tolist()

    def _release(self, slots: list[Slot]) -> None:
        """Hand over finished answers and free their rows."""
        for row, slot in enumerate(slots):
            if slot is None:
                continue
            index, answer = slot
            ended = answer[-1] in self.stop_ids
            if ended or len(answer) >= self.limit:
                self.finish(index, answer, not ended)
                slots[row] = None

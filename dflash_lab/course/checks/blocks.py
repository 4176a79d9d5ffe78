"""Checks of lesson 02, from whole texts to blocks.

Leaves out: models; masks and counts only.
"""

from __future__ import annotations

from collections.abc import Callable

from dflash_lab.course.checks.core import (
    call,
    leading,
    passed,
    same_list,
    tried_on,
)

_SIZES = ((4, 1), (6, 2), (6, 3), (4, 4))


def check_block_of(block_of: Callable) -> None:
    """`block_of(place, block_size)`: the number of a place's block, from 0."""
    sizes = (1, 3, 8)
    for size in sizes:
        expected = [number for number in range(4) for _ in range(size)]
        case = f"block_size={size}, places 0 to {len(expected) - 1}"
        found = [call(block_of, i, size, case=case) for i in range(len(expected))]
        same_list(found, expected, case, "place")
    passed(block_of, len(sizes))


def check_clean_sees(clean_sees: Callable) -> None:
    """`clean_sees(row, column, block_size)`: clean rows see no later block."""
    _check_table(clean_sees, lambda mine, theirs: theirs <= mine)


def check_noisy_sees_clean(noisy_sees_clean: Callable) -> None:
    """`noisy_sees_clean(row, column, block_size)`: noisy rows see earlier blocks."""
    _check_table(noisy_sees_clean, lambda mine, theirs: theirs < mine)


def check_noisy_sees_noisy(noisy_sees_noisy: Callable) -> None:
    """`noisy_sees_noisy(row, column, block_size)`: noisy rows see their own block."""
    _check_table(noisy_sees_noisy, lambda mine, theirs: theirs == mine)


def _check_table(sees: Callable, rule: Callable[[int, int], bool]) -> None:
    for length, size in _SIZES:
        blocks = [number for number in range(length) for _ in range(size)][:length]
        for row in range(length):
            case = f"{length} places, block_size={size}, row {row}"
            found = [call(sees, row, c, size, case=case) for c in range(length)]
            expected = [rule(blocks[row], theirs) for theirs in blocks]
            same_list(found, expected, case, "column")
    passed(sees, len(_SIZES))


@tried_on([(32, 8, 4), (32, 8, 8), (32, 1, 1), (32, 32, 4), (32, 4, 9)])
def check_passes(tokens: int, block_size: int, steps: int) -> int:
    """`passes(tokens, block_size, steps)`: passes over the model for a whole text.

    Each block takes its denoising steps, at most one per token of it, and all blocks
    but the last take one more pass, which puts the clean block into the cache.
    """
    count = 0
    for block in range(tokens // block_size):
        left = block_size
        for _ in range(steps):
            if left > 0:
                count += 1
                left -= max(1, block_size // steps) if steps < block_size else 1
        count += block < tokens // block_size - 1
    return count


@tried_on(
    [
        ([1, 2, 3], [1, 2, 3]),
        ([1, 2, 3], [1, 9, 3]),
        ([5, 2, 3], [1, 2, 3]),
        ([7], [7]),
        ([4, 4, 4, 4], [4, 4, 4, 5]),
    ]
)
def check_leading(drafts: list[int], truth: list[int]) -> int:
    """`leading(drafts, truth)`: places that agree before the first that does not."""
    return leading(mine == right for mine, right in zip(drafts, truth, strict=True))

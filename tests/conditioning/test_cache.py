"""The position cache against plain recomputation."""

from __future__ import annotations

import pytest
import torch
from helpers import random_target

from dflash_lab.conditioning.cache import PositionCache, causal_mask
from dflash_lab.errors import DFlashLabError


def test_mask_shows_own_and_earlier_positions_only():
    positions = torch.tensor([[2, 3], [0, 1]])
    for window in (None, 1, 2):
        mask = causal_mask(positions, 5, window)
        for b in range(2):
            for t in range(2):
                for k in range(5):
                    p = int(positions[b, t])
                    seen = k <= p and (window is None or k > p - window)
                    assert bool(mask[b, 0, t, k]) is seen


@torch.inference_mode()
def test_rejected_rows_are_never_seen_again():
    """Junk written ahead is overwritten or hidden, row by row."""
    target = random_target(0)
    noise = torch.Generator().manual_seed(0)
    ids = torch.randint(61, (3, 20), generator=noise)
    expected = target.model(ids).logits
    cache = target.new_cache(3, 40)
    lengths = torch.tensor([4, 7, 2])
    for row in range(3):
        n = int(lengths[row])
        target.forward(
            ids[row : row + 1, :n], torch.arange(n)[None], cache, torch.tensor([row])
        )
    while int(lengths.min()) < 15:
        positions = lengths[:, None] + torch.arange(5)
        block = torch.randint(61, (3, 5), generator=noise)
        keep = torch.randint(1, 5, (3,), generator=noise)
        for row in range(3):
            n, k = int(lengths[row]), int(keep[row])
            block[row, :k] = ids[row, n : n + k]
        logits = target.forward(block, positions, cache)
        for row in range(3):
            n, k = int(lengths[row]), int(keep[row])
            k = min(k, 20 - n)
            torch.testing.assert_close(
                logits[row, :k], expected[row, n : n + k], rtol=1e-3, atol=1e-3
            )
        lengths = torch.minimum(lengths + keep, torch.tensor(15))


def test_row_and_grid_writes_agree():
    noise = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 3, 4, 5, generator=noise)
    positions = torch.tensor([[0, 1, 2, 3], [2, 3, 4, 5]])
    grid = PositionCache(2, 8)
    grid.write_at(positions)
    grid.write(keys, values, 0)
    by_row, by_token = PositionCache(2, 8), PositionCache(2, 8)
    for row in range(2):
        by_row.write_at(positions[row : row + 1], torch.tensor([row]))
        by_row.write(keys[row : row + 1], values[row : row + 1], 0)
    rows = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    by_token.write_at(positions.reshape(8, 1), rows)
    flat = [
        x.transpose(1, 2).reshape(8, 1, 3, 5).transpose(1, 2) for x in (keys, values)
    ]
    by_token.write(*flat, 0)
    for other in (by_row, by_token):
        for a, b in zip(grid.read(0, 6), other.read(0, 6), strict=True):
            assert torch.equal(a, b)
    assert grid.rows_written == by_row.rows_written == by_token.rows_written == 8


def test_rows_are_read_in_the_order_asked_for():
    cache = PositionCache(2, 2)
    rows = torch.tensor([1, 0])
    cache.write_at(torch.tensor([[0], [0]]), rows)
    new = torch.tensor([5.0, 7.0]).view(2, 1, 1, 1)
    keys, _ = cache.update(new, new, 0)
    assert keys.flatten().tolist() == [5.0, 7.0]
    assert cache.read(0, 1)[0].flatten().tolist() == [7.0, 5.0]


def test_keeping_rows_keeps_their_contents():
    cache = PositionCache(3, 4)
    cache.write_at(torch.tensor([[0], [1], [2]]))
    cache.write(torch.arange(3.0).view(3, 1, 1, 1), torch.zeros(3, 1, 1, 1), 0)
    cache.lengths = torch.tensor([1, 2, 3])
    cache.keep_rows(torch.tensor([2, 0]))
    keys, _ = cache.read(0, 4)
    assert keys[:, 0, :, 0].tolist() == [[0, 0, 2, 0], [0, 0, 0, 0]]
    assert cache.lengths.tolist() == [3, 1]


def test_a_position_outside_is_refused():
    with pytest.raises(DFlashLabError, match="position 8 does not fit"):
        PositionCache(1, 8).write_at(torch.tensor([[8]]))

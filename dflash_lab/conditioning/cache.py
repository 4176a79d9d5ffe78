"""Key/value caches that are written by position and never shrink.

Every row of the batch owns `capacity` slots, one per absolute position. A forward pass
writes its keys and values at the positions of its tokens; whatever a rejected draft
left behind lies at positions that the mask hides until they are written again. So
"crop" is only a smaller length, rows of one batch may have different lengths, and no
step allocates or copies the past. With `static_span` set, a pass reads so many
positions whatever they hold and asks no tensor for its value, so a device never waits
for the host. `PositionCache` is handed to any `transformers`
decoder as its cache; the drafter stores its context keys and values in one too.

Leaves out: recurrent state (linear attention, Mamba), which cannot be taken back by
position, and eviction for sliding windows: the window is a mask here, not a ring.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_lab.errors import DFlashLabError


class PositionCache:
    """Keys and values of B rows and `capacity` positions, one pair per layer.

    Buffers are allocated at the first write of a layer, in that write's dtype and
    device, so that layers may differ in head count and head dimension.

    Args:
        batch_size: number of rows B.
        capacity: number of positions per row.

    Attributes:
        lengths: (B,) int64 on the CPU, valid positions of each row; what lies beyond
            is stale. The owner sets it: writing does not know what will be accepted.
        static_span: positions that a pass reads; None for as many as were written.
            With it, positions are on the buffers' device and a pass writes all rows.
        rows_written: number of (row, position) pairs written to layer 0 so far, those
            of static passes left out. Tests
            use it to show that nothing is computed twice.
    """

    # Asked by `transformers` before it decides how to run a model with this cache.
    is_compileable = False
    is_sliding = (False,)

    def __init__(self, batch_size: int, capacity: int):
        self.batch_size = batch_size
        self.capacity = capacity
        self.lengths = torch.zeros(batch_size, dtype=torch.long)
        self.static_span: int | None = None
        self.rows_written = 0
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._rows = torch.arange(batch_size)
        self._positions: Tensor | None = None
        self._whole = True
        self._span = 0

    def write_at(self, positions: Tensor, rows: Tensor | None = None) -> int:
        """Say where the next forward pass writes.

        Args:
            positions: (R, T) int64, absolute position of each token.
            rows: (R,) int64, the cache row of each batch row; all rows if None. A row
                may be named more than once, for different positions.

        Returns:
            L, the number of leading positions the pass will see: `max(positions) + 1`.

        Raises:
            DFlashLabError: a position lies outside the capacity.
        """
        self._positions = positions
        self._whole = rows is None
        device = positions.device if self.static_span is not None else None
        if rows is None:
            rows = torch.arange(self.batch_size, device=device)
        self._rows = rows
        if self.static_span is not None:
            self._span = self.static_span
            return self._span
        self._span = int(positions.max()) + 1
        if self._span > self.capacity:
            raise DFlashLabError(
                f"position {self._span - 1} does not fit a cache of {self.capacity} "
                "positions; allocate a larger one"
            )
        return self._span

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values and return all it may look at.

        This is the call that a `transformers` attention layer makes.

        Args:
            keys: (R, H, T, d) for the rows and positions given to `write_at`.
            values: (R, H, T, d').
            layer_idx: the layer.

        Returns:
            (R, H, L, d) and (R, H, L, d'), with stale positions still to be masked.
        """
        self.write(keys, values, layer_idx)
        return self.read(layer_idx, self._span, None if self._whole else self._rows)

    def write(self, keys: Tensor, values: Tensor, layer_idx: int) -> None:
        """Write without reading: keys (R, H, T, d) at the announced positions."""
        assert self._positions is not None, "call write_at first"
        rows, positions = self._rows, self._positions
        for store, new in ((self._keys, keys), (self._values, values)):
            if layer_idx not in store:
                shape = (self.batch_size, new.shape[1], self.capacity, new.shape[3])
                store[layer_idx] = new.new_zeros(shape)
            buffer = store[layer_idx]
            if self.static_span is not None and len(rows) == 1 == self.batch_size:
                buffer.index_copy_(2, positions[0], new)
            elif self.static_span is not None:
                buffer[rows[:, None], :, positions] = new.transpose(1, 2)
            elif len(rows) == 1 and _is_range(positions[0]):
                # One row, consecutive positions: a plain slice is a single copy.
                start = int(positions[0, 0])
                buffer[int(rows[0]), :, start : start + new.shape[2]] = new[0]
            else:
                buffer[rows[:, None], :, positions] = new.transpose(1, 2)
        if layer_idx == 0 and self.static_span is None:
            self.rows_written += positions.numel()

    def read(
        self, layer_idx: int, span: int, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `span` positions of some rows, or of all."""
        which: slice | Tensor = slice(None)
        if rows is not None:
            which = rows
            if len(rows) == 1:  # a view; indexing would copy
                which = slice(int(rows[0]), int(rows[0]) + 1)
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        return keys[which, :, :span], values[which, :, :span]

    def span_before(self, start: Tensor) -> int:
        """Positions to read for rows whose next token stands at `start` (B,)."""
        return int(start.max()) if self.static_span is None else self.static_span

    def reads_exactly(self, start: Tensor) -> bool:
        """Whether no row reads past its own `start`; said without asking a tensor."""
        return self.static_span is None and len(start) == 1

    def keep_rows(self, rows: Tensor) -> None:
        """Keep only these rows, in this order; the others' memory is released."""
        self.lengths = self.lengths[rows]
        for store in (self._keys, self._values):
            for layer_idx in store:
                store[layer_idx] = store[layer_idx][rows]
        self.batch_size = len(rows)
        self._rows = torch.arange(self.batch_size)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Longest valid length over the rows; `transformers` asks for it."""
        return int(self.lengths.max())

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the next query; unused as long as positions are passed."""
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length, layer_idx: int = 0) -> tuple[int, int]:
        """Key length and offset; unused as long as a ready mask is passed."""
        return self._span, 0


def _is_range(positions: Tensor) -> bool:
    first, last = int(positions[0]), int(positions[-1])
    return last - first == len(positions) - 1


def causal_mask(
    positions: Tensor, span: int, window: int | None = None, device=None
) -> Tensor:
    """Which cached positions each query may see, by position alone.

    Args:
        positions: (B, T) int64, absolute position of each query.
        span: L, number of key positions.
        window: sliding window that counts the query itself; None for full attention.

    Returns:
        (B, 1, T, L) bool, True where attention is allowed. A query sees keys at its
        own position and before; stale keys of a rejected draft lie after every
        committed query or were overwritten, so they are never seen.
    """
    query = positions.to(device)[:, None, :, None]
    key = torch.arange(span, device=device)[None, None, None, :]
    mask = key <= query
    if window is not None:
        mask = mask & (key > query - window)
    return mask

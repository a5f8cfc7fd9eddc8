"""The KV cache of the torch engine: one row of keys and values for each running response.

Owns the layout of keys and values; has no notion of requests or sampling. Rows keep their place
while others join and leave; a row's token at position p lies in column p, so rows of different
lengths need no padding to each other and no re-alignment, only a mask.
"""

from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

FIRST_COLUMNS = 64  # the cache doubles from here to the longest sequence allowed


@dataclass(slots=True)
class RowPlacement:
    """The rows and columns that one forward pass writes and may read. `rows` [b], `columns` [b, q],
    both int64."""

    rows: torch.Tensor
    columns: torch.Tensor
    # = rows[0]; rows are consecutive
    first: int
    # columns that are read
    width: int


class RowCache(Cache):
    """Preallocated [rows, heads, columns, head dim] for each layer, grown by doubling."""

    def __init__(self, num_layers: int, num_rows: int, max_columns: int) -> None:
        self._max_columns = max_columns
        self._columns = min(FIRST_COLUMNS, max_columns)
        self.row_layers = [RowLayer(num_rows, self._columns) for _ in range(num_layers)]
        super().__init__(layers=list(self.row_layers))

    @property
    def scratch(self) -> int:
        """The column that padding writes to and that is never read."""
        return self._columns

    def reserve(self, columns: int) -> None:
        """Make room for sequences of so many tokens."""
        if columns > self._columns:
            while self._columns < columns:
                self._columns = min(2 * self._columns, self._max_columns)
            for layer in self.row_layers:
                layer.widen(self._columns)

    def give_back(self) -> int:
        """Free all rows, while none is used, and return their bytes. The next pass allocates them
        again, as the first one did."""
        self._columns = min(FIRST_COLUMNS, self._max_columns)
        return sum(layer.give_back(self._columns) for layer in self.row_layers)

    def place(self, placement: RowPlacement) -> None:
        """Set where the next forward pass writes and reads, in all layers."""
        for layer in self.row_layers:
            layer.placement = placement

    def copy_rows(self, source: torch.Tensor, target: torch.Tensor, columns: int) -> None:
        """Copy the first `columns` tokens of row `source[i]` to row `target[i]`; overlaps are
        allowed."""
        for layer in self.row_layers:
            for kv in (layer.keys, layer.values):
                if kv is not None:
                    kv[target, :, :columns] = kv[source, :, :columns]


class RowLayer(CacheLayerMixin):
    """One layer's part, behind the interface by which transformers' attention reads and writes a
    cache."""

    def __init__(self, num_rows: int, columns: int) -> None:
        super().__init__()
        self._num_rows = num_rows
        self._columns = columns
        self.placement: RowPlacement | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate at the first update: only then are heads, dimensions and dtype known for any
        model."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = self._allocate(key_states)
        self.values = self._allocate(value_states)
        self.is_initialized = True

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        # Zeros, not arbitrary memory: a NaN in a masked column would still reach the result as 0 *
        # NaN.
        return like.new_zeros((self._num_rows, like.shape[1], self._columns + 1, like.shape[3]))

    def widen(self, columns: int) -> None:
        old, self._columns = self._columns, columns
        if self.keys is not None and self.values is not None:
            keys, values = self.keys, self.values
            self.keys, self.values = self._allocate(keys), self._allocate(values)
            self.keys[:, :, :old] = keys[:, :, :old]
            self.values[:, :, :old] = values[:, :, :old]

    def give_back(self, columns: int) -> int:
        num_bytes = sum(kv.nbytes for kv in (self.keys, self.values) if kv is not None)
        self.keys = self.values = None
        self.is_initialized, self._columns = False, columns
        return num_bytes

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values [b, heads, q, dim]; return all to read, [b, heads, width,
        dim]."""
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        assert self.placement is not None
        assert self.keys is not None
        assert self.values is not None
        p = self.placement
        if key_states.shape[2] == 1:
            columns = p.columns[:, 0]
            self.keys[p.rows, :, columns] = key_states[:, :, 0]
            self.values[p.rows, :, columns] = value_states[:, :, 0]
        else:
            self.keys[p.rows[:, None], :, p.columns] = key_states.transpose(1, 2)
            self.values[p.rows[:, None], :, p.columns] = value_states.transpose(1, 2)
        last = p.first + len(p.rows)
        return self.keys[p.first : last, :, : p.width], self.values[p.first : last, :, : p.width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        width = self.placement.width if self.placement else 0
        return max(width, query_length), 0

    def get_seq_length(self) -> int:
        return self.placement.width if self.placement else 0

    def get_max_length(self) -> int:
        return -1

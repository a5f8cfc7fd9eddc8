"""Rows of the torch engine's cache with the keys and values of ended turns of episodes.

Owns which rows behind the running ones are kept until a running response needs them, the oldest
first. Copies nothing: it returns which rows to copy where.
"""

from collections.abc import Sequence

from lightrl.engine.requests import Running, num_reusable


class ParkedRows:
    """The parked rows among `num_rows`, each by its response. Running and parked responses together
    never have more rows than there are."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._rows: dict[str, tuple[int, list[int]]] = {}  # row and tokens; the oldest first

    def num_reusable(self, r: Running) -> int:
        """Return for how many of the tokens of `r` its parked row has keys and values."""
        parked = self._rows.get(r.response)
        return num_reusable(parked[1], r.tokens) if parked else 0

    def park(self, ended: Sequence[Running], num_running: int) -> list[int]:
        """Return a row for each turn that ends, of those that are free behind `num_running`. The
        last ones, which responses that start reach last."""
        rows = self._free(num_running)[: len(ended)]
        for row, r in zip(rows, ended, strict=True):
            self._rows[r.response] = row, r.tokens
        return rows

    def join(
        self, first: int, joining: Sequence[Running], context_of: Sequence[int]
    ) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Make room for responses that start in the rows from `first` on, and park them no longer.

        The context of `joining[i]` is computed in row `first + context_of[i]`. Returns how many
        tokens of each context need not be, once these copies are made: (from row, to row, tokens).
        """
        reused, source = [0] * (max(context_of) + 1), dict[int, int]()
        for r, context in zip(joining, context_of, strict=True):
            num = self.num_reusable(r)
            row, _ = self._rows.pop(r.response, (0, []))
            if num > reused[context]:
                reused[context], source[context] = num, row
        copies = [(row, first + context, reused[context]) for context, row in source.items()]
        end = first + len(joining)
        for response in list(self._rows)[: max(0, len(self._rows) - (self._num_rows - end))]:
            del self._rows[response]
        free = self._free(end)
        for response, (row, tokens) in self._rows.items():
            if row < end:
                copies.append((row, free.pop(0), len(tokens)))
                self._rows[response] = copies[-1][1], tokens
        return reused, copies

    def clear(self) -> None:
        """Forget all rows: their keys and values are of other weights, or gone."""
        self._rows.clear()

    def _free(self, num_running: int) -> list[int]:
        parked = {row for row, _ in self._rows.values()}
        return [row for row in reversed(range(num_running, self._num_rows)) if row not in parked]

"""Staging: all that a step needs on the device, in one piece of memory and one copy.

A step's inputs are a dozen small arrays. Sent one at a time they are a dozen calls, and from ordinary memory each of
them makes the CPU wait. So they are laid out end to end in pinned memory, which the GPU can read by itself:

    pinned host memory   [ids | positions | slots | ... | block table]    filled with numpy
                            |  one asynchronous copy
    device memory        [ids | positions | slots | ... | block table]    torch sees pieces of it

Two pinned buffers take turns: while one is being copied, the other is filled for the next step. A third is not needed,
as no more than two steps are ever under way.
"""

import numpy as np
import torch

ALIGNMENT = 16  # bytes; the widest load of a GPU


class Staging:
    """Copies arrays of any shapes to the device. On a CPU they are where they are needed already."""

    def __init__(self, device: torch.device):
        self.device = device
        self._pinned = [torch.empty(0, dtype=torch.uint8)] * 2
        self._turn = 0

    def upload(self, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """The arrays as tensors on the device, by name."""
        if self.device.type == "cpu":
            return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        offsets, size = layout(arrays)
        buffer = self._next_buffer(size)
        host = buffer.numpy()
        for name, array in arrays.items():
            piece = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            host[offsets[name] : offsets[name] + array.nbytes] = piece
        return views(buffer[:size].to(self.device, non_blocking=True), arrays)

    def _next_buffer(self, size: int) -> torch.Tensor:
        """The one that was not filled last, with room for `size` bytes."""
        self._turn = 1 - self._turn
        if len(self._pinned[self._turn]) < size:
            self._pinned[self._turn] = torch.empty(2 * size, dtype=torch.uint8, pin_memory=True)
        return self._pinned[self._turn]


def layout(arrays: dict[str, np.ndarray]) -> tuple[dict[str, int], int]:
    """Where each array begins, in bytes, and how long they are together."""
    offsets, end = {}, 0
    for name, array in arrays.items():
        offsets[name] = end
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def views(buffer: torch.Tensor, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """The pieces of a uint8 tensor in which `upload` puts these arrays, with their dtypes and shapes."""
    offsets, _ = layout(arrays)
    found = {}
    for name, array in arrays.items():
        piece = buffer[offsets[name] : offsets[name] + array.nbytes]
        found[name] = piece.view(torch.from_numpy(array[:0]).dtype).view(array.shape)
    return found


class TableRows:
    """Block tables as the rows of one array. A row is written only where its table has changed since the last step."""

    def __init__(self):
        self._rows = np.zeros((0, 0), dtype=np.int32)
        self._tables: list[list[int]] = []  # per row, whose it was in the last step
        self._written: list[tuple[int, int]] = []  # of that: how many blocks, and the last one

    def fill(self, tables: list[list[int]]) -> np.ndarray:
        """[N, blocks of the longest] int32, filled up with 0. Valid until the next call."""
        self._make_room(len(tables), max(map(len, tables)))
        for i, table in enumerate(tables):
            count, last = self._written[i]
            if self._tables[i] is table and len(table) == count and table[-1] == last:
                continue
            # A table grows at its end, and only its last block may have been exchanged, for a copy of it.
            kept = count - 1 if self._tables[i] is table and 0 < count <= len(table) else 0
            self._rows[i, kept : len(table)] = table[kept:]
            self._rows[i, len(table) : max(count, len(table))] = 0
            self._tables[i], self._written[i] = table, (len(table), table[-1])
        return self._rows[: len(tables), : max(map(len, tables))]

    def _make_room(self, num_rows: int, width: int) -> None:
        rows, columns = self._rows.shape
        if num_rows > rows or width > columns:
            grown = np.zeros((max(num_rows, rows), max(2 * width, columns)), dtype=np.int32)
            grown[:rows, :columns] = self._rows
            self._rows = grown
            self._tables += [[] for _ in range(len(grown) - rows)]
            self._written += [(0, -1)] * (len(grown) - rows)

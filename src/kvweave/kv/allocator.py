"""Who owns which slot.

| state | owners | may be written |
|---|---|---|
| free | none | no |
| private | one request | yes, by that request |
| shared | request(s) and/or the prefix tree | no |

``allocate`` prefers one contiguous run, because attention reads a contiguous context without copying.
"""

from __future__ import annotations

import bisect

import numpy as np
import torch
from torch import Tensor

from kvweave.errors import IntegrityError


class SlotAllocator:
    """Reference-counted slots. Free slots are kept as sorted, disjoint, maximal runs."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._refs = np.zeros(num_slots, dtype=np.int32)
        self._runs: list[tuple[int, int]] = [(0, num_slots)] if num_slots else []
        self._free = num_slots

    @property
    def num_free(self) -> int:
        return self._free

    def allocate(self, n: int, behind: int | None = None) -> Tensor | None:
        """``n`` slots with one owner, int64 [n]; None if fewer are free.

        Those directly ``behind`` a slot if they are free, so that a context that grows stays one run; else the best fitting
        run, else the largest runs.
        """
        if n > self._free:
            return None
        if n == 0:
            return torch.empty(0, dtype=torch.int64)
        if behind is not None and self._is_free(behind + 1, behind + 1 + n):
            self._take(behind + 1, behind + 1 + n)
            return torch.arange(behind + 1, behind + 1 + n)
        fitting = [r for r in self._runs if r[1] - r[0] >= n]
        taken: list[tuple[int, int]] = []
        if fitting:
            start, _ = min(fitting, key=lambda r: r[1] - r[0])
            taken.append((start, start + n))
        else:
            missing = n
            for start, stop in sorted(self._runs, key=lambda r: r[0] - r[1]):
                size = min(missing, stop - start)
                taken.append((start, start + size))
                missing -= size
                if not missing:
                    break
        for start, stop in taken:
            self._take(start, stop)
        return torch.cat([torch.arange(a, b) for a, b in taken])

    def share(self, slots: Tensor) -> None:
        """One more owner for each slot; the slots become read-only."""
        index = slots.numpy()
        if (self._refs[index] < 1).any():
            raise IntegrityError("a free slot cannot be shared")
        self._refs[index] += 1

    def release(self, slots: Tensor) -> None:
        """One owner less for each slot; slots without owners become free."""
        index = slots.numpy()
        if (self._refs[index] < 1).any():
            raise IntegrityError("a slot was released twice")
        self._refs[index] -= 1
        freed = np.sort(index[self._refs[index] == 0])
        for run in np.split(freed, np.flatnonzero(np.diff(freed) != 1) + 1):
            if run.size:
                self._give(int(run[0]), int(run[-1]) + 1)

    def writable(self, slots: Tensor) -> bool:
        """True if every slot has exactly one owner."""
        return bool((self._refs[slots.numpy()] == 1).all())

    def owners(self, slots: Tensor) -> np.ndarray:
        """Number of owners of each slot, int32 [n]."""
        return self._refs[slots.numpy()]

    def check_integrity(self) -> None:
        """Raises ``IntegrityError`` unless the free runs are exactly the slots without owners."""
        free = np.zeros(self.num_slots, dtype=bool)
        previous = -1
        for start, stop in self._runs:
            if not previous < start < stop <= self.num_slots:
                raise IntegrityError("free runs overlap, touch or are out of order")
            free[start:stop] = True
            previous = stop
        if (self._refs < 0).any() or not np.array_equal(free, self._refs == 0) or self._free != int(free.sum()):
            raise IntegrityError("free runs and reference counts disagree")

    def _is_free(self, start: int, stop: int) -> bool:
        i = bisect.bisect_right(self._runs, (start, self.num_slots + 1)) - 1
        return i >= 0 and stop <= self._runs[i][1]

    def _take(self, start: int, stop: int) -> None:
        i = bisect.bisect_right(self._runs, (start, self.num_slots + 1)) - 1
        a, b = self._runs.pop(i)
        self._runs[i:i] = [r for r in ((a, start), (stop, b)) if r[0] < r[1]]
        self._refs[start:stop] = 1
        self._free -= stop - start

    def _give(self, start: int, stop: int) -> None:
        self._free += stop - start
        i = bisect.bisect_left(self._runs, (start, stop))
        if i < len(self._runs) and self._runs[i][0] == stop:
            stop = self._runs.pop(i)[1]
        if i and self._runs[i - 1][1] == start:
            i -= 1
            start = self._runs.pop(i)[0]
        self._runs.insert(i, (start, stop))

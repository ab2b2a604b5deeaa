"""Which runs of a row of equal granules are free."""

from bisect import bisect_left


class Space:
    """Free runs of ``total`` granules; the smallest run that fits is cut."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"at least one granule, not {total}")
        self.total = total
        self.free = total
        self._runs: list[tuple[int, int]] = [(0, total)]  # (start, length), ascending, never touching

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(start, length) of every free run, ascending."""
        return tuple(self._runs)

    @property
    def largest(self) -> int:
        """Length of the longest free run."""
        return max((length for _, length in self._runs), default=0)

    def take(self, count: int) -> int | None:
        """Start of ``count`` adjacent granules, no longer free; None where no run is long enough."""
        best: int | None = None
        for index, (_, length) in enumerate(self._runs):
            if length >= count and (best is None or length < self._runs[best][1]):
                best = index
        if best is None:
            return None
        start, length = self._runs[best]
        if length == count:
            del self._runs[best]
        else:
            self._runs[best] = (start + count, length - count)
        self.free -= count
        return start

    def give(self, start: int, count: int) -> None:
        """Free granules again; raises ValueError where some are free already or do not exist."""
        index = bisect_left(self._runs, (start, 0))
        before = self._runs[index - 1] if index else None
        after = self._runs[index] if index < len(self._runs) else None
        end = start + count
        overlaps = (before is not None and sum(before) > start) or (after is not None and after[0] < end)
        if start < 0 or count < 1 or end > self.total or overlaps:
            raise ValueError(f"granules {start}..{end} of {self.total} are not all taken")
        first, last = index, index
        if before is not None and sum(before) == start:
            first, start = index - 1, before[0]
        if after is not None and after[0] == end:
            last, end = index + 1, sum(after)
        self._runs[first:last] = [(start, end - start)]
        self.free += count


def longest(runs: list[tuple[int, int]]) -> int:
    """The longest stretch without a gap in ``runs`` of (start, length) that do not overlap."""
    best, end, stretch = 0, -1, 0
    for start, length in sorted(runs):
        stretch = stretch + length if start == end else length
        end = start + length
        best = max(best, stretch)
    return best

"""Do the books of a store agree with its memory? Run when idle, and by every test."""

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from hw.kv.lease import Block, Staged
from hw.kv.memory import GRANULE
from hw.kv.space import Space
from hw.kv.transports.base import BlockKey, IntegrityError


def check_books(
    space: Space,
    words: npt.NDArray[np.uint64],
    blocks: Mapping[int, Block],
    staged: Iterable[Staged],
    visible: Mapping[BlockKey, Block],
    leases: Mapping[int, Block],
    used: Counter[bytes],
) -> None:
    """Raises ``IntegrityError`` at the first contradiction.

    ``words``: ``[granules, 2]``, generation and bytes of what starts there; ``blocks`` by offset; ``leases`` by number;
    ``used``: granules by salt.
    """
    holders: list[Block | Staged] = [*blocks.values(), *staged]
    spans = sorted([(held.granules.start, len(held.granules)) for held in holders] + list(space.runs))
    at = 0
    for start, length in [*spans, (space.total, 0)]:
        if start != at:
            raise IntegrityError(f"granule {min(start, at)} is {'lost' if start > at else 'given out twice'}")
        at = start + length
    written = {int(g) * GRANULE: (int(words[g, 0]), int(words[g, 1])) for g in np.nonzero(words[:, 0])[0]}
    if written != {block.offset: (block.generation, block.nbytes) for block in blocks.values()}:
        raise IntegrityError("the generations in memory are not those of the blocks")
    if {number: block for block in blocks.values() for number in block.leases} != dict(leases):
        raise IntegrityError("leases and blocks disagree")
    for block in blocks.values():
        if visible.get(block.key) is not block and not block.leases:
            raise IntegrityError("a block that nobody can reach keeps its room")
    for key, block in visible.items():
        if blocks.get(block.offset) is not block or block.key != key:
            raise IntegrityError("a visible block is not in the memory")
    holding: Counter[bytes] = Counter()
    for held in holders:
        holding[held.key.salt if isinstance(held, Block) else held.salt] += len(held.granules)
    if holding != used:
        raise IntegrityError("what the tenants use does not add up")

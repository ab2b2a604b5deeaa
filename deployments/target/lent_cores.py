"""Cores the engine uses itself as long as no draft works on them.

On a machine with few cores a draft model and the target cannot both have all of them, but each would waste the other's: so
the engine's threads are bound to all cores, and while a draft works the engine leaves it the last ones by computing
with fewer threads. OpenMP takes the new count at its next parallel region.
"""

import torch


class LentCores:
    """Switches the number of threads of the calling thread's parallel regions."""

    def __init__(self, own_threads: int) -> None:
        """``own_threads``: how many remain while cores are lent; 0: nothing is ever lent."""
        self._all = torch.get_num_threads()
        self._own = min(own_threads, self._all) if own_threads else self._all
        self._now = self._all

    def use(self, all_of_them: bool) -> None:
        threads = self._all if all_of_them else self._own
        if threads != self._now:
            # vLLM's CPU worker replaces torch.set_num_threads to keep others from undoing its binding; this keeps to it
            torch._C.set_num_threads(threads)
            self._now = threads

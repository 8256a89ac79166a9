"""Reference solution of ``lfu_eviction``."""

from __future__ import annotations


class LFUWithAging:
    """Least frequently used with dynamic aging (LFU-DA, Arlitt et al. 2000).

    ``age`` is the frequency at which the last run went. Whatever is used from then on is counted from there, so that a
    run that nobody uses any more is overtaken after as many evictions as it had uses, at most.
    """

    def __init__(self) -> None:
        self.age = 0

    def on_use(self, now: int, uses: int) -> tuple[int, int]:
        """Frequency above the age, and the time of the use to decide among equals."""
        return self.age + uses, now

    def on_evict(self, priority: tuple[int, int]) -> None:
        """The age is the highest frequency that was not enough."""
        self.age = max(self.age, priority[0])

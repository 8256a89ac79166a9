"""The scheduler's three decisions, each a protocol: queue order, the make-up of a step, and admission."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from minisgl.registry import Registry, build
from minisgl.request import Request

MAX_BYPASS = 64  # later requests that may be admitted before an earlier one; after that, all wait for it

# -- the queue -----------------------------------------------------------------------------------------------------


class QueuePolicy(Protocol):
    """Orders the waiting requests."""

    def order(self, waiting: Sequence[Request], cached_len: Callable[[Request], int]) -> Iterable[Request]:
        """Return a permutation of ``waiting``, which is in order of arrival but for turns of clients and bodies; change
        nothing.

        ``cached_len`` tells how many tokens of a request the prefix cache holds now.
        """
        ...


@runtime_checkable
class UsageListener(Protocol):
    """Extra methods of a `QueuePolicy` that depends on how much each user has been served."""

    def on_admit(self, request: Request) -> None:
        """Called when a request first gets a slot; its prompt beyond ``cached_tokens`` will be computed."""
        ...

    def on_finish(self, request: Request) -> None:
        """Called when a request has ended for any reason, with all its ``output``; it may never have started."""
        ...


class FirstComeFirstServed:
    """Order of arrival."""

    def order(self, waiting: Sequence[Request], cached_len: Callable[[Request], int]) -> Iterable[Request]:
        return waiting


class LongestPrefixMatch:
    """Longest cached prefix first, so that it is used before it is evicted (SGLang, Zheng et al. 2024).

    A request that was bypassed too often comes first, so that none starves. A queue over ``limit`` keeps its order of
    arrival, because matching every request at every step takes too long.
    """

    limit = 128

    def order(self, waiting: Sequence[Request], cached_len: Callable[[Request], int]) -> Iterable[Request]:
        if len(waiting) > self.limit:
            return waiting
        return sorted(waiting, key=lambda request: (request.bypassed < MAX_BYPASS, -cached_len(request)))


QUEUE_POLICIES: Registry[Callable[[], QueuePolicy]] = {"fcfs": FirstComeFirstServed, "lpm": LongestPrefixMatch}


# -- the batch -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """What a `BatchPolicy` may look at: numbers of requests by state, and recent steps."""

    decoding: int
    prefilling: int
    waiting: int
    prefill_steps: int  # since the last step with a decode row
    max_prefill_tokens: int  # the engine's limit for a step


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the next step is made of: at most ``prefill_tokens`` prompt tokens, and decode rows beside them or not.

    Decode rows always run if there turn out to be no prefill rows.
    """

    prefill_tokens: int
    decode: bool


class BatchPolicy(Protocol):
    """Decides what each step is made of."""

    def plan(self, load: SchedulerLoad) -> StepPlan:
        """Plan the next step; with nothing to decode, the plan must prefill."""
        ...


class PrefillFirst:
    """Steps are prefill or decode, and prefill goes first, since a full decode batch has throughput.

    After ``patience`` prefill steps in a row the decode rows get one, or new prompts would stall them for ever. Two
    keep their pause short, and more of them in a row save next to no time.
    """

    patience = 2

    def plan(self, load: SchedulerLoad) -> StepPlan:
        if load.decoding and load.prefill_steps >= self.patience:
            return StepPlan(prefill_tokens=0, decode=True)
        return StepPlan(prefill_tokens=load.max_prefill_tokens, decode=False)


class Mixed:
    """Every step has all decode rows, and prefill chunks beside them (Sarathi-Serve, Agrawal et al. 2024)."""

    def plan(self, load: SchedulerLoad) -> StepPlan:
        return StepPlan(prefill_tokens=load.max_prefill_tokens, decode=True)


class Static:
    """Static batching, for comparison: a batch fills, runs until its last request is done, and only then refills."""

    def plan(self, load: SchedulerLoad) -> StepPlan:
        still_filling = not load.decoding or load.prefill_steps > 0
        return StepPlan(prefill_tokens=load.max_prefill_tokens if still_filling else 0, decode=False)


BATCH_POLICIES: Registry[Callable[[], BatchPolicy]] = {"prefill-first": PrefillFirst, "mixed": Mixed, "static": Static}


# -- admission -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemoryDemand:
    """Memory, in pages, when a request asks to start."""

    now: int  # new pages for the tokens that the request has
    at_most: int  # new pages if it generates as many tokens as it may
    available: int  # pages that can be allocated now
    promised: int  # pages that running requests still need if they all generate as many tokens as they may
    running: int  # number of running requests


class AdmissionPolicy(Protocol):
    """Decides which requests may start."""

    def can_admit(self, demand: MemoryDemand) -> bool:
        """Whether the request may start; must be True for one that fits an otherwise idle engine."""
        ...


class Optimistic:
    """Start a request that fits now, with one page to spare for each running one; preempt if that fails (vLLM)."""

    def can_admit(self, demand: MemoryDemand) -> bool:
        return demand.now + demand.running <= demand.available


class Reserve:
    """Start only requests that are sure to finish. Nothing is preempted, but short answers leave memory unused."""

    def can_admit(self, demand: MemoryDemand) -> bool:
        return demand.at_most + demand.promised <= demand.available


ADMISSION_POLICIES: Registry[Callable[[], AdmissionPolicy]] = {"optimistic": Optimistic, "reserve": Reserve}


# -- all three -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Policies:
    """One policy of each kind; the defaults are those of `EngineConfig`."""

    queue: QueuePolicy = field(default_factory=FirstComeFirstServed)
    batch: BatchPolicy = field(default_factory=PrefillFirst)
    admission: AdmissionPolicy = field(default_factory=Optimistic)

    @property
    def usage_listener(self) -> UsageListener | None:
        """The queue policy, if it has the methods of a `UsageListener`."""
        queue: object = self.queue
        return queue if isinstance(queue, UsageListener) else None

    @classmethod
    def named(
        cls, queue_policy: str = "fcfs", batch_policy: str = "prefill-first", admission_policy: str = "optimistic"
    ) -> Policies:
        """Build from the options of the same names; `ConfigError` for an unknown name or a class of another kind."""
        return cls(
            build("queue_policy", queue_policy, QUEUE_POLICIES, QueuePolicy),
            build("batch_policy", batch_policy, BATCH_POLICIES, BatchPolicy),
            build("admission_policy", admission_policy, ADMISSION_POLICIES, AdmissionPolicy),
        )

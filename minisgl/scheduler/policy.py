"""The three decisions of a scheduler, each behind a protocol of its own.

`QueuePolicy`: which waiting request comes first. `BatchPolicy`: what a step is made of. `AdmissionPolicy`: whether a
request may start, given the memory that is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, runtime_checkable

from minisgl.errors import ConfigError
from minisgl.registry import Registry, resolve
from minisgl.request import Request

MAX_BYPASS = 64
"""How often later requests may be admitted before an earlier one; after that, all wait for it."""


P = TypeVar("P")


# -- the queue -----------------------------------------------------------------------------------------------------


class QueuePolicy(Protocol):
    """Orders the waiting requests."""

    def order(self, waiting: Sequence[Request], cached_len: Callable[[Request], int]) -> Iterable[Request]:
        """Return a permutation of ``waiting``, and change nothing.

        Args:
            waiting: requests in order of arrival.
            cached_len: tokens of a request that the prefix cache holds now.
        """
        ...


@runtime_checkable
class UsageListener(Protocol):
    """Methods of a `QueuePolicy` that depends on how much each user has been served. The scheduler calls them."""

    def on_admit(self, request: Request) -> None:
        """Called when a request gets its slot for the first time; its prompt beyond ``cached_tokens`` will be
        computed."""
        ...

    def on_finish(self, request: Request) -> None:
        """Called when a request has ended, for any reason, with all of its ``output``; it may never have started."""
        ...


class FirstComeFirstServed:
    """Order of arrival."""

    def order(self, waiting: Sequence[Request], cached_len: Callable[[Request], int]) -> Iterable[Request]:
        return waiting


class LongestPrefixMatch:
    """Longest cached prefix first, so that it is used before it is evicted (SGLang, Zheng et al. 2024).

    A request that was bypassed too often goes before all, or a stream of longer prefixes would starve it. Matching
    every waiting request at every step does not scale, so a queue over ``limit`` keeps its order of arrival.
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
    """What a `BatchPolicy` may look at.

    Args:
        decoding, prefilling, waiting: requests in these states.
        prefill_steps: steps since the last one with a decode row.
        max_prefill_tokens: the engine's limit on prompt tokens a step.
    """

    decoding: int
    prefilling: int
    waiting: int
    prefill_steps: int
    max_prefill_tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the next step is made of.

    Args:
        prefill_tokens: most prompt tokens to feed; 0 means no prefill.
        decode: whether decode rows run in the same step as prefill rows. They always run if there are no prefill rows.
    """

    prefill_tokens: int
    decode: bool


class BatchPolicy(Protocol):
    """Decides what a step is made of."""

    def plan(self, load: SchedulerLoad) -> StepPlan:
        """Plan the next step; with nothing to decode, the plan must prefill."""
        ...


class PrefillFirst:
    """Steps are prefill or decode, and prefill goes first: it fills the decode batch, which is where throughput is.

    A stream of new prompts would stall running requests for ever, so after ``patience`` prefill steps in a row the
    decode rows get one.
    """

    patience = 8

    def plan(self, load: SchedulerLoad) -> StepPlan:
        if load.decoding and load.prefill_steps >= self.patience:
            return StepPlan(prefill_tokens=0, decode=True)
        return StepPlan(prefill_tokens=load.max_prefill_tokens, decode=False)


class Mixed:
    """Every step has all decode rows, and prefill chunks beside them (Sarathi-Serve, Agrawal et al. 2024)."""

    def plan(self, load: SchedulerLoad) -> StepPlan:
        return StepPlan(prefill_tokens=load.max_prefill_tokens, decode=True)


class Static:
    """The strawman: a batch is filled, runs until its last request is done, and only then is the next one filled."""

    def plan(self, load: SchedulerLoad) -> StepPlan:
        still_filling = not load.decoding or load.prefill_steps > 0
        return StepPlan(prefill_tokens=load.max_prefill_tokens if still_filling else 0, decode=False)


BATCH_POLICIES: Registry[Callable[[], BatchPolicy]] = {"prefill-first": PrefillFirst, "mixed": Mixed, "static": Static}


# -- admission -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemoryDemand:
    """Memory, in pages, when a request asks to start.

    Args:
        now: new pages it needs for the tokens it has.
        at_most: new pages it needs if it generates all it may.
        available: pages that can be allocated now.
        promised: pages that the running requests will still need if they all generate all they may.
        running: number of running requests.
    """

    now: int
    at_most: int
    available: int
    promised: int
    running: int


class AdmissionPolicy(Protocol):
    """Decides whether a request may start."""

    def can_admit(self, demand: MemoryDemand) -> bool:
        """Return whether the request may start; it must be True for one that fits an otherwise idle engine."""
        ...


class Optimistic:
    """Start a request that fits now, with one page to spare for each running one; preempt if that fails (vLLM)."""

    def can_admit(self, demand: MemoryDemand) -> bool:
        return demand.now + demand.running <= demand.available


class Reserve:
    """Start only what is sure to finish: nothing is ever preempted, and memory is left unused by short answers."""

    def can_admit(self, demand: MemoryDemand) -> bool:
        return demand.at_most + demand.promised <= demand.available


ADMISSION_POLICIES: Registry[Callable[[], AdmissionPolicy]] = {"optimistic": Optimistic, "reserve": Reserve}


# -- all three -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Policies:
    """One policy of each kind; those that are not given are the defaults of `EngineConfig`."""

    queue: QueuePolicy = field(default_factory=FirstComeFirstServed)
    batch: BatchPolicy = field(default_factory=PrefillFirst)
    admission: AdmissionPolicy = field(default_factory=Optimistic)

    @property
    def usage_listener(self) -> UsageListener | None:
        """The queue policy, if it listens."""
        queue: object = self.queue
        return queue if isinstance(queue, UsageListener) else None

    @classmethod
    def named(
        cls, queue_policy: str = "fcfs", batch_policy: str = "prefill-first", admission_policy: str = "optimistic"
    ) -> Policies:
        """Build from the options of the same names, each a name of its table or ``"module:Class"``.

        Raises:
            ConfigError: a name is unknown, or its class lacks the method of the protocol.
        """
        return cls(
            _build("queue_policy", queue_policy, QUEUE_POLICIES, "order"),
            _build("batch_policy", batch_policy, BATCH_POLICIES, "plan"),
            _build("admission_policy", admission_policy, ADMISSION_POLICIES, "can_admit"),
        )


def _build(option: str, name: str, table: Registry[Callable[[], P]], method: str) -> P:
    make = resolve(option, name, table)
    if not hasattr(make, method):
        raise ConfigError(f"{option}: {name!r} has no method {method!r}; is it a policy of another kind?")
    return make()

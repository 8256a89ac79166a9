"""The three decisions of a scheduler, each a small object that can be exchanged.

*Order*: which waiting request is looked at first. *Composition*: what a step is made of. *Admission*: whether a
request may start, given the memory that is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from minisgl.core.registry import Registry
from minisgl.core.request import Request
from minisgl.errors import ConfigError

MAX_BYPASS = 64
"""How often later requests may be admitted before an earlier one; after that, all wait for it."""

# -- order ---------------------------------------------------------------------------------------------------------


class Order(Protocol):
    """Decides in which order waiting requests are considered."""

    def arrange(self, waiting: Sequence[Request], cached_len: Callable[[Request], int]) -> Iterable[Request]:
        """A permutation of ``waiting``, which is in order of arrival. ``cached_len`` tells the tokens of a request
        that the prefix cache has now."""
        ...


@runtime_checkable
class Account(Protocol):
    """What an `Order` may have besides, if it depends on whom the engine has served, and how much.

    The scheduler tells it; `Order.arrange` changes nothing.
    """

    def on_admit(self, request: Request) -> None:
        """A request has got its slot for the first time; its prompt, less its ``cached_tokens``, will be computed."""
        ...

    def on_finish(self, request: Request) -> None:
        """A request has ended, for whatever reason, with all of its ``output``; it may never have been admitted."""
        ...


class NoAccount:
    """Keeps no books."""

    def on_admit(self, request: Request) -> None:
        pass

    def on_finish(self, request: Request) -> None:
        pass


ORDERS: Registry[Callable[[], Order]] = Registry("order_policy")


@ORDERS.register("fcfs")
class FirstComeFirstServed:
    """Order of arrival."""

    def arrange(self, waiting: Sequence[Request], cached_len: Callable[[Request], int]) -> Iterable[Request]:
        return waiting


@ORDERS.register("lpm")
class LongestPrefixMatch:
    """Longest cached prefix first, so that it is used before it is evicted (SGLang, Zheng et al. 2024).

    A request that was bypassed too often goes before all, or a stream of longer prefixes would starve it. Matching
    every waiting request at every step does not scale, so a queue over ``limit`` is taken as it comes.
    """

    limit = 128

    def arrange(self, waiting: Sequence[Request], cached_len: Callable[[Request], int]) -> Iterable[Request]:
        if len(waiting) > self.limit:
            return waiting
        return sorted(waiting, key=lambda request: (request.bypassed < MAX_BYPASS, -cached_len(request)))


# -- composition ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """What a composition may look at.

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
class Plan:
    """What the next step is made of.

    Args:
        prefill_tokens: most prompt tokens to feed; 0 means no prefill.
        decode: whether decode rows run in the same step as prefill rows. They always run if there are no prefill rows.
    """

    prefill_tokens: int
    decode: bool


class Composition(Protocol):
    """Decides what a step is made of."""

    def plan(self, load: Load) -> Plan: ...


COMPOSITIONS: Registry[Callable[[], Composition]] = Registry("composition_policy")


@COMPOSITIONS.register("prefill-first")
class PrefillFirst:
    """Steps are prefill or decode, and prefill goes first: it fills the decode batch, which is where throughput is.

    A stream of new prompts would stall running requests for ever, so after ``patience`` prefill steps in a row the
    decode rows get one.
    """

    patience = 8

    def plan(self, load: Load) -> Plan:
        if load.decoding and load.prefill_steps >= self.patience:
            return Plan(prefill_tokens=0, decode=True)
        return Plan(prefill_tokens=load.max_prefill_tokens, decode=False)


@COMPOSITIONS.register("mixed")
class Mixed:
    """Every step has all decode rows, and prefill chunks beside them (Sarathi-Serve, Agrawal et al. 2024)."""

    def plan(self, load: Load) -> Plan:
        return Plan(prefill_tokens=load.max_prefill_tokens, decode=True)


@COMPOSITIONS.register("static")
class Static:
    """The strawman: a batch is filled, runs until its last request is done, and only then is the next one filled."""

    def plan(self, load: Load) -> Plan:
        still_filling = not load.decoding or load.prefill_steps > 0
        return Plan(prefill_tokens=load.max_prefill_tokens if still_filling else 0, decode=False)


# -- admission -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Demand:
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


class Admission(Protocol):
    """Decides whether a request may start. It must say yes to one that fits an otherwise idle engine."""

    def admits(self, demand: Demand) -> bool: ...


ADMISSIONS: Registry[Callable[[], Admission]] = Registry("admission_policy")


@ADMISSIONS.register("optimistic")
class Optimistic:
    """Start whatever fits now, with one page of room for each running request; preempt if that was too bold (vLLM)."""

    def admits(self, demand: Demand) -> bool:
        return demand.now + demand.running <= demand.available


@ADMISSIONS.register("reserve")
class Reserve:
    """Start only what is sure to finish: nothing is ever preempted, and memory is left unused by short answers."""

    def admits(self, demand: Demand) -> bool:
        return demand.at_most + demand.promised <= demand.available


# -- all three -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Policy:
    """One of each."""

    order: Order
    composition: Composition
    admission: Admission

    @property
    def account(self) -> Account:
        """The order, if it keeps books."""
        order: object = self.order
        return order if isinstance(order, Account) else NoAccount()

    @classmethod
    def parse(cls, spec: str) -> Policy:
        """Build from names separated by commas, e.g. ``"lpm,mixed"``; kinds that are not named take their default.

        A name that is not registered is a path ``module:Class``; its kind is told by the method that it has.

        Raises:
            ConfigError: a name is unknown, or two of one kind are given.
        """
        parts: dict[str, Any] = {}
        for name in filter(None, (name.strip() for name in spec.split(","))):
            kind, part = _make(name)
            if kind in parts:
                raise ConfigError(f"policy: {spec!r} names two policies for the {kind}; give one of each kind")
            parts[kind] = part
        parts = {"order": FirstComeFirstServed(), "composition": PrefillFirst(), "admission": Optimistic(), **parts}
        return cls(**parts)


_KINDS: dict[str, tuple[Registry[Any], str]] = {
    "order": (ORDERS, "arrange"),
    "composition": (COMPOSITIONS, "plan"),
    "admission": (ADMISSIONS, "admits"),
}


def _make(name: str) -> tuple[str, Any]:
    for kind, (registry, method) in _KINDS.items():
        if name in registry.names() or (":" in name and hasattr(registry.get(name), method)):
            return kind, registry.get(name)()
    known = "; ".join(f"{kind}: {', '.join(registry.names())}" for kind, (registry, _) in _KINDS.items())
    raise ConfigError(f"policy: unknown name {name!r}; choose from {known}")

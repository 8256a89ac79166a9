"""What distinguishes fair queueing from other orders: whom it serves, in an engine that has less than users want."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from minisgl.registry import resolve
from minisgl.request import Request
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.policy import QUEUE_POLICIES, Policies, QueuePolicy
from tests.contracts.counting import count_operations
from tests.scheduler.harness import Harness

CONTRACTS = {"make_policy": (QUEUE_POLICIES, QueuePolicy)}

MakePolicy = Callable[[], QueuePolicy]


@pytest.fixture
def make_policy(request: pytest.FixtureRequest) -> MakePolicy:
    return resolve("--impl", request.param, QUEUE_POLICIES)


class Engine:
    """An engine that runs few requests at a time, and a service that is measured in virtual tokens."""

    def __init__(self, policy: QueuePolicy, max_running: int = 1, prefix_cache: str = "none") -> None:
        self.harness = Harness(
            policies=Policies(queue=policy),
            max_running=max_running,
            num_pages=512,
            prefix_cache=prefix_cache,
            max_prefill_tokens=512,
        )
        self._rng = np.random.default_rng(0)

    def ask(self, user: str, count: int = 1, prompt_len: int = 4, max_tokens: int = 2) -> list[Request]:
        prompts = [self._rng.integers(0, 3, prompt_len).tolist() for _ in range(count)]
        return [self.harness.add(prompt, max_tokens=max_tokens, user=user) for prompt in prompts]

    def serve(self, count: int) -> list[Request]:
        """Run until that many more requests are done; those, in order."""
        before = len(self.harness.finished)
        while len(self.harness.finished) < before + count:
            self.harness.step()
        return list(self.harness.finished.values())[before:]


def service(requests: list[Request]) -> Counter[str]:
    """One for each prompt token that was computed and two for each token of an answer, by user."""
    result: Counter[str] = Counter()
    for request in requests:
        result[request.user] += request.prompt_len - request.cached_tokens + 2 * len(request.output)
    return result


def names(requests: list[Request]) -> Counter[str]:
    return Counter(request.user for request in requests)


class TestFairness:
    def test_a_flood_does_not_keep_others_out(self, make_policy: MakePolicy) -> None:
        engine = Engine(make_policy())
        engine.ask("flood", 60)
        engine.serve(5)
        engine.ask("guest", 10)
        guests = names(engine.serve(18))["guest"]
        assert guests in (8, 9, 10), f"two users wait, so half of 18 requests should be the guest's; {guests} were"

    def test_requests_of_a_user_keep_their_order(self, make_policy: MakePolicy) -> None:
        engine = Engine(make_policy())
        for _ in range(10):
            engine.ask("a", prompt_len=9)
            engine.ask("b", prompt_len=2)
        done = engine.serve(20)
        for user in "ab":
            uids = [request.uid for request in done if request.user == user]
            assert uids == sorted(uids), f"requests of user {user!r} overtake each other: {uids}"

    def test_one_user_is_served_in_order_of_arrival(self, make_policy: MakePolicy) -> None:
        engine = Engine(make_policy())
        asked = engine.ask("", 12)
        assert engine.serve(12) == asked, "with one user alone, requests must be served in the order of their arrival"

    @pytest.mark.parametrize("max_running", [1, 4])
    def test_long_prompts_pay_for_their_length(self, make_policy: MakePolicy, max_running: int) -> None:
        engine = Engine(make_policy(), max_running)
        engine.ask("long", 40, prompt_len=36)
        engine.ask("short", 100, prompt_len=6)
        shares = service(engine.serve(70))
        difference, limit = abs(shares["long"] - shares["short"]), 40 * (max_running + 1)
        assert difference <= limit, f"{dict(shares)} virtual tokens: {difference} apart, where at most {limit} is fair"

    @pytest.mark.parametrize("max_running", [1, 4])
    def test_long_answers_pay_for_their_length(self, make_policy: MakePolicy, max_running: int) -> None:
        engine = Engine(make_policy(), max_running)
        engine.ask("long", 40, max_tokens=18)
        engine.ask("short", 120, max_tokens=2)
        shares = service(engine.serve(70))
        difference, limit = abs(shares["long"] - shares["short"]), 40 * (max_running + 1)
        assert difference <= limit, f"{dict(shares)} virtual tokens: {difference} apart, where at most {limit} is fair"

    def test_what_the_cache_has_is_free(self, make_policy: MakePolicy) -> None:
        engine = Engine(make_policy(), prefix_cache="radix")
        for _ in range(60):
            engine.harness.add([1, 2] * 16, max_tokens=2, user="same")
        engine.ask("new", 60, prompt_len=32)
        shares = service(engine.serve(60))
        difference = abs(shares["same"] - shares["new"])
        assert difference <= 80, (
            f"{dict(shares)} virtual tokens without cached ones: {difference} apart, not at most 80"
        )

    def test_many_users(self, make_policy: MakePolicy) -> None:
        engine = Engine(make_policy(), max_running=2)
        for number in range(6):
            engine.ask(f"user {number}", 60, prompt_len=3 + 5 * number, max_tokens=1 + number)
        shares = service(engine.serve(120))
        assert len(shares) == 6, f"six users wait, and {len(shares)} of them were served"
        difference = max(shares.values()) - min(shares.values())
        assert difference <= 120, f"{dict(shares)} virtual tokens: {difference} apart, where at most 120 is fair"


class TestReturn:
    def test_time_away_earns_no_credit(self, make_policy: MakePolicy) -> None:
        """Nobody may save up service, and then keep all others waiting."""
        engine = Engine(make_policy())
        engine.ask("idle", 2)
        engine.ask("busy", 100)
        engine.serve(60)
        engine.ask("idle", 40)
        busy = names(engine.serve(20))["busy"]
        assert busy in (9, 10, 11), f"one user was away and comes back: of 20 requests, half are fair; busy got {busy}"

    def test_service_in_an_idle_engine_is_no_debt(self, make_policy: MakePolicy) -> None:
        """What nobody else wanted is not held against the user who had it."""
        engine = Engine(make_policy())
        engine.ask("early", 80)
        engine.serve(40)
        engine.ask("late", 40)
        early = names(engine.serve(20))["early"]
        assert early in (9, 10, 11), f"nobody else was there before: of 20 requests, half are fair; early got {early}"


def waiting(count: int, users: int) -> list[Request]:
    """The queue of one step; the users' requests are mixed."""
    rng = np.random.default_rng(count)
    params = SamplingParams()
    return [
        Request(uid, np.zeros(int(rng.integers(1, 50)), dtype=np.int32), params, 64, user=f"user {rng.integers(users)}")
        for uid in range(count)
    ]


class TestOperations:
    @pytest.mark.parametrize("users", [1, 20, 400])
    def test_arranging_four_times_the_queue_costs_little_more_than_four_times(
        self, make_policy: MakePolicy, users: int
    ) -> None:
        """Sorting would cost 5.2 times as much, a search for each request 16 times."""
        policy = make_policy()
        costs = [
            count_operations(partial(lambda queue: list(policy.order(queue, lambda request: 0)), waiting(count, users)))
            for count in (100, 400)
        ]
        assert costs[1] <= 7 * costs[0], f"{costs[0]} instructions for 100 requests, {costs[1]} for 400"

    def test_keeping_accounts_costs_the_same_however_many_users_there_are(self, make_policy: MakePolicy) -> None:
        policy = make_policy()
        costs = []
        for request in waiting(1000, 1000):
            costs.append(
                count_operations(lambda request=request: (policy.on_admit(request), policy.on_finish(request)))
            )
        assert max(costs) < 300, f"{max(costs)} instructions for an admission and an end"

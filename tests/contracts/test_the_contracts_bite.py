"""A suite passes for a right implementation given from outside, and fails for each wrong one, where it is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

SUITES = Path(__file__).parent
CACHES = "test_prefix_cache.py"
EVICTIONS = "test_eviction_policy.py"
BACKENDS = "test_attention_backend.py"
SAMPLERS = "test_sampler.py"
ARCHITECTURES = "test_architecture.py"
COMMUNICATORS = "test_communicator.py"
PLANES = "test_control_plane.py"
POLICIES = "test_policy.py"
STORES = "test_page_store.py"
QUANTIZERS = "test_quantizer.py"
DRAFTERS = "test_drafter.py"


class Verdict:
    """Pytest plugin that collects which tests passed and which failed, by name."""

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::")[2].partition("[")[0]
        if report.failed:
            self.failed.add(name)
        elif report.when == "call":
            self.passed.add(name)


def grade(path: str, suite: str, *options: str) -> tuple[int, Verdict]:
    verdict = Verdict()
    # The plugin that is left out collects garbage five times at the end of a run: seconds, with PyTorch loaded.
    plugins = ["-p", "no:cacheprovider", "-p", "no:unraisableexception"]
    arguments = [str(SUITES / suite), "--impl", path, "-q", *plugins, *options]
    profile = settings.get_current_profile_name()
    settings.load_profile("failing")
    try:
        return pytest.main(arguments, plugins=[verdict]), verdict
    finally:
        settings.load_profile(profile)


@pytest.mark.parametrize(
    ("path", "suite"),
    [("minisgl.kvcache.radix:RadixCache", CACHES), ("minisgl.attention.torch_backend:TorchAttention", BACKENDS)],
)
def test_a_right_one_passes(path: str, suite: str) -> None:
    status, verdict = grade(path, suite)
    assert status == pytest.ExitCode.OK
    assert len(verdict.passed) > 20
    assert not verdict.failed


@pytest.mark.parametrize(
    ("mutant", "broken"),
    [
        ("LosesLocksOnSplit", "test_lock_survives_the_division_of_its_prefix"),
        ("ClaimsDuplicates", "test_duplicates_are_answered_with_the_canonical_pages"),
        ("EvictsLocked", "test_lock_protects_the_whole_prefix"),
        ("LocksTheLastNodeAlone", "test_lock_protects_what_several_inserts_have_built"),
    ],
)
def test_a_broken_cache_fails(mutant: str, broken: str) -> None:
    status, verdict = grade(f"tests.contracts.mutants:{mutant}", CACHES)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert broken in verdict.failed
    assert "test_starts_empty" in verdict.passed, "the suite did run"


def test_a_cache_that_extends_wrongly_fails() -> None:
    status, verdict = grade("tests.contracts.mutants:ExtendsForOthersToo", "test_prefix_cache_random.py")
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "test_random_sequences_agree_with_the_model" in verdict.failed
    assert "test_eviction_follows_last_use" in verdict.passed, "the suite did run"


@pytest.mark.parametrize(
    ("mutant", "broken"),
    [
        ("Forgets", {"test_a_priority_never_falls", "test_the_tree_stays_sound"}),
        ("SearchesItsHistory", {"test_a_use_costs_the_same_however_much_is_cached"}),
    ],
)
def test_a_broken_eviction_policy_fails(mutant: str, broken: set[str]) -> None:
    status, verdict = grade(f"tests.contracts.mutants:{mutant}", EVICTIONS)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert broken <= verdict.failed
    assert "test_policies_share_nothing" in verdict.passed, "the suite did run"


@pytest.mark.parametrize(
    ("mutant", "broken"),
    [
        ("ForgetsTheConstraints", "test_a_constrained_row_takes_the_likeliest_token_that_it_may"),
        ("ConstrainsTheFirstRows", "test_a_constraint_is_of_its_row_alone"),
    ],
)
def test_a_broken_sampler_fails(mutant: str, broken: str) -> None:
    assert not {"CI", "BUILD_NUMBER"} & os.environ.keys(), "pytest would explain for minutes how lists differ"
    options = ("--tb=no", "-k", "constrain or greedy_rows")
    status, verdict = grade(f"tests.contracts.mutants:{mutant}", SAMPLERS, *options)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert broken in verdict.failed
    assert "test_greedy_rows_take_the_likeliest_token" in verdict.passed, "the suite did run"


@pytest.mark.parametrize(
    ("mutant", "suite", "broken", "passed"),
    [
        ("StarvesTheUncached", POLICIES, "test_an_order_starves_nobody", "test_an_order_serves_everybody"),
        ("HasNoPatience", POLICIES, "test_a_composition_lets_decodes_run", "test_a_composition_serves_everybody"),
        ("KeepsAPageBack", POLICIES, "test_an_idle_engine_admits_what_fits", "test_an_admission_serves_everybody"),
        (
            "RestoresBehindAGap",
            STORES,
            "test_nothing_comes_back_that_was_not_saved",
            "test_what_comes_back_is_what_was_saved",
        ),
        (
            "GathersItsOwnFirst",
            COMMUNICATORS,
            "test_all_gather_puts_side_by_side",
            "test_all_reduce_adds_up",
        ),
        (
            "CutsLongMessages",
            PLANES,
            "test_a_message_of_any_size_arrives_whole",
            "test_every_rank_gets_every_message_in_order",
        ),
        (
            "ForgetsTheSlowestRank",
            PLANES,
            "test_many_messages_while_ranks_read_at_their_own_pace",
            "test_every_rank_gets_every_message_in_order",
        ),
        (
            "ScalesAllTokensAlike",
            QUANTIZERS,
            "test_a_row_does_not_depend_on_the_others",
            "test_what_comes_back_is_near",
        ),
        ("ShrinksWeights", QUANTIZERS, "test_what_comes_back_is_near", "test_a_token_of_zeros_is_the_bias"),
        ("ForgetsTheZeroPoint", QUANTIZERS, "test_a_product_is_that_of_the_weight", "test_what_comes_back_is_near"),
        ("PacksAcrossGroups", QUANTIZERS, "test_parts_are_those_of_the_whole", "test_what_comes_back_is_near"),
        (
            "DraftsTooMuch",
            DRAFTERS,
            "test_guesses_are_few_enough_and_in_the_vocabulary",
            "test_two_drafters_share_nothing",
        ),
        (
            "DraftsForTheFirstRow",
            DRAFTERS,
            "test_rows_are_answered_in_their_order_and_by_themselves",
            "test_a_repetition_is_continued",
        ),
        (
            "BelievesItsDrafts",
            DRAFTERS,
            "test_what_was_verified_counts_and_not_what_was_guessed",
            "test_a_repetition_is_continued",
        ),
        ("RemembersRequests", DRAFTERS, "test_a_finished_request_is_forgotten", "test_a_repetition_is_continued"),
    ],
)
def test_a_broken_part_fails(mutant: str, suite: str, broken: str, passed: str) -> None:
    status, verdict = grade(f"tests.contracts.mutants:{mutant}", suite, "--tb=no", "-k", f"{broken} or {passed}")
    assert status == pytest.ExitCode.TESTS_FAILED
    assert broken in verdict.failed
    assert passed in verdict.passed - verdict.failed


def test_a_right_architecture_passes() -> None:
    status, verdict = grade("minisgl.models.architectures:Qwen3", ARCHITECTURES)
    assert status == pytest.ExitCode.OK
    assert len(verdict.passed) == 4


def test_a_broken_architecture_fails() -> None:
    status, verdict = grade("tests.contracts.mutant_architecture:GraniteForCausalLM", ARCHITECTURES)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert verdict.failed == {"test_scores_of_whole_prompts", "test_scores_of_a_prompt_in_chunks"}
    assert len(verdict.passed) == 2, "the suite did run"


@pytest.mark.parametrize(
    ("mutant", "broken", "passed"),
    [
        ("SeesTheNextToken", "test_whole_prompts", "test_decode_rows"),
        ("IgnoresTheWindow", "test_a_token_sees_its_window", "test_mixed_steps"),
        (
            "AttendsBeforeItStores",
            "test_a_row_reads_pages_that_another_row_of_the_step_writes",
            "test_rows_share_pages",
        ),
        ("RemembersTheFirstStep", "test_a_second_plan_forgets_the_first", "test_whole_prompts"),
    ],
)
def test_a_broken_backend_fails(mutant: str, broken: str, passed: str) -> None:
    status, verdict = grade(f"tests.contracts.mutants:{mutant}", BACKENDS, "--tb=no", "-k", f"{broken} or {passed}")
    assert status == pytest.ExitCode.TESTS_FAILED
    assert broken in verdict.failed
    assert passed in verdict.passed - verdict.failed


@pytest.mark.parametrize(
    ("path", "suite"),
    [
        ("minisgl.attention.torch_backend:TorchAttention", "test_attention_backend"),
        ("minisgl.scheduler.policy:PrefillFirst", "test_policy"),
    ],
)
def test_a_class_goes_to_the_suite_that_asks_for_most(
    path: str, suite: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A composition has ``plan``; so has an attention backend, and ``forward``."""
    assert grade(path, "", "--collect-only")[0] == pytest.ExitCode.OK
    lines = [line for line in capsys.readouterr().out.splitlines() if "::" in line]
    assert lines
    assert all(suite in line and path in line for line in lines)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no.such.module:Cache", "No module named 'no'"),
        ("minisgl.kvcache.radix:NoSuchCache", "has no attribute 'NoSuchCache'"),
        ("tests.contracts.mutants:__doc__", "is not a class"),
        ("minisgl.kvcache.pool:PagePool", "make_cache: lacks evict, held_pages, insert, lock, match, unlock"),
    ],
)
def test_what_cannot_be_graded_is_a_usage_error(path: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert grade(path, CACHES)[0] == pytest.ExitCode.USAGE_ERROR
    assert message in capsys.readouterr().err

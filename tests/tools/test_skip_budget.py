"""Skipped tests are counted and held to a budget."""

from __future__ import annotations

import pytest

pytest_plugins = "pytester"


SKIPS = """
    import pytest

    def test_runs(): pass

    @pytest.mark.skip(reason="too lazy")
    def test_skipped(): assert False

    @pytest.mark.xfail(reason="broken since May")
    def test_expected_to_fail(): assert False
"""


def run(pytester: pytest.Pytester, budget: str, tests: str, *options: str) -> pytest.RunResult:
    pytester.makeini("[pytest]\nmarkers =\n    gpu\n    needs")
    pytester.mkdir("tests").joinpath("skip-budget.txt").write_text(budget)
    pytester.makepyfile(tests)
    return pytester.runpytest_inprocess("-p", "tests.skip_budget", "-p", "no:cacheprovider", *options)


def test_over_the_budget_fails_and_names_each_skip(pytester: pytest.Pytester) -> None:
    result = run(pytester, "1\none is allowed", SKIPS)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["skipped: *test_skipped: *too lazy", "skipped: *broken since May", "2 skipped; *FAILED"]
    )


def test_within_the_budget_passes_and_names_each_skip(pytester: pytest.Pytester) -> None:
    result = run(pytester, "2\ntwo are allowed", SKIPS)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["skipped: *test_skipped: *too lazy", "2 skipped; tests/skip-budget.txt allows 2"])


def test_a_skipped_file_counts(pytester: pytest.Pytester) -> None:
    result = run(pytester, "0\n", "import pytest\npytest.importorskip('no_such_module')")
    assert result.ret != pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["skipped: *no_such_module*", "1 skipped; *FAILED"])


WANTS = """
    @pytest.mark.gpu
    def test_kernel(): pass

    @pytest.mark.needs("no_such_program")
    def test_page(): pass

    @pytest.mark.needs("pytest")
    def test_without(): pass
"""


def test_workers_count_as_one_run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pytester.makepyfile(test_lazy="import pytest\npytest.importorskip('no_such_module')")
    result = run(pytester, "0\n", SKIPS + WANTS, "-n2", "--without", "pytest")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "4 skipped; *FAILED",
            "1 tests marked gpu left out *",
            "1 tests left out for want of pytest",
            "1 tests need no_such_program: *",
        ]
    )


def test_a_budget_without_a_reason_is_refused(pytester: pytest.Pytester) -> None:
    result = run(pytester, "3\n", SKIPS)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*give the reason below the number*"])


@pytest.mark.parametrize("cuda", [False, True])
def test_gpu_tests_are_left_out_where_there_is_no_gpu(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, cuda: bool
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    tests = "import pytest\n@pytest.mark.gpu\ndef test_kernel(): pass\ndef test_plain(): pass"
    result = run(pytester, "0\n", tests)
    result.assert_outcomes(passed=2 if cuda else 1, deselected=0 if cuda else 1)
    result.stdout.fnmatch_lines([f"{0 if cuda else 1} tests marked gpu left out *"])


NEEDS = """
    import pytest

    @pytest.mark.needs("no_such_package")
    def test_with_package(): assert False

    @pytest.mark.needs("pytest", "sh")
    def test_plain(): pass
"""


def test_a_missing_package_or_program_is_a_skip_and_the_run_says_what_to_do(pytester: pytest.Pytester) -> None:
    result = run(pytester, "0\n", NEEDS)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "skipped: *test_with_package: *no_such_package is not installed",
            "1 skipped; *FAILED",
            "1 tests need no_such_package: install it, or leave them out with --without no_such_package *",
        ]
    )


def test_whoever_does_without_says_so_and_is_told_how_many_tests_that_leaves_out(pytester: pytest.Pytester) -> None:
    result = run(pytester, "0\n", NEEDS, "--without", "no_such_package", "--without", "something")
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=1, deselected=1)
    result.stdout.fnmatch_lines(["0 skipped; *", "1 tests left out for want of no_such_package"])


def test_tests_that_nobody_asked_for_need_nothing(pytester: pytest.Pytester) -> None:
    result = run(pytester, "0\n", NEEDS, "-k", "plain")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.no_fnmatch_line("*no_such_package*")


@pytest.mark.parametrize("cuda", [False, True])
def test_a_test_for_gpus_is_left_out_for_want_of_its_package(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, cuda: bool
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    result = run(pytester, "0\n", NEEDS.replace("@pytest", "@pytest.mark.gpu\n    @pytest", 1))
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=1, deselected=1)
    told = "1 tests left out for want of no_such_package" if cuda else "1 tests marked gpu left out *"
    result.stdout.fnmatch_lines([told])


def test_programs_are_found_beside_the_interpreter_too(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = pytester.mkdir("bin") / "no_such_program"
    program.touch(mode=0o755)
    monkeypatch.setattr("sys.executable", str(program.with_name("python")))
    tests = 'import pytest\n@pytest.mark.needs("no_such_program")\ndef test_with_program(): pass'
    run(pytester, "0\n", tests).assert_outcomes(passed=1)


@pytest.mark.parametrize("devices", [0, 2, 4])
def test_tests_of_several_gpus_are_left_out_where_there_are_fewer(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, devices: int
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: devices)
    tests = """
        import pytest

        @pytest.mark.parametrize("n", [pytest.param(n, marks=pytest.mark.needs(f"{n} GPUs")) for n in (2, 4)])
        def test_ranks(n): pass
    """
    result = run(pytester, "0\n", tests)
    result.assert_outcomes(passed=devices // 2, deselected=2 - devices // 2)

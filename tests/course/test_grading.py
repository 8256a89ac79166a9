"""The grader: what it says of right, wrong and slow submissions, and of those that do not want to be graded."""

from __future__ import annotations

import argparse
import json
import re
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from minisgl.book.course_table import CourseError
from minisgl.book.grading import OUTPUT_LIMIT, Report, add_grade, grade, load
from minisgl.book.supervise import KEPT_OUTPUT

WRONG = """
class Order:
    def order(self, waiting, cached_len):
        return waiting
    def on_admit(self, request): pass
    def on_finish(self, request): pass
"""
SLOW = """
from assignments.solutions.fair_queueing import FairQueueing

class Order(FairQueueing):
    def order(self, waiting, cached_len):
        left, charged = list(waiting), {}
        while left:
            def start(request):
                return self._start(request.user) + charged.get(request.user, 0), request.uid
            first = min(left, key=start)
            charged[first.user] = charged.get(first.user, 0) + first.prompt_len
            left.remove(first)
            yield first
"""
POLICY = """
import os, subprocess, sys, time
{at_import}

class Policy:
    def on_use(self, now, uses):
        {in_use}
        return now
    def on_evict(self, priority):
        pass
"""
LEAVES_A_PROCESS = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open("pid", "w").write(str(child.pid))
"""


ARCHITECTURE = """
from assignments.solutions import gemma

class GemmaForCausalLM(gemma.GemmaForCausalLM):
    @staticmethod
    def differences(hf):
        return gemma.GemmaForCausalLM.differences(hf) | {difference}
"""


def submit(folder: Path, assignment: str, source: str, name: str, time_limit: float | None = None) -> Report:
    (folder / "mine.py").write_text(source, encoding="utf-8")
    return grade(load(assignment), f"mine:{name}", time_limit, folder)


def submit_policy(folder: Path, at_import: str = "", in_use: str = "pass", time_limit: float | None = None) -> Report:
    return submit(folder, "lfu_eviction", POLICY.format(at_import=at_import, in_use=in_use), "Policy", time_limit)


def is_alive(pid: int) -> bool:
    """False also if nobody has asked yet how the process ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# -- wrong, slow, right --------------------------------------------------------------------------------------------


def test_a_wrong_submission(tmp_path: Path) -> None:
    report = submit(tmp_path, "fair_queueing", WRONG, "Order")
    assert report.verdict == "failed"
    assert [item.points for item in report.items] == [20, 0, 0, 20]
    fairness = report.items[1]
    assert fairness.failed >= 5
    assert fairness.first_failure is not None
    assert "test_a_flood_does_not_keep_others_out" in fairness.first_failure.test
    assert "assert 0 in (8, 9, 10)" in fairness.first_failure.message


def test_a_slow_submission(tmp_path: Path) -> None:
    report = submit(tmp_path, "fair_queueing", SLOW, "Order")
    assert report.verdict == "slow"
    assert [item.points for item in report.items] == [20, 40, 20, 0]
    assert "instructions for 100 requests" in report.message


def test_a_right_submission_by_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the student's folder, with a report that a script can read."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "from assignments.solutions.fair_queueing import FairQueueing as Order", encoding="utf-8"
    )
    parser = argparse.ArgumentParser()
    add_grade(parser.add_subparsers(required=True))
    arguments = parser.parse_args(["grade", "fair_queueing", "mine:Order", "--json", "report.json"])
    assert arguments.run(arguments) == 0
    report = json.loads(Path("report.json").read_text(encoding="utf-8"))
    assert (report["verdict"], report["points"], report["max_points"]) == ("passed", 100, 100)
    assert all(item["points"] == item["max_points"] and item["not_run"] == 0 for item in report["items"])
    assert 0 < report["seconds"] < report["time_limit"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.py", "report.json"], "nothing else is left"


# -- those that do not want to be graded ---------------------------------------------------------------------------


def test_one_that_never_ends(tmp_path: Path) -> None:
    start = time.monotonic()
    report = submit_policy(tmp_path, in_use="while True: pass", time_limit=12)
    assert report.verdict == "time-limit"
    assert report.points == 0
    assert time.monotonic() - start < 12 + 30


def test_one_that_never_ends_to_be_imported(tmp_path: Path) -> None:
    report = submit_policy(tmp_path, at_import="while True: time.sleep(1)", time_limit=4)
    assert report.verdict == "time-limit"
    assert "while it was imported" in report.message


def test_one_that_prints_megabytes(tmp_path: Path) -> None:
    report = submit_policy(tmp_path, in_use="for _ in range(1000): print('x' * 100_000)")
    assert report.verdict == "output-limit"
    assert report.output_bytes > OUTPUT_LIMIT
    assert len(report.output) == KEPT_OUTPUT


@pytest.mark.parametrize("way", ["sys.exit(0)", "os._exit(0)"])
def test_one_that_exits_in_a_test(tmp_path: Path, way: str) -> None:
    """With the status of success, but the tests that were to come are missed."""
    report = submit_policy(tmp_path, in_use=way)
    assert report.verdict == "exited"
    assert "test_a_priority_never_falls" in report.message
    assert report.points == 0


@pytest.mark.parametrize("way", ["sys.exit(0)", "os._exit(0)"])
def test_one_that_exits_when_imported(tmp_path: Path, way: str) -> None:
    report = submit_policy(tmp_path, at_import=way)
    assert report.verdict == "exited"
    assert "import" in report.message


def test_one_that_forks(tmp_path: Path) -> None:
    report = submit_policy(tmp_path, at_import="os.fork()")
    assert report.verdict == "processes"


def test_one_that_leaves_a_process_behind(tmp_path: Path) -> None:
    """In a session of its own, where killing the group does not reach it."""
    report = submit_policy(tmp_path, at_import=LEAVES_A_PROCESS)
    assert report.verdict == "processes"
    assert "1 of them" in report.message
    assert not is_alive(int((tmp_path / "pid").read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module", "No module named 'no_such_module'"),
        ("class Policy", "SyntaxError"),
        ("class Other: pass", "has no attribute 'Policy'"),
    ],
)
def test_one_that_cannot_be_imported(tmp_path: Path, source: str, message: str) -> None:
    report = submit(tmp_path, "lfu_eviction", source, "Policy")
    assert report.verdict == "no-import"
    assert message in report.message


def test_one_that_is_something_else(tmp_path: Path) -> None:
    report = submit(tmp_path, "lfu_eviction", "class Policy:\n    def on_use(self, now, uses): ...", "Policy")
    assert report.verdict == "not-gradable"
    assert "lacks on_evict" in report.message


def test_every_report_can_be_written(tmp_path: Path) -> None:
    """Whatever a message contains."""
    report = submit_policy(tmp_path, in_use=r"raise ValueError('\ud800 \x00 ' + 'y' * 1_000_000)")
    failure = json.loads(json.dumps(asdict(report)))["items"][0]["first_failure"]
    assert "ValueError" in failure["message"]
    assert len(failure["message"].encode()) <= 2000


# -- the assignment ------------------------------------------------------------------------------------------------


def test_a_teacher_grades_from_a_folder_of_their_own(tmp_path: Path) -> None:
    """With a test that nobody has seen, and fewer points for the rest."""
    private = tmp_path / "hidden"
    private.mkdir()
    (private / "conftest.py").write_text(
        "from tests.contracts.conftest import pytest_generate_tests as pytest_generate_tests\n", encoding="utf-8"
    )
    (private / "test_hidden.py").write_text(
        "from assignments.lfu_eviction.test_lfu_eviction import CONTRACTS, make_policy\n"
        "def test_first_rank(make_policy):\n    assert make_policy().on_use(1, 1) == (1, 1)\n",
        encoding="utf-8",
    )
    (private / "assignment.toml").write_text(
        'title = "hidden"\nstarter_fails = ""\nsolution = ""\ntime_limit = 60\n'
        '[[items]]\nname = "public"\npoints = 1\n'
        'tests = ["tests/contracts/test_eviction_policy.py::test_policies_share_nothing"]\n'
        '[[items]]\nname = "hidden"\npoints = 2\ntests = ["test_hidden.py"]\n',
        encoding="utf-8",
    )
    report = grade(load(str(private)), "assignments.solutions.lfu_eviction:LFUWithAging")
    assert (report.verdict, report.points, report.max_points) == ("passed", 3, 3)


def test_an_assignment_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CourseError, match=r"no assignment 'nothing'; choose from .*fair_queueing.*; or give a folder"):
        load("nothing")
    (tmp_path / "assignment.toml").write_text('title = "no items"', encoding="utf-8")
    with pytest.raises(CourseError, match="items"):
        load(str(tmp_path))


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ('{"embedding_multiplier": 1.0}', "wrong from token 0 on.*so look at the embedding, the norms, the biases"),
        ('{"attention_scale": 1.0}', "wrong from token 1 on.*so look at what makes a token see others: rotation"),
    ],
)
def test_a_model_with_other_scores_is_told_where_to_look(tmp_path: Path, difference: str, message: str) -> None:
    report = submit(tmp_path, "gemma", ARCHITECTURE.replace("{difference}", difference), "GemmaForCausalLM")
    assert report.verdict == "failed"
    first = report.items[0].first_failure
    assert first is not None
    assert re.search(message, first.message.partition("\n")[0]), first.message
    assert report.points == 10, "it takes no memory on the meta device, and nothing else is right"

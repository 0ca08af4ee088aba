"""Test modules that run in a separate process with SGLang's environment for a CPU, as servers do
(server_forkserver.py).

SGLang reads the environment when it is imported, and hooks on it cannot be removed. So the process of the other tests
cannot run these modules.

A test is collected by the name of its function, without importing its module. Therefore `-k` selects functions, not
parameters. The first test of a group starts a process that runs all selected tests of the group with pytest. Its
reports become the reports of the tests here, one for each set of parameters.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4_sglang.srt.launch.command import Command, cpu_environment
from support import server_forkserver

# These modules share a scheduler, which the plugin speculation_judge starts.
SCHEDULER = (
    "test_scheduler_speculation.py",
    "test_scheduler_faults.py",
    "test_scheduler_results.py",
    "test_scheduler_sleep.py",
)
# The group of each module.
GROUPS = {
    **dict.fromkeys(SCHEDULER, "scheduler"),
    "interpreted_kernels.py": "interpreted",
    "test_overlapping_layer.py": "layer",
    "test_scheduler_drafts.py": "drafts",
    "test_scheduler_prefill_graphs.py": "prefill graphs",
}
# Environment variable of a group's process: the file to which it writes its reports.
REPORTS = "DSV4_SGLANG_TEST_REPORTS"

# Reports by test name, without parameters.
Reports = dict[str, list[pytest.TestReport]]
# Reports of the groups that have run in this session.
FINISHED = pytest.StashKey[dict[str, Reports]]()


class IsolatedTest(pytest.Item):
    """A test function with all its parameters."""

    def __init__(self, *, line: int, **arguments: object) -> None:
        super().__init__(**arguments)
        self.line, self.group = line, GROUPS[self.path.name]

    def runtest(self) -> None:
        raise NotImplementedError("run by `run`")

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, self.line, self.name


class IsolatedModule(pytest.File):
    def collect(self) -> Iterator[IsolatedTest]:
        statements = ast.parse(self.path.read_text()).body
        of_module = [node.value for node in statements if _is_assignment(node, "pytestmark")]
        for node in statements:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                test = IsolatedTest.from_parent(self, name=node.name, line=node.lineno - 1)
                test.add_marker("slow")
                if _names_full([*of_module, *node.decorator_list]):
                    test.add_marker("full")
                yield test


def _is_assignment(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]


def _names_full(marks: list[ast.expr]) -> bool:
    """Return True if one of the marks is `full`. It is the only mark that selects tests of these modules."""
    return any(ast.unparse(node) == "pytest.mark.full" for mark in marks for node in ast.walk(mark))


def module(path: Path, parent: pytest.Collector) -> IsolatedModule | None:
    """Return the collector of a file whose tests run in a separate process.

    Return None for other files and in that process.
    """
    if path.name not in GROUPS or REPORTS in os.environ:
        return None
    return IsolatedModule.from_parent(parent, path=path)


def run(test: IsolatedTest, following: pytest.Item | None) -> None:
    """Report the results of a test. `following`: the next test of this process, which need not be in the same folder as
    the test before this one."""
    finished = test.session.stash.setdefault(FINISHED, {})
    if test.group not in finished:
        selected = [item for item in test.session.items if isinstance(item, IsolatedTest)]
        finished[test.group] = _run_group([item for item in selected if item.group == test.group])
    test.ihook.pytest_runtest_logstart(nodeid=test.nodeid, location=test.location)
    for report in finished[test.group][test.nodeid]:
        test.ihook.pytest_runtest_logreport(report=report)
    test.ihook.pytest_runtest_logfinish(nodeid=test.nodeid, location=test.location)
    test.session._setupstate.teardown_exact(following)


def _run_group(tests: list[IsolatedTest]) -> Reports:
    names = [f"{test.path}::{test.name}" for test in tests]
    plugins = ["-p", "support.speculation_judge"] if tests[0].group == "scheduler" else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugins, *names]
    reports: Reports = defaultdict(list)
    failure = ""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "reports")
        file.touch()
        try:
            server_forkserver.run(Command(command, {**cpu_environment(), REPORTS: str(file)}), Path(folder, "log"))
        except AssertionError as error:
            failure = str(error)
        for line in file.read_text().splitlines():
            report = pytest.TestReport._from_json(json.loads(line))
            # xdist accepts reports only of the test that it runs. The parameters stay in the report's location.
            report.nodeid = report.nodeid.partition("[")[0]
            reports[report.nodeid].append(report)
    for test in tests:
        if not any(report.when == "teardown" for report in reports[test.nodeid]):
            reports[test.nodeid].append(_failed(test, failure))
    return reports


def _failed(test: IsolatedTest, failure: str) -> pytest.TestReport:
    """Return the report of a test whose process crashed or did not find the test."""
    return pytest.TestReport(test.nodeid, test.location, {}, "failed", f"the test did not end:\n{failure}", "call")


def write(report: pytest.TestReport) -> None:
    """Send a report from the process of a group."""
    if file := os.environ.get(REPORTS):
        with Path(file).open("a") as lines:
            lines.write(json.dumps(report._to_json()) + "\n")

from __future__ import annotations

import importlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator

import hypothesis
import pytest
import torch
import transformers

from testkit.cases import DAY, fix_the_day, is_drawn, mark_all_but_few
from testkit.effort import children_s

LONGEST = ("tests/test_commands.py", "tests/run/test_signals.py", "tests/cli/test_verbs.py")
PUSH_S = 3.0
"""Processor time that a test of a push may take; what takes longer has the mark `merge`."""
PROCESSOR_S = "processor_s"
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")
# Ignored under nohup, or behind a shell's `&`; children would inherit that.
for number, usual in (
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
    (signal.SIGINT, signal.default_int_handler),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


def pytest_configure(config: pytest.Config) -> None:
    fix_the_day()
    if "PYTEST_XDIST_WORKER" not in os.environ:  # a worker has that of its parent
        # With what the user's cache knows of this machine, runs would be planned in other ways.
        cache = tempfile.TemporaryDirectory(prefix="megatrain-cache-")
        config.add_cleanup(cache.cleanup)
        os.environ["MEGATRAIN_CACHE"] = cache.name


def pytest_collection_finish() -> None:
    """Other tests are on a machine without an accelerator.

    Whatever needs the device loads it while tests are collected: autograd makes its threads for
    the devices that there are at its first use.
    """
    if "testkit.host_gpu" in sys.modules:
        importlib.import_module("testkit.host_gpu.module").show(False)


@pytest.fixture(autouse=True)
def _host_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("hostgpu") is None:
        yield
        return
    control = importlib.import_module("testkit.host_gpu.control")
    with control.present():
        control.start_anew()
        yield
        control.start_anew()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Note the processor time, which neighbors on the machine do not add to."""
    begin = time.process_time() + children_s()
    try:
        return (yield)
    finally:
        item.user_properties.append((PROCESSOR_S, time.process_time() + children_s() - begin))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    share = terminalreporter.config.getoption("--share")
    if exitstatus and share > 1:
        terminalreporter.write_line(f"these cases are those of {DAY}={os.environ[DAY]}")
    slow = [
        f"{seconds:6.1f} s  {report.nodeid}"
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport)
        and report.when == "call"
        and not {"merge", "night", "long"} & set(report.keywords)
        for name, seconds in report.user_properties
        if name == PROCESSOR_S and isinstance(seconds, float) and seconds > PUSH_S
    ]
    if slow:
        terminalreporter.section(f"over {PUSH_S:g} s without the mark `merge`", sep="-")
        terminalreporter.write_line("\n".join(sorted(slow, reverse=True)))


@pytest.hookimpl(tryfirst=True)  # before `-m`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Complete the marks, leave out the night's cases of other days, begin with the longest tests.

    At the end of a run no worker then waits for the other.
    """
    mark_all_but_few(items)
    share = config.getoption("--share")
    others = [
        item
        for item in items
        if item.get_closest_marker("night") and not is_drawn(item.nodeid, share)
    ]
    config.hook.pytest_deselected(items=others)
    left_out = set(others)
    items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share",
        type=int,
        default=1,
        help="of the tests marked night, play one in so many, which the date chooses",
    )
    parser.addoption(
        "--device",
        help="where tests/gpu runs, all of it: `cuda`, `cuda:1`, `xpu`, `hostgpu` or `simulated`. "
        "Without it, what is fast runs on the simulator, all on hostgpu, and tests marked gpu on "
        "torch's accelerator",
    )

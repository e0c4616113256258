from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator

import hypothesis
import pytest
import torch
import transformers

from testkit.cases import SEED, fix_the_day

LONGEST = ("tests/test_commands.py", "tests/run/test_signals.py", "tests/cli/test_verbs.py")
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


def pytest_configure() -> None:
    fix_the_day()


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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    if exitstatus:
        terminalreporter.write_line(f"the cases of the day are those of {SEED}={os.environ[SEED]}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest tests: at the end of a run no worker then waits for the other."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        help="where tests/gpu runs, all of it: `cuda`, `cuda:1`, `xpu`, `hostgpu` or `simulated`. "
        "Without it, what is fast runs on the simulator, all on hostgpu, and tests marked gpu on "
        "torch's accelerator",
    )

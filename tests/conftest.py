from __future__ import annotations

import signal

import hypothesis
import pytest
import torch
import transformers

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        help="where tests/gpu runs, all of it: `cuda`, `cuda:1`, `xpu` or `simulated`. Without it, "
        "what is fast runs on the simulator, and tests marked gpu on torch's accelerator",
    )

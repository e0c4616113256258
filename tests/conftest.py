from __future__ import annotations

import faulthandler

import pytest
import torch
import transformers

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)
faulthandler.dump_traceback_later(900, exit=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where tests marked gpu run, e.g. cuda")

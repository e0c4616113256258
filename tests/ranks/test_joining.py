"""From the environment to ranks that can talk; a process alone stays alone."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatrain.ranks.environment import VARIABLES
from megatrain.ranks.joining import join_ranks
from megatrain.ranks.ranks import ALONE


@pytest.mark.parametrize("size", [None, "1"])
def test_a_process_alone_makes_no_group(monkeypatch: pytest.MonkeyPatch, size: str | None) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
    assert join_ranks("cpu", 1.0) is ALONE
    assert not dist.is_initialized()

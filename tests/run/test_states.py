"""Every state of the optimizer resumes exactly, and a run may change from one to another."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.errors import Interrupted
from testkit.runs import Setting, config_of, differences, run

pytestmark = pytest.mark.usefixtures("cache_in_world")
NARROW = ["bf16"]


@pytest.mark.parametrize("state", NARROW)
def test_a_run_in_a_narrow_state_resumes_in_its_bits(
    world: Path, tmp_path: Path, state: str
) -> None:
    setting = Setting(state=state, save_every=3, keep=1)
    ended = run(config_of(world, tmp_path / "whole", setting))
    assert ended is not None
    config = config_of(world, tmp_path / "stopped", setting)
    with pytest.raises(Interrupted):
        run(config, stop=2)
    assert run(config, resume=True, die=7) is None
    resumed = run(config, resume=True)
    whole = (ended, tmp_path / "whole")
    assert differences(world, resumed, tmp_path / "stopped", whole) == []

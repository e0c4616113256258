"""A run that takes rounds with peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain.config import Config
from megatrain.errors import Interrupted
from testkit.runs import Setting, config_of, run, unequal

pytestmark = pytest.mark.usefixtures("cache_in_world")
SETTING = Setting(save_every=2, eval_every=None)


def _config(world: Path, folder: Path, name: str = "a", **changes: Any) -> Config:
    peers = {
        "at": f"file://{folder}/meeting",
        "name": name,
        "signed": False,
        "inner_steps": 1,
        "outer_rate": 1.0,
        "momentum": 0.0,
        "compression": "none",
        **changes,
    }
    return config_of(world, folder / name, SETTING, peers=peers)


@pytest.mark.merge
def test_a_run_of_one_peer_has_the_bits_of_a_run_without(world: Path, tmp_path: Path) -> None:
    plain = run(config_of(world, tmp_path / "plain", SETTING))
    assert unequal(run(_config(world, tmp_path)), plain) == []
    again = _config(world, tmp_path / "again")
    with pytest.raises(Interrupted, match="stopped after step 5"):
        run(again, stop=5)
    assert unequal(run(again, resume=True), plain) == []
    other = run(_config(world, tmp_path / "other", outer_rate=0.7))
    assert unequal(other, plain) != []

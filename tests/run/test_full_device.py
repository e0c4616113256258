"""Law of full_device.py: what device memory held is in the run folder, where the device tells."""

from __future__ import annotations

import json
from pathlib import Path

from megatrain.errors import DeviceFull
from megatrain.run.folder import RunFolder
from megatrain.run.full_device import SNAPSHOT, keep_snapshot


def test_what_the_device_tells_is_kept_and_nothing_else(tmp_path: Path) -> None:
    said: list[str] = []
    with RunFolder(tmp_path / "run") as folder:
        keep_snapshot(folder, DeviceFull("full"), said.append)
        assert said == []
        assert not (folder.path / SNAPSHOT).exists()
        keep_snapshot(folder, DeviceFull("full", {"segments": [{"total_size": 7}]}), said.append)
        kept = json.loads((folder.path / SNAPSHOT).read_text())
    assert kept == {"segments": [{"total_size": 7}]}
    (line,) = said
    assert SNAPSHOT in line

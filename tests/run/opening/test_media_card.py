"""What a run did for media is in its folder, and on its report with small pictures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatrain.report.page import write_report
from testkit.media_runs import media_run_config, write_media_world
from testkit.runs import run

pytestmark = pytest.mark.merge


def test_a_run_tells_what_it_did_and_shows_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    write_media_world(tmp_path)
    cards = []
    for name in ("first", "second"):
        run(media_run_config(tmp_path, tmp_path / name, train={"steps": 1}))
        cards.append(json.loads((tmp_path / name / "media.json").read_text()))
    first, second = (card["towers"] for card in cards)
    assert (first["computed"], first["found"]) == (second["found"], 0)
    assert second["computed"] == second["seconds"] == 0
    assert first["bytes"] == second["bytes"] > 0
    assert cards[0]["trained"] == "projector"
    assert cards[0]["items"] == first["computed"]
    target = tmp_path / "report.html"
    write_report([tmp_path / "first"], target)
    page = target.read_text()
    assert len(re.findall(r'<img src="data:image/png;base64,', page)) >= 3
    assert "img-src data:" in page
    assert page.index("outputs computed") < page.index("<img ") < page.index("[image 1: ")
    files = [path.read_bytes() for path in tmp_path.glob("*.png")]
    assert files
    assert not any(data[40:60].hex() in page or data in target.read_bytes() for data in files)

"""The benchmark of one long row: its row fills the positions, and tiles lower what it needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.long_row import write_world
from megatrain.config import load_config
from megatrain.run.trainer import Trainer

TOKENS = 4096


@pytest.mark.merge
def test_the_row_is_as_long_as_asked_and_needs_less_with_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    path = write_world(tmp_path / "world", tokens=TOKENS, hidden=128, tile=128)
    needed = []
    for changes in ([], ["memory.tile_tokens=null"]):
        with Trainer(load_config(path, changes), dry_run=True) as trainer:
            assert trainer.data.card["longest"] == TOKENS
            assert trainer.home.decoder.config.max_position_embeddings == TOKENS
            lines = trainer.plan.ledger.lines
            needed.append(sum(line.num_bytes for line in lines if "working" in line.purpose))
    with_tiles, without = needed
    assert with_tiles < without

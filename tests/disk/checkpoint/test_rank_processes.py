"""Ranks as processes with gloo: they save, restore and export what one process would."""

from __future__ import annotations

from pathlib import Path

from megatrain.disk.checkpoint.manifest import read_manifest
from megatrain.disk.checkpoint.parts import checkpoint_parts
from megatrain.disk.checkpoint.restore import restore
from megatrain.disk.checkpoint.save import write_checkpoint
from megatrain.disk.hf.model import read_model_folder
from megatrain.optim.states import WITH_CLIP
from megatrain.ranks.agreement import Agreement
from megatrain.ranks.ranks import Ranks
from testkit.rank_processes import run_ranks
from tests.disk.checkpoint.test_save_ranks import files_of, snapshot_of
from tests.disk.rank_homes import fill_at_random, small


def restored_and_saved(ranks: Ranks, folder: Path, checkpoint: Path) -> Path:
    """Restore a checkpoint as one of several ranks, save it again and export it."""
    home = read_model_folder(folder / "model").empty(WITH_CLIP, None, ranks.owner)
    parts = checkpoint_parts(home)
    with Agreement(ranks.agree):
        restore(checkpoint, read_manifest(checkpoint), parts)
    home.export(folder / "export", shard_bytes=100_000, ranks=ranks)
    return write_checkpoint(folder / "again", parts, snapshot_of(home), {}, ranks=ranks)


def test_processes_restore_save_and_export_as_one_process(tmp_path: Path) -> None:
    home = read_model_folder(small(tmp_path / "model", "ernie4_5_moe")).load(WITH_CLIP)
    fill_at_random(home, [])
    checkpoint = write_checkpoint(
        tmp_path / "checkpoints", checkpoint_parts(home), snapshot_of(home), {}
    )
    home.export(tmp_path / "alone", shard_bytes=100_000)
    folders = run_ranks(3, restored_and_saved, tmp_path, checkpoint)
    assert len(set(folders)) == 1
    assert files_of(folders[0]) == files_of(checkpoint)
    assert files_of(tmp_path / "export") == files_of(tmp_path / "alone")

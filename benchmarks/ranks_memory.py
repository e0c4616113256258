"""Resident bytes of ranks that share one store: loading, saving, restoring and exporting.

    python -m benchmarks.ranks_memory --params 200M --ranks 4 --json

A random Llama of about the asked size is written to a scratch folder. Processes with gloo on the
loopback load it, write every byte of every kind, save a checkpoint together, restore it and export.
Figures are the largest of all ranks; `share` is the store of one process over the number of ranks.

    store_over_share      resident with every kind written, above the start, over the share
    load_extra_bytes      peak during load above what is resident after it
    save_extra_bytes      peak during a save above what was resident before it
    restore_extra_bytes   the same of a restore
    export_extra_bytes    the same of an export
    same_files            whether checkpoint and export have the bytes of those of one process
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import shutil
import tempfile
from importlib import import_module
from pathlib import Path

from benchmarks.load_export import _count, _peak, _touch, _write_model
from megatrain.disk.checkpoint.manifest import read_manifest
from megatrain.disk.checkpoint.parts import checkpoint_parts
from megatrain.disk.checkpoint.restore import restore
from megatrain.disk.checkpoint.save import save_checkpoint
from megatrain.disk.hf.model import HostModel, read_model_folder
from megatrain.engine.snapshot import Gate, Snapshot
from megatrain.memory.host import resident_bytes
from megatrain.optim.states import WITH_CLIP
from megatrain.ranks.ranks import ALONE, Ranks
from testkit.printed import print_figures
from testkit.rank_processes import run_ranks

Figures = dict[str, float]


def main() -> None:
    """Run the benchmark and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", default="200M", help="how many parameters, e.g. 800M or 1.5B")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--dir", type=Path, default=None, help="a folder on the disk to use")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="megatrain-bench-", dir=options.dir))
    try:
        _write_model(scratch / "source", _count(options.params))
        _write_model(scratch / "warm-up", 10_000_000)
        work = import_module("benchmarks.ranks_memory").of_rank  # not __main__: it is pickled
        found: list[Figures] = run_ranks(options.ranks, work, scratch)
        result: Figures = {"ranks": options.ranks}
        result |= {name: max(figures[name] for figures in found) for name in found[0]}
        result["same_files"] = same_files(scratch)
    finally:
        shutil.rmtree(scratch)
    print_figures(result, as_json=options.json)


def of_rank(ranks: Ranks, scratch: Path) -> Figures:
    """Return the figures of one rank."""
    read_model_folder(scratch / "warm-up").load(WITH_CLIP, None, ranks.owner)
    source = read_model_folder(scratch / "source")
    gc.collect()
    begin = resident_bytes()
    with _peak() as peak:
        home = source.load(WITH_CLIP, None, ranks.owner)
    figures: Figures = {"load_extra_bytes": peak[0] - resident_bytes()}
    _touch(home)
    layout = home.store.layout
    share = sum(source.empty(WITH_CLIP).store.layout.kind_bytes.values()) / layout.owner.size
    figures |= {
        "params": layout.num_params,
        "share_bytes": share,
        "store_over_share": round((resident_bytes() - begin) / share, 4),
    }
    ranks.agree({})
    with _peak() as peak:
        begin = resident_bytes()
        folder = _save(home, scratch / "checkpoints", ranks)
    figures["save_extra_bytes"] = peak[0] - begin
    with _peak() as peak:
        begin = resident_bytes()
        restore(folder, read_manifest(folder), checkpoint_parts(home))
    figures["restore_extra_bytes"] = peak[0] - begin
    ranks.agree({})
    with _peak() as peak:
        begin = resident_bytes()
        home.export(scratch / "export", ranks=ranks)
    figures["export_extra_bytes"] = peak[0] - begin
    return figures


def same_files(scratch: Path) -> bool:
    """Return whether one process saves and exports the same bytes."""
    home = read_model_folder(scratch / "source").load(WITH_CLIP)
    _touch(home)
    _save(home, scratch / "alone", ALONE)
    home.export(scratch / "export-alone")
    checkpoints = [next((scratch / name).iterdir()) for name in ("checkpoints", "alone")]
    exports = [scratch / name for name in ("export", "export-alone")]
    return all(_marks(one) == _marks(other) for one, other in (checkpoints, exports))


def _save(home: HostModel, parent: Path, ranks: Ranks) -> Path:
    blocks = range(home.store.layout.num_blocks)
    snapshot = Snapshot(Gate(blocks), blocks, 1, dict.fromkeys(blocks, 0))
    return save_checkpoint(parent, checkpoint_parts(home), snapshot, {}, ranks=ranks)


def _marks(folder: Path) -> dict[str, str]:
    marks = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                marks[str(path.relative_to(folder))] = hashlib.file_digest(file, "md5").hexdigest()
    return marks


if __name__ == "__main__":
    main()

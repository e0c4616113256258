"""Save and load a checkpoint: speed against the disk, memory, and what training loses to a save.

    python -m benchmarks.checkpoint --params 400M --json [--rounds 5] [--dir D] [--tokens 512]

A random Llama of the asked size is made in memory, with masters and moments. Save and load take
turns with a plain sequential O_DIRECT loop over as many bytes, fsync included, hashing on our side;
figures are medians over rounds of the ratio within a round.

    save_vs_disk       our save, from call to acknowledged, in bytes/s over the raw write
    load_vs_disk       our verified load into the store, over the raw read of the same files
    save_extra_bytes   peak of resident memory during a save above what it was before

Then steps of the engine, in pairs of stretches of the same number of steps: one without a save,
one with a save in the background from its first step on; who begins alternates. A stretch is as
many steps as a save covers.

How long a step is decides everything, and that is a choice: here as long as a save, as it is with
7B parameters, 128k tokens, 150 TFLOP/s and a disk of 2.5 GB/s. In the place of an accelerator's
compute stand waits, as in benchmarks.overlap: on two cores real compute would take them from the
save, which no accelerator does. The rest is real: copies, updates of all parameters, the save.

    save_stall_share   (seconds with a save - seconds without) / seconds without, median of pairs
    held_share         seconds that updates waited for a block that was not yet copied, likewise:
                       what the save costs by its design, without the cores it uses

with the global norm known before any update (late), `_in_backward` with updates in backward, and
`_computing`: late, all compute real, on one thread, `--tokens` a step; `_uploading`: late, the save
sent to a bucket behind it (`--to`, a folder that stands for one), and a stretch as many steps as
both cover.

    sent_s             seconds of an upload, beside the steps
    asked_s            of them, those in which who trains was held up by calls of the upload
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch

from benchmarks.load_export import _config, _count, _peak
from benchmarks.raw_disk import raw_read, raw_write
from megatrain.batch import MicroBatch
from megatrain.disk.checkpoint.manifest import read_manifest
from megatrain.disk.checkpoint.parts import checkpoint_parts
from megatrain.disk.checkpoint.restore import restore
from megatrain.disk.checkpoint.save import delete_checkpoint, write_checkpoint
from megatrain.disk.hf.model import HostModel
from megatrain.engine.engine import Engine
from megatrain.engine.snapshot import Gate
from megatrain.lanes.lane import Lane
from megatrain.memory.host import resident_bytes
from megatrain.memory.kinds import TensorKind
from megatrain.memory.layout import build_layout
from megatrain.memory.store import Store
from megatrain.models.build import build_decoder
from megatrain.optim.adamw import AdamW
from megatrain.optim.states import WITH_CLIP, WITHOUT_CLIP
from megatrain.run.uploads import open_uploads
from megatrain.step.ops import Op, OpKind
from megatrain.step.shape import Update
from testkit.engines import make_engine
from testkit.printed import print_figures
from testkit.slow_lane import SlowLane

FEW_TOKENS = 8
TARGETS = {"save_vs_disk": 0.8, "load_vs_disk": 0.8, "save_stall_share": 0.05}


def main() -> None:
    """Run the benchmark and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", default="400M", help="how many parameters, e.g. 400M or 1.5B")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=512, help="of a step that really computes")
    parser.add_argument("--dir", type=Path, default=None, help="a folder on the disk to measure")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    parser.add_argument("--no-steps", action="store_true", help="save and load only")
    parser.add_argument("--to", help="URL to upload to; by default a folder beside the saves")
    options = parser.parse_args()
    torch.set_num_threads(1)
    scratch = Path(tempfile.mkdtemp(prefix="megatrain-bench-", dir=options.dir))
    try:
        result = measure(scratch, _count(options.params), options)
    finally:
        shutil.rmtree(scratch)
    print_figures(result, as_json=options.json)


def measure(scratch: Path, num_params: int, options: argparse.Namespace) -> dict[str, float]:
    """Return the figures named at the top of this module."""
    home = _model(num_params, WITH_CLIP)
    result = measure_disk(scratch, home, options.rounds)
    if options.no_steps:
        return result
    wait_s = result["save_s"]
    result |= measure_steps(scratch, home, "late", FEW_TOKENS, options.rounds, wait_s)
    found = measure_steps(scratch, home, "late", options.tokens, options.rounds, None)
    result |= {f"{name}_computing": value for name, value in found.items()}
    (scratch / "run").mkdir()
    with _Sending(options.to or f"file://{scratch}/bucket", scratch / "run") as sending:
        found = measure_steps(scratch, home, "late", FEW_TOKENS, options.rounds, wait_s, sending)
    result |= {f"{name}_uploading": value for name, value in found.items()}
    del home
    home = _model(num_params, WITHOUT_CLIP)
    found = measure_steps(scratch, home, "in_backward", FEW_TOKENS, options.rounds, wait_s)
    return result | {f"{name}_in_backward": value for name, value in found.items()}


def _model(num_params: int, kinds: tuple[TensorKind, ...]) -> HostModel:
    """Return a model of small random weights and moments that never were on a disk."""
    config = _config(num_params)
    decoder = build_decoder(config, "bf16")
    store = Store(build_layout(decoder.blocks, kinds))
    generator = torch.Generator().manual_seed(0)
    for param in decoder.params:
        weight = store.param(param.name, TensorKind.HI)
        if weight.dim() > 1:
            weight.normal_(0.0, 0.02, generator=generator)
        else:
            weight.fill_(1.0)
    for block in range(store.layout.num_blocks):
        for kind in kinds:
            if kind is not TensorKind.HI:
                store.block_bytes(block, kind).fill_(0)  # resident, as in training
    return HostModel(
        decoder=decoder,
        store=store,
        source=Path(),
        config_json=config.to_json_string().encode(),
        carried={},
    )


def measure_disk(scratch: Path, home: HostModel, rounds: int) -> dict[str, float]:
    """Return the figures of save and load, nothing else going on."""
    parts = checkpoint_parts(home)
    saves, seconds, loads, extra, raw_writes, raw_reads = [], [], [], [], [], []
    with _engine(home, "late") as engine:
        for number in range(rounds + 1):
            written = raw_write(scratch / "raw", parts.num_bytes)
            before = resident_bytes()
            with _peak() as peak:
                begin = time.perf_counter()
                folder = write_checkpoint(scratch / "saves", parts, engine.snapshot(), {})
                save_s = time.perf_counter() - begin
            read = raw_read(sorted(folder.glob("*/*.safetensors")))
            begin = time.perf_counter()
            restore(folder, read_manifest(folder), parts)
            load_rate = parts.num_bytes / (time.perf_counter() - begin)
            delete_checkpoint(folder)
            if number == 0:
                continue  # to warm up
            extra.append(peak[0] - before)
            saves.append(parts.num_bytes / save_s / written)
            seconds.append(save_s)
            loads.append(load_rate / read)
            raw_writes.append(written)
            raw_reads.append(read)
    return {
        "params": home.store.layout.num_params,
        "state_bytes": parts.num_bytes,
        "save_vs_disk": round(statistics.median(saves), 3),
        "load_vs_disk": round(statistics.median(loads), 3),
        "save_s": round(statistics.median(seconds), 3),
        "save_extra_bytes": max(extra),
        "most_extra_bytes": max(256 << 20, parts.num_bytes // 50),
        "raw_write_gb_s": round(statistics.median(raw_writes) / 1e9, 3),
        "raw_read_gb_s": round(statistics.median(raw_reads) / 1e9, 3),
    }


class _Sending:
    """Uploads of saves, asked for after each step as a trainer does."""

    def __init__(self, url: str, run: Path) -> None:
        self._uploads = open_uploads(url, run, keep=1, keep_best=False)
        self._asked: set[Path] = set()
        self.seconds: list[float] = []
        """Of each upload."""
        self.asked_s = 0.0
        """In which who asked was held up."""

    def after_step(self, saved: Path | None) -> None:
        begin = time.perf_counter()
        if saved is not None and saved not in self._asked:
            self._asked.add(saved)
            self._uploads.add(saved)
        for result in self._uploads.ended():
            assert result.sent is not None, result
            self.seconds.append(result.seconds)
        self.asked_s += time.perf_counter() - begin

    def finish(self, saved: Path) -> None:
        """Wait until a save is there."""
        self.after_step(saved)
        assert self._uploads.wait()
        self.after_step(saved)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._uploads.close()


def measure_steps(
    scratch: Path,
    home: HostModel,
    update: Update,
    tokens: int,
    rounds: int,
    wait_s: float | None,
    sending: _Sending | None = None,
) -> dict[str, float]:
    """Return what a save in the background costs the steps it covers, and its upload with it.

    With `wait_s` an accelerator computes for so long in each step.
    """
    parts = checkpoint_parts(home)
    ids = torch.randint(0, 32000, (1, tokens), generator=torch.Generator().manual_seed(0))
    batch = [MicroBatch(input_ids=ids, labels=ids)]
    saves: list[float] = []
    saved: list[Path] = []

    def save(engine: Engine) -> None:
        snapshot = engine.snapshot()
        begin = time.perf_counter()
        saved.append(write_checkpoint(scratch / "saves", parts, snapshot, {}))
        saves.append(time.perf_counter() - begin)

    def stretch(engine: Engine, num_steps: int, *, saving: bool) -> float:
        thread = threading.Thread(target=save, args=(engine,))
        begin = time.perf_counter()
        if saving:
            thread.start()
        for _ in range(num_steps):
            engine.step(batch)
            if sending is not None:
                sending.after_step(saved[0] if saved else None)
        seconds = time.perf_counter() - begin
        if saving:
            thread.join()
            if sending is not None:
                sending.finish(saved[0])
            delete_checkpoint(saved.pop())
        return seconds

    def covers() -> float:
        """Return the seconds of the last save, and of its upload."""
        return saves[-1] + (0.0 if sending is None else sending.seconds[-1])

    with _engine(home, update, None if wait_s is None else _waiting(home, wait_s)) as engine:
        engine.step(batch)
        step_s = min(stretch(engine, 1, saving=False) for _ in range(3))
        stretch(engine, 3, saving=True)
        num_steps = max(1, math.ceil(covers() / step_s))
        shares, held, plain, asked = [], [], [], []
        for number in range(rounds):
            seconds = {}
            for saving in (number % 2 == 0, number % 2 == 1):
                before_s = 0.0 if sending is None else sending.asked_s
                with _waits() as waited:
                    seconds[saving] = stretch(engine, num_steps, saving=saving)
                if saving:
                    held.append(waited[0])
                    asked.append(0.0 if sending is None else sending.asked_s - before_s)
            plain.append(seconds[False])
            shares.append(seconds[True] / seconds[False] - 1)
    found: dict[str, float] = {
        "save_stall_share": round(statistics.median(shares), 4),
        "held_share": round(statistics.median(held) / statistics.median(plain), 4),
        "step_s": round(statistics.median(plain) / num_steps, 3),
        "save_beside_steps_s": round(statistics.median(saves[1:]), 3),
        "steps_covered": num_steps,
        "tokens": tokens,
    }
    if sending is not None:
        found["sent_s"] = round(statistics.median(sending.seconds[1:]), 3)
        found["asked_s"] = round(statistics.median(asked), 4)
    return found


def _engine(home: HostModel, update: Update, lanes: list[Lane] | None = None) -> Engine:
    clips = 1.0 if update == "late" else None
    optimizer = AdamW(learning_rate=1e-5, max_grad_norm=clips, num_threads=1)
    return make_engine(home.decoder, home.store, optimizer=optimizer, update=update, lanes=lanes)


def _waiting(home: HostModel, wait_s: float) -> list[Lane]:
    """Return lanes that compute for `wait_s` a step: a block as long as its bytes are many."""
    sizes = [
        home.store.block_bytes(block, TensorKind.HI).nbytes
        for block in range(home.store.layout.num_blocks)
    ]

    def delay(op: Op) -> float:
        assert op.block is not None
        share = sizes[op.block] / sum(sizes)
        return wait_s * share * (0.25 if op.kind is OpKind.FORWARD else 0.75)

    return [Lane("in"), SlowLane("compute", delay=delay), Lane("out"), Lane("host")]


@contextmanager
def _waits() -> Iterator[list[float]]:
    """Yield a list whose one item is how long updates waited at the gate inside the block."""
    waited, real = [0.0], Gate.enter

    def enter(self: Gate, block: int) -> int:
        begin = time.perf_counter()
        number = real(self, block)
        waited[0] += time.perf_counter() - begin
        return number

    Gate.enter = enter  # type: ignore[method-assign]
    try:
        yield waited
    finally:
        Gate.enter = real  # type: ignore[method-assign]


if __name__ == "__main__":
    main()

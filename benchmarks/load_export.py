"""Load a model folder and export it again: memory against the ledger, speed against the disk.

    python -m benchmarks.load_export --params 800M --json

A random Llama of about the asked size is written to a scratch folder. Then, in turns and several
times, the same bytes are moved by a plain sequential O_DIRECT loop and by us, and the ratio of the
two is reported (median of rounds). `--dir` chooses the disk.

    bytes_per_param    resident after load with every kind written, over the number of parameters
    peak_over_ledger   peak resident over what the ledger named before the load
    load_extra_bytes   peak resident during load above what is resident after it
    load_vs_disk       our load, in bytes/s, over the raw read
    export_vs_disk     our export to a new folder over the raw write, both with fsync
    replace_vs_disk    the same to a folder that has an older export, whose blocks are freed
"""

from __future__ import annotations

import argparse
import gc
import math
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import LlamaConfig

from benchmarks.raw_disk import raw_read, raw_write
from megatrain.disk.hf.model import HostModel, load_model
from megatrain.memory.host import resident_bytes
from megatrain.memory.kinds import TensorKind
from megatrain.memory.layout import build_layout
from megatrain.memory.store import Store, store_ledger
from megatrain.models.build import build_decoder
from megatrain.optim.states import WITH_CLIP
from testkit.printed import print_figures


def main() -> None:
    """Run the benchmark and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", default="800M", help="how many parameters, e.g. 800M or 1.5B")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=None, help="a folder on the disk to measure")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="megatrain-bench-", dir=options.dir))
    try:
        result = measure(scratch, _count(options.params), options.rounds)
    finally:
        shutil.rmtree(scratch)
    print_figures(result, as_json=options.json)


def measure(scratch: Path, num_params: int, rounds: int) -> dict[str, float]:
    """Return the figures named at the top of this module."""
    source = scratch / "source"
    _write_model(source, num_params)
    files = sorted(source.glob("*.safetensors"))
    num_bytes = sum(path.stat().st_size for path in files)

    layout = build_layout(build_decoder(_config(num_params), "bf16").blocks, WITH_CLIP)
    load_model(_write_model(scratch / "warm-up", 10_000_000))
    gc.collect()
    baseline = resident_bytes()
    ledger_bytes = baseline + store_ledger(layout).total("host")

    load_ratios, extra, model = [], [], None
    for _ in range(rounds):
        raw = raw_read(files)
        model = None
        gc.collect()
        with _peak() as peak:
            begin = time.perf_counter()
            model = load_model(source)
            seconds = time.perf_counter() - begin
        extra.append(peak[0] - resident_bytes())
        load_ratios.append(num_bytes / seconds / raw)
    assert model is not None

    export_ratios: list[float] = []
    replace_ratios: list[float] = []
    for _ in range(rounds):
        for ratios in (export_ratios, replace_ratios):
            raw = raw_write(scratch / "raw", num_bytes)
            begin = time.perf_counter()
            model.export(scratch / "export")
            ratios.append(num_bytes / (time.perf_counter() - begin) / raw)
        shutil.rmtree(scratch / "export")

    with _peak() as peak:
        _touch(model)
    resident = resident_bytes() - baseline
    return {
        "params": layout.num_params,
        "bytes_per_param": round(resident / layout.num_params, 3),
        "peak_over_ledger": round(peak[0] / ledger_bytes, 4),
        "load_extra_bytes": max(extra),
        "load_vs_disk": round(statistics.median(load_ratios), 3),
        "export_vs_disk": round(statistics.median(export_ratios), 3),
        "replace_vs_disk": round(statistics.median(replace_ratios), 3),
        "raw_read_gb_s": round(raw_read(files) / 1e9, 2),
        "largest_tensor_bytes": max(p.param.num_elements for p in layout.places.values()) * 2,
    }


def _count(text: str) -> int:
    scale = {"M": 10**6, "B": 10**9}.get(text[-1].upper(), 1)
    return int(float(text.rstrip("MmBb")) * scale)


def _config(num_params: int) -> LlamaConfig:
    """Return a Llama of about `num_params`: 16 layers, as wide as that takes, 32000 tokens."""
    # 16 layers of about 12.7 h^2 (attention 4, MLP 3 x 2.9) and two tables of 32000 h
    a, b = 16 * 12.66, 64000
    hidden = (-b + math.sqrt(b * b + 4 * a * num_params)) / (2 * a)
    hidden = max(128, round(hidden / 128) * 128)
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=round(hidden * 2.9 / 128) * 128,
        num_hidden_layers=16,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=32000,
        tie_word_embeddings=False,
    )


def _write_model(folder: Path, num_params: int) -> Path:
    """Write a model of small random weights, with our own export."""
    config = _config(num_params)
    decoder = build_decoder(config, "bf16")
    store = Store(build_layout(decoder.blocks, (TensorKind.HI,)))
    generator = torch.Generator().manual_seed(0)
    for block in range(store.layout.num_blocks):
        weights = store.block_bytes(block, TensorKind.HI).view(torch.int16)
        weights.random_(0x3C00, 0x3D00, generator=generator)
    folder.mkdir()
    config_json = config.to_json_string().encode()
    HostModel(
        decoder=decoder, store=store, source=folder, config_json=config_json, carried={}
    ).export(folder)
    return folder


def _touch(model: HostModel) -> None:
    """Write every byte of every kind, as training would."""
    for block in range(model.store.layout.num_blocks):
        for kind in model.store.kinds:
            model.store.block_bytes(block, kind).fill_(1)


@contextmanager
def _peak() -> Iterator[list[int]]:
    """Yield a list whose one item is the peak of resident memory inside the block."""
    peak, done = [resident_bytes()], threading.Event()

    def watch() -> None:
        while not done.wait(0.003):
            peak[0] = max(peak[0], resident_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


if __name__ == "__main__":
    main()

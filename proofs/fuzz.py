"""Fuzz the readers of foreign files: whatever the input, a result or an error of ours, and soon.

    python -m proofs.fuzz --target config --count 100000 --seed 0 --json

    config   parse_config; every fifth that is accepted is also built as a decoder
    index    parse_index and read_folder, in a folder with links, pipes and shards
    header   parse_header and read_entries
    yaml     a run's config: parse_document, resolve_config, dump_config; and `init --from` it
    jsonl    a file of rows: open_source and its rows; every fifth is also tokenized
    parquet  the same for a Parquet file whose bytes were changed
    manifest a checkpoint's: parse_manifest, and what the run knew; most of them with a right hash

Input number i of a seed is always the same: `--first i --count 1` plays it again. Each input has
5 s and 2 GiB. What is accepted is checked too: a config names a decoder, paths of an index lie in
the folder, tensors of a header lie in the file and cover it, a config survives being dumped, each
line of a file of rows is a row or counted as bad, in order.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megatrain.cli.starting import bring_over
from megatrain.config import Config, dump_config
from megatrain.config.aliases import ALIASES, HINTS
from megatrain.config.load import resolve_config
from megatrain.config.settings import FIELDS
from megatrain.config.yaml_reader import parse_document
from megatrain.data.rows.formats import Format
from megatrain.data.rows.skipped import SkippedRows
from megatrain.data.rows.source import open_source
from megatrain.data.tokens.encoding import ChunkEncoder, Settings
from megatrain.disk.checkpoint.manifest import Manifest, parse_manifest, signed
from megatrain.disk.hf.folder import parse_index, read_folder
from megatrain.disk.hf.names import NameMap
from megatrain.disk.hf.safetensors_format import TensorEntry, parse_header, read_entries
from megatrain.errors import MegaTrainError
from megatrain.memory.direct import CHUNK_BYTES
from megatrain.memory.layout import build_layout
from megatrain.model_files import INDEX_NAME
from megatrain.models.build import build_decoder
from megatrain.models.config_json import LARGEST_VALUES, REFUSED_KEYS, parse_config
from megatrain.optim.states import WITH_CLIP
from megatrain.planning.levers import KEPT
from megatrain.run.opening.resumption import changed_settings, known_of
from megatrain.run.state import RunState
from megatrain.step.settings import StepSettings
from proofs.mutation import NUMBERS, Mutator
from testkit.families import FAMILIES, tiny_config
from testkit.printed import print_figures
from testkit.tokenizers_of_kinds import tokenizer_of, tokenizer_of_style

MAX_SECONDS = 5.0
MAX_BYTES = 2 << 30
BUILD_EVERY = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Something that reads foreign input."""

    make: Callable[[random.Random], Any]
    """Makes an input."""
    play: Callable[[Any], str]
    """Reads it and returns how that ended; what it raises is judged by the caller."""


class TooSlow(BaseException):
    """An input took more processor time than MAX_SECONDS. No handler of errors may catch it."""


@dataclass(slots=True, kw_only=True)
class Result:
    """What became of many inputs."""

    target: str
    count: int
    seed: int
    outcomes: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    max_seconds: float = 0.0
    slowest_input: int = -1
    wall_seconds: float = 0.0
    extra_bytes: int = 0
    """Peak resident memory above that of the start: a bound for every single input."""


def main() -> None:
    """Fuzz one target; end with 1 if anything but an error of ours came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=sorted(TARGETS), required=True)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = fuzz(options.target, options.count, options.seed, options.first)
    print_figures(asdict(result), as_json=options.json)
    sys.exit(bool(result.failures))


def fuzz(target: str, count: int, seed: int = 0, first: int = 0) -> Result:
    """Return what became of inputs `first` to `first + count` of `target`."""
    result = Result(target=target, count=count, seed=seed)
    scratch = Path(tempfile.mkdtemp(prefix="megatrain-fuzz-"))
    begin = time.perf_counter()
    try:
        with _quiet(), _limited():
            fuzzed = TARGETS[target](scratch)
            resident = _status("VmRSS")
            for number in range(first, first + count):
                _play_one(fuzzed, number, result)
            result.extra_bytes = max(_status("VmHWM") - resident, 0)
    finally:
        shutil.rmtree(scratch)
    result.wall_seconds = time.perf_counter() - begin
    return result


def _play_one(target: Target, number: int, result: Result) -> None:
    made = target.make(random.Random(f"{result.target} {result.seed} {number}"))
    begin = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
    try:
        outcome = target.play(made)
    except MegaTrainError as error:
        outcome = type(error).__name__
        if _ran_out(error):
            result.failures.append(f"input {number}: an allocation failed: {error!s:.300}")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        outcome = f"not ours: {type(error).__name__}"
        result.failures.append(f"input {number}: {type(error).__name__}: {error!s:.300}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    seconds = time.process_time() - begin
    result.outcomes[outcome] = result.outcomes.get(outcome, 0) + 1
    if seconds > result.max_seconds:
        result.max_seconds, result.slowest_input = seconds, number
    if seconds > MAX_SECONDS:
        result.failures.append(f"input {number}: {seconds:.1f} s")


def _ran_out(error: BaseException | None) -> bool:
    """Return whether the limit of memory, and not a check of ours, ended an input."""
    while error is not None:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def _limited() -> Iterator[None]:
    """Hold this process to MAX_BYTES more than it has, each input to MAX_SECONDS of its time."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlow(f"more than {MAX_SECONDS} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGPROF, stop)
    resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + MAX_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from commenting on each input."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)


def _status(line: str) -> int:
    """Return a line of /proc/self/status in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{line}:")[2].split()[0]) << 10


# --- config --------------------------------------------------------------------------------------

_CONFIG_KEYS = (
    *REFUSED_KEYS, *LARGEST_VALUES, "_attn_implementation", "_name_or_path", "to_dict", "__class__",
    "rope_scaling", "rope_theta", "rope_parameters", "torch_dtype", "dtype", "layer_types",
    "num_labels", "id2label", "attention_types", "sub_configs", "text_config", "is_decoder",
    "tie_word_embeddings", "per_layer_config", "output_attentions", "hidden_act",
)  # fmt: skip


@functools.cache
def _config_seeds() -> list[dict[str, Any]]:
    return [json.loads(tiny_config(family).to_json_string()) for family in FAMILIES]


def _config_target(scratch: Path) -> Target:
    seeds = _config_seeds()
    values = (*FAMILIES, "default", "llama3", "yarn", "linear", "sliding_attention", "silu")
    accepted = 0

    def make(rng: random.Random) -> bytes:
        return Mutator(rng, _CONFIG_KEYS, values, seeds).mutate()

    def play(data: bytes) -> str:
        nonlocal accepted
        config = parse_config(data)
        assert config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        accepted += 1
        if accepted % BUILD_EVERY:
            return "accepted"
        decoder = build_decoder(config, "bf16")
        build_layout(decoder.blocks, WITH_CLIP)
        NameMap(decoder)
        return "built"

    return Target(make=make, play=play)


# --- index ---------------------------------------------------------------------------------------


def _file(tensors: dict[str, Any], data_bytes: int) -> bytes:
    header = json.dumps(tensors).encode()
    return struct.pack("<Q", len(header)) + header + bytes(data_bytes)


def _one(begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]}


def _index_target(scratch: Path) -> Target:
    folder = scratch / "model"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(_file({"w0": _one(0, 8), "w1": _one(8, 16)}, 16))
    (folder / "b.safetensors").write_bytes(_file({"w2": _one(0, 4)}, 4))
    (scratch / "secret.safetensors").write_bytes(_file({"w2": _one(0, 4)}, 4))
    (folder / "out.safetensors").symlink_to("../secret.safetensors")
    (folder / "loop.safetensors").symlink_to("loop.safetensors")
    (folder / "zero.safetensors").symlink_to("/dev/zero")
    (folder / "in.safetensors").symlink_to("b.safetensors")
    (folder / "dir.safetensors").mkdir()
    os.mkfifo(folder / "pipe.safetensors")
    names = ["a", "b", "out", "loop", "zero", "in", "dir", "pipe", "absent"]
    values = [f"{name}.safetensors" for name in names] + ["../secret.safetensors", INDEX_NAME]
    good = {"w0": "a.safetensors", "w1": "a.safetensors", "w2": "b.safetensors"}
    seeds = [
        {"metadata": {"total_size": 20}, "weight_map": good},
        {"weight_map": good},
        {"weight_map": good | {"w2": "in.safetensors"}},
    ]
    keys = ("weight_map", "metadata", "w0", "w1", "w2", "w3", "x" * 600)

    def make(rng: random.Random) -> bytes:
        return Mutator(rng, keys, values, seeds).mutate()

    def play(data: bytes) -> str:
        wanted = parse_index(data)
        (folder / INDEX_NAME).write_bytes(data)
        found = read_folder(folder)
        assert found.keys() == wanted.keys(), "index and folder disagree"
        for tensor in found.values():
            assert tensor.path.parent == folder.resolve(), f"{tensor.path} is not in the folder"
            assert tensor.path.name in ("a.safetensors", "b.safetensors")
        return "accepted"

    return Target(make=make, play=play)


# --- header --------------------------------------------------------------------------------------


def _header_target(scratch: Path) -> Target:
    path = scratch / "x.safetensors"
    seeds: list[dict[str, Any]] = [
        {"w0": _one(0, 8), "w1": _one(8, 16), "__metadata__": {"format": "pt"}},
        {"w": {"dtype": "BF16", "shape": [2, 4], "data_offsets": [0, 16]}},
        {"e": _one(0, 0), "w": _one(0, 16)},
        {"s": {"dtype": "F4", "shape": [2, 16], "data_offsets": [0, 16]}},
    ]
    keys = ("__metadata__", "dtype", "shape", "data_offsets", "w0", "w1", "w2", "x" * 600)
    values = (
        "F64", "F32", "BF16", "U8", "F4", "F6_E2M3", "BOOL", [0, 16], [8, 16], [16, 16], [2, 2],
        [1 << 32, 1 << 32], [1 << 52] * 4, [-2, -2], [True, 4], [4.0], _one(0, 16), _one(8, 16),
    )  # fmt: skip

    def make(rng: random.Random) -> tuple[int, bytes, bytes]:
        header = Mutator(rng, keys, values, seeds).mutate()
        length = len(header) if rng.random() < 0.9 else rng.getrandbits(rng.choice((4, 8, 12, 64)))
        return length, header, bytes(rng.choice((16, 16, 16, 16, 0, 8, 15, 17)))

    def play(made: tuple[int, bytes, bytes]) -> str:
        length, header, data = made
        path.write_bytes(struct.pack("<Q", length) + header + data)
        entries = read_entries(path)
        if length == len(header):
            assert entries == parse_header(header, len(data), path.name)
        _check_cover(entries, 8 + length, path.stat().st_size)
        return "accepted"

    return Target(make=make, play=play)


def _check_cover(entries: list[TensorEntry], start: int, stop: int) -> None:
    """Check that tensors lie in the file, one after the other, from first byte to last."""
    position = start
    for entry in entries:
        assert entry.start == position, f"{entry} does not begin at {position}"
        assert entry.stop >= entry.start
        position = entry.stop
    assert position == stop, f"tensors end at {position}, the file at {stop}"


# --- yaml ----------------------------------------------------------------------------------------

_YAML_SEEDS: list[dict[str, Any]] = [
    {"model": "org/name", "data": "train.jsonl"},
    {
        "model": {"name_or_path": "org/name", "dtype": "bf16", "frozen": ["*.norm"]},
        "data": {"train": [{"path": "a", "weight": 2}, "b"], "eval": 0.02, "max_length": "2k"},
        "train": {"epochs": 1, "batch_tokens": "128k", "max_grad_norm": None},
        "optim": {"learning_rate": 1e-5, "betas": [0.9, 0.95], "schedule": "wsd", "warmup": 0.03},
        "memory": {"device": "cuda:1", "vram": "20GB", "ram": "128GiB", "slots": 3},
        "eval": {"every": 200}, "save": {"dir": "runs/a", "keep": 2}, "log": {"to": ["wandb"]},
    },
    {
        "model_name_or_path": "org/name", "cutoff_len": 2048, "dataset": "a,b", "stage": "sft",
        "learning_rate": 1e-5, "per_device_train_batch_size": 2, "lr_scheduler_type": "cosine",
    },
    {"base_model": "org/name", "datasets": [{"path": "a", "type": "alpaca"}], "sequence_len": 512},
]  # fmt: skip
_YAML_VALUES = (
    "auto", "24GB", "128k", "1e-5", "cpu", "host", "null", "~", "<<", "&a", "*a", "!!str x", "|",
    "wsd", "no", "steps", ["a"], {"path": "a"}, [{"path": "a", "data_files": ["b"]}], [0.9, 0.9],
)  # fmt: skip
_YAML_JUNK = (
    b"\n&a [*a]", b"\n- ", b"\n? ", b"\n---\n", b"\n\t", b" # ", b"!!python/name:os.system", b": ",
    b"\n%TAG ! x", b"|\n  ", b">-\n", b'"\\U0011ffff"', b"[" * 200, b"{a: " * 50, b"\xef\xbb\xbf",
)  # fmt: skip


def _yaml_target(scratch: Path) -> Target:
    ours = [key for keys in FIELDS.values() for key in keys]
    keys = (*ours, *ours, *ALIASES, *HINTS, "sources", "fraction")
    dotted = [f"{section}.{key}" for section, names in FIELDS.items() for key in names]

    def make(rng: random.Random) -> tuple[bytes, list[str]]:
        data = Mutator(rng, keys, (*_YAML_VALUES, *ours), _YAML_SEEDS).mutate()
        if rng.random() < 0.2:
            at = rng.randrange(len(data) + 1)
            data = data[:at] + rng.choice(_YAML_JUNK) + data[at:]
        overrides = [
            f"{rng.choice(dotted)}={rng.choice((*_YAML_VALUES, *NUMBERS[:20]))}"
            for _ in range(rng.choice((0, 0, 0, 1, 2)))
        ]
        return data, overrides

    def play(made: tuple[bytes, list[str]]) -> str:
        document = parse_document(made[0], "run.yaml")
        if isinstance(document.value, dict):
            _, read_as, undecided = bring_over(document)
            assert len(read_as) + len(undecided) == len(document.value), "a key has no line"
        config = resolve_config(document, made[1])
        text = dump_config(config)
        assert resolve_config(parse_document(text.encode(), "dump")) == config, "lost in the dump"
        return "accepted"

    return Target(make=make, play=play)


# --- rows ----------------------------------------------------------------------------------------

_TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "two words"}]
_CALL = {"id": "7", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_ROW_SEEDS: list[dict[str, Any]] = [
    {"messages": [{"role": "system", "content": "s"}, *_TALK, *_TALK], "id": 7},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"instruction": "add", "input": "1, 2", "output": "3", "history": [["q", "a"]]},
    {"prompt": "p", "completion": "c"},
    {"prompt": _TALK[:1], "completion": _TALK[1:]},
    {"question": "q?", "answer": "a", "text": None},
    {"text": "plain words \u00e9"},
    {
        "messages": [
            _TALK[0],
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [_CALL],
            },
            {"role": "tool", "tool_call_id": "7", "content": "4"},
            {"role": "assistant", "content": "4", "weight": 1},
        ],
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        ],
        "chat_template_kwargs": {"enable_thinking": False},
    },
]
_ROW_KEYS = (
    "messages", "conversations", "role", "content", "from", "value", "instruction", "input",
    "output", "history", "system", "prompt", "completion", "question", "answer", "text",
    "tool_calls", "function", "name", "arguments", "weight", "train", "thinking", "type", "tools",
    "chat_template_kwargs", "images", "tokenize",
)  # fmt: skip
_ROW_VALUES = (
    "user", "assistant", "gpt", "tool", "wizard", _TALK, [_TALK], json.dumps(_TALK), ["a", "b"],
    "<|im_end|>", "<|im_start|>system\n", " ", "\r", "\u2028", "\x85", "[]", "[{}]", "null",
    [_CALL], {"f": None}, "function_call", "<think>", "</think>", 0, 1, True,
    [{"type": "text", "text": "a"}, {"type": "image_url"}],
)  # fmt: skip
_ROW_JUNK = (
    b"\n", b"\r\n", b"\r", b"\n\n", b"\xef\xbb\xbf", b"\0", b"\x0b", b"\xe2\x80\xa8", b"\xff\xfe",
    b"[" * 2000, b'{"a":' * 2000, b"9" * 5000, b" " * 3000, b"// x\n", b"]\n[", b"\x1a",
)  # fmt: skip


def _jsonl_target(scratch: Path) -> Target:
    def make(rng: random.Random) -> tuple[str, bytes]:
        kind = rng.choice(_ROW_SEEDS)  # most lines of a file have one shape
        lines = []
        for _ in range(rng.choice((1, 2, 3, 5))):
            same = json.dumps(kind).encode()
            mutator = Mutator(rng, _ROW_KEYS, _ROW_VALUES, (kind, kind, rng.choice(_ROW_SEEDS)))
            lines.append(same if rng.random() < 0.6 else mutator.mutate())
        is_array = rng.random() < 0.15
        data = b"[" + b",\n".join(lines) + b"]" if is_array else b"\n".join(lines)
        if rng.random() < 0.2:
            at = rng.randrange(len(data) + 1)
            data = data[:at] + rng.choice(_ROW_JUNK) + data[at:]
        return "a.json" if is_array else "a.jsonl", data

    return _rows_target(scratch, make)


def _parquet_target(scratch: Path) -> Target:
    import pyarrow as pa
    import pyarrow.parquet as pq

    seeds = []
    for number, kind in enumerate(_ROW_SEEDS):
        for codec in ("none", "snappy", "zstd"):
            path = scratch / f"{number}-{codec}.parquet"
            rows = [{**kind, "number": row} for row in range(1 + 40 * (number % 3))]
            pq.write_table(pa.Table.from_pylist(rows), path, compression=codec)
            seeds.append(path.read_bytes())

    def make(rng: random.Random) -> tuple[str, bytes]:
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.choice((0, 1, 1, 1, 2, 8))):
            at = rng.randrange(len(data)) if rng.random() < 0.6 else -1 - rng.randrange(300)
            at = max(at, -len(data))
            kind = rng.randrange(4)
            if kind == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                data[at] = rng.choice((0, 1, 127, 128, 255))
            elif kind == 2:
                data[at : at + rng.choice((1, 4, 30))] = b""
            else:
                data[at:at] = rng.randbytes(rng.choice((1, 4, 30)))
        return "a.parquet", bytes(data)

    return _rows_target(scratch, make)


def _rows_target(scratch: Path, make: Callable[[random.Random], tuple[str, bytes]]) -> Target:
    tokenizers = (tokenizer_of("qwen3"), tokenizer_of_style("qwen3"))
    settings: Settings = {
        "max_length": 64, "train_on": "assistant", "template_kwargs": {},
        "overlong": "truncate", "no_target": "drop",
    }  # fmt: skip
    played = 0

    @functools.cache  # a template takes ten times as long to compile as a row to encode
    def encoder(shape: Format, number: int) -> ChunkEncoder:
        return ChunkEncoder(tokenizers[number], shape, settings)

    def play(made: tuple[str, bytes]) -> str:
        nonlocal played
        path = scratch / made[0]
        path.write_bytes(made[1])
        source, skipped = open_source(path), SkippedRows()
        values = list(source.values())
        places = [place for place, _ in source.rows(skipped)]
        assert len(places) + skipped.total == len(values), "a row is lost"
        numbers = [int(place.rpartition(":")[2]) for place in places]
        assert numbers == sorted(set(numbers)), "rows out of order"
        played += 1
        if played % BUILD_EVERY == 0:
            encoded = encoder(source.format, played // BUILD_EVERY % 2).encode(values)
            assert encoded.num_rows == len(values)
            assert int(encoded.lengths.sum()) == len(encoded.ids)
        return "some bad" if skipped.total else "accepted"

    return Target(make=make, play=play)


# --- manifest ------------------------------------------------------------------------------------

_HASH = "0123456789abcdef" * 2


def _manifest_seed(files: dict[str, Any], **run: Any) -> dict[str, Any]:
    state = RunState(global_step=7, total_tokens=900, first_loss=2.5, left_out={3: "why"})
    state.judge("loss", 2.25)
    training = {
        "run": state.to_json() | run,
        "eval_loss": 1.5,
        "data": {"epoch": 0, "window": 1, "row": 2, "order": _HASH},
        "lines": {"metrics.jsonl": 1000, "samples.jsonl": 0},
        "config": _manifest_config().model_dump(mode="json"),
        "num_updates": [[0, 7], [1, 7]],
        **{lever.name: getattr(StepSettings(), lever.name) for lever in KEPT},
        "learning_rate": 1e-5,
        "source_mark": _HASH,
    }
    written = Manifest(step=7, files={}, model=_HASH, training=training).to_bytes()
    fields: dict[str, Any] = json.loads(written) | {"files": files}
    del fields["sha256"]
    return fields


@functools.cache
def _manifest_config() -> Config:
    config = Config.model_validate({"model": "m", "data": "rows.jsonl"}).settled(131072)
    return config.decided(packing=True, learning_rate=1e-5)


def _manifest_target(scratch: Path) -> Target:
    one = {"num_bytes": 10, "digests": [_HASH]}
    two = {"num_bytes": CHUNK_BYTES + 1, "digests": [_HASH, _HASH]}
    seeds = [
        _manifest_seed({"model/config.json": one, "state/block-00000.safetensors": two}),
        _manifest_seed({"model/empty": {"num_bytes": 0, "digests": []}}, eval_loss=1.0),
    ]
    keys = (
        *("schema", "step", "model", "chunk_bytes", "training", "files", "num_bytes", "digests"),
        *("run", "data", "lines", "config", "num_updates", "left_out", "recent", "order", "epoch"),
        *("model/a", "state/..", "../x", "/x", "model/" + "x" * 300, "model/a/b", "sha256"),
    )
    values = (_HASH, _HASH.upper(), [_HASH], one, two, 8 << 20, CHUNK_BYTES, [[0, 7]], [["0", 7]])

    def make(rng: random.Random) -> bytes:
        data = Mutator(rng, keys, values, seeds).mutate()
        if rng.random() < 0.9:
            data = signed(data.removesuffix(b"}") + b"\n}")
        return data if rng.random() < 0.95 else data[: rng.randrange(len(data))]

    def play(data: bytes) -> str:
        manifest = parse_manifest(data, "manifest.json")
        again = parse_manifest(manifest.to_bytes(), "again")
        # Not ==: NaN is not itself.
        assert again.to_bytes() == manifest.to_bytes(), "lost in the writing"
        for name, record in manifest.files.items():
            assert (scratch / name).resolve().parent.parent == scratch.resolve(), name
            assert len(record.digests) == -(-record.num_bytes // CHUNK_BYTES)
        changed_settings(_manifest_config(), manifest)
        known = known_of(manifest)
        assert json.dumps(known.state.to_json())
        return "accepted"

    return Target(make=make, play=play)


TARGETS: dict[str, Callable[[Path], Target]] = {
    "config": _config_target,
    "index": _index_target,
    "header": _header_target,
    "yaml": _yaml_target,
    "jsonl": _jsonl_target,
    "parquet": _parquet_target,
    "manifest": _manifest_target,
}

if __name__ == "__main__":
    main()

"""Ten billion tokens: the first step, the memory, and a resume in the middle.

    python -m proofs.scale --json [--tokens 10000000000]

The tokens are made on the fly, in place of the bytes of a .bin file; everything else is what a run
does. Each figure has a process of its own.

    seconds_to_first_step   from the start of a process to the end of the first step of a tiny model
    resident_growth_bytes   anonymous memory of a process that goes through half of the tokens, at
                            most, over that after 32 windows; or over that of a process with 1/100
                            of the tokens, if it is more
    resume_exact            whether a fresh process at the saved position gives the steps that the
                            first one gives, which came there step by step
    resume_chunks           chunks that the fresh process has read for them, of `chunks`

Ends with 1 unless the resume is exact, memory grows by at most 16 MiB, and the first step comes
within 60 s. `--spoil order` lets the fresh process have another seed: found.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from testkit.printed import print_figures

TOKENS = 10_000_000_000
MAX_LENGTH, BATCH_TOKENS, END = 2048, 8192, 1
LIMITS = {"seconds_to_first_step": 60.0, "resident_growth_bytes": 16 << 20}
NUM_COMPARED = 6
_WARM_WINDOWS = 32
_PERIOD = 1_000_003
"""Prime, so that no two chunks are alike."""
_PATIENCE_S = 7200.0


@lru_cache
def _pattern() -> NDArray[np.uint16]:
    drawn = np.random.default_rng(0)
    ids = drawn.integers(2, 250, _PERIOD, dtype=np.uint16)
    ids[drawn.random(_PERIOD) < 1 / 1500] = END
    return np.concatenate([ids, ids])


class MadeFile:
    """Bytes of uint16 that are a function of their place."""

    name = "made.bin"
    num_reads = 0

    def __init__(self, num_tokens: int) -> None:
        self.num_bytes = 2 * num_tokens

    def read(self, start: int, stop: int) -> bytes:
        MadeFile.num_reads += 1
        first, count = start // 2, (stop - start) // 2
        at = first % _PERIOD
        ids = np.resize(_pattern()[at : at + min(count, _PERIOD)], count)
        if count > 4:  # its own number, so that no chunk can stand for another
            ids[:4] = 2 + first // np.array([1, 200, 200**2, 200**3]) % 200
        return ids.tobytes()

    def mark(self) -> str:
        return f"{self.num_bytes}"


def _steps(num_tokens: int, seed: int = 42) -> Any:
    from megatrain.data.chunks.chunks import ChunkedDocuments, without_held
    from megatrain.data.chunks.token_files import TokenFile, TokenFiles
    from megatrain.data.steps.chunk_windows import ChunkOrder
    from megatrain.data.steps.steps import Steps

    file = TokenFile(
        file=MadeFile(num_tokens), dtype=np.dtype("<u2"), offset=0, num_tokens=num_tokens
    )
    source = TokenFiles("made.bin", [file], max_length=MAX_LENGTH, end=END)
    documents = ChunkedDocuments([source])
    order = ChunkOrder([without_held(0, source.num_chunks, 0, seed)], [1.0], seed)
    return Steps(
        documents, order, batch_tokens=BATCH_TOKENS, micro_batch_tokens=BATCH_TOKENS,
        max_length=MAX_LENGTH, seed=seed,
    )  # fmt: skip


def _resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def _compared(steps: Any, position: Any) -> list[str]:
    """Digests of the steps from a position on."""
    found = []
    for _ in range(NUM_COMPARED):
        batch, position = steps.batch(position)
        digest = xxhash.xxh3_128()
        for micro in batch:
            for tensor in (micro.input_ids, micro.labels, micro.position_ids):
                digest.update(tensor.numpy().tobytes())
        found.append(digest.hexdigest())
    return found


def play_walk(num_tokens: int, share: float = 0.5) -> dict[str, Any]:
    """Go through a part of the tokens, step by step."""
    from megatrain.data.steps.steps import Position

    steps, position, seen, warm = _steps(num_tokens), Position(), 0, 0
    least = share * steps._windows.num_windows
    most = 0
    while position.window < least:
        rows, position = steps.rows(position)
        seen += len(rows)
        if position.window >= _WARM_WINDOWS:
            warm = warm or _resident_bytes()
            if seen % 4096 < len(rows):
                most = max(most, _resident_bytes())
    found: dict[str, Any] = {"resident": max(most, _resident_bytes()), "warm": warm, "rows": seen}
    found |= {"state": steps.state(position), "steps": _compared(steps, position)}
    steps.documents.close()
    return found


def play_resume(num_tokens: int, state: str, spoil: str) -> dict[str, Any]:
    """Give the steps after a saved position."""
    from megatrain.data.steps.steps import Position

    begin = time.perf_counter()
    steps = _steps(num_tokens)
    saved = json.loads(state)
    if spoil == "order":
        steps = _steps(num_tokens, seed=43)
        saved["order"] = steps.state(Position())["order"]
    MadeFile.num_reads = 0
    found = _compared(steps, steps.position(saved))
    seconds = time.perf_counter() - begin
    steps.documents.close()
    return {
        "steps": found,
        "reads": MadeFile.num_reads,
        "seconds": seconds,
        "chunks": steps._windows.order.size,
    }


def play_first(num_tokens: int, folder: Path) -> dict[str, Any]:
    """Train one step of a tiny model."""
    os.environ["MEGATRAIN_CACHE"] = str(folder / "cache")
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from megatrain.cli.demo import byte_tokenizer
    from megatrain.config import Config
    from megatrain.data.chunks import token_files
    from megatrain.run.callbacks import Callback
    from megatrain.run.trainer import Trainer

    torch.set_num_threads(1)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    shape = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=MAX_LENGTH,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder / "model")
    setattr(token_files, "byte_files", lambda path, suffixes: [MadeFile(num_tokens)])  # noqa: B010
    config = Config.model_validate(
        {
            "model": {"name_or_path": str(folder / "model")},
            "data": {
                "train": {"path": "made.bin", "dtype": "uint16", "eos": END},
                "max_length": MAX_LENGTH,
            },
            "train": {"steps": num_tokens // BATCH_TOKENS, "batch_tokens": BATCH_TOKENS},
            "memory": {"device": "cpu"},
            "eval": {"samples": 0},
            "save": {"dir": str(folder / "run"), "every": None},
        }
    )
    took: list[float] = []

    class First(Callback):
        def on_step_end(self, config: Any, state: Any, control: Any, **_: Any) -> None:
            took.extend((_age_s(), time.process_time()))
            control.should_training_stop = True

    with Trainer(config, callbacks=[First()]) as trainer:
        trainer.train()
    return {"seconds": took[0], "cpu_seconds": took[1]}


def _age_s() -> float:
    """Seconds since this process began."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    up = float(Path("/proc/uptime").read_text().split()[0])
    return up - ticks / os.sysconf("SC_CLK_TCK")


def _played(*words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "proofs.scale", "--play", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)[:200]}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(num_tokens: int, spoil: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="megatrain-scale-") as folder:
        first = _played("first", str(num_tokens), folder)
    small = _played("walk", str(num_tokens // 100))
    walked = _played("walk", str(num_tokens))
    resumed = _played("resume", str(num_tokens), json.dumps(walked["state"]), spoil)
    before = walked["warm"] or walked["resident"]
    growth = max(walked["resident"] - before, walked["resident"] - small["resident"], 0)
    return {
        "tokens": num_tokens,
        "seconds_to_first_step": round(first["seconds"], 1),
        "cpu_seconds_to_first_step": round(first["cpu_seconds"], 1),
        "resident_bytes": walked["resident"],
        "resident_growth_bytes": growth,
        "resume_exact": resumed["steps"] == walked["steps"],
        "resume_seconds": round(resumed["seconds"], 2),
        "resume_chunks": resumed["reads"],
        "chunks": resumed["chunks"],
        "packed_rows_before_resume": walked["rows"],
        "limits": LIMITS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--spoil", choices=("none", "order"), default="none")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--play", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.play:
        what, tokens, *more = arguments.play
        played = {
            "walk": lambda: play_walk(int(tokens)),
            "resume": lambda: play_resume(int(tokens), *more),
            "first": lambda: play_first(int(tokens), Path(more[0])),
        }[what]()
        print(json.dumps(played))
        return
    found = measure(arguments.tokens, arguments.spoil)
    print_figures(found, as_json=arguments.json)
    is_within = all(found[name] <= limit for name, limit in LIMITS.items())
    sys.exit(0 if is_within and found["resume_exact"] else 1)


if __name__ == "__main__":
    main()

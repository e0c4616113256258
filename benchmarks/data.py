"""Preparing data against the bare tokenizer: rows per second, memory and cores of the whole tree.

    python -m benchmarks.data --json [--rows 50000] [--rounds 3] [--workers 2]

Rows are conversations of one to four questions and answers, with English from the docstrings of
the standard library. The tokenizer is a byte-level BPE trained on the same text, with a ChatML
template that has generation tags, so that every mask is derived twice.

    rows_per_s        rows over the time of `prepare`, from the call to the published folder
    vs_tokenizer      that over the rows per second of one batch call of the bare tokenizer (Rust,
                      both cores, no offsets asked for, ids read) on texts rendered beforehand
    vs_transformers   the same for the call that most programs make, tokenizer(texts)
    cpu_vs_tokenizer  the tokenizer's processor seconds per row over ours: what vs_tokenizer is on
                      a machine that is otherwise idle
    peak_bytes        most memory of the process and its workers at one time (PSS, sampled)
    cores_busy        processor seconds of the tree over seconds

`prepare` and the tokenizer take turns in every round, in processes of their own; figures are
medians over rounds, of the ratio within a round. The tokenizers see at most SAMPLE of the rows.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

SAMPLE = 20_000
MAX_LENGTH = 4096
TARGETS = {"vs_tokenizer": 0.7, "peak_bytes": 3 << 29, "cores_busy": 1.8}
_VOCABULARY = 16_384
_SAMPLE_EVERY_S = 0.2
_SENTENCE = re.compile(r"(?<=[.:!?])\s+|\n\s*\n")
_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def sentences() -> list[str]:
    """Return the sentences of the standard library's docstrings."""
    found = []
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                found += _SENTENCE.split(ast.get_docstring(node) or "")
    return [sentence for sentence in found if len(sentence) > 20]


def conversations(count: int, text: list[str]) -> Iterator[list[dict[str, str]]]:
    """Yield conversations that are a function of their number."""
    for number in range(count):
        rng = random.Random(number)
        turns = [{"role": "system", "content": rng.choice(text)}] if rng.random() < 0.2 else []
        for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
            asked = " ".join(rng.choices(text, k=1 + int(rng.expovariate(0.7))))
            said = " ".join(rng.choices(text, k=1 + int(rng.expovariate(0.2))))
            turns.append({"role": "user", "content": f"{asked} ({rng.randrange(10**6)})"})
            turns.append({"role": "assistant", "content": said})
        yield turns


def make_tokenizer(text: list[str]) -> Any:
    """Return a fast tokenizer trained on the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=["<pad>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>"
    )
    fast.chat_template = _TEMPLATE
    return fast


# --- what is measured, each in a process of its own ----------------------------------------------


def _load(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def play_prepare(folder: Path, num_workers: int) -> dict[str, float]:
    from megatrain.data.tokens.prepare import prepare

    tokenizer = _load(folder)
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        before, begin = _cpu_seconds(), time.perf_counter()
        prepared = prepare(
            folder / "rows.jsonl",
            tokenizer,
            cache_dir=cache,
            max_length=MAX_LENGTH,
            num_workers=num_workers,
        )
        wall = time.perf_counter() - begin
        card = prepared.card
    return {
        "rows_per_s": card["rows"] / wall,
        "tokens_per_row": card["tokens"] / card["rows"],
        "cores_busy": (cpu := _cpu_seconds() - before) / wall,
        "cpu_us_per_row": 1e6 * cpu / card["rows"],
        "seconds": wall,
    }


def play_tokenizers(folder: Path) -> dict[str, float]:
    tokenizer = _load(folder)
    with (folder / "rows.jsonl").open() as file:
        talks = [json.loads(line)["messages"] for _, line in zip(range(SAMPLE), file, strict=False)]
    texts = [tokenizer.apply_chat_template(talk, tokenize=False) for talk in talks]
    backend = tokenizer.backend_tokenizer

    def bare(batch: list[str]) -> Any:
        return [one.ids for one in backend.encode_batch_fast(batch, add_special_tokens=False)]

    def usual(batch: list[str]) -> Any:
        return tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]

    found = {}
    for name, call in (("tokenizer", bare), ("transformers", usual)):
        call(texts[:500])
        before, begin = _cpu_seconds(), time.perf_counter()
        for at in range(0, len(texts), 1000):
            call(texts[at : at + 1000])
        found[name] = len(texts) / (time.perf_counter() - begin)
        found[f"{name}_cpu_us"] = 1e6 * (_cpu_seconds() - before) / len(texts)
    return found


def _cpu_seconds() -> float:
    """Processor time of this process and of those it has waited for."""
    parts = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(part.ru_utime + part.ru_stime for part in parts)


# --- turns ---------------------------------------------------------------------------------------


def _measured(arguments: list[str]) -> tuple[dict[str, float], int]:
    """Return what a child process prints, and the most memory that its tree held."""
    command = [sys.executable, "-m", "benchmarks.data", *arguments]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peak = 0
    while child.poll() is None:
        peak = max(peak, _tree_bytes(child.pid))
        time.sleep(_SAMPLE_EVERY_S)
    assert child.stdout is not None
    printed = child.stdout.read()
    if child.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
    return json.loads(printed), peak


def _tree_bytes(pid: int) -> int:
    total = 0
    try:
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            total += one.memory_full_info().pss
    except psutil.Error:  # it has just ended
        pass
    return total


def measure(num_rows: int, num_rounds: int, num_workers: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="megatrain-data-") as name:
        folder = Path(name)
        text = sentences()
        make_tokenizer(text).save_pretrained(str(folder))
        with (folder / "rows.jsonl").open("w") as file:
            for talk in conversations(num_rows, text):
                file.write(json.dumps({"messages": talk}) + "\n")
        file_bytes = (folder / "rows.jsonl").stat().st_size
        rounds = []
        for _ in range(num_rounds):
            ours, peak = _measured(
                ["--play", "prepare", str(folder), "--workers", str(num_workers)]
            )
            theirs, _ = _measured(["--play", "tokenizers", str(folder)])
            rounds.append({**ours, **theirs, "peak_bytes": float(peak)})

    def median(name: str, over: str = "") -> float:
        values = [one[name] / (one[over] if over else 1.0) for one in rounds]
        return round(statistics.median(values), 3)

    return {
        "rows": num_rows,
        "file_bytes": file_bytes,
        "workers": num_workers,
        "rounds": num_rounds,
        "tokens_per_row": median("tokens_per_row"),
        "seconds": median("seconds"),
        "rows_per_s": median("rows_per_s"),
        "tokenizer_rows_per_s": median("tokenizer"),
        "vs_tokenizer": median("rows_per_s", "tokenizer"),
        "vs_transformers": median("rows_per_s", "transformers"),
        "cpu_us_per_row": median("cpu_us_per_row"),
        "tokenizer_cpu_us_per_row": median("tokenizer_cpu_us"),
        "cpu_vs_tokenizer": median("tokenizer_cpu_us", "cpu_us_per_row"),
        "peak_bytes": int(max(one["peak_bytes"] for one in rounds)),
        "cores_busy": median("cores_busy"),
        "targets": TARGETS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--play", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.play:
        what, folder = arguments.play[0], Path(arguments.play[1])
        is_ours = what == "prepare"
        print(
            json.dumps(
                play_prepare(folder, arguments.workers) if is_ours else play_tokenizers(folder)
            )
        )
        return
    result = measure(arguments.rows, arguments.rounds, arguments.workers)
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:22} {value}")


if __name__ == "__main__":
    main()

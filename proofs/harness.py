"""Tasks of lm-evaluation-harness: our model in it against its own `hf`, request by request.

    python -m proofs.harness --json
    python -m proofs.harness --shifted --json     (must end with 1)

Run this in an environment of its own that has `lm_eval[hf]` from PyPI beside MegaTrain's
requirements; no network is asked. Two tiny random models in fp32, one with rotary and one with
learned positions, are evaluated on three tasks made from files: choices (log-likelihoods), texts of
several windows (rolling log-likelihoods) and sums (generation until a line ends). Ends with 1 if a
log-likelihood differs by more than 1e-6 of its size, a choice, a generated text or a score of the
tables differs, or if a model with other weights would pass. `--shifted` spoils our model: it leaves
out the first token of every text, and the faults of each task are counted.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedConfig

from megatrain.cli.demo import byte_tokenizer
from megatrain.cli.harness import harness_model

CLOSE = 1e-6
TASKS = ("choices", "texts", "sums")
_DATA = "dataset_path: json\ndataset_kwargs: {{data_files: {{test: {file}}}}}\ntest_split: test\n"
_TASKS = {
    "choices": (
        "output_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: 0\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n"
    ),
    "texts": (
        "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        "metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, "
        "{metric: bits_per_byte}]\n"
    ),
    "sums": (
        "output_type: generate_until\ndoc_to_text: '{{question}}'\n"
        "doc_to_target: '{{choices[0]}}'\n"
        "generation_kwargs: {until: ['a', '(('], max_gen_toks: 24, do_sample: false}\n"
        "metric_list: [{metric: exact_match}]\n"
    ),
}


def configs(vocab_size: int) -> dict[str, PreTrainedConfig]:
    ends = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None, "vocab_size": vocab_size}
    return {
        "rotary": LlamaConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=96, initializer_range=0.2, **ends,
        ),
        "learned": GPT2Config(
            n_embd=64, n_layer=2, n_head=4, n_positions=96, initializer_range=0.2, **ends,
        ),
    }  # fmt: skip


def write_model(folder: Path, config: PreTrainedConfig, seed: int) -> Path:
    torch.manual_seed(seed)
    byte_tokenizer().save_pretrained(folder)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def write_tasks(folder: Path) -> None:
    draw = random.Random(0)
    rows = [
        {
            "question": f"{draw.randrange(10 ** draw.randrange(1, 40))} and {draw.randrange(99)} =",
            "choices": [f" {draw.randrange(999)}" for _ in range(4)],
            "text": " ".join(f"word {draw.randrange(999)}" for _ in range(draw.randrange(1, 60))),
        }
        for _ in range(40)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in _TASKS.items():
        head = f"task: {name}\n" + _DATA.format(file=folder / "rows.jsonl")
        (folder / f"{name}.yaml").write_text(head + text)


def shifted(made: type[Any]) -> type[Any]:
    """Return a model of the harness that reads every text from its second token on."""

    def tok_encode(self: Any, string: str, *given: Any, **named: Any) -> list[int]:
        return list(made.tok_encode(self, string, *given, **named))[1:]

    return type("Shifted", (made,), {"tok_encode": tok_encode})


def evaluated(model: Any, tasks: Path) -> Any:
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return lm_eval.simple_evaluate(
        model=model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0
    )


def responses(found: Any, task: str) -> list[Any]:
    """Return what the model answered to each request of a task."""
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    return [response for sample in samples for response in sample["resps"]]


def _numbers(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for one in value:
            yield from _numbers(one)
    else:
        yield value


def compared(ours: Any, theirs: Any) -> tuple[float, int, list[str]]:
    """Return the largest difference relative to the size, the number of answers, the faults."""
    largest, count, faults = 0.0, 0, []
    pairs = [
        (f"{task} request", responses(ours, task), responses(theirs, task)) for task in TASKS
    ] + [
        (f"{task} {metric}", value, theirs["results"][task][metric])
        for task in TASKS
        for metric, value in ours["results"][task].items()
        if isinstance(value, float)
    ]
    for name, one, other in pairs:
        for mine, its in zip(_numbers(one), _numbers(other), strict=True):
            count += 1
            if isinstance(mine, float):
                difference = abs(mine - its) / max(1.0, abs(its))
                largest = max(largest, difference)
                if difference > CLOSE:
                    faults.append(f"{name}: {mine} here, {its} by hf")
            elif mine != its:
                faults.append(f"{name}: {mine!r} here, {its!r} by hf")
    return largest, count, faults


def prove(name: str, config: PreTrainedConfig, folder: Path, *, is_shifted: bool) -> dict[str, Any]:
    from lm_eval.models.huggingface import HFLM

    model = write_model(folder / name, config, seed=1)
    other = write_model(folder / f"{name}-other", config, seed=2)
    theirs = evaluated(HFLM(pretrained=str(model), dtype="float32", device="cpu"), folder)
    with ExitStack() as stack:
        made = harness_model(model, stack, device="cpu")
        ours = evaluated((shifted(made) if is_shifted else made)(), folder)
        wrong = evaluated(harness_model(other, stack, device="cpu")(), folder)
    largest, count, faults = compared(ours, theirs)
    if not compared(wrong, theirs)[2]:
        faults.append("a model with other weights would pass")
    texts = responses(ours, "sums")
    if len({str(text) for text in texts}) < 5:
        faults.append("the generated texts are all alike")
    by_task = {task: sum(fault.startswith(task) for fault in faults) for task in TASKS}
    return {
        "model": name, "answers": count, "largest": largest,
        "faults": len(faults), "by_task": by_task, "first": faults[:3],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--shifted", action="store_true", help="spoil our model; must end with 1")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with (
        tempfile.TemporaryDirectory(prefix="megatrain-harness-") as path,
        redirect_stdout(sys.stderr),
    ):
        write_tasks(Path(path))
        vocabulary = len(byte_tokenizer())
        found = [
            prove(name, config, Path(path), is_shifted=options.shifted)
            for name, config in configs(vocabulary).items()
        ]
    passed = not any(one["faults"] for one in found)
    if options.json:
        print(json.dumps({"passed": passed, "models": found}))
    else:
        print(*found, f"passed: {passed}", sep="\n")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()

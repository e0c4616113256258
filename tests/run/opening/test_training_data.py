"""The data of a run: mixtures, held-out rows, steps by rows, and the order of the file."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatrain.batch import MicroBatch
from megatrain.cli.demo import byte_tokenizer
from megatrain.config import Config
from megatrain.data.training_rows import TrainingRows, gather
from megatrain.errors import ModelFolderError
from megatrain.run.opening.model import load_tokenizer
from megatrain.run.opening.training_data import TrainingData, open_data
from megatrain.step.settings import StepSettings

SETTINGS = StepSettings(micro_batch_tokens=64)


def _write(path: Path, letter: str, count: int) -> str:
    rows = [{"prompt": f"{letter}{number}?", "completion": "yes"} for number in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _open(tmp_path: Path, data: dict[str, Any], train: dict[str, Any], **more: Any) -> TrainingData:
    values = {"model": "m", "data": {"max_length": 64, **data}, "train": train, **more}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
        patch.setattr(os, "sched_getaffinity", lambda process: {0})  # no other processes
        config = Config.model_validate(values).decided(packing=True)
        tokenizer = byte_tokenizer()
        return open_data(config, tokenizer, SETTINGS, gather(config, tokenizer), flat=True)


def _names(batch: list[MicroBatch]) -> list[str]:
    """The questions of a step, `a17`, in no particular order."""
    text = byte_tokenizer().decode([int(i) for micro in batch for i in micro.input_ids.flatten()])
    return re.findall(r"([ab]\d+)\?", text)


def _epoch(data: TrainingData, num_steps: int) -> list[list[str]]:
    with_names = [_names(data.next_batch()) for _ in range(num_steps)]
    data.close()
    return with_names


def test_files_without_weights_are_concatenated(tmp_path: Path) -> None:
    files = [_write(tmp_path / "a.jsonl", "a", 60), _write(tmp_path / "b.jsonl", "b", 6)]
    data = _open(tmp_path, {"train": files}, {"batch_rows": 8})
    seen = Counter(name for step in _epoch(data, data.steps_of(1)) for name in step)
    assert len(seen) == 66
    assert set(seen.values()) == {1}


def test_a_weight_repeats_the_rows_of_its_file(tmp_path: Path) -> None:
    a, b = _write(tmp_path / "a.jsonl", "a", 60), _write(tmp_path / "b.jsonl", "b", 6)
    data = _open(tmp_path, {"train": [a, {"path": b, "weight": 2.5}]}, {"batch_rows": 8})
    assert data.steps_of(1) == math.ceil(75 / 8)
    seen = Counter(name for step in _epoch(data, data.steps_of(1)) for name in step)
    assert {seen[f"a{number}"] for number in range(60)} == {1}
    assert Counter(seen[f"b{number}"] for number in range(6)) == {2: 3, 3: 3}


@pytest.mark.parametrize("packing", [True, False])
def test_a_step_has_exactly_the_rows_asked_for(tmp_path: Path, packing: bool) -> None:
    rows = _write(tmp_path / "a.jsonl", "a", 30)
    data = _open(tmp_path, {"train": rows, "packing": packing}, {"batch_rows": 8})
    steps = _epoch(data, 8)
    assert [len(set(step)) for step in steps] == [8, 8, 8, 6] * 2
    assert sorted(steps[0] + steps[1] + steps[2] + steps[3]) == sorted(f"a{n}" for n in range(30))


@pytest.mark.parametrize("packing", [True, False])
def test_without_shuffling_rows_come_as_they_stand(tmp_path: Path, packing: bool) -> None:
    files = [_write(tmp_path / "a.jsonl", "a", 12), _write(tmp_path / "b.jsonl", "b", 4)]
    settings = {"train": files, "packing": packing, "shuffle": False}
    steps = _epoch(_open(tmp_path, settings, {"batch_rows": 4}), 8)
    order = [[f"a{n}" for n in range(4 * k, 4 * k + 4)] for k in range(3)]
    expected = [*order, [f"b{n}" for n in range(4)]] * 2
    assert [sorted(step) for step in steps] == [sorted(step) for step in expected]


def test_held_out_rows_are_not_trained_on(tmp_path: Path) -> None:
    rows = _write(tmp_path / "a.jsonl", "a", 30)
    data = _open(tmp_path, {"train": rows, "eval": 0.2}, {"batch_rows": 8})
    held = {name for batch in data.eval_batches() for name in _names(batch)}
    trained = {name for step in _epoch(data, data.steps_of(1)) for name in step}
    assert len(held) == 6
    assert len(trained) == 24
    assert held & trained == set()


def test_the_limit_of_an_evaluation_counts_rows(tmp_path: Path) -> None:
    """A text of several pieces is one row."""
    path = tmp_path / "a.txt"
    path.write_text("".join(f"a{number}? {'word ' * 40}\n" for number in range(10)))
    settings = {"train": str(path), "eval": str(path), "overlong": "split"}
    data = _open(tmp_path, settings, {"batch_rows": 2}, eval={"max_rows": 3})
    judged = [int(i) for batch in data.eval_batches() for m in batch for i in m.labels.flatten()]
    end = byte_tokenizer().eos_token_id
    assert judged.count(end) == 3 == data.num_judged
    assert len(judged) > 3 * 150


@pytest.mark.parametrize("most", [10, 2])
def test_every_source_is_judged_whatever_the_limit(tmp_path: Path, most: int) -> None:
    sizes = (("a", 100), ("b", 1), ("bb", 1))
    files = [_write(tmp_path / f"{name}.jsonl", name[0], size) for name, size in sizes]
    settings = {"train": files[0], "eval": files}
    data = _open(tmp_path, settings, {"batch_rows": 2}, eval={"max_rows": most})
    judged = sorted(name for batch in data.eval_batches() for name in _names(batch))
    assert judged == [*(f"a{number}" for number in range(max(1, most - 2))), "b0", "b0"]
    assert data.num_judged == len(judged)
    assert data.eval_names == ("a", "b", "bb")


def test_a_loss_has_the_name_of_its_source(tmp_path: Path) -> None:
    """Of the first one nothing is held out."""
    sizes = (("few", 3), ("a", 60), ("b", 40))
    files = [_write(tmp_path / f"{name}.jsonl", name[-1], size) for name, size in sizes]
    data = _open(tmp_path, {"train": files, "eval": 0.1}, {"batch_rows": 2})
    found: Counter[str] = Counter()
    for micro in (micro for batch in data.eval_batches() for micro in batch):
        assert micro.source_ids is not None
        for number, name in enumerate(data.eval_names):
            ids = micro.input_ids[micro.source_ids == number].tolist()
            letters = re.findall(r"([abw])\d+\?", byte_tokenizer().decode(ids))
            assert set(letters) <= {name}
            found[name] += len(letters)
    assert found == {"a": 6, "b": 4}


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 133\n"


def test_questions_have_the_answers_of_their_rows(tmp_path: Path) -> None:
    data = _open(tmp_path, {"train": _write(tmp_path / "a.jsonl", "a", 5)}, {"batch_tokens": 64})
    decode = byte_tokenizer().decode
    asked = [(decode(list(q.prompt)), decode(list(q.answer))) for q in data.questions(2)]
    data.close()
    assert len(asked) == 2
    for prompt, answer in asked:
        assert re.search(r"a\d\?", prompt)
        assert answer == "yes<|end|>"


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 300}')
    with pytest.raises(ModelFolderError, match=r"has no tokenizer\.json, .*\. Copy"):
        load_tokenizer(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).encode("a") == byte_tokenizer().encode("a")


def test_a_pipe_in_a_model_folder_is_not_waited_for(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "special_tokens_map.json").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "special_tokens_map.json")
    with pytest.raises(ModelFolderError, match=r"special_tokens_map\.json is not a regular file"):
        load_tokenizer(tmp_path)


def _name_code(folder: Path, known: str = "OwnTokenizer") -> None:
    path = folder / "tokenizer_config.json"
    fields = json.loads(path.read_text()) | {
        "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]},
        "tokenizer_class": known,
    }
    path.write_text(json.dumps(fields))


def test_a_tokenizer_that_is_code_is_refused_unless_the_folder_has_it_as_a_file_too(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k2", "vocab_size": 300}')
    byte_tokenizer().save_pretrained(tmp_path)
    _name_code(tmp_path)
    assert load_tokenizer(tmp_path).encode("a") == byte_tokenizer().encode("a")
    (tmp_path / "tokenizer.json").rename(tmp_path / "tiktoken.model")
    with pytest.raises(
        ModelFolderError, match=r"\(tokenization_own\.OwnTokenizer\), which is never"
    ):
        load_tokenizer(tmp_path)


def test_a_tokenizer_that_git_lfs_left_behind_is_named(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(POINTER)
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json is a Git LFS pointer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("weights", [(1, 1), (2, 1), (2.5, 0.5)])
def test_the_tokens_of_an_epoch_are_those_of_its_steps(
    tmp_path: Path, weights: tuple[float, float]
) -> None:
    names = (("a", 40), ("b", 8))
    paths = [_write(tmp_path / f"{name}.jsonl", name, count) for name, count in names]
    files = [{"path": p, "weight": w} for p, w in zip(paths, weights, strict=True)]
    data = _open(tmp_path, {"train": files}, {"batch_rows": 8})
    rows = data.rows
    assert isinstance(rows, TrainingRows)
    exact = sum(int(rows.train.lengths[row]) for row in rows.order.rows(0, 0, rows.order.size))
    assert rows.epoch_tokens == pytest.approx(exact, rel=0 if 0.5 not in weights else 0.02)
    data.close()

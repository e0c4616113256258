"""Answers about pictures that a user names, against transformers' processor and `generate`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForMultimodalLM
from typer.testing import CliRunner

from megatrain.cli.app import app
from megatrain.cli.verbs import evaluate_model, sample_from
from megatrain.data.media.loading import load_processor
from megatrain.engine.sampling import continue_texts
from megatrain.errors import DataError
from megatrain.media import MediaKind
from megatrain.run.evaluation import answers, samples
from megatrain.run.evaluation.conversation import Turn, ordinary_texts, printed_answer
from megatrain.run.opening.model import load_tokenizer
from testkit.media_runs import media_run_config, save_reading_model, write_media_world
from testkit.processors import save_pictures
from testkit.runs import run

NUM_TOKENS = 8


def generated(
    folder: Path, parts: list[dict[str, str]], pictures: Path, later: Sequence[Turn] = ()
) -> list[int]:
    """Return what transformers answers, with its own processor."""
    tokenizer = load_tokenizer(folder)
    processor = load_processor(folder, tokenizer)
    model = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}, *later], tokenize=False, add_generation_prompt=True
    )
    images = [Image.open(pictures / one["image"]) for one in parts if one["type"] == "image"]
    given = processor(
        text=[text],
        images=[images] if images else None,
        return_tensors="pt",
        add_special_tokens=False,
    )
    whole = model.generate(**given, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)
    tokens: list[int] = whole[0, given["input_ids"].shape[1] :].tolist()
    return tokens


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("gemma3", marks=pytest.mark.merge)])
def test_answers_about_pictures_are_those_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatrain.cli.verbs.printed_answer", lambda t, tokens: t.decode(tokens))
    monkeypatch.setattr("megatrain.cli.verbs.eos_token_ids", lambda *_: frozenset())
    model = tmp_path / "model"
    save_reading_model(model, family, lively=True)
    names = [tmp_path / name for name in save_pictures(tmp_path, 3)]
    about: dict[tuple[int, ...], list[tuple[MediaKind, Path]]]
    about = {pair: [("image", names[n]) for n in pair] for pair in ((0, 1), (1, 0), (2,))}
    asked = ["what is it?", "two and three"]
    found = {
        pair: sample_from(model, asked, NUM_TOKENS, device="cpu", media=media)
        for pair, media in about.items()
    }
    tokenizer = load_tokenizer(model)
    for pair, texts in found.items():
        for prompt, answer in zip(asked, texts, strict=True):
            parts = [{"type": "image", "image": names[n].name} for n in pair]
            parts.append({"type": "text", "text": prompt})
            assert answer == tokenizer.decode(generated(model, parts, tmp_path))
    assert len({tuple(texts) for texts in found.values()}) == 3, "pictures change answers"


@pytest.mark.merge
def test_a_user_asks_about_a_picture_on_the_command_line(tmp_path: Path) -> None:
    save_reading_model(tmp_path / "model", "qwen2_5_vl", lively=True)
    first, second = (tmp_path / name for name in save_pictures(tmp_path, 2))

    def said(*words: str | Path, code: int = 0) -> str:
        asked = ["sample", str(tmp_path / "model"), "what?", "--device", "cpu", *map(str, words)]
        done = CliRunner().invoke(app, asked)
        assert done.exit_code == code, done.output
        return done.stdout if code == 0 else str(done.exception or done.output)

    one, two = said("--image", first), said("--image", second)
    assert len({one, two, said("--image", first, "--image", second), said()}) == 4
    assert said("--image", first) == one


@pytest.mark.parametrize(
    ("prompt", "contents", "why"),
    [
        ("what?", b"no picture", "a.png: medium cannot be decoded"),
        ("<|image_pad|>", None, "a.png: text has a token that stands for media"),
        ("<image><image>", None, "a.png: media and their places differ in number"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    prompt: str, contents: bytes | None, why: str, tmp_path: Path
) -> None:
    save_reading_model(tmp_path / "model", "qwen2_5_vl")
    path = tmp_path / save_pictures(tmp_path, 1)[0]
    path = path.rename(tmp_path / "a.png")
    if contents is not None:
        path.write_bytes(contents)
    with pytest.raises(DataError, match=why):
        sample_from(tmp_path / "model", [prompt], 1, device="cpu", media=[("image", path)])


@pytest.mark.merge
def test_rows_with_pictures_are_answered_by_eval_and_during_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    write_media_world(tmp_path, num_rows=3)
    save_reading_model(tmp_path / "model", "qwen2_5_vl", lively=True)
    made: list[list[int]] = []

    def kept(*asked: Any, **more: Any) -> list[list[int]]:
        found = continue_texts(*asked, **more)
        made.extend(found)
        return found

    for module in (answers, samples):
        monkeypatch.setattr(module, "continue_texts", kept)
    evaluate_model(tmp_path / "model", tmp_path / "rows.jsonl", None, answers=True)
    changes: dict[str, Any] = {"data": {"eval": None}, "train": {"steps": 1}}
    run(media_run_config(tmp_path, tmp_path / "run", **changes, eval={"samples": 3}))
    rows = [json.loads(line)["messages"][0]["content"]
            for line in (tmp_path / "rows.jsonl").read_text().splitlines()]  # fmt: skip
    wanted = [generated(tmp_path / "model", parts, tmp_path) for parts in rows]
    for found, row in zip(made, (2, 1, 0, 0, 1, 2), strict=False):  # eval takes the longest first
        assert found[:4] == wanted[row][:4]
    assert len({tuple(tokens[:4]) for tokens in wanted}) == 3
    lines = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    shown = [json.loads(line)["prompt"].count("[image ") for line in lines]
    assert shown == [0, 1, 2, 0, 1, 2]


@pytest.mark.merge
def test_a_conversation_about_a_picture_is_that_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatrain.cli.verbs.eos_token_ids", lambda *_: frozenset())
    folder = tmp_path / "model"
    save_reading_model(folder, "qwen2_5_vl", lively=True)
    (name,) = save_pictures(tmp_path, 1)
    tokenizer = load_tokenizer(folder)
    parts = [{"type": "image", "image": name}, {"type": "text", "text": "what is it?"}]
    first = generated(folder, parts, tmp_path)
    later = [
        {"role": "assistant", "content": ordinary_texts(tokenizer, first)[-1].strip("\n")},
        {"role": "user", "content": "two and three"},
    ]
    second = generated(folder, parts, tmp_path, later)
    words = ["sample", str(folder), "--image", str(tmp_path / name), "--device", "cpu"]
    words += ["--max-new-tokens", str(NUM_TOKENS)]
    done = CliRunner().invoke(app, words, input="what is it?\ntwo and three\n")
    assert done.exit_code == 0, done.output
    answers = (printed_answer(tokenizer, tokens) for tokens in (first, second))
    assert done.stdout == "".join(f"{answer}\n\n" for answer in answers)

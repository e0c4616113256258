"""Rows that the model cannot take are refused before its weights are read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.cli.demo import byte_tokenizer
from megatrain.data.tokens.prepare import prepare
from megatrain.data.tokens.prepared import PreparedData
from megatrain.errors import DataError
from megatrain.run.opening.training_data import check_rows
from testkit.families import tiny_config, tiny_model
from testkit.written import write

TWICE = {"max_position_embeddings": 256}


def _decoder(family: str, **changes: Any) -> Any:
    config = tiny_config(family)
    for key, value in changes.items():
        setattr(config, key, value)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return SimpleNamespace(config=config, text_config=config, model=model)


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PreparedData:
    """Two short rows and one of some 200 tokens."""
    texts = [{"prompt": "a", "completion": "b" * n} for n in (3, 200, 5)]
    path = write(tmp_path / "a.jsonl", texts)
    return prepare(path, byte_tokenizer(), cache_dir=tmp_path / "cache", max_length=512)


@pytest.mark.parametrize("family", ["gpt2", "gptj"])
def test_rows_beyond_a_table_of_positions_are_refused(rows: PreparedData, family: str) -> None:
    decoder = _decoder(family, vocab_size=1000, max_position_embeddings=128)
    with pytest.raises(
        DataError,
        match=r"1 of 3 documents are longer than the 128 positions .* the longest has \d+ tokens "
        r"\(a\.jsonl:2\)\. It has no embedding beyond them: set data\.max_length to 128",
    ):
        check_rows([rows], decoder)


def test_a_run_does_not_begin_with_rows_beyond_rotary_positions(rows: PreparedData) -> None:
    llama = _decoder("llama", vocab_size=1000)
    with pytest.raises(
        DataError,
        match=r"1 of 3 documents are longer than the 128 positions of the model .* the longest has "
        r"\d+ tokens \(a\.jsonl:2\)\. The model was not trained there\. Give "
        r"`model\.rope: \{type: yarn, factor: 2\.0\}` to scale its positions .*"
        r"or data\.max_length: 128\.",
    ):
        check_rows([rows], llama, begins=True)
    assert check_rows([rows], _decoder("llama", vocab_size=1000, **TWICE), begins=True) == []


@pytest.mark.parametrize(("family", "begins"), [("llama", False), ("phi3", True)])
def test_elsewhere_rows_beyond_rotary_positions_are_a_warning(
    rows: PreparedData, family: str, begins: bool
) -> None:
    """In a run that goes on, and where no setting makes the model reach them."""
    (note,) = check_rows([rows], _decoder(family, vocab_size=1000), begins=begins)
    assert "1 of 3 documents are longer than the 128 positions of the model" in note
    assert note.endswith("The model was not trained there; a max_length of 128 leaves them out")


def test_a_token_beyond_the_embedding_is_found_with_its_place(rows: PreparedData) -> None:
    largest = max(int(rows.tokens(number)[0].max()) for number in range(3))
    assert rows.card["largest_id"] == largest
    assert (
        check_rows([rows], _decoder("qwen3", vocab_size=largest + 1, max_position_embeddings=512))
        == []
    )
    with pytest.raises(
        DataError, match=rf"a\.jsonl:1 has token id {largest}, but .* has {largest} rows"
    ):
        check_rows([rows], _decoder("qwen3", vocab_size=largest))


@pytest.mark.parametrize(("family", "fails"), [("gpt2", True), ("gptj", True), ("llama", False)])
def test_a_table_has_an_end(family: str, fails: bool) -> None:
    """What is refused would fail in the model's own code, and the rest would not."""
    model = tiny_model(family, torch.float32).eval()
    ids = torch.full((1, model.config.max_position_embeddings + 1), 3)
    try:
        model(input_ids=ids, use_cache=False)
    except (IndexError, RuntimeError):
        assert fails
    else:
        assert not fails

"""New tokens get rows that begin as the mean of the others; every other bit stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.disk.hf.growth import Growth, tables
from megatrain.disk.hf.model import HostModel, load_model, read_model_folder
from megatrain.errors import ConfigError, WeightsMismatch
from megatrain.memory.kinds import TensorKind
from megatrain.memory.tier.scratch_file import Scratch
from testkit.families import save_tiny

ROWS = 320
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("llama", {"tie_word_embeddings": False}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "head with a bias": ("phi", {}),
    "positions in a table": ("gpt2", {}),
    "experts": ("qwen3_moe", {}),
}


def grown(
    folder: Path,
    num_tokens: int,
    count: int,
    dtype: Any = "bf16",
    frozen: tuple[str, ...] = (),
    scratch: Scratch | None = None,
) -> HostModel:
    ids = tuple(range(num_tokens, num_tokens + count))
    growth = Growth(num_tokens=num_tokens, new_ids=ids, files={"tokenizer.json": b"new"})
    found = read_model_folder(folder, dtype=dtype, frozen=frozen, attn=None, growth=growth)
    return found.load((TensorKind.HI, TensorKind.LO), scratch)


@pytest.mark.few(12)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("num_tokens", "count"), [(ROWS, 3), (ROWS - 5, 3), (ROWS - 2, 4)])
@pytest.mark.parametrize("case", CASES)
def test_new_rows_are_the_mean_and_the_others_stay(
    tmp_path: Path, case: str, num_tokens: int, count: int, dtype: Any
) -> None:
    """Tables without spare rows, with enough of them, and with too few."""
    family, changes = CASES[case]
    save_tiny(tmp_path / "model", family, torch.float32, **changes)
    old = load_model(tmp_path / "model", dtype=dtype, kinds=(TensorKind.HI, TensorKind.LO))
    new = grown(tmp_path / "model", num_tokens, count, dtype)
    names = tables(new.decoder)
    assert len(names) == {"tied": 1, "head with a bias": 3, "positions in a table": 1}.get(case, 2)
    assert new.decoder.config.vocab_size == max(ROWS, num_tokens + count)
    for param in old.decoder.params:
        before, after = old.store.master(param.name), new.store.master(param.name)
        if param.name not in names:
            assert torch.equal(before, after), param.name
            continue
        fresh = list(range(num_tokens, num_tokens + count))
        others = [row for row in range(ROWS) if row not in fresh]
        assert torch.equal(before[others], after[others]), param.name
        mean = before[:num_tokens].double().mean(0).float()
        for row in fresh:
            assert torch.allclose(after[row], mean, rtol=1e-6, atol=1e-9), param.name
            assert torch.equal(after[row], after[fresh[0]])


@pytest.mark.parametrize("case", ["untied", "tied"])
def test_new_rows_are_the_same_where_remainders_are_on_disk(tmp_path: Path, case: str) -> None:
    family, changes = CASES[case]
    save_tiny(tmp_path / "model", family, torch.float32, **changes)
    expected = grown(tmp_path / "model", ROWS, 3).store
    scratch = Scratch(folder=tmp_path, kinds=(TensorKind.LO,))
    found = grown(tmp_path / "model", ROWS, 3, scratch=scratch).store
    for name in expected.layout.places:
        assert torch.equal(found.master(name), expected.master(name)), name
    found.close()


def test_an_export_of_a_grown_model_loads(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama", tie_word_embeddings=True)
    (tmp_path / "model" / "tokenizer.json").write_text("old")
    (tmp_path / "model" / "added_tokens.json").write_text("{}")
    home = grown(tmp_path / "model", ROWS, 3)
    home.export(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.vocab_size == len(model.get_input_embeddings().weight) == ROWS + 3
    name = "model.embed_tokens.weight"
    assert torch.equal(model.get_parameter(name), home.store.param(name, TensorKind.HI))
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "new"
    assert not (tmp_path / "out" / "added_tokens.json").exists()


@pytest.mark.parametrize("pattern", ["model.embed_tokens.*", "lm_head.*"])
def test_a_frozen_table_is_a_conflict(tmp_path: Path, pattern: str) -> None:
    save_tiny(tmp_path / "model", "llama", tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=r"new rows, but it is not trained \(model\.frozen"):
        grown(tmp_path / "model", ROWS, 3, frozen=(pattern,))


def test_other_tables_that_are_too_small_are_still_refused(tmp_path: Path) -> None:
    """Without new tokens, and in params that tokens do not index."""
    save_tiny(tmp_path / "model", "llama")
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 320', '"vocab_size": 330'))
    with pytest.raises(WeightsMismatch, match="has shape"):
        load_model(tmp_path / "model")
    config.write_text(config.read_text().replace('"hidden_size": 64', '"hidden_size": 80'))
    with pytest.raises(WeightsMismatch, match="has shape"):
        grown(tmp_path / "model", ROWS, 3)

"""`export --gguf`, with a converter of a few lines in place of llama.cpp's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from megatrain.cli.app import app
from megatrain.cli.exporting import export_gguf
from megatrain.cli.gguf import PROGRAM, VARIABLE
from megatrain.disk.hf.model import load_model
from megatrain.errors import ConfigError, ConverterError, MissingPackage
from megatrain.models.adapters.lora import LoraConfig
from testkit.families import save_tiny

CONVERTER = f"""\
#!{sys.executable}
import json, os, sys
folder, _, target, _, outtype = sys.argv[1:]
has = sorted(os.listdir(folder))
name = os.path.basename(folder)
facts = [outtype, name, "model.safetensors" in has, os.environ["HF_HUB_OFFLINE"]]
open(target, "w").write(json.dumps(facts))
"""
REFUSAL = """
print("ERROR:hf-to-gguf:Model LlamaForCausalLM is not supported")
sys.exit(1)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "base", "llama", torch.bfloat16)


@pytest.fixture
def converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The converter of a folder that the variable names."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "llama.cpp"))
    (tmp_path / "llama.cpp").mkdir()
    path = tmp_path / "llama.cpp" / PROGRAM
    path.write_text(CONVERTER)
    path.chmod(0o755)
    return path


def test_the_export_is_converted_in_its_own_precision(
    model: Path, converter: Path, tmp_path: Path
) -> None:
    place = tmp_path / "out"
    place.mkdir()
    said = export_gguf(model, place / "mine.gguf")
    export_gguf(model, place / "exact.gguf", dtype="fp32")
    assert json.loads((place / "mine.gguf").read_text()) == ["bf16", "mine", True, "1"]
    assert json.loads((place / "exact.gguf").read_text()) == ["f32", "exact", True, "1"]
    assert sorted(path.name for path in place.iterdir()) == ["exact.gguf", "mine.gguf"]
    assert said.endswith(f" in {place / 'mine.gguf'}; llama.cpp and Ollama load it")


def test_a_program_on_path_is_started_as_it_is(
    model: Path, converter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("PATH", str(converter.parent))
    export_gguf(model, tmp_path / "mine.gguf")
    assert (tmp_path / "mine.gguf").exists()


@pytest.mark.parametrize("writes", [True, False])
def test_a_refusal_is_repeated_and_leaves_no_file(
    model: Path, converter: Path, tmp_path: Path, writes: bool
) -> None:
    before = CONVERTER if writes else CONVERTER.partition("folder")[0]
    converter.write_text(before + REFUSAL)
    with pytest.raises(ConverterError, match="ended with code 1") as told:
        export_gguf(model, tmp_path / "mine.gguf")
    assert str(told.value).endswith("It said:\n  " + REFUSAL.split('"')[1])
    assert not list(tmp_path.glob("*gguf*"))
    converter.write_text("")
    with pytest.raises(ConverterError, match=r"code 0 and wrote no GGUF .* It said nothing\.$"):
        export_gguf(model, tmp_path / "mine.gguf")


def test_without_a_converter_the_way_to_one_is_told_before_any_work(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingPackage, match=rf"not on PATH.* Run `git clone .*{VARIABLE}="):
        export_gguf(tmp_path / "no model", tmp_path / "mine.gguf")
    monkeypatch.setenv(VARIABLE, str(model))
    with pytest.raises(MissingPackage, match=rf"is {model}, where there is no {PROGRAM}"):
        export_gguf(tmp_path / "no model", tmp_path / "mine.gguf")


def test_what_cannot_be_one_file_is_refused(model: Path, converter: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name of a new file"):
        export_gguf(model, converter)
    with pytest.raises(ConfigError, match="no is not a directory"):
        export_gguf(model, tmp_path / "no" / "mine.gguf")
    load_model(model, lora=LoraConfig(rank=2, alpha=2)).export(tmp_path / "adapters")
    with pytest.raises(ConfigError, match=r"adapters alone\. Add --merge"):
        export_gguf(tmp_path / "adapters", tmp_path / "mine.gguf")
    export_gguf(tmp_path / "adapters", tmp_path / "mine.gguf", merge=True)
    assert (tmp_path / "mine.gguf").exists()


@pytest.mark.parametrize("words", [[], ["folder", "--gguf", "mine.gguf"]])
def test_a_folder_or_a_file_is_written_not_both(words: list[str], model: Path) -> None:
    done = CliRunner().invoke(app, ["export", str(model), *words])
    assert isinstance(done.exception, ConfigError)
    assert "give a folder to create, or --gguf FILE" in str(done.exception)

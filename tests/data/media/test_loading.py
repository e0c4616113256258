"""Processors from model folders, which are not trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.data.media.loading import load_processor, processor_template
from megatrain.errors import ModelFolderError
from testkit.processors import save_processor, tiny_processor


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of a processor, as models have them."""
    save_processor(tmp_path, "qwen2_5_vl")
    return tmp_path


def _change(path: Path, **changes: Any) -> None:
    fields = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(fields | changes))


def test_a_processor_has_the_settings_of_its_folder(folder: Path) -> None:
    made = tiny_processor("qwen2_5_vl")
    found = load_processor(folder, made.tokenizer)
    assert type(found) is type(made)
    assert found.tokenizer is made.tokenizer
    assert found.image_processor.to_dict() == made.image_processor.to_dict()


@pytest.mark.parametrize(
    ("file", "changes", "words"),
    [
        ("processor_config.json", {"auto_map": {"AutoProcessor": "evil.Processor"}}, "neither is"),
        ("processor_config.json", {"audio_tokenizer": {"name": "owner/other"}}, "neither is read"),
        ("config.json", {"model_type": "llama"}, "has no processor"),
        ("config.json", {"model_type": "../evil"}, "has no processor"),
    ],
)  # fmt: skip
def test_a_folder_that_asks_for_more_is_refused(
    folder: Path, file: str, changes: dict[str, Any], words: str
) -> None:
    _change(folder / file, **changes)
    with pytest.raises(ModelFolderError, match=words):
        load_processor(folder, tiny_processor("qwen2_5_vl").tokenizer)


def test_a_template_of_an_older_folder(folder: Path) -> None:
    assert processor_template(folder) is None
    _change(folder / "chat_template.json", chat_template="{{ messages }}")
    assert processor_template(folder) == "{{ messages }}"

"""The processor of a model: the class that its family has in transformers, with its own settings.

The class is that of the family, whatever the folder says; files of the folder are read as data, and
code in it is never run. Tokens and the chat template are those of the tokenizer that rows have. No
part for videos is loaded, which would need torchvision.

Laws (tests/data/media/test_loading.py)
    1. A processor that was saved with a model is read with its settings.
    2. A folder that asks for another repository or for code is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatrain.errors import ModelFolderError
from megatrain.model_files import PROCESSOR_NAMES


def load_processor(folder: str | Path, tokenizer: Any) -> Any:
    """Return the processor of a model folder, with this tokenizer. Raises ModelFolderError."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    folder = Path(folder)
    family = _fields(folder, "config.json").get("model_type")
    name = PROCESSOR_MAPPING_NAMES.get(family)
    found = None if name is None else getattr(transformers, name, None)
    if found is None or not hasattr(found, "get_attributes"):
        raise ModelFolderError(
            f"{folder}: transformers has no processor for {str(family)[:40]}, so rows with media "
            "cannot be read. Remove model.media to train on text."
        )
    fields = _fields(folder, "processor_config.json")
    if other := [key for key in ("audio_tokenizer", "auto_map") if fields.get(key)]:
        raise ModelFolderError(
            f"{folder}: its processor has {other[0]}, which names code or another repository; "
            "neither is read. Remove model.media to train on text."
        )
    try:
        parts = [_part(kind, folder, tokenizer) for kind in found.get_attributes()]
        settings, _ = found.get_processor_dict(str(folder), local_files_only=True)
        settings.pop("chat_template", None)
        with videos_missing():
            return found.from_args_and_dict(parts, settings)
    except ModelFolderError:
        raise
    except Exception as error:  # transformers raises any
        raise ModelFolderError(
            f"{folder}: cannot read its processor: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}"
        ) from error


def has_processor(folder: Path) -> bool:
    """Return whether a model has files for media, and its family a processor for them."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    return any((folder / name).is_file() for name in PROCESSOR_NAMES) and (
        PROCESSOR_MAPPING_NAMES.get(_fields(folder, "config.json").get("model_type")) is not None
    )


def processor_files(folder: Path) -> str:
    """Return all that decides about the processor of a folder, as text."""
    import transformers
    from transformers.utils import is_torchvision_available

    fields = {name: _fields(folder, name) for name in PROCESSOR_NAMES}
    family = _fields(folder, "config.json").get("model_type")
    by = f"{transformers.__version__} {is_torchvision_available()}"
    return f"{family} {json.dumps(fields, sort_keys=True)} {by}"


def processor_template(folder: str | Path) -> str | None:
    """Return the chat template that a folder has for its processor alone, in an older form."""
    found = _fields(Path(folder), "chat_template.json").get("chat_template")
    return found if isinstance(found, str) else None


def _part(kind: str, folder: Path, tokenizer: Any) -> Any:
    """Return one part of a processor."""
    from transformers import AutoFeatureExtractor, AutoImageProcessor

    how = {"trust_remote_code": False, "local_files_only": True}
    if kind == "tokenizer":
        return tokenizer
    if kind == "image_processor":
        return AutoImageProcessor.from_pretrained(str(folder), **how)
    if kind in ("feature_extractor", "audio_processor"):
        return AutoFeatureExtractor.from_pretrained(str(folder), **how)
    if kind == "video_processor":
        return NoVideos()
    raise ModelFolderError(f"{folder}: its processor has a part {kind}, which is not known here.")


class NoVideos(dict[str, Any]):
    """Stands where a processor has a part for videos: it has no settings and can do nothing."""


@contextmanager
def videos_missing() -> Iterator[None]:
    """Let processors be made with NoVideos: transformers would want torchvision for the check."""
    from transformers import ProcessorMixin

    check = ProcessorMixin.check_argument_for_proper_class

    def lenient(self: Any, name: str, part: Any) -> Any:
        return NoVideos if isinstance(part, NoVideos) else check(self, name, part)

    ProcessorMixin.check_argument_for_proper_class = lenient
    try:
        yield
    finally:
        ProcessorMixin.check_argument_for_proper_class = check


def _fields(folder: Path, name: str) -> dict[str, Any]:
    """Return an object of JSON in a folder; an empty one if there is no such file."""
    try:
        found = json.loads((folder / name).read_bytes()[: 1 << 24])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFolderError(f"{folder / name}: cannot read it: {str(error)[:100]}") from error
    return found if isinstance(found, dict) else {}

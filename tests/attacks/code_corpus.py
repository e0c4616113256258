"""Files that are code, or unpickle to code, lying in a folder: read by nobody, run by nobody."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from tests.attacks.folders import (
    SHAPES,
    Case,
    Make,
    cases,
    config,
    payload,
    write_benign,
    write_config,
    write_index,
    write_weights,
)
from tests.attacks.sandbox import LOADED, MARKER


class _Bomb:
    """Pickles to a call that leaves a file behind."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.marker}'",)


def pickled(folder: Path) -> bytes:
    """Return a pickle that would leave a file beside the folder, were it ever loaded."""
    return pickle.dumps({"w": _Bomb(folder.parent / MARKER)})


def torch_saved(folder: Path) -> bytes:
    """Return the same as torch writes it."""
    buffer = io.BytesIO()
    torch.save({"w": _Bomb(folder.parent / MARKER)}, buffer)
    return buffer.getvalue()


def _zipped(folder: Path) -> bytes:
    """Return a zip file that begins like safetensors of an empty header."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", pickled(folder))
    return b"\x02\0\0\0\0\0\0\0{}" + buffer.getvalue()


def _instead(name: str, content: Any, more: dict[str, Any] | None = None) -> Make:
    """A folder with a config and, in place of safetensors, something else."""

    def make(folder: Path) -> None:
        write_config(folder, config())
        (folder / name).write_bytes(content(folder) if callable(content) else content)
        for other, value in (more or {}).items():
            (folder / other).write_text(json.dumps(value))

    return make


def _beside(name: str, content: Any) -> Make:
    """A benign folder with one file more."""

    def make(folder: Path) -> None:
        write_benign(folder)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = content(folder) if callable(content) else content
        path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())

    return make


def _shard(folder: Path) -> None:
    write_config(folder, config())
    write_weights(folder, pickled(folder), "a.safetensors")
    write_index(folder, {"weight_map": dict.fromkeys(SHAPES, "a.safetensors")})


def _python(folder: Path) -> bytes:
    return payload(folder).encode()


def _script(folder: Path) -> bytes:
    return f"#!/bin/sh\ntouch '{folder.parent / MARKER}'\n".encode()


_EVIL = {"AutoTokenizer": ["tokenization_evil.Tokenizer", None], "AutoModel": "modeling_evil.Model"}
_TEMPLATE = (
    "{{ cycler.__init__.__globals__.os.system('touch " + MARKER + "') }}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
)
_INDEX = {"weight_map": {"w": "pytorch_model-1.bin"}}

PICKLES = [
    *cases(
        "instead",
        "ModelFolderError",
        {
            "a pickle": (_instead("pytorch_model.bin", pickled), "It has pytorch_model.bin"),
            "what torch saves": (_instead("pytorch_model.bin", torch_saved), "not supported"),
            "shards of pickles": (
                _instead(
                    "pytorch_model-1.bin", pickled, {"pytorch_model.bin.index.json": _INDEX}
                ),
                "It has pytorch_model-1.bin",
            ),
            "a pickle of another name": (_instead("consolidated.00.pth", pickled), "neither"),
            "an old checkpoint": (_instead("model.ckpt", pickled), "neither"),
            "an adapter": (_instead("adapter_model.bin", pickled), "It has adapter_model.bin"),
            "an adapter in safetensors": (
                _instead("adapter_model.safetensors", b"\x02\0\0\0\0\0\0\0{}"), "not supported",
            ),
            "Keras": (_instead("tf_model.h5", b"\x89HDF\r\n\x1a\n"), "neither"),
            "Flax": (_instead("flax_model.msgpack", b"\x81"), "neither"),
            "GGUF": (_instead("model.gguf", b"GGUF\x03\0\0\0"), "neither"),
            "a library": (_instead("model.so", b"\x7fELF"), "neither"),
        },
    ),
    *cases(
        "disguised",
        "WeightsFormatError",
        {
            "a pickle": (_instead("model.safetensors", pickled), "header of"),
            "what torch saves": (_instead("model.safetensors", torch_saved), "header of"),
            "a zip behind an empty header": (_instead("model.safetensors", _zipped), "or extended"),
            "a shard that is a pickle": (_shard, "header of"),
            "a script": (_instead("model.safetensors", _script), "header of"),
            "Python": (_instead("model.safetensors", _python), "header of"),
            "GGUF": (_instead("model.safetensors", b"GGUF\x03\0\0\0" + bytes(99)), "header of"),
            "gzip": (_instead("model.safetensors", gzip.compress(bytes(9999))), "header of"),
        },
    ),
]  # fmt: skip

BYSTANDERS = cases(
    "beside",
    LOADED,
    {
        name: _beside(name, content)
        for name, content in {
            "modeling_llama.py": _python,
            "modeling_evil.py": _python,
            "configuration_llama.py": _python,
            "tokenization_evil.py": _python,
            "__init__.py": _python,
            "sitecustomize.py": _python,
            "setup.py": _python,
            "conftest.py": _python,
            "handler.py": _python,
            "flash_attn.py": _python,
            "kernels/__init__.py": _python,
            "torch/__init__.py": _python,
            "safetensors.py": _python,
            "custom_generate/generate.py": _python,
            "evil.pth": lambda folder: b"import os; " + _python(folder),
            "install.sh": _script,
            "requirements.txt": b"evil==1.0\n",
            "training_args.bin": torch_saved,
            "optimizer.pt": torch_saved,
            "rng_state.pth": torch_saved,
            "pytorch_model.bin": pickled,
            "tokenizer.json": {"model": {"type": "evil"}, "normalizer": [[[]]] * 100},
            "tokenizer_config.json": {"auto_map": _EVIL, "chat_template": _TEMPLATE},
            "chat_template.jinja": _TEMPLATE.encode(),
            "processor_config.json": {"auto_map": _EVIL},
            "generation_config.json": {"custom_generate": "evil/repo", "trust_remote_code": True},
            "adapter_config.json": {"auto_mapping": {"base_model_class": "evil.Model"}},
            "quantize_config.json": {"quant_method": "evil"},
            "config_sentence_transformers.json": {"auto_map": _EVIL},
        }.items()
    },
)

CODE_CASES: list[Case] = [*PICKLES, *BYSTANDERS]

"""Tiny processors of joint families, made of their configs, with small tokenizers.

Templates are written in our own words, in the form that each family's has: parts of text and media.
"""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.data.media.loading import NoVideos, videos_missing
from testkit.tokenizers_of_kinds import made


def _turns(begin: str, end: str, media: str) -> str:
    """Return a template that writes each turn between two marks, and `media` for an image."""
    said = (
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content or [] %}"
        "{% if p.type == 'text' %}{{ p.text }}{% else %}{{ '" + media + "' }}{% endif %}"
        "{% endfor %}{% endif %}{{ '" + end + "' }}"
    )
    return (
        "{% for m in messages %}{{ '" + begin + "' + m.role + '\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}" + said + "{% endgeneration %}"
        "{% else %}" + said + "{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '" + begin + "assistant\n' }}{% endif %}"
    )


_QWEN: dict[str, Any] = {
    "template": _turns(
        begin="<|im_start|>", end="<|im_end|>", media="<|vision_start|><|image_pad|><|vision_end|>"
    ),
    "marks": ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
              "<|image_pad|>", "<|video_pad|>"),
    "eos": "<|im_end|>",
}  # fmt: skip
_GEMMA: dict[str, Any] = {
    "template": "{{ bos_token }}"
    + _turns(begin="<start_of_turn>", end="<end_of_turn>", media="<start_of_image>"),
    "marks": ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>",
              "<end_of_image>", "<image_soft_token>"),
    "eos": "<eos>",
}  # fmt: skip
_AUDIO: dict[str, Any] = {
    "template": _turns(
        begin="<|im_start|>", end="<|im_end|>", media="<|audio_bos|><|AUDIO|><|audio_eos|>"
    ),
    "marks": ("<|im_start|>", "<|im_end|>", "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
    "eos": "<|im_end|>",
}
GEMMA_TOKENS = {
    "boi": "<start_of_image>", "eoi": "<end_of_image>", "image": "<image_soft_token>",
}  # fmt: skip
PROCESSORS = ("qwen2_5_vl", "gemma3", "qwen2_audio")
"""Families with a processor here."""


def tiny_processor(family: str) -> Any:
    """Return a new processor of a family; pictures are a few patches of 4 pixels."""
    return _MAKERS[family]()


def save_processor(folder: Path, family: str) -> Any:
    """Save a new processor as model folders have it; return it, with its tokenizer."""
    processor = tiny_processor(family)
    folder.mkdir(exist_ok=True)
    if family == "gemma3":
        processor.save_pretrained(folder)
    for name in ("image_processor", "feature_extractor"):
        if hasattr(processor, name):
            getattr(processor, name).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    return processor


def wav_samples(data: bytes, rate: int) -> NDArray[np.float32]:
    """Return the samples of a `sound`: it stands in for torchcodec, which tests do not need."""
    with wave.open(io.BytesIO(data)) as file:
        assert file.getframerate() == rate
        whole = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    return whole.astype(np.float32) / np.float32(32768)


def _qwen() -> Any:
    from transformers import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = made(**_QWEN)
    images = Qwen2VLImageProcessorPil(
        patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024}
    )
    with videos_missing():
        return Qwen2_5_VLProcessor(
            images, tokenizer, NoVideos(), chat_template=tokenizer.chat_template
        )


def _gemma() -> Any:
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    tokenizer = made(**_GEMMA)
    for name, token in GEMMA_TOKENS.items():
        setattr(tokenizer, f"{name}_token", token)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
    images = Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    return Gemma3Processor(
        images, tokenizer, chat_template=tokenizer.chat_template, image_seq_length=4
    )


def _audio() -> Any:
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

    tokenizer = made(**_AUDIO)
    sounds = WhisperFeatureExtractor(feature_size=8, chunk_length=1, n_fft=400)
    return Qwen2AudioProcessor(sounds, tokenizer, chat_template=tokenizer.chat_template)


_MAKERS = {"qwen2_5_vl": _qwen, "gemma3": _gemma, "qwen2_audio": _audio}


def picture(seed: int = 0, width: int = 24, height: int = 16, form: str = "PNG") -> bytes:
    """Return the file of a picture whose pixels come from a seed."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, form)
    return out.getvalue()


def sound(seed: int = 0, seconds: float = 0.2, rate: int = 16_000) -> bytes:
    """Return the WAV of a noise from a seed."""
    samples = np.random.default_rng(seed).integers(-9000, 9000, int(seconds * rate), dtype=np.int16)
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())
    return out.getvalue()


def save_pictures(folder: Path, count: int) -> list[str]:
    """Write pictures of several sizes into a folder; return their names."""
    names = []
    for seed in range(count):
        names.append(f"{seed}.png")
        (folder / names[-1]).write_bytes(picture(seed, 16 + 8 * (seed % 3), 16 + 4 * (seed % 4)))
    return names

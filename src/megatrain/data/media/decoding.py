"""The decoder's process: untrusted bytes to pixels or samples, with limits of memory and size.

It imports Pillow, and soundfile if there is one, and no more, so it starts in a moment. A request
is a header in JSON and the bytes of one medium; an answer is a header in JSON and raw bytes.
Nothing that it sends is unpickled.

Laws (tests/data/media/test_decoder.py)
    1. Formats that are not in IMAGES are refused, whatever a file's name says.
    2. The size that a header claims is checked before anything is decoded.
    3. Pixels are those of Pillow after its own turn by EXIF, in RGB, as transformers loads them.
"""

from __future__ import annotations

import io
import json
import os
import resource
import struct
import sys
import warnings
import wave
from collections.abc import Mapping
from multiprocessing import connection
from typing import Any

IMAGES = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that Pillow may try. Of several frames, the first."""
BEGUN = b"begun"
"""Sent when the limits are set."""
OTHER_FORMAT = "medium of an unknown format"
BROKEN = "medium cannot be decoded"
TOO_MANY_PIXELS = "image with too many pixels"
TOO_LONG = "sound is too long"
NOT_FINITE = "sound with infinite or undefined samples"
NO_MEMORY = "medium needs too much memory to decode"
_BYTES_OF_PIXEL = 20
"""Most bytes of a pixel while it is decoded: as it came, turned, in RGB and as it is sent."""
_OWN_BYTES = 640 << 20
"""Address space of Python with Pillow and its codecs."""
_MAX_SIDE = 65_500
_SOUNDS = ("FLAC", "OGG", "MP3")
_FLOATS = 3
"""The code of samples in floating point in the header of a WAV."""


class Refused(Exception):
    """A medium that is not decoded: a reason to count, and a detail."""


def serve(pipe: connection.Connection) -> None:
    """Answer requests until the pipe is closed."""
    limits: dict[str, Any] = json.loads(pipe.recv_bytes())
    if sys.platform != "darwin":  # macOS refuses such limits; that of time holds there too
        room = _OWN_BYTES + max(_BYTES_OF_PIXEL * limits["pixels"], 16 * limits["bytes"])
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pipe.send_bytes(BEGUN)
    while True:
        try:
            request: dict[str, Any] = json.loads(pipe.recv_bytes())
            data = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        header, body = _answer(request, data, limits)
        pipe.send_bytes(json.dumps(header).encode())
        pipe.send_bytes(body)


def _answer(
    request: Mapping[str, Any], data: bytes, limits: Mapping[str, Any]
) -> tuple[dict[str, Any], bytes]:
    try:
        if request["want"] == "sound":
            return _sound(data, limits, request["rate"])
        return _image(data, limits)
    except Refused as refused:
        reason, detail = refused.args
    except MemoryError:
        reason, detail = NO_MEMORY, ""
    except Exception as error:  # decoders raise any
        reason, detail = BROKEN, f"{type(error).__name__}: {error}"
    return {"reason": reason, "detail": detail[:120]}, b""


def _opened(data: bytes, limits: Mapping[str, Any]) -> Any:
    """Return an image of which the header alone was read. Raises Refused."""
    from PIL import Image, UnidentifiedImageError, WebPImagePlugin

    Image.preinit()
    known = [form for form in IMAGES if form != "WEBP" or WebPImagePlugin.SUPPORTED]
    Image.MAX_IMAGE_PIXELS = limits["pixels"]
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    try:
        image = Image.open(io.BytesIO(data), formats=known)
    except UnidentifiedImageError:
        raise Refused(OTHER_FORMAT, f"it begins with {data[:12]!r}") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise Refused(TOO_MANY_PIXELS, str(error)) from None
    width, height = image.size
    if width * height > limits["pixels"] or max(width, height) > _MAX_SIDE:
        raise Refused(TOO_MANY_PIXELS, f"{width} x {height}, {limits['pixels']:,} are allowed")
    if min(width, height) < 1:
        raise Refused(BROKEN, f"{width} x {height} pixels")
    return image


def _image(data: bytes, limits: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Return the pixels of an image in RGB, upright."""
    from PIL import ImageOps

    image = ImageOps.exif_transpose(_opened(data, limits)).convert("RGB")
    return {"width": image.width, "height": image.height}, image.tobytes()


def _sound(data: bytes, limits: Mapping[str, Any], wanted: int) -> tuple[dict[str, Any], bytes]:
    """Return a sound's samples, the mean of its channels, in fp32, `wanted` of them a second."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # each thread would reserve address space
    import numpy as np

    from megatrain.data.media.resampling import resampled

    is_wav = data[:4] == b"RIFF" and data[8:12] == b"WAVE"
    rate, found = _wav(data, limits) if is_wav else _other_sound(data, limits)
    samples = found[:, 0] if found.shape[1] == 1 else found.mean(axis=1, dtype=np.float32)
    if samples.size == 0:
        raise Refused(BROKEN, "no samples")
    if not np.isfinite(samples).all():
        raise Refused(NOT_FINITE, "")
    found = resampled(np.ascontiguousarray(samples, np.float32), rate, wanted)
    return {"rate": wanted}, found.astype("<f4").tobytes()


def _check_sound(num_frames: int, rate: int, channels: int, limits: Mapping[str, Any]) -> None:
    if not 1000 <= rate <= 400_000 or not 1 <= channels <= 32:
        raise Refused(BROKEN, f"{channels} channels of {rate} samples a second")
    if num_frames > limits["seconds"] * rate:
        seconds = num_frames / rate
        raise Refused(TOO_LONG, f"{seconds:.0f} s, {limits['seconds']:g} s are allowed")


def _wav(data: bytes, limits: Mapping[str, Any]) -> tuple[int, Any]:
    """Return samples a second, and samples between -1 and 1. (frames, channels)"""
    import numpy as np

    rate, channels, width, is_float, raw = _wav_parts(data)
    if width not in (1, 2, 3, 4) or (is_float and width != 4):
        raise Refused(BROKEN, f"samples of {8 * width} bits")
    num_frames = len(raw) // max(1, channels * width)
    _check_sound(num_frames, rate, channels, limits)
    raw = raw[: num_frames * channels * width]
    if is_float:
        return rate, np.frombuffer(raw, "<f4").reshape(-1, channels)
    if width == 1:
        whole = np.frombuffer(raw, np.uint8).astype(np.int32) - 128
    elif width == 3:  # as the upper bytes of 32 bits
        padded = np.zeros((num_frames * channels, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        whole = padded.reshape(-1).view("<i4") >> 8
    else:
        whole = np.frombuffer(raw, f"<i{width}")
    scaled = (whole / float(1 << (8 * width - 1))).astype(np.float32)
    return rate, scaled.reshape(-1, channels)


def _wav_parts(data: bytes) -> tuple[int, int, int, bool, bytes]:
    """Return rate, channels, bytes of a sample, whether samples are floats, and all of them."""
    try:
        with wave.open(io.BytesIO(data)) as file:
            frames = file.readframes(min(file.getnframes(), len(data)))
            return file.getframerate(), file.getnchannels(), file.getsampwidth(), False, frames
    except wave.Error:  # of floats, which it does not know
        form = data.find(b"fmt ", 12, 4096)
        begin = data.find(b"data", form + 4, form + 4096) if form > 0 else -1
        if begin < 0:
            raise
        code, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", data, form + 8)
        if code != _FLOATS:
            raise
        (size,) = struct.unpack_from("<I", data, begin + 4)
        return rate, channels, bits // 8, True, data[begin + 8 : begin + 8 + size]


def _other_sound(data: bytes, limits: Mapping[str, Any]) -> tuple[int, Any]:
    """Return the same of a format that soundfile knows."""
    try:
        import soundfile
    except ImportError:
        raise Refused(
            OTHER_FORMAT, f"it begins with {data[:12]!r}; other sounds than WAV need soundfile"
        ) from None
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if file.format not in _SOUNDS:
                raise Refused(OTHER_FORMAT, str(file.format))
            _check_sound(file.frames, file.samplerate, file.channels, limits)
            return file.samplerate, file.read(dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise Refused(OTHER_FORMAT, str(error)) from None

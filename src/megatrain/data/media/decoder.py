"""Untrusted media decoded by another process, which has limits of memory and time.

    with Decoder(MediaLimits()) as decoder:
        picture = decoder.image(data)

A process that takes too long, or dies, is killed, and another is started for the next medium. What
it answers is checked: a size within the limits, and as many bytes as the size says.

Laws (tests/data/media/test_decoder.py)
    1. Bytes that cannot be decoded, whatever they are, are a BadRow with its reason.
    2. So is a decoder that hangs or dies, in bounded time; the next medium is decoded.
    3. No process outlives its decoder.
"""

from __future__ import annotations

import json
import multiprocessing
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from typing import Any

from megatrain.data.media.decoding import BEGUN, BROKEN, serve
from megatrain.data.rows.skipped import BadRow
from megatrain.data.tokens.children import program_hidden
from megatrain.errors import DataError, MissingPackage

TOO_SLOW = "medium takes too long to decode"
DIED = "medium ends the decoder"
TOO_MANY_BYTES = "medium with too many bytes"
_MAX_HEADER_BYTES = 4096
_START_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """The most that a row's media may be."""

    per_row: int = 64
    bytes: int = 64 << 20
    """Of one medium, as it is stored."""
    pixels: int = 64_000_000
    """Of one image."""
    seconds: float = 600.0
    """Of one sound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """An image in RGB."""

    width: int
    height: int
    rgb: bytes
    """Three bytes of each pixel, row by row."""


def require_pillow() -> None:
    """Raise MissingPackage without Pillow."""
    try:
        found = find_spec("PIL")
    except ValueError:  # it is there in name
        found = None
    if found is None:
        raise MissingPackage("media need Pillow. Run `pip install megatrain[media]`.")


class Decoder:
    """One process that decodes, started when it is needed."""

    def __init__(
        self,
        limits: MediaLimits,
        *,
        limit_s: float = 30.0,
        work: Callable[[connection.Connection], None] = serve,
    ) -> None:
        """`limit_s`: the longest time for one medium. `work`: what the process runs.

        Raises MissingPackage without Pillow.
        """
        require_pillow()
        self.limits = limits
        self._limit_s, self._work = limit_s, work
        self._child: SpawnProcess | None = None
        self._pipe: Any = None

    def image(self, data: bytes) -> Picture:
        """Return the pixels of an image. Raises BadRow."""
        most = self.limits.pixels
        header, rgb = self._ask("image", data, 3 * most)
        width, height = _whole(header, "width"), _whole(header, "height")
        if width * height > most or len(rgb) != 3 * width * height:
            raise BadRow(BROKEN, "pixels and size differ")
        return Picture(width=width, height=height, rgb=rgb)

    def sound(self, data: bytes, rate: int) -> bytes:
        """Return `rate` samples a second of a sound, in fp32, little-endian. Raises BadRow."""
        header, samples = self._ask("sound", data, 16 * self.limits.bytes, rate=rate)
        if len(samples) % 4 or not samples or _whole(header, "rate") != rate:
            raise BadRow(BROKEN, "no samples")
        return samples

    @property
    def process_id(self) -> int | None:
        """That of the process; None: there is none now."""
        return None if self._child is None else self._child.pid

    def _ask(self, want: str, data: bytes, most: int, **more: Any) -> tuple[dict[str, Any], bytes]:
        """Return the header and the bytes that the process answers. Raises BadRow."""
        if len(data) > self.limits.bytes:
            raise BadRow(TOO_MANY_BYTES, f"{len(data):,}, {self.limits.bytes:,} are allowed")
        self._start()
        child, pipe = self._child, self._pipe
        assert child is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            child.kill()  # whoever waits for its pipe goes on

        timer = threading.Timer(self._limit_s, stop)
        timer.start()
        try:
            pipe.send_bytes(json.dumps({"want": want, **more}).encode())
            pipe.send_bytes(data)
            header = json.loads(pipe.recv_bytes(_MAX_HEADER_BYTES))
            body = pipe.recv_bytes(most)
            if not isinstance(header, dict):
                raise ValueError("no header")
        except (EOFError, OSError, ValueError):
            self.close()
            if late.is_set():
                raise BadRow(TOO_SLOW, f"over {self._limit_s:g} s") from None
            raise BadRow(DIED, f"exit code {child.exitcode}") from None
        finally:
            timer.cancel()
            timer.join()
        if "reason" in header:
            raise BadRow(str(header["reason"])[:80], str(header.get("detail", ""))[:120])
        return header, body

    def _start(self) -> None:
        if self._child is not None and self._child.is_alive():
            return
        self.close()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        child = context.Process(target=self._work, args=(theirs,), daemon=True)
        with program_hidden():
            child.start()
        theirs.close()
        self._child = child
        try:
            self._pipe.send_bytes(json.dumps(asdict(self.limits)).encode())
            connection.wait([self._pipe, child.sentinel], _START_S)
            if not self._pipe.poll() or self._pipe.recv_bytes(_MAX_HEADER_BYTES) != BEGUN:
                raise EOFError
        except (EOFError, OSError):
            self.close()
            raise DataError(
                f"the process that decodes media could not start (exit code {child.exitcode}); its "
                "output is above"
            ) from None

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._pipe.close()
            self._child.kill()
            self._child.join()
            self._child = None

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _whole(header: dict[str, Any], name: str) -> int:
    value = header.get(name)
    if not isinstance(value, int) or not 0 < value < 1 << 31:
        raise BadRow(BROKEN, f"{name} is {str(value)[:20]}")
    return value

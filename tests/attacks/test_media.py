"""A file of attacks by media: each is a bad row with its reason, and the rest is trained on."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import time
import zlib
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megatrain.data.media.decoder import Decoder, MediaLimits
from megatrain.data.media.processing import TOO_MANY, MediaSettings
from megatrain.data.media.sources import ABSENT, LINK, OUTSIDE
from megatrain.data.rows.skipped import BadRow
from megatrain.data.tokens.prepare import prepare
from testkit.peak_bytes import peak_above
from testkit.processors import picture, save_pictures, tiny_processor
from tests.attacks.media_corpus import MEDIA, chunk, png

NAMES = {
    "http://127.0.0.1:1/x.png": LINK,
    "http://169.254.169.254/latest/meta-data": LINK,
    "file:///etc/passwd": LINK,
    "s3://bucket/x.png": LINK,
    "../secret.png": OUTSIDE,
    "/etc/passwd": OUTSIDE,
    "link.png": OUTSIDE,
    "gone.png": ABSENT,
}


def test_a_file_of_attacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a row makes no connection")

    monkeypatch.setattr(socket.socket, "connect", never)
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "secret.png").write_bytes(b"secret")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    good = save_pictures(folder, 3)
    hostile = {name: case for name, case in MEDIA.items() if case[0] == "image"}
    wanted = Counter(NAMES.values())
    media = [[name] for name in NAMES]
    for number, (_, data, reason) in enumerate(hostile.values()):
        (folder / f"hostile-{number}.png").write_bytes(data())
        media.append([f"hostile-{number}.png"])
        wanted[reason] += 1
    media.append([good[0]] * 10_000)
    wanted[TOO_MANY] += 1
    rows = [
        {"prompt": "what is two", "completion": "four", "images": names}
        for names in [[good[0]], *media, [good[1]], [good[2], good[0]]]
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    processor = tiny_processor("qwen2_5_vl")
    limits = MediaLimits(bytes=1 << 22, pixels=1_000_000)
    prepared = prepare(
        folder / "rows.jsonl",
        processor.tokenizer,
        cache_dir=tmp_path / "cache",
        max_length=64,
        max_bad=1.0,
        media=MediaSettings(processor=processor, limits=limits),
    )
    assert prepared.card["bad"] == dict(wanted)
    assert (prepared.card["kept"], prepared.card["media"]) == (3, {"image": 4})
    assert all(
        places[0].startswith("rows.jsonl:") for places in prepared.card["bad_places"].values()
    )


PIXELS = 16_000_000
_SIDE = 4000
MIB = 1 << 20


def _zeros(num_rows: int) -> bytes:
    """Return a PNG of 16 million pixels, of which so many rows are there, in some kilobytes."""
    return png(_SIDE, _SIDE, chunk(b"IDAT", zlib.compress(bytes((1 + 3 * _SIDE) * num_rows), 9)))


def _turned() -> bytes:
    from PIL import Image

    out, turned = io.BytesIO(), Image.Exif()
    turned[0x0112] = 6
    Image.new("CMYK", (_SIDE, _SIDE)).save(out, "JPEG", exif=turned)
    return out.getvalue()


LARGE = {
    "as many pixels as allowed": lambda: _zeros(_SIDE),
    "as many, cut off": lambda: _zeros(_SIDE // 2),
    "as many, in four colors and turned": _turned,
}
"""Images whose header is within the limits: they are decoded, or break while they are."""


def _child_peak(pid: int) -> int:
    """Return what a process held at most."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def _child_seconds(pid: int) -> float:
    """Return the processor time of a process: a busy machine changes it little."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.merge
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="it reads Linux's /proc")
def test_time_and_memory_of_hostile_media_are_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    """A new process for each, so that none hides behind another; -s prints what each took."""
    limits = MediaLimits(bytes=1 << 24, pixels=PIXELS, seconds=2.0)
    cases: dict[str, tuple[str, bytes]] = {
        name: (case[0], case[1]()) for name, case in MEDIA.items()
    }
    cases |= {name: ("image", make()) for name, make in LARGE.items()}
    for name, (kind, data) in cases.items():
        with Decoder(limits) as decoder:
            decoder.image(picture())
            pid = decoder.process_id
            assert pid is not None
            idle, begun, own = _child_peak(pid), _child_seconds(pid), time.process_time()

            def ask(decoder: Decoder = decoder, kind: str = kind, data: bytes = data) -> Any:
                with suppress(BadRow):
                    return decoder.image(data) if kind == "image" else decoder.sound(data, 16_000)

            _, ours = peak_above(ask)
            grown, seconds = _child_peak(pid) - idle, _child_seconds(pid) - begun
            seconds += time.process_time() - own
        with capsys.disabled():
            held = f"decoder {grown / MIB:6.1f} MiB, ours {ours / MIB:6.1f} MiB"
            print(f"{name:36} {seconds:5.2f} s, {held}")
        large = name in LARGE
        assert idle < 128 * MIB
        assert grown < (20 * PIXELS if large else 64 * MIB), name
        assert ours < (4 * PIXELS if large else 0) + 16 * MIB, name
        assert seconds < (10 if large else 2), name


@pytest.mark.merge
def test_rows_with_very_many_pixels_are_in_memory_one_image_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a row is compared with its processor's own tokens, of all images at once."""
    (tmp_path / "large.png").write_bytes(_zeros(_SIDE))
    good = save_pictures(tmp_path, 1)
    rows = [["large.png"] * 12, good, good * 10_000]
    (tmp_path / "rows.jsonl").write_text(
        "".join(
            json.dumps({"prompt": "what", "completion": "four", "images": names}) + "\n"
            for names in rows
        )
    )
    processor = tiny_processor("qwen2_5_vl")
    settings = MediaSettings(processor=processor, limits=MediaLimits(pixels=PIXELS))

    def work() -> Any:
        return prepare(
            tmp_path / "rows.jsonl", processor.tokenizer, cache_dir=tmp_path / "cache",
            max_length=400, max_bad=1.0, media=settings,
        )  # fmt: skip

    begun = time.process_time()
    prepared, peak = peak_above(work)
    assert prepared.card["bad"] == {TOO_MANY: 1}
    assert prepared.card["kept"] == 2
    assert peak < 20 * PIXELS + 64 * MIB, "of one image, and what the processor makes of it"
    assert time.process_time() - begun < 60

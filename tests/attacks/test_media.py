"""A file of attacks by media: each is a bad row with its reason, and the rest is trained on."""

from __future__ import annotations

import json
import socket
from collections import Counter
from pathlib import Path

import pytest

from megatrain.data.media.decoder import MediaLimits
from megatrain.data.media.processing import TOO_MANY, MediaSettings
from megatrain.data.media.sources import ABSENT, LINK, OUTSIDE
from megatrain.data.tokens import prepare as prepare_module
from megatrain.data.tokens.prepare import prepare
from testkit.processors import save_pictures, tiny_processor
from tests.attacks.media_corpus import MEDIA

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

    monkeypatch.setattr(prepare_module, "probe_template", lambda *_: None)
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

"""Where media may be read: below one folder or place, and never because a row says so."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from megatrain.data.media import sources
from megatrain.data.media.decoder import TOO_MANY_BYTES
from megatrain.data.media.sources import ABSENT, LINK, OUTSIDE, MediaFolder
from megatrain.data.rows.media import Medium
from megatrain.data.rows.skipped import BadRow
from megatrain.places import FolderPlace

MOST = 1000


def _read(where: str | Path | None, name: str) -> bytes:
    return MediaFolder(where).read(Medium(kind="image", name=name), MOST).data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of media, beside which there is a secret."""
    inside = tmp_path / "data"
    (inside / "deep").mkdir(parents=True)
    (inside / "deep" / "a.png").write_bytes(b"picture")
    (inside / "large.png").write_bytes(bytes(MOST + 1))
    (tmp_path / "secret.png").write_bytes(b"secret")
    (inside / "link.png").symlink_to(tmp_path / "secret.png")
    (inside / "up").symlink_to(tmp_path)
    (inside / "loop").symlink_to(inside / "loop")
    os.mkfifo(inside / "pipe.png")
    return inside


@pytest.mark.parametrize("name", ["deep/a.png", "./deep/../deep/a.png", "{}/deep/a.png"])
def test_paths_below_the_folder(folder: Path, name: str) -> None:
    assert _read(folder, name.format(folder)) == b"picture"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../secret.png", OUTSIDE),
        ("deep/../../secret.png", OUTSIDE),
        ("{}/../secret.png", OUTSIDE),
        ("link.png", OUTSIDE),
        ("up/secret.png", OUTSIDE),
        ("/etc/passwd", OUTSIDE),
        ("/dev/zero", OUTSIDE),
        ("loop", ABSENT),
        ("pipe.png", ABSENT),
        ("deep", ABSENT),
        ("gone.png", ABSENT),
        ("x" * 9999, ABSENT),
        ("large.png", TOO_MANY_BYTES),
        ("http://127.0.0.1:1/x.png", LINK),
        ("https://example.com/x.png", LINK),
        ("HTTP://169.254.169.254/latest", LINK),
        ("file:///etc/passwd", LINK),
        ("ftp://localhost/x", LINK),
        ("s3://bucket/x.png", LINK),
    ],
)
def test_everything_else_is_a_bad_row(
    folder: Path, name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a row makes no connection")

    monkeypatch.setattr(socket.socket, "connect", never)
    with pytest.raises(BadRow) as refused:
        _read(folder, name.format(folder))
    assert refused.value.reason == reason


def test_rows_without_a_folder_name_no_media() -> None:
    with pytest.raises(BadRow, match=ABSENT):
        _read(None, "a.png")


def test_a_place_that_the_config_names(folder: Path) -> None:
    url = f"file://{folder}"
    assert _read(url, "deep/a.png") == b"picture"
    assert _read(url, f"{url}/deep/a.png") == b"picture"
    for name, reason in (
        ("../secret.png", OUTSIDE),
        (f"{url}/../secret.png", OUTSIDE),
        (f"{url}/link.png", OUTSIDE),
        ("s3://other/a.png", LINK),
        ("http://x/a.png", LINK),
        ("file:///etc/passwd", LINK),
        ("large.png", TOO_MANY_BYTES),
    ):
        with pytest.raises(BadRow, match=reason):
            _read(url, name)


def test_a_bucket_that_the_config_names(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(sources, "open_place", lambda url: FolderPlace(folder))
    url = "s3://bucket/media"
    assert _read(url, "deep/a.png") == _read(url, f"{url}/deep/a.png") == b"picture"
    for name, reason in (
        ("../secret.png", LINK),
        ("s3://other/a.png", LINK),
        ("http://x/a.png", LINK),
        ("gone.png", ABSENT),
        ("large.png", TOO_MANY_BYTES),
    ):
        with pytest.raises(BadRow, match=reason):
            _read(url, name)

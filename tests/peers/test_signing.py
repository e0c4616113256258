"""Whose claim a claim is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatrain.errors import DiskError, MissingPackage, PeersError
from megatrain.peers.signing import SIGNATURE, Ed25519
from testkit.faulty_os import faulty


def test_without_the_package_its_name_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(MissingPackage, match=r"pip install megatrain\[peers\]"):
        Ed25519(tmp_path / "key")


def test_signatures_are_of_one_key_and_of_every_byte(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="signatures need cryptography")
    a, b = Ed25519(tmp_path / "a"), Ed25519(tmp_path / "b")
    signed = a.signed({"norm": 1.5, "peer": "a"})
    assert b.is_by(signed, a.public)
    assert not b.is_by(signed, b.public)
    assert not b.is_by({**signed, "norm": 1.25}, a.public)
    assert not b.is_by({"norm": 1.5, "peer": "a"}, a.public)
    assert not b.is_by({**signed, SIGNATURE: "zz"}, a.public)
    assert Ed25519(tmp_path / "a").public == a.public


def test_a_file_that_is_no_key_is_named(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="signatures need cryptography")
    (tmp_path / "a").write_text("hello")
    with pytest.raises(PeersError, match="is not a secret key of a peer"):
        Ed25519(tmp_path / "a")


def test_a_key_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="signatures need cryptography")
    num_failed = 0
    while True:
        path = tmp_path / str(num_failed)
        try:
            with faulty(fail_at=num_failed):
                public = Ed25519(path).public
        except DiskError:
            assert len(Ed25519(path).public) == 64  # made or read: there is room again
            num_failed += 1
            continue
        assert num_failed >= 3
        assert Ed25519(path).public == public
        assert path.stat().st_mode & 0o777 == 0o600
        return

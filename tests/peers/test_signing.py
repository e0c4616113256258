"""Whose claim a claim is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatrain.errors import MissingPackage, PeersError
from megatrain.peers.signing import SIGNATURE, Ed25519


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

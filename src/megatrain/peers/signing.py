"""Signatures: whose claim, and whose record, something is.

Keys are Ed25519, by the package `cryptography` (`pip install megatrain[peers]`). The secret key of
a peer is a file that only its owner reads; it is made when it is first needed. A meeting whose
peers all belong to one owner may do without: `peers.signed: false`.

What is signed is JSON with sorted keys and no spaces, without the signature itself.

Laws (tests/peers/test_signing.py)
    1. A claim counts if it was signed by the key of its peer, and if no byte of it has changed.
    2. A secret key never leaves its file, and others than its owner cannot read that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from megatrain import files
from megatrain.errors import MissingPackage, PeersError

SIGNATURE = "signature"


def canonical(fields: Mapping[str, Any]) -> bytes:
    """Return fields as the bytes that are signed."""
    unsigned = {key: value for key, value in fields.items() if key != SIGNATURE}
    return json.dumps(unsigned, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


class Signer(Protocol):
    """Signs for one peer, and knows the signatures of others."""

    public: str
    """The public key, in hexadecimal digits; empty: nothing is signed."""

    def signed(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields with their signature."""

    def is_by(self, fields: Mapping[str, Any], public: str) -> bool:
        """Return whether fields were signed by the owner of a public key."""


class Unsigned:
    """No signatures: everybody who writes to the meeting place is trusted."""

    public = ""

    def signed(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return dict(fields)

    def is_by(self, fields: Mapping[str, Any], public: str) -> bool:
        return True


class Ed25519:
    """The key of one peer, in a file."""

    def __init__(self, path: Path) -> None:
        """Read the secret key, or make one. Raises MissingPackage, PeersError or DiskError."""
        try:
            from cryptography.hazmat.primitives.asymmetric import ed25519
        except ImportError:
            raise MissingPackage(
                "peers.signed is true: signatures need cryptography. Run `pip install "
                "megatrain[peers]`, or set peers.signed to false if all peers are your own."
            ) from None
        self._library = ed25519
        if not path.exists():
            files.make_folder(path.parent)
            secret = ed25519.Ed25519PrivateKey.generate().private_bytes_raw()
            files.write_new(path, secret.hex().encode() + b"\n", secret=True)
        try:
            secret = bytes.fromhex(path.read_text().strip())
            self._secret = ed25519.Ed25519PrivateKey.from_private_bytes(secret)
        except (OSError, ValueError) as error:
            raise PeersError(f"peers.key {path} is not a secret key of a peer: {error}") from None
        self.public = self._secret.public_key().public_bytes_raw().hex()

    def signed(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {**fields, SIGNATURE: self._secret.sign(canonical(fields)).hex()}

    def is_by(self, fields: Mapping[str, Any], public: str) -> bool:
        from cryptography.exceptions import InvalidSignature

        try:
            key = self._library.Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
            key.verify(bytes.fromhex(fields[SIGNATURE]), canonical(fields))
        except (InvalidSignature, ValueError, KeyError, TypeError, RecursionError):
            return False
        return True

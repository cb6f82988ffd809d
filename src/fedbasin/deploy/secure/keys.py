"""Keys, sealed messages and shares of secrets.

X25519 agrees on keys, HKDF-SHA256 binds each key to its session, purpose and clients, AES-256-GCM
seals what one client sends another by way of the server (all from `cryptography`). Shares are
Flower's (Shamir, of PyCryptodome). Shamir's scheme accepts any share. So every share is dealt
together with its hash, and a secret is compared with what its owner has published before.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares

from fedbasin.deploy.wire import Refused

KEY_BYTES = 32  # of keys, seeds and hashes
SHARE_BYTES = 52  # of a share of 32 bytes: its number, and three blocks of 16
_NONCE_BYTES = 12
SEALED_BYTES = _NONCE_BYTES + 2 * SHARE_BYTES + 16  # two shares, and GCM's tag


class KeyPair(NamedTuple):
    """A secret key and its public key, 32 bytes each."""

    secret: bytes
    public: bytes


def make_pair() -> KeyPair:
    """Return a new key pair."""
    secret = X25519PrivateKey.generate()
    return KeyPair(secret.private_bytes_raw(), secret.public_key().public_bytes_raw())


def public_of(secret: bytes) -> bytes:
    """Return the public key of a secret key."""
    key = X25519PrivateKey.from_private_bytes(secret)
    return bytes(key.public_key().public_bytes_raw())


def make_seed() -> bytes:
    """Return a new secret seed."""
    return secrets.token_bytes(KEY_BYTES)


def agreed_key(secret: bytes, public: bytes, info: bytes) -> bytes:
    """Return the key that only the owners of two key pairs know."""
    try:
        own = X25519PrivateKey.from_private_bytes(secret)
        shared = own.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:  # of a wrong length, or a point of small order
        raise Refused(f"a public key cannot be used: {error}") from error
    return derived_key(shared, info)


def derived_key(secret: bytes, info: bytes) -> bytes:
    """Return a key that is bound to its purpose."""
    return bytes(HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=info).derive(secret))


def seal(key: bytes, text: bytes, info: bytes) -> bytes:
    """Encrypt and sign a message; a key seals one message only."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return nonce + bytes(AESGCM(key).encrypt(nonce, text, info))


def unseal(key: bytes, sealed: bytes, info: bytes) -> bytes:
    """Return a sealed message, or refuse one that was changed or is for another."""
    try:
        return bytes(AESGCM(key).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], info))
    except (InvalidTag, ValueError) as error:
        raise Refused("a sealed message cannot be opened") from error


def hash_of(text: bytes, info: bytes) -> bytes:
    """Return the hash by which a secret of at least 16 random bytes is recognised later."""
    return hmac.digest(info, text, hashlib.sha256)


def same(a: bytes, b: bytes) -> bool:
    """Compare two hashes or keys."""
    return hmac.compare_digest(a, b)


def deal(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Cut a secret into shares, of which any `threshold` give it back."""
    return list(create_shares(secret, threshold, count))


def combine(shares: list[bytes]) -> bytes:
    """Return the secret of shares. Wrong shares give a wrong secret, so compare its hash."""
    try:
        return bytes(combine_shares(shares))
    except ValueError as error:
        raise Refused(f"shares do not fit together: {error}") from error

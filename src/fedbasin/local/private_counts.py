r"""Class counts of all clients together, with no client's own counts shown to anyone.

    holder:  make_keys             -> public key to every client and the server; secret key stays
    client:  encrypt_counts        -> E(c_k), c_k = its rows by class, to the server
    server:  add_counts            -> E(c_1) + E(c_2) + ... = E(sum_k c_k), to the holder
    holder:  decrypt_counts        -> sum_k c_k, announced to all

Every step takes and returns bytes, so that any transport can carry them. The scheme is BFV: exact
sums of integers modulo t = 1032193, decoded in (-t/2, t/2], in polynomials of degree 4096 (128-bit
security). A class with more than `MOST` rows would wrap around, so the holder compares the sum
with the number of rows: every wrap takes t away, hence one that happened never goes unseen.

What is promised: server and clients follow the protocol but are curious, and the server does not
conspire with the holder. The server then learns sizes, timings and the announced sum. Not promised:
anything against a holder that is handed a single client's message, or clients that lie.

Needs the extra ``fedbasin[he]`` (TenSEAL), imported when first used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from fedbasin.core.rng import Key

MODULUS = 1_032_193  # t
DEGREE = 4096  # also the most classes that fit into one message
MOST = MODULUS // 2  # the largest total of a class
FEWEST = 3  # the sum over two clients tells either what the other holds
_LONGEST = {"public key": 1 << 18, "secret key": 1 << 19, "encrypted counts": 1 << 17}


class PrivateCountsError(ValueError):
    """Counts, keys or messages that cannot be used, with the reason."""


@dataclass(frozen=True)
class Keys:
    """A holder's pair: `public` is for everyone, `secret` never leaves the holder."""

    public: bytes
    secret: bytes = field(repr=False)


def draw_holders(clients: Sequence[int], holders: int, key: Key) -> list[int]:
    """Draw the clients that make keys, from the run's randomness."""
    if not 1 <= holders <= len(clients):
        raise PrivateCountsError(
            f"holders is {holders}: draw at least 1 and at most the {len(clients)} clients"
        )
    drawn = key.fold("key holders").numpy().choice(len(clients), holders, replace=False)
    return sorted(clients[i] for i in drawn)


def make_keys() -> Keys:
    """Make a key pair from the system's randomness; a seed would make it guessable."""
    context = _fresh_context()
    parts = {"save_galois_keys": False, "save_relin_keys": False}
    return Keys(
        context.serialize(save_secret_key=False, **parts),
        context.serialize(save_secret_key=True, **parts),
    )


def read_public(public: bytes) -> Any:
    """Read a holder's public key; one with a secret inside is refused, so no server holds one."""
    context = _read_key(public, "public key")
    if context.is_private():
        raise PrivateCountsError("public key: holds a secret key, which must stay with its holder")
    return context


def encrypt_counts(public: bytes, counts: Sequence[int] | np.ndarray) -> bytes:
    """Encrypt one client's rows by class under a holder's public key."""
    numbers = np.asarray(counts)
    if numbers.ndim != 1 or not 1 <= len(numbers) <= DEGREE:
        raise PrivateCountsError(
            f"counts has shape {numbers.shape}: give one number for each of 1 to {DEGREE} classes"
        )
    if numbers.dtype.kind not in "iu" or (numbers < 0).any():
        raise PrivateCountsError(f"counts must be whole numbers of at least 0, got {counts}")
    if (numbers > MOST).any():
        raise PrivateCountsError(f"counts holds {numbers.max()}, the most of a class is {MOST}")
    vector = _tenseal().bfv_vector(read_public(public), numbers.tolist())
    return bytes(vector.serialize())


def encrypt_share(public: bytes, counts: Sequence[int] | np.ndarray, clients: int) -> bytes:
    """Encrypt one client's rows by class where nobody will know how many rows there are in all.

    No class may have more rows than the sum can hold of each of `clients` clients.
    """
    most = MOST // clients
    if max(counts, default=0) > most:
        raise PrivateCountsError(
            f"counts holds {max(counts)}, the most of a class is {most} for each of {clients} "
            "clients: a larger sum could wrap around unseen"
        )
    return encrypt_counts(public, counts)


def add_counts(public: bytes, messages: Sequence[bytes], classes: int) -> bytes:
    """Add the clients' encrypted counts: the server's step, refused where it could decrypt."""
    if len(messages) < FEWEST:
        raise PrivateCountsError(
            f"{len(messages)} messages to add: a sum over fewer than {FEWEST} clients would tell "
            "what one of them holds"
        )
    context = read_public(public)
    total = _vector(context, messages[0], classes)
    for message in messages[1:]:
        total += _vector(context, message, classes)
    return bytes(total.serialize())


def check_counts(public: bytes, message: bytes, classes: int) -> None:
    """Refuse one client's encrypted counts if they cannot be read."""
    _vector(read_public(public), message, classes)


def decrypt_counts(secret: bytes, message: bytes, classes: int, rows: int) -> list[int]:
    """Decrypt the sum: the holder's step, refused where the sum is not that of `rows` rows.

    Args:
        secret: the holder's secret key.
        message: what the server added up.
        classes: how many classes there are.
        rows: how many rows the clients hold together, as they say when they train; 0 where nobody
            knows, and every client has checked its own counts (`encrypt_share`).
    """
    context = _read_key(secret, "secret key")
    if not context.is_private():
        raise PrivateCountsError("secret key: holds no secret, only its holder can decrypt")
    total = [int(n) for n in _vector(context, message, classes).decrypt()]
    if min(total) < 0 or (rows and sum(total) != rows):
        raise PrivateCountsError(
            f"the decrypted counts do not add up to {rows} rows: a class has more than {MOST} "
            "rows in all, a client counted wrongly, or the key is not the one they encrypted with"
        )
    return total


def gather_counts(counts: np.ndarray, key: Key, holders: int = 1) -> np.ndarray:
    """Run the whole protocol on counts [N, classes]; return their sum [classes].

    Clients are dealt to the holders; each group's sum is decrypted by its holder and announced, so
    more holders mean that one who breaks the protocol harms fewer, but smaller sums are shown.
    """
    clients, classes = counts.shape
    drawn = draw_holders(range(clients), holders, key)
    order = key.fold("key groups").numpy().permutation(clients)
    pairs = {holder: make_keys() for holder in drawn}
    total = np.zeros(classes, dtype=np.int64)
    for keys, group in zip(pairs.values(), np.array_split(order, holders), strict=True):
        messages = [encrypt_counts(keys.public, counts[client]) for client in group]
        added = add_counts(keys.public, messages, classes)
        total += decrypt_counts(keys.secret, added, classes, int(counts[group].sum()))
    return total


def _tenseal() -> ModuleType:
    try:
        import tenseal
    except ImportError as error:
        raise PrivateCountsError(
            "encrypted counts need TenSEAL: pip install 'fedbasin[he]'; without it the server "
            "sees every client's class counts in plain"
        ) from error
    return tenseal  # type: ignore[no-any-return, unused-ignore]


def _fresh_context() -> Any:
    he = _tenseal()
    return he.context(he.SCHEME_TYPE.BFV, poly_modulus_degree=DEGREE, plain_modulus=MODULUS)


def _parameters(context: Any) -> tuple[int, ...]:
    """Return the library's fingerprint of a scheme, its degree and its moduli."""
    return tuple(context.seal_context().data.key_parms_id())


@cache
def _our_parameters() -> tuple[int, ...]:
    return _parameters(_fresh_context())


def _checked(message: bytes, what: str) -> bytes:
    """Refuse what is not bytes of a plausible length before any of it is read."""
    if not isinstance(message, bytes) or not 0 < len(message) <= _LONGEST[what]:
        size = f"{len(message)} bytes" if isinstance(message, bytes) else type(message).__name__
        raise PrivateCountsError(f"{what}: expected 1 to {_LONGEST[what]} bytes, got {size}")
    return message


def _read_key(message: bytes, what: str) -> Any:
    """Read a key and check that it is for our scheme."""
    checked = _checked(message, what)
    he = _tenseal()
    try:
        context = he.context_from(checked)
        known = context.has_public_key() and _parameters(context) == _our_parameters()
    except (RuntimeError, ValueError, TypeError) as error:
        raise PrivateCountsError(f"{what}: cannot be read ({error})") from error
    if not known:
        raise PrivateCountsError(
            f"{what}: made for another scheme than BFV of degree {DEGREE} modulo {MODULUS}"
        )
    return context


def _vector(context: Any, message: bytes, classes: int) -> Any:
    """Read encrypted counts and check how many there are."""
    what = "encrypted counts"
    checked = _checked(message, what)
    he = _tenseal()
    try:
        vector = he.bfv_vector_from(context, checked)
    except (RuntimeError, ValueError, TypeError) as error:
        raise PrivateCountsError(f"{what}: cannot be read ({error})") from error
    if vector.size() != classes:
        raise PrivateCountsError(f"{what}: {vector.size()} classes, expected {classes}")
    return vector

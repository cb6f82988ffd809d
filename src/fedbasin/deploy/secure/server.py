"""The server's part of the protocol: what it is told, what it passes on, and the sum it opens.

    keys     every client sends two public keys: one to be written to, one for masks
    shares   every client deals shares of its mask key and of a seed, sealed for their holders
    masked   every client sends its words, masked; the server adds them up
    unmask   survivors send their shares of survivors' seeds and of lost clients' mask keys

A client may be lost in any stage. `RoundFailed` ends the round where too few are left, or where
someone sent what is provably wrong. Nothing is unmasked then.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from flwr.app import ConfigRecord

from fedbasin.deploy.secure.fields import by_client, read_all_bytes, read_bytes, read_clients
from fedbasin.deploy.secure.keys import (
    KEY_BYTES,
    SEALED_BYTES,
    SHARE_BYTES,
    agreed_key,
    combine,
    derived_key,
    hash_of,
    public_of,
    same,
)
from fedbasin.deploy.secure.masks import Mask, add_masks
from fedbasin.deploy.secure.quantise import NUMBERS, Sums
from fedbasin.deploy.secure.settings import Session
from fedbasin.deploy.wire import Refused


class RoundFailed(RuntimeError):
    """A round that ends without a sum, with the reason."""


class PublicKeys(NamedTuple):
    """What a client publishes first."""

    seal: bytes
    mask: bytes


@dataclass(frozen=True)
class Dealt:
    """What a client dealt, by holder."""

    sealed: dict[int, bytes]  # both shares, which only the holder can open
    seed_hashes: dict[int, bytes]  # of the holders' shares of its seed
    key_hashes: dict[int, bytes]  # of the holders' shares of its mask key
    seed_hash: bytes


def rings(clients: Sequence[int], neighbours: int) -> dict[int, list[int]]:
    """Return with whom each client shares secrets, itself included, in rising order.

    With fewer neighbours than others there are, clients stand in a ring of random order, and each
    shares with the nearest on both sides.
    """
    if not neighbours or neighbours >= len(clients) - 1:
        return {client: sorted(clients) for client in clients}
    order = list(clients)
    secrets.SystemRandom().shuffle(order)
    reach = range(-(neighbours // 2), neighbours // 2 + 1)
    count = len(order)
    return {
        client: sorted(order[(place + offset) % count] for offset in reach)
        for place, client in enumerate(order)
    }


class ServerProtocol:
    """One round on the server.

    Args:
        session: what was agreed on.
        size: how many words an update has.
        neighbours: with how many others a client shares secrets; 0 for all.
    """

    def __init__(self, session: Session, size: int, neighbours: int = 0) -> None:
        self.session = session
        self.size = size
        self._neighbours = neighbours
        self._keys: dict[int, PublicKeys] = {}
        self._rings: dict[int, list[int]] = {}
        self._dealt: dict[int, Dealt] = {}
        self._masking: frozenset[int] = frozenset()  # who masks for whom: fixed after `shares`
        self._total: tuple[np.ndarray, np.ndarray] | None = None
        self._survivors: set[int] = set()
        self._seed_shares: dict[int, list[bytes]] = {}
        self._key_shares: dict[int, list[bytes]] = {}

    @property
    def with_keys(self) -> list[int]:
        """Clients that sent keys."""
        return sorted(self._keys)

    @property
    def masking(self) -> list[int]:
        """Clients that dealt shares and are asked for an update."""
        return sorted(self._masking)

    @property
    def survivors(self) -> list[int]:
        """Clients whose masked update was added."""
        return sorted(self._survivors)

    def take_keys(self, client: int, record: ConfigRecord) -> None:
        """Take a client's public keys."""
        keys = PublicKeys(
            read_bytes(record, "seal-key", KEY_BYTES), read_bytes(record, "mask-key", KEY_BYTES)
        )
        known = {key for one in self._keys.values() for key in one}
        if keys.seal == keys.mask or not known.isdisjoint(keys):
            raise Refused("a public key is not new")
        self._keys[client] = keys

    def close_keys(self) -> None:
        """Decide who shares with whom; nobody can join any more."""
        self._need(len(self._keys), "sent keys")
        self._rings = rings(self.with_keys, self._neighbours)

    def keys_for(self, client: int) -> ConfigRecord:
        """Return the public keys of a client's holders."""
        ring = self._rings[client]
        return ConfigRecord(
            {
                "holders": ring,
                "seal-keys": [self._keys[holder].seal for holder in ring],
                "mask-keys": [self._keys[holder].mask for holder in ring],
            }
        )

    def take_shares(self, client: int, record: ConfigRecord) -> None:
        """Take what a client deals to its holders."""
        ring = self._rings[client]
        others = [holder for holder in ring if holder != client]
        count = len(ring)
        self._dealt[client] = Dealt(
            by_client(others, read_all_bytes(record, "sealed", SEALED_BYTES, count - 1)),
            by_client(ring, read_all_bytes(record, "seed-hashes", KEY_BYTES, count)),
            by_client(ring, read_all_bytes(record, "key-hashes", KEY_BYTES, count)),
            read_bytes(record, "seed-hash", KEY_BYTES),
        )

    def close_shares(self) -> None:
        """Decide who masks; clients with too few holders left are left out."""
        masking = set(self._dealt)
        while alone := {c for c in masking if not self._enough(c, masking)}:
            masking -= alone
        self._need(len(masking), "dealt shares")
        self._masking = frozenset(masking)

    def shares_for(self, client: int) -> ConfigRecord:
        """Return what a client's holders dealt to it, with the hashes."""
        dealers = [c for c in self._rings[client] if c in self._masking and c != client]
        return ConfigRecord(
            {
                "dealers": dealers,
                "sealed": [self._dealt[dealer].sealed[client] for dealer in dealers],
                "seed-hashes": [self._dealt[dealer].seed_hashes[client] for dealer in dealers],
                "key-hashes": [self._dealt[dealer].key_hashes[client] for dealer in dealers],
            }
        )

    def take_masked(self, client: int, words: np.ndarray, numbers: np.ndarray) -> None:
        """Add a client's masked words to the sum."""
        if client not in self._masking:
            raise Refused("it dealt no shares in this round")
        if client in self._survivors:
            raise Refused("it answers twice in one round")
        for name, array, shape, dtype in (
            ("words", words, (self.size,), np.uint32),
            ("numbers", numbers, (NUMBERS,), np.uint64),
        ):
            if array.shape != shape or array.dtype != dtype:
                raise Refused(
                    f"its {name} are {array.dtype} {array.shape}, expected {np.dtype(dtype)} "
                    f"{shape}"
                )
        if self._total is None:
            self._total = np.zeros(self.size, np.uint32), np.zeros(NUMBERS, np.uint64)
        self._total[0].__iadd__(words)
        self._total[1].__iadd__(numbers)
        self._survivors.add(client)

    def close_masked(self) -> None:
        """Check that the sum can be opened."""
        self._need(len(self._survivors), "sent an update")
        for client in self._opened():
            if not self._enough(client, self._survivors):
                raise RoundFailed(f"too few clients are left that hold shares of client {client}")

    def lists_for(self, client: int) -> ConfigRecord:
        """Return which of a client's holders survived, and which were lost."""
        ring = [c for c in self._rings[client] if c in self._masking]
        return ConfigRecord(
            {
                "survivors": [c for c in ring if c in self._survivors],
                "lost": [c for c in ring if c not in self._survivors],
            }
        )

    def take_unmask(self, client: int, record: ConfigRecord) -> None:
        """Take a survivor's shares, or none of them if one is wrong."""
        lists = self.lists_for(client)
        survivors = read_clients(lists, "survivors")
        lost = read_clients(lists, "lost")
        seeds = read_all_bytes(record, "seed-shares", SHARE_BYTES, len(survivors))
        keys = read_all_bytes(record, "key-shares", SHARE_BYTES, len(lost))
        for owner, share in zip(survivors, seeds, strict=True):
            self._check(client, owner, share, "seed", self._dealt[owner].seed_hashes)
        for owner, share in zip(lost, keys, strict=True):
            self._check(client, owner, share, "key", self._dealt[owner].key_hashes)
        for owner, share in zip(survivors, seeds, strict=True):
            self._seed_shares.setdefault(owner, []).append(share)
        for owner, share in zip(lost, keys, strict=True):
            self._key_shares.setdefault(owner, []).append(share)

    def open(self) -> tuple[np.ndarray, Sums | None]:
        """Remove the masks from the sum, once; return its words and numbers."""
        masks = []
        for client in self._opened():
            lost = client not in self._survivors
            shares = (self._key_shares if lost else self._seed_shares).get(client, [])
            if len(shares) < self.session.threshold:
                raise RoundFailed(
                    f"{len(shares)} of {self.session.threshold} clients sent a share of client "
                    f"{client}"
                )
            secret = self._combined(client, shares[: self.session.threshold], lost=lost)
            if lost:
                masks += self._pairwise(client, secret)
            else:
                info = self.session.info("self mask", client)
                masks.append(Mask(derived_key(secret, info), add=False))
        assert self._total is not None
        total = self._total
        self._total = None
        add_masks(total, masks)
        self._seed_shares.clear()
        self._key_shares.clear()
        return total[0], Sums.of(total[1], len(self._survivors), self.session)

    def _opened(self) -> list[int]:
        """Return whose secrets are needed: survivors', and those of lost clients near to them."""
        lost = self._masking - self._survivors
        near = {c for c in lost if not self._survivors.isdisjoint(self._rings[c])}
        return sorted(self._survivors | near)

    def _pairwise(self, lost: int, secret: bytes) -> list[Mask]:
        """Return what cancels the masks that survivors share with a lost client."""
        masks = []
        for client in self._rings[lost]:
            if client in self._survivors:
                masks.append(pairwise_mask(self.session, client, lost, secret, self._keys).opposite)
        return masks

    def _combined(self, client: int, shares: list[bytes], *, lost: bool) -> bytes:
        """Return a client's secret; one that is not what the client published is its fault."""
        try:
            secret = combine(shares)
            if len(secret) != KEY_BYTES:
                raise Refused(f"a secret of {len(secret)} bytes")
        except Refused as reason:
            raise RoundFailed(f"client {client} dealt wrong shares: {reason}") from reason
        if lost:
            right = same(public_of(secret), self._keys[client].mask)
        else:
            info = self.session.info("seed", client)
            right = same(hash_of(secret, info), self._dealt[client].seed_hash)
        if not right:
            raise RoundFailed(f"client {client} dealt shares of another secret than its own")
        return secret

    def _check(
        self, holder: int, owner: int, share: bytes, kind: str, hashes: Mapping[int, bytes]
    ) -> None:
        info = self.session.info(f"share of {kind}", owner, holder)
        if not same(hash_of(share, info), hashes[holder]):
            raise Refused(f"client {holder} sent a wrong share of the {kind} of client {owner}")

    def _enough(self, client: int, among: Iterable[int]) -> bool:
        return len(set(self._rings[client]).intersection(among)) >= self.session.threshold

    def _need(self, count: int, what: str) -> None:
        if count < self.session.threshold:
            raise RoundFailed(f"{count} clients {what}, {self.session.threshold} are needed")


def pairwise_mask(
    session: Session, client: int, other: int, secret: bytes, keys: Mapping[int, PublicKeys]
) -> Mask:
    """Return the mask that a client adds for another one, from the secret of either of them.

    Of the two, the one with the lower number adds the stream and the other subtracts it.

    Args:
        session: what was agreed on.
        client: whose mask it is.
        other: with whom it is shared.
        secret: the mask key of `client` or of `other`.
        keys: public keys by client.
    """
    own = same(public_of(secret), keys[client].mask)
    public = keys[other].mask if own else keys[client].mask
    low, high = sorted((client, other))
    return Mask(agreed_key(secret, public, session.info("mask", low, high)), add=client == low)

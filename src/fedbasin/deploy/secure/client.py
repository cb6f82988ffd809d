"""A client's part of the protocol. It trusts nothing that the server sends.

Between messages its secrets lie in Flower's client state. A secret is erased as soon as it has
served: the keys and the seed when the masked update is made, the others' shares when they are
sent. A new session erases what an unfinished one left.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict

from fedbasin.deploy.clients import ASK
from fedbasin.deploy.secure.fields import by_client, read_all_bytes, read_bytes, read_clients
from fedbasin.deploy.secure.keys import (
    KEY_BYTES,
    SEALED_BYTES,
    SHARE_BYTES,
    agreed_key,
    deal,
    derived_key,
    hash_of,
    make_pair,
    make_seed,
    public_of,
    same,
    seal,
    unseal,
)
from fedbasin.deploy.secure.masks import Mask, add_masks
from fedbasin.deploy.secure.server import PublicKeys, pairwise_mask
from fedbasin.deploy.secure.settings import SECURE, Session
from fedbasin.deploy.wire import Refused, number, the_record

KEYS = "secure-keys"  # the questions of the protocol
SHARES = "secure-shares"
UNMASK = "secure-unmask"
STAGES = (KEYS, SHARES, UNMASK)
WORDS = "words"  # the arrays of a masked reply
NUMBERS = "numbers"
MAIL = "secure-mail"  # the record of what the server passes on
FLOOR = "secure-threshold"  # the setting of a node: the least threshold that it takes part with
_STATE = "fedbasin-secure"
_LAST = "fedbasin-secure-last"


class SecureClient:
    """One client in one federation.

    Args:
        context: Flower's context of the client.
        client: its id.
        floor: the least threshold it takes part with; above 0 it sends nothing in plain. The
            node's own configuration may say more.
    """

    def __init__(self, context: Context, client: int, floor: int = 0) -> None:
        own = context.node_config.get(FLOOR, 0)
        if not isinstance(own, int) or isinstance(own, bool) or own < 0:
            raise Refused(f"the node's {FLOOR} is {own!r}, expected a whole number")
        self._context = context
        self._client = client
        self.floor = max(floor, own)

    def refuse_plain(self, what: str) -> None:
        """Refuse to send something that shows this client alone."""
        if self.floor:
            raise Refused(
                f"this client takes part in secure aggregation alone and sends no {what}: run the "
                "server with secure=Secure(...) and without evaluation on clients"
            )

    def check_sum(self, config: ConfigRecord) -> None:
        """Refuse to add encrypted class counts to a sum over few clients."""
        if self.floor:
            clients = number(config, "clients", least=0)
            if clients < self.floor:
                raise Refused(
                    f"class counts are added up over {clients} clients, this client takes part "
                    f"from {self.floor} on"
                )

    def answer(self, content: RecordDict) -> RecordDict:
        """Answer one of the protocol's questions."""
        asked = the_record(content, ConfigRecord, "config").get(ASK)
        session = Session.read(the_record(content, ConfigRecord, SECURE))
        if asked == KEYS:
            return self._keys(session)
        mail = the_record(content, ConfigRecord, MAIL)
        if asked == SHARES:
            return self._shares(session, mail)
        return self._unmask(session, mail)

    def _keys(self, session: Session) -> RecordDict:
        self._context.state.pop(_STATE, None)  # secrets of a session that was not finished
        if session.threshold < self.floor:
            raise Refused(
                f"threshold is {session.threshold}, this client takes part from {self.floor} on"
            )
        self._check_new(session)
        sealing = make_pair()
        masking = make_pair()
        secrets = {"seal-secret": sealing.secret, "mask-secret": masking.secret}
        self._store("keys", session, secrets)
        return _reply({"seal-key": sealing.public, "mask-key": masking.public})

    def _shares(self, session: Session, mail: ConfigRecord) -> RecordDict:
        held = self._held("keys", session)
        ring = read_clients(mail, "holders")
        count = len(ring)
        seal_keys = read_all_bytes(mail, "seal-keys", KEY_BYTES, count)
        mask_keys = read_all_bytes(mail, "mask-keys", KEY_BYTES, count)
        secret = read_bytes(held, "seal-secret", KEY_BYTES)
        mask_secret = read_bytes(held, "mask-secret", KEY_BYTES)
        keys = {c: PublicKeys(s, m) for c, s, m in zip(ring, seal_keys, mask_keys, strict=True)}
        own = PublicKeys(public_of(secret), public_of(mask_secret))
        if keys.get(self._client) != own:
            raise Refused("this client's keys are not those it has sent")
        if len({key for pair in keys.values() for key in pair}) != 2 * count:
            raise Refused("two clients have one public key")
        if not session.threshold <= count < 2 * session.threshold:
            raise Refused(
                f"secrets are shared among {count} clients with threshold {session.threshold}, "
                "which must be more than half of them"
            )
        seed = make_seed()
        seed_shares = by_client(ring, deal(seed, session.threshold, count))
        key_shares = by_client(ring, deal(mask_secret, session.threshold, count))
        sealed = []
        for holder in ring:
            if holder != self._client:
                info = _seal_info(session, self._client, holder, keys)
                key = agreed_key(secret, keys[holder].seal, info)
                sealed.append(seal(key, seed_shares[holder] + key_shares[holder], info))
        self._store(
            "shares",
            session,
            {
                "seal-secret": secret,
                "mask-secret": mask_secret,
                "seed": seed,
                "own-share": seed_shares[self._client],
                "holders": ring,
                "seal-keys": seal_keys,
                "mask-keys": mask_keys,
            },
        )
        return _reply(
            {
                "sealed": sealed,
                "seed-hashes": self._hashes(session, "seed", seed_shares),
                "key-hashes": self._hashes(session, "key", key_shares),
                "seed-hash": hash_of(seed, session.info("seed", self._client)),
            }
        )

    def _hashes(self, session: Session, kind: str, shares: Mapping[int, bytes]) -> list[bytes]:
        return [
            hash_of(share, session.info(f"share of {kind}", self._client, holder))
            for holder, share in shares.items()
        ]

    def begin(self, content: RecordDict) -> Session | None:
        """Return the session of a request to train; None where the server asks in plain."""
        if SECURE not in content:
            self.refuse_plain("model")
            return None
        session = Session.read(the_record(content, ConfigRecord, SECURE))
        self._check_new(session)
        self._opened(session, the_record(content, ConfigRecord, MAIL))
        return session

    def masked(
        self, session: Session, words: np.ndarray, numbers: np.ndarray, content: RecordDict
    ) -> ArrayRecord:
        """Mask an update in place and return it as it travels, once a session.

        Args:
            session: what was agreed on.
            words: the quantised update, uint32.
            numbers: what goes with it, uint64.
            content: the request to train.
        """
        held = self._held("shares", session)
        received = self._opened(session, the_record(content, ConfigRecord, MAIL))
        ring = read_clients(held, "holders")
        secret = read_bytes(held, "mask-secret", KEY_BYTES)
        seal_keys = read_all_bytes(held, "seal-keys", KEY_BYTES, len(ring))
        mask_keys = read_all_bytes(held, "mask-keys", KEY_BYTES, len(ring))
        keys = {c: PublicKeys(s, m) for c, s, m in zip(ring, seal_keys, mask_keys, strict=True)}
        seed = read_bytes(held, "seed", KEY_BYTES)
        masks = [Mask(derived_key(seed, session.info("self mask", self._client)), add=True)]
        for other in received:
            masks.append(pairwise_mask(session, self._client, other, secret, keys))
        self._note(session)  # before anything leaves: a second update would show one client's
        add_masks((words, numbers), masks)
        own = read_bytes(held, "own-share", SHARE_BYTES)
        shares = {**received, self._client: (own, bytes(SHARE_BYTES))}
        ids = sorted(shares)
        self._store(
            "masked",
            session,
            {
                "dealers": ids,
                "seed-shares": [shares[c][0] for c in ids],
                "key-shares": [shares[c][1] for c in ids],
            },
        )
        return ArrayRecord({WORDS: Array(words), NUMBERS: Array(numbers)})

    def _opened(self, session: Session, mail: ConfigRecord) -> dict[int, tuple[bytes, bytes]]:
        """Return the shares of others' seeds and mask keys that this client holds."""
        held = self._held("shares", session)
        dealers = read_clients(mail, "dealers")
        count = len(dealers)
        ring = read_clients(held, "holders")
        if self._client in dealers or not set(dealers) <= set(ring):
            raise Refused("a client dealt shares that was not among the holders")
        if count + 1 < session.threshold:
            raise Refused(f"{count + 1} clients dealt shares, {session.threshold} are needed")
        seal_keys = read_all_bytes(held, "seal-keys", KEY_BYTES, len(ring))
        mask_keys = read_all_bytes(held, "mask-keys", KEY_BYTES, len(ring))
        keys = {c: PublicKeys(s, m) for c, s, m in zip(ring, seal_keys, mask_keys, strict=True)}
        secret = read_bytes(held, "seal-secret", KEY_BYTES)
        sealed = read_all_bytes(mail, "sealed", SEALED_BYTES, count)
        seed_hashes = read_all_bytes(mail, "seed-hashes", KEY_BYTES, count)
        key_hashes = read_all_bytes(mail, "key-hashes", KEY_BYTES, count)
        received = {}
        for place, dealer in enumerate(dealers):
            info = _seal_info(session, dealer, self._client, keys)
            try:
                text = unseal(agreed_key(secret, keys[dealer].seal, info), sealed[place], info)
            except Refused as reason:
                raise Refused(f"the shares from client {dealer}: {reason}") from reason
            seed_share, key_share = text[:SHARE_BYTES], text[SHARE_BYTES:]
            for kind, share, expected in (
                ("seed", seed_share, seed_hashes[place]),
                ("key", key_share, key_hashes[place]),
            ):
                told = hash_of(share, session.info(f"share of {kind}", dealer, self._client))
                if not same(told, expected):
                    raise Refused(f"client {dealer} dealt a wrong share of its {kind}")
            received[dealer] = (seed_share, key_share)
        return received

    def _unmask(self, session: Session, mail: ConfigRecord) -> RecordDict:
        held = self._held("masked", session)
        dealers = read_clients(held, "dealers")
        count = len(dealers)
        seeds = by_client(dealers, read_all_bytes(held, "seed-shares", SHARE_BYTES, count))
        keys = by_client(dealers, read_all_bytes(held, "key-shares", SHARE_BYTES, count))
        survivors = read_clients(mail, "survivors")
        lost = read_clients(mail, "lost")
        both = set(survivors) & set(lost)
        if both:
            raise Refused(f"client {min(both)} is said to be lost and to have survived")
        if set(survivors) | set(lost) != set(dealers):
            raise Refused("the lists of survivors and lost clients are not those that masked")
        if self._client in lost:
            raise Refused("this client is said to be lost")
        if len(survivors) < session.threshold:
            raise Refused(f"{len(survivors)} clients survived, {session.threshold} are needed")
        del self._context.state[_STATE]  # first: no share is told twice, whatever happens
        return _reply(
            {
                "seed-shares": [seeds[client] for client in survivors],
                "key-shares": [keys[client] for client in lost],
            }
        )

    def _store(self, stage: str, session: Session, secrets: dict[str, Any]) -> None:
        """Replace what the session has kept so far."""
        told = json.dumps(dict(session.record()), sort_keys=True)
        self._context.state[_STATE] = ConfigRecord({"stage": stage, "session": told, **secrets})

    def _held(self, stage: str, session: Session) -> ConfigRecord:
        """Return what an earlier stage of the session has left."""
        held = self._context.state.config_records.get(_STATE)
        if held is None or held["stage"] != stage:
            at = "no session" if held is None else f"a session after {held['stage']!r}"
            raise Refused(f"this client is in {at}, expected one after {stage!r}")
        if held["session"] != json.dumps(dict(session.record()), sort_keys=True):
            raise Refused("the message is of another session than this client's")
        return held

    def _check_new(self, session: Session) -> None:
        """Refuse a round for which an update was sent before, and any before that."""
        attempt, round = self._last(session.run)
        if (session.attempt, session.round) <= (attempt, round):
            raise Refused(
                f"round {session.round} of start {session.attempt}: this client has sent its "
                f"update of round {round} of start {attempt}; a second one would show a single "
                "client's by subtraction"
            )

    def _last(self, run: str) -> tuple[int, int]:
        file = self._file(run)
        if file is not None:
            if not file.exists():
                return 0, 0
            told = json.loads(file.read_text(encoding="utf-8"))
            return int(told["attempt"]), int(told["round"])
        last = self._context.state.config_records.get(_LAST)
        if last is None or last["run"] != run:
            return 0, 0
        return int(last["attempt"]), int(last["round"])

    def _note(self, session: Session) -> None:
        file = self._file(session.run)
        told = {"run": session.run, "attempt": session.attempt, "round": session.round}
        if file is None:
            self._context.state[_LAST] = ConfigRecord(told)
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_suffix(".new")
        fresh.write_text(json.dumps(told), encoding="utf-8")
        fresh.replace(file)

    def _file(self, run: str) -> Path | None:
        folder = self._context.node_config.get("state-dir")
        if folder is None:
            return None
        return Path(str(folder)) / run / f"secure{self._client:06d}.json"


def _seal_info(session: Session, dealer: int, holder: int, keys: Mapping[int, PublicKeys]) -> bytes:
    """Return what sealed shares are bound to: both mask keys, as the one who seals knows them.

    Two clients that were told different mask keys cannot open each other's shares. Their masks
    would not cancel, and the sum would be of no use.
    """
    return session.info("shares", dealer, holder) + keys[dealer].mask + keys[holder].mask


def _reply(values: dict[str, Any]) -> RecordDict:
    return RecordDict({"config": ConfigRecord(values)})

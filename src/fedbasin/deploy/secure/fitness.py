"""Which runs can be secured. Others are refused before anything is sent, with the reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fedbasin.core.catalogue import needs_of
from fedbasin.core.expressions import Choice
from fedbasin.core.method import Method
from fedbasin.core.protocols import is_private, needs_gradients
from fedbasin.core.rule import LocalRule
from fedbasin.core.vectors import Weighting
from fedbasin.deploy.secure.settings import Secure, Session
from fedbasin.deploy.settings import Handling, ServerSide
from fedbasin.local.privacy import LARGEST_NORMAL, AddsNoise

# A noise with so many steps of rounding in its standard deviation has 0.3 % more after it.
_STEPS_IN_NOISE = 4


def check_method(method: Method) -> Weighting:
    """Return how a method weighs clients, or refuse one that looks at single clients."""
    weighting = method.streams()
    if needs_gradients(method):
        raise ValueError(f"secure: {method} asks every client for its gradient")
    if weighting is None and is_private(method):
        raise ValueError(
            f"secure: {method} clips the updates on the server, which sees their sum alone; write "
            "dp(noise_by='clients'), where clients clip and add the noise"
        )
    if weighting is None:
        raise ValueError(
            f"secure: {method} looks at single replies or at what clients report, and secure "
            "aggregation shows their mean alone; available: methods that merge by the mean, such "
            "as fedavg, fedprox, fedadam, ima(fedavg)"
        )
    return weighting


def check_secure(
    secure: Secure, method: Method, server: ServerSide, handling: Handling, fraction_evaluate: float
) -> None:
    """Refuse a run in which the server would have to see what a single client sends."""
    weighting = check_method(method)
    if "class_counts" in needs_of(method) and server.counts != "private":
        raise ValueError(
            f"secure: {method} needs the clients' class counts: give "
            "server=ServerSide(counts='private'), where the server sees their sum alone, or take a "
            "rule that uses a client's own counts, such as balanced_softmax"
        )
    if handling.guard is not None:
        raise ValueError(
            "secure: a guard compares the lengths of single updates, which the server does not "
            "see; leave guard out (Secure's clip bounds every weight of every update)"
        )
    if handling.stream is False:
        raise ValueError("secure: replies are always added up as they arrive; leave stream out")
    if fraction_evaluate:
        raise ValueError(
            "secure: clients that evaluate would show their own scores and numbers of rows; give "
            "fraction_evaluate=0, and test on the server"
        )
    if weighting == "samples" and not secure.rows:
        raise ValueError(
            f"secure: {method} weighs clients by their rows: give Secure(rows=...), the most rows "
            "of a client, or a method with weighting='uniform'"
        )


def check_noise(secure: Secure, rules: Sequence[LocalRule], shared: Sequence[Any]) -> None:
    """Refuse words that would cut the noise of clients, or round it away.

    The sum would have less noise than the record says, and than epsilon is computed from.

    Args:
        secure: the user's settings.
        rules: what clients do.
        shared: what they are sent for it.
    """
    for rule, sent in zip(rules, shared, strict=True):
        if not isinstance(rule, AddsNoise) or not (std := rule.noise_std(sent)):
            continue
        least = rule.bound(sent) + LARGEST_NORMAL * std
        noise = f"the noise that each client adds, of standard deviation {std:.3g}"
        if secure.clip < least:
            raise ValueError(
                f"secure: Secure(clip={secure.clip:g}) would cut {noise}, and the sum would have "
                f"less than the record says: give Secure(clip={_rounded_up(least)}) or more "
                "(in an app: federation.secure-clip)"
            )
        if secure.step > std / _STEPS_IN_NOISE:
            raise ValueError(
                f"secure: Secure(clip={secure.clip:g}, bits={secure.bits}) rounds to multiples of "
                f"{secure.step:.3g}, which swallows {noise}: give more bits, or "
                f"clip={_rounded_up(least)}"
            )


def _rounded_up(value: float) -> str:
    """Write a number with three digits that is no smaller."""
    digits = 2 - math.floor(math.log10(value))
    return f"{math.ceil(value * 10.0**digits) / 10.0**digits:g}"


def check_cohorts(secure: Secure, participation: Choice) -> None:
    """Refuse cohorts of a fixed size that is below the threshold."""
    size = dict(participation.arguments).get("clients")
    if isinstance(size, int) and size < secure.needed(size):
        raise ValueError(
            f"secure: cohorts of {size} clients are below the threshold of {secure.needed(size)}; "
            "let more clients take part, or lower the threshold"
        )


def session_of(
    secure: Secure,
    method: Method,
    server: ServerSide,
    *,
    run: str,
    round: int,
    attempt: int,
    cohort: int,
    statistics: int,
) -> Session:
    """Return what a round's parties agree on.

    Args:
        secure: the user's settings.
        method: how the server merges.
        server: says what happens to BatchNorm statistics.
        run: the federation's name.
        round: from 1.
        attempt: how often the run was started.
        cohort: how many clients were drawn.
        statistics: how many BatchNorm statistics the network has.
    """
    weighting = check_method(method)
    clip = 0.0
    if statistics and server.statistics.policy == "mean":
        if not secure.statistics or not secure.rows:
            raise ValueError(
                "secure: the network has BatchNorm statistics: give Secure(statistics=..., "
                "rows=...), their largest change in a round and the most rows of a client, or "
                "let the server keep or recalibrate them (sim.buffers)"
            )
        clip = secure.statistics
    return Session(
        run=run,
        round=round,
        attempt=attempt,
        threshold=secure.needed(cohort),
        clients=cohort,
        bits=secure.bits,
        clip=float(secure.clip),
        rows=secure.rows,
        statistics=float(clip),
        weighting=weighting,
    )

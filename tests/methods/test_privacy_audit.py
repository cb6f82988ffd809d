"""What `dp` releases, in thousands of trials, against the delta that it claims at its epsilon.

Two worlds differ by one client, which does the worst it can. Who sees all noised sums and clips
guesses in which world they arose. With epsilon and delta as claimed, P(S) - e^epsilon Q(S) is at
most delta for every set S of outcomes. S is chosen on one half of the trials and measured on the
other, and a test fails only if the lower confidence bound (error 1e-6) is above the claim.

FEDBASIN_TEST_PRIVACY is how many trials a world has (`make test-privacy`: 100,000). Where it is
set, noise comes from the run's own generator in place of NumPy's, which is faster.
"""

import math
import os
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy.stats import beta

import fedbasin.local.privacy
from fedbasin.core.method import Context, Sampling
from fedbasin.core.rng import root
from fedbasin.core.rule import Finish, Start
from fedbasin.core.vectors import Layout
from fedbasin.local.privacy import NoiseCarry
from fedbasin.methods.dp import DP
from fedbasin.methods.parts import accounting
from fedbasin.testing import replies_of

AT_LENGTH = "FEDBASIN_TEST_PRIVACY" in os.environ
TRIALS = int(os.environ.get("FEDBASIN_TEST_PRIVACY", "4000"))
ERROR = 1e-6  # of a verdict that a claim is wrong
ROUNDS = 2
OTHERS = 2  # whose draws the attacker knows: they are in every cohort
NOTHING, SHORT, LONG = 0.0, 0.999, 1e3  # lengths of an update over the clip

pytestmark = [
    pytest.mark.skipif(not accounting.installed(), reason="needs the extra fedbasin[dp]"),
    pytest.mark.timeout(300 + TRIALS // 20),
]


@dataclass(frozen=True)
class Game:
    """What runs, and the updates of the one client in both worlds; None where it is not there."""

    method: DP
    sampling: Sampling
    one: float | None
    other: float | None
    in_its_place: float | None = None  # the update of who is drawn where the client is not
    drawn: float = 1.0  # the chance that it takes part in a round

    def trial(self, update, key, draws):
        """Return what all rounds release, and the epsilon that is claimed for them."""
        context = Context(Layout(("w",), ((1,),)), self.sampling.clients, ROUNDS, key)
        context = replace(context, sampling=self.sampling)
        model = torch.zeros(1, dtype=torch.float64)
        state = self.method.init(model, context)
        released = []
        for round in range(ROUNDS):
            moves = [NOTHING] * OTHERS
            guest = update if draws.random() < self.drawn else self.in_its_place
            if guest is not None:
                moves.append(guest)
            clip = float(state.own.clip)
            models = self.sent(torch.tensor(moves, dtype=torch.float64) * clip, state, context)
            around = replace(context.at(round, 0.1), answered=len(moves))
            served, state = self.method.aggregate(state, model, replies_of(models), around)
            released += [float(served.send) / clip, math.log(float(state.own.clip) / clip)]
        return released, served.notes

    def sent(self, moves, state, context):
        """Return the models of a cohort, as its clients' rule sends them."""
        if self.method.noise_by == "server":
            return moves[:, None]  # the server clips again
        *_, rule = self.method.rules()
        shared = self.method.broadcast(state, moves[:1] * 0, context)[-1]
        begun = Start(
            **{name: None for name in Start._fields}
            | {"vector": torch.zeros(1, dtype=torch.float64), "shared": shared}
        )
        ends = [Finish(**dict.fromkeys(Finish._fields) | {"vector": move[None]}) for move in moves]
        keys = torch.randint(1 << 62, (len(ends), 2), generator=CLIENTS)
        return torch.stack(
            [rule.upload(NoiseCarry(k), begun, end) for k, end in zip(keys, ends, strict=True)]
        )


CLIENTS = torch.Generator()


def shows(game, seed):
    """Return a lower bound of the delta at the claimed epsilon, and this epsilon."""
    draws = np.random.default_rng(seed)
    CLIENTS.manual_seed(seed)
    worlds = []
    for number, update in enumerate((game.one, game.other)):
        rows = []
        for trial in range(TRIALS):
            released, notes = game.trial(update, root(seed).fold(number, trial), draws)
            rows.append(released)
        worlds.append(np.array(rows))
    epsilon = notes[0].epsilon
    half = TRIALS // 2
    guess = best_guess(*(world[:half] for world in worlds), epsilon)
    return guess.bound(*(world[half:] for world in worlds), epsilon, ERROR), epsilon


@dataclass(frozen=True)
class Guess:
    """The set S: outcomes whose score is above a threshold; `turned` exchanges the worlds."""

    direction: np.ndarray
    threshold: float
    turned: bool

    def bound(self, one, other, epsilon, error):
        """Return the lower bound of P(S) - e^epsilon Q(S)."""
        p, q = (int((rows @ self.direction > self.threshold).sum()) for rows in (one, other))
        if self.turned:
            p, q = len(other) - q, len(one) - p
        low = beta.ppf(error / 2, p, len(one) - p + 1) if p else 0.0  # Clopper and Pearson's
        high = beta.isf(error / 2, q + 1, len(other) - q) if q < len(other) else 1.0
        return low - math.exp(epsilon) * high


def best_guess(one, other, epsilon):
    """Return the best half-space of Fisher's direction."""
    spread = np.cov(one, rowvar=False) + np.cov(other, rowvar=False)
    direction = np.linalg.pinv(spread) @ (one.mean(0) - other.mean(0))
    scores = np.concatenate([one, other]) @ direction
    guesses = [
        Guess(direction, threshold, turned)
        for threshold in np.quantile(scores, np.linspace(0.01, 0.99, 99))
        for turned in (False, True)
    ]
    return max(guesses, key=lambda guess: guess.bound(one, other, epsilon, 0.01))


RATE = 20 / 21
POISSON, FIXED = Sampling("poisson", 20.0, 21), Sampling("fixed", 20.0, 21)
FEW, FEW_FIXED = Sampling("poisson", 3.0, 6), Sampling("fixed", 3.0, 6)
# Noise and delta at which a few thousand trials tell a noise that is a quarter too small.
PLAIN = DP(noise=0.8, delta=0.5, accountant="pld")
ADAPTIVE = DP(noise=1.4, delta=0.3, accountant="pld", adaptive=True)
REPLACED = DP(noise=1.9, delta=0.3)
BY_CLIENTS = DP(noise=1.4, delta=0.3, accountant="pld", noise_by="clients")
GAMES = {
    "fixed clip, poisson": Game(PLAIN, POISSON, None, LONG, drawn=RATE),
    "fixed clip, fixed size": Game(REPLACED, FIXED, -LONG, LONG, NOTHING, RATE),
    "fixed clip, noise of clients, poisson": Game(BY_CLIENTS, FEW, NOTHING, LONG),
    "fixed clip, noise of clients, fixed size": Game(BY_CLIENTS, FEW_FIXED, NOTHING, -SHORT),
    "adaptive clip, poisson": Game(ADAPTIVE, POISSON, None, SHORT, drawn=RATE),
    "adaptive clip, fixed size": Game(
        replace(REPLACED, adaptive=True), FIXED, -SHORT, LONG, NOTHING, RATE
    ),
}


@pytest.fixture(autouse=True)
def fast_noise(monkeypatch):
    """Take NumPy's numbers for those of the run's generator, which has tests of its own."""
    if AT_LENGTH:
        return
    draws = np.random.default_rng(7)

    def normal(key, counter):
        return torch.from_numpy(draws.standard_normal(len(counter)))

    monkeypatch.setattr(sys.modules["fedbasin.methods.dp"], "normal", normal)
    monkeypatch.setattr(fedbasin.local.privacy, "normal", normal)


@pytest.mark.parametrize("name", GAMES)
def test_no_more_shows_than_is_claimed(name):
    game = GAMES[name]
    found, epsilon = shows(game, seed=list(GAMES).index(name))
    assert found <= game.method.delta, f"delta is above {found:.3f} at epsilon {epsilon:.3f}"


def test_the_audit_finds_a_round_that_is_not_counted(monkeypatch):
    game = GAMES["fixed clip, poisson"]
    one_round = accounting.epsilon(0.8, ROUNDS - 1, 0.5, POISSON, "pld")
    module = sys.modules["fedbasin.methods.dp"]
    monkeypatch.setattr(module, "epsilon", lambda *arguments: one_round)
    assert shows(game, seed=0)[0] > game.method.delta

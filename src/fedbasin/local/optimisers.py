r"""The optimisers of clients: what turns a direction into the next model.

An optimiser is a frozen dataclass with pure functions for ONE client, state in and state out, so
the same code runs in a loop, under `vmap`, compiled, and on a real client. `direction` is the
gradient after the rules of the method and after clipping. `lr` is the rate of the round. `paces`
are factors of it that rules ask for, one for each rule.

    sgd     m <- rho m + d + wd v          v <- v - lr m         (nesterov: d + wd v + rho m)
    adam    d <- d + wd v                  v <- v - lr mhat / (sqrt(uhat) + eps)
    adamw   the same without d + wd v      v <- v - lr (mhat / (sqrt(uhat) + eps) + wd v)
            m <- b1 m + (1 - b1) d,  mhat = m / (1 - b1^t),  u <- b2 u + (1 - b2) d^2,  uhat alike

They equal `torch.optim`. Enter one of your own with ``@entry("optimiser")``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedbasin.core.bounds import Bounded, above, at_least, within
from fedbasin.core.catalogue import entry, needs_of
from fedbasin.core.expressions import ExpressionError, text
from fedbasin.core.tree import tensors
from fedbasin.core.vectors import Layout

Paces = Sequence[Tensor | None]


class Optimiser(Bounded, ABC):
    """How a client steps. Subclasses are frozen dataclasses that can be pickled."""

    default_lr: ClassVar[float] = 0.1  # the usual learning rate

    @abstractmethod
    def init(self, vector: Tensor) -> Any:
        """Return the state before the first step: a named tuple of tensors, counters included."""

    @abstractmethod
    def update(
        self, direction: Tensor, state: Any, vector: Tensor, lr: Tensor | float, paces: Paces = ()
    ) -> tuple[Tensor, Any]:
        """Return the next model [P] and the next state; nothing given is changed."""

    def effective_steps(self, steps: int, pull: float = 0.0) -> float | None:
        """Return how many gradients K steps add up to, a_i of FedNova.

        It is how far K steps along a gradient that is always 1 lead, in units of the learning
        rate. An adaptive optimiser has no such number and returns None.

        Args:
            steps: K.
            pull: eta mu, where a proximal term mu (v - x) shortens the way.
        """
        return None

    @property
    def adaptive(self) -> bool:
        """Whether the length of a step does not follow the length of the gradient."""
        return self.effective_steps(1) is None

    @property
    def writes_in_place(self) -> bool:
        """Whether `update_in_place` may be used in place of `update`."""
        return False

    def update_in_place(
        self,
        gradients: tuple[Tensor | None, ...],
        state: Any,
        vector: Tensor,
        lr: float,
        layout: Layout,
    ) -> None:
        """Write the next model and state over the present ones; one gradient for each layer."""
        raise NotImplementedError(f"{self} does not write in place")

    def __str__(self) -> str:
        try:
            return text(self)
        except ExpressionError:  # an optimiser that is not in the catalogue
            return repr(self)


class Velocity(NamedTuple):
    """The state of SGD with momentum."""

    velocity: Tensor  # [P] m


@entry("optimiser")
@dataclass(frozen=True)
class SGD(Optimiser):
    """Stochastic gradient descent, as `torch.optim.SGD`.

    Args:
        momentum: share of the last step that is kept, rho in [0, 1).
        weight_decay: multiple of the parameters added to the gradient.
        nesterov: whether the gradient is taken as if one step ahead; needs momentum.
    """

    momentum: float = within("[0, 1)", default=0.0)
    weight_decay: float = at_least(0, default=0.0)
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.nesterov, bool):
            raise ValueError(f"nesterov must be True or False, got {self.nesterov}")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs momentum: write momentum=0.9")

    def init(self, vector: Tensor) -> Velocity | tuple[()]:
        """Return m = 0, or nothing where there is no momentum."""
        return Velocity(torch.zeros_like(vector)) if self.momentum else ()

    def update(
        self, direction: Tensor, state: Any, vector: Tensor, lr: Tensor | float, paces: Paces = ()
    ) -> tuple[Tensor, Any]:
        """Take the step of `torch.optim.SGD`."""
        if self.weight_decay:
            direction = direction + self.weight_decay * vector
        if self.momentum:
            velocity = torch.add(direction, state.velocity, alpha=self.momentum)
            state = Velocity(velocity)
            if self.nesterov:
                direction = torch.add(direction, velocity, alpha=self.momentum)
            else:
                direction = velocity
        return _moved(vector, direction, lr, paces), state

    def effective_steps(self, steps: int, pull: float = 0.0) -> float:
        """Return a_i of K steps.

        With momentum rho, a = [K - rho (1 - rho^K) / (1 - rho)] / (1 - rho); Nesterov's K steps
        lead as far as K + 1 of these without the first, which is 1. With a proximal term,
        a <- (1 - eta mu) a + 1; with both, m <- rho m + 1 - eta mu a and a <- a + m.
        """
        rho = self.momentum
        if not pull:
            taken = steps + 1 if self.nesterov else steps
            length = (taken - rho * (1 - rho**taken) / (1 - rho)) / (1 - rho)
            return length - 1 if self.nesterov else length
        velocity = 0.0
        length = 0.0
        for _ in range(steps):
            direction = 1 - pull * length
            velocity = rho * velocity + direction
            length += direction + rho * velocity if self.nesterov else velocity
        return length

    @property
    def writes_in_place(self) -> bool:
        """Plain and heavy-ball steps do; a subclass may have another `update`."""
        return type(self) is SGD and not self.nesterov

    def update_in_place(
        self,
        gradients: tuple[Tensor | None, ...],
        state: Any,
        vector: Tensor,
        lr: float,
        layout: Layout,
    ) -> None:
        """Apply every layer's gradient where the layer lies in the vector.

        To join them to one vector first is one more pass over memory, which a wide dense layer
        feels.
        """
        if self.momentum:
            direction = state.velocity.mul_(self.momentum)
            if self.weight_decay:
                direction.add_(vector, alpha=self.weight_decay)
            _add(layout.views(direction), gradients, 1.0)
            vector.sub_(direction, alpha=lr)
        else:
            if self.weight_decay:
                vector.mul_(1 - lr * self.weight_decay)
            _add(layout.views(vector), gradients, -lr)


class Moments(NamedTuple):
    """The state of Adam and AdamW."""

    mean: Tensor  # [P] m, of the directions
    square: Tensor  # [P] u, of their squares
    steps: Tensor  # 0-d int64, steps taken, t


@dataclass(frozen=True)
class _Adaptive(Optimiser):
    """What Adam and AdamW share: two running means, and their checks."""

    default_lr: ClassVar[float] = 0.001

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = above(0, default=1e-8)
    weight_decay: float = at_least(0, default=0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas}")

    def init(self, vector: Tensor) -> Moments:
        """Return means of zero."""
        return _no_moments(vector)


@entry("optimiser", paper="Kingma and Ba, ICLR 2015", url="https://arxiv.org/abs/1412.6980")
@dataclass(frozen=True)
class Adam(_Adaptive):
    """Adam with bias correction, as `torch.optim.Adam`; weight decay is added to the gradient.

    Args:
        betas: how slowly the means of directions and of their squares change, each in [0, 1).
        eps: added to the root of the mean square.
        weight_decay: multiple of the parameters added to the gradient.
    """

    def update(
        self,
        direction: Tensor,
        state: Moments,
        vector: Tensor,
        lr: Tensor | float,
        paces: Paces = (),
    ) -> tuple[Tensor, Moments]:
        """Take the step of `torch.optim.Adam`."""
        if self.weight_decay:
            direction = direction + self.weight_decay * vector
        direction, state = _normalised(direction, state, self.betas, self.eps)
        return _moved(vector, direction, lr, paces), state


@entry(
    "optimiser", paper="Loshchilov and Hutter, ICLR 2019", url="https://arxiv.org/abs/1711.05101"
)
@dataclass(frozen=True)
class AdamW(_Adaptive):
    """Adam with weight decay apart from the gradient, as `torch.optim.AdamW`.

    Args:
        betas: how slowly the means of directions and of their squares change, each in [0, 1).
        eps: added to the root of the mean square.
        weight_decay: share of the parameters, times the learning rate, taken off in every step.
    """

    weight_decay: float = 0.01

    def update(
        self,
        direction: Tensor,
        state: Moments,
        vector: Tensor,
        lr: Tensor | float,
        paces: Paces = (),
    ) -> tuple[Tensor, Moments]:
        """Take the step of `torch.optim.AdamW`."""
        direction, state = _normalised(direction, state, self.betas, self.eps)
        if self.weight_decay:
            direction = direction + self.weight_decay * vector
        return _moved(vector, direction, lr, paces), state


def check_plain_steps(method: object, optimiser: Optimiser, kept: bool = False) -> None:
    """Refuse a method that counts the steps of SGD where they cannot be counted.

    Args:
        method: how the server merges.
        optimiser: how clients step.
        kept: whether they keep its state between rounds: a momentum of earlier rounds moves the
            model by more than the gradients of this one.
    """
    if "plain_sgd" not in needs_of(method):
        return
    if optimiser.adaptive:
        raise ValueError(
            f"{method} divides by the number of SGD steps behind an update, and the steps of "
            f"{optimiser} cannot be counted so; take the optimiser sgd, or another method such as "
            "scaffold or fedavgm"
        )
    if kept and tensors(optimiser.init(torch.zeros(1))):
        raise ValueError(
            f"{method} divides by the number of SGD steps behind an update, and a state of "
            f"{optimiser} that is kept adds steps of earlier rounds; set keep_optimiser to false, "
            "or take another method such as scaffold or fedavgm"
        )


def _no_moments(vector: Tensor) -> Moments:
    zero = torch.zeros((), dtype=torch.int64, device=vector.device)
    return Moments(torch.zeros_like(vector), torch.zeros_like(vector), zero)


def _normalised(
    direction: Tensor, state: Moments, betas: tuple[float, float], eps: float
) -> tuple[Tensor, Moments]:
    """Return Adam's direction, mhat / (sqrt(uhat) + eps), and the new state."""
    first, second = betas
    mean = torch.lerp(state.mean, direction, 1 - first)
    square = second * state.square + (1 - second) * direction * direction
    steps = state.steps + 1
    taken = steps.to(direction.dtype)
    root = (square / _gathered(taken, second)).sqrt()
    return mean / _gathered(taken, first) / (root + eps), Moments(mean, square, steps)


def _gathered(taken: Tensor, beta: float) -> Tensor:
    """Return 1 - beta^t, the weights in a mean that began at zero.

    `1 - 0.999**t` has lost five digits of a float32 by cancellation at t = 1; this has not.
    """
    if not beta:
        return torch.ones_like(taken)
    return -torch.expm1(taken * math.log(beta))


def _moved(vector: Tensor, direction: Tensor, lr: Tensor | float, paces: Paces) -> Tensor:
    """Return v - eta d; the rate eta is that of the round times the rules' paces."""
    for pace in paces:
        direction = direction if pace is None else pace * direction
    if isinstance(lr, Tensor):
        return vector - lr * direction
    return torch.sub(vector, direction, alpha=lr)  # one pass over memory, not two


def _add(views: dict[str, Tensor], gradients: tuple[Tensor | None, ...], scale: float) -> None:
    """Add multiples of gradients to the parts of a vector; a part that was not used has none."""
    for view, gradient in zip(views.values(), gradients, strict=True):
        if gradient is not None:
            view.add_(gradient, alpha=scale)

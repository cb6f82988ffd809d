"""The client half of a method: pure functions on vectors, written for ONE client.

Because a rule never loops over clients, the same code runs in a plain loop, under `vmap`
for a whole cohort, and on a real device. Rules stack: `begin` and `end` run for each,
`loss` passes a value along, and `direction` nests, with rules that move the point at which
the gradient is taken (SAM) inside those that correct it (FedProx, SCAFFOLD).

What crosses `vmap` (own state, carry, report) is a named tuple of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from fedbasin.core.net import Net, Outputs

Gradient = Callable[[Tensor], Tensor]


class Batch(NamedTuple):
    """One mini-batch of one client."""

    inputs: Tensor  # [B, ...] ready for the network
    labels: Tensor  # [B]
    weight: Tensor  # [B] 1 for a sample, 0 for padding


class Start(NamedTuple):
    """What a client knows when its round begins; numbers are 0-d tensors."""

    vector: Tensor  # [P] the model it received
    shared: Any  # what the method broadcasts to this rule
    own: Any  # what this rule kept on the client
    round: Tensor  # number of finished rounds
    lr: Tensor  # learning rate of this round
    steps: Tensor  # how many local steps it will take, K_i
    examples: Tensor  # how many samples it holds, n_i
    class_counts: Tensor  # [classes] its samples by class
    gradient: Tensor | None  # [P] full-batch gradient at `vector`, for rules that ask for it


class Finish(NamedTuple):
    """What a client knows when its local training is over."""

    vector: Tensor  # [P] the trained model, y_i
    steps: Tensor  # steps taken, K_i
    lr_sum: Tensor  # sum of the step sizes, eta K_i


class View(NamedTuple):
    """What a loss may look at: the forward pass of one batch."""

    net: Net
    vector: Tensor  # [P] where the loss is evaluated
    outputs: Outputs
    batch: Batch


class LocalRule:
    """What a client does beyond plain SGD. Every hook has a neutral default."""

    layer: ClassVar[Literal["perturb", "correct"]] = "correct"
    wants_gradient: ClassVar[bool] = False  # whether `Start.gradient` must be filled

    def own(self, vector: Tensor) -> Any:
        """Return the state a client has before its first round: a named tuple of zeros."""
        return ()

    def begin(self, start: Start, net: Net) -> Any:
        """Return what the rule carries through the local steps."""
        return ()

    def loss(self, carry: Any, value: Tensor, view: View) -> tuple[Tensor, Any]:
        """Add a term to the loss so far, or replace it; return it with the carry."""
        return value, carry

    def direction(self, carry: Any, vector: Tensor, gradient: Gradient) -> tuple[Tensor, Any]:
        """Return the direction handed to the optimiser, with the carry.

        `gradient(v)` is the gradient of this batch's loss at v, seen through the rules inside.
        """
        return gradient(vector), carry

    def end(self, carry: Any, start: Start, finish: Finish) -> tuple[Any, Any]:
        """Return the client's new own state and its report to the server."""
        return start.own, ()


Rules = LocalRule | tuple[LocalRule, ...]


def as_rules(local: Rules) -> tuple[LocalRule, ...]:
    """Return one rule or several as a tuple."""
    return local if isinstance(local, tuple) else (local,)

"""The client half of a method: pure functions on vectors, written for ONE client.

Because a rule never loops over clients, the same code runs in a plain loop, under `vmap`
for a whole cohort, and on a real device. Rules stack: `begin` and `end` run for each,
`loss` passes a value along (a rule that replaces the task loss comes first), and `direction`
nests, with rules that move the point at which the gradient is taken (SAM) inside those that
correct it (FedProx, SCAFFOLD), and these inside the one that keeps a momentum of what they give.

What crosses `vmap` (a client's state, survey, carry, report) is a named tuple of tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Protocol,
    runtime_checkable,
)

from torch import Tensor

from fedbasin.core.bounds import Bounded
from fedbasin.core.net import Net, Outputs
from fedbasin.core.task import CLASSIFICATION, Task

if TYPE_CHECKING:
    from fedbasin.core.method import Context

Gradient = Callable[[Tensor], Tensor]
Layer = Literal["keep", "correct", "perturb"]  # outermost first


class Batch(NamedTuple):
    """One mini-batch of one client."""

    inputs: Tensor  # [B, ...] ready for the network
    labels: Tensor  # [B] or [B, k]
    weight: Tensor  # [B] 1 for a sample, 0 for padding


class Start(NamedTuple):
    """What a client knows when its round begins; numbers are 0-d tensors."""

    vector: Tensor  # [P] the model it received
    shared: Any  # what the method broadcasts to this rule
    client_state: Any  # what this rule kept on the client
    round: Tensor  # number of finished rounds
    lr: Tensor  # learning rate of this round
    steps: Tensor  # how many local steps it will take, K_i
    epoch_steps: Tensor  # how many of them are one pass over its rows
    examples: Tensor  # how many samples it holds, n_i
    class_counts: Tensor  # [classes] its samples by class
    survey: Any  # the sums this rule's `survey` found over the client's rows; () without one
    buffers: Tensor | None = None  # [Q] the received statistics, for a forward pass at `vector`


class Finish(NamedTuple):
    """What a client knows when its local training is over."""

    vector: Tensor  # [P] the trained model, y_i
    steps: Tensor  # steps taken, K_i
    lr_sum: Tensor  # sum of the step sizes, eta K_i


class LossInputs(NamedTuple):
    """What a loss may look at: the forward pass of one batch."""

    net: Net
    vector: Tensor  # [P] where the loss is evaluated
    outputs: Outputs
    batch: Batch
    key: Tensor  # int64 [2], this step's randomness; fold it before drawing
    task: Task = CLASSIFICATION


class SurveyBatch(NamedTuple):
    """What a survey may look at: some of the client's rows, plain and without augmentation."""

    net: Net
    vector: Tensor  # [P] the model it received
    buffers: Tensor  # [Q] and its statistics
    shared: Any  # what the method broadcasts to this rule
    batch: Batch
    task: Task = CLASSIFICATION


class Setting(NamedTuple):
    """The training settings that a rule or a method may warn about."""

    momentum: float  # of the clients' SGD
    weight_decay: float
    clip: float | None
    ragged: bool  # whether clients take different numbers of steps
    statistics: bool  # whether the network averages BatchNorm statistics without renewing them
    adaptive: str = ""  # the clients' optimiser, where it is adaptive
    clients: int = 0  # how many there are, N; 0 where it is not known


def rescaled(setting: Setting, what: str) -> Iterator[str]:
    """Say what an adaptive optimiser does to a term that a rule adds to the gradient."""
    if setting.adaptive:
        yield (
            f"local.optimiser = {setting.adaptive} rescales {what} together with the gradient, "
            "each parameter on its own; the paper has plain SGD"
        )


class LocalRule(Bounded):
    """What a client does beyond the optimiser's step. Every hook has a neutral default."""

    layer: ClassVar[Layer] = "correct"
    owns: ClassVar[frozenset[Literal["loss", "rows"]]] = frozenset()  # hooks only one rule may fill
    surveys: ClassVar[bool] = False  # whether `survey` is wanted before training

    def shared(self, context: Context) -> Any:
        """Return what the server sends to this rule where the method itself sends nothing."""
        return ()

    def client_state(self, vector: Tensor) -> Any:
        """Return the state a client has before its first round: a named tuple of zeros."""
        return ()

    def survey(self, look: SurveyBatch) -> Any:
        """Return sums over some rows at the received model; they add up over the client's rows."""
        return ()

    def begin(self, start: Start, net: Net) -> Any:
        """Return what the rule carries through the local steps."""
        return ()

    def loss(self, carry: Any, value: Tensor, view: LossInputs) -> tuple[Tensor, Any]:
        """Add a term to the loss so far, or replace it; return it with the carry."""
        return value, carry

    def direction(self, carry: Any, vector: Tensor, gradient: Gradient) -> tuple[Tensor, Any]:
        """Return the direction handed to the optimiser, with the carry.

        `gradient(v)` is the gradient of this batch's loss at v, seen through the rules inside.
        """
        return gradient(vector), carry

    def lr_factor(self, carry: Any) -> Tensor | None:
        """Return what the client's learning rate is multiplied by [0-d], if anything."""
        return None

    def after_step(self, carry: Any, vector: Tensor, net: Net) -> tuple[Tensor, Any]:
        """Return the model after the optimiser's step, changed where the rule wants it."""
        return vector, carry

    def upload(self, carry: Any, start: Start, finish: Finish) -> Tensor:
        """Return the vector [P] that is sent in place of the trained model."""
        return finish.vector

    def end(self, carry: Any, start: Start, finish: Finish) -> tuple[Any, Any]:
        """Return the client's new state and its report to the server."""
        return start.client_state, ()

    def cautions(self, setting: Setting) -> Iterator[str]:
        """Yield warnings: why, with these settings, the rule may not behave as in its paper."""
        yield from ()


class DrawsRows(LocalRule, ABC):
    """A rule that draws a client's rows with replacement."""

    owns: ClassVar[frozenset[Literal["loss", "rows"]]] = frozenset({"rows"})

    @abstractmethod
    def chances(self, labels: Tensor, class_counts: Tensor) -> Tensor:
        """Return how likely each row [n] is drawn."""


@runtime_checkable
class Proximal(Protocol):
    """A rule whose `direction` adds mu (v - x), which shortens what gradients add up to."""

    @property
    def proximal_mu(self) -> float:
        """The strength mu."""
        ...


Rules = LocalRule | tuple[LocalRule, ...]


def as_rules(local: Rules) -> tuple[LocalRule, ...]:
    """Return one rule or several as a tuple."""
    return local if isinstance(local, tuple) else (local,)


def check_rules(rules: tuple[LocalRule, ...]) -> None:
    """Refuse rules of which two fill a hook that only one may."""
    for rule in rules:
        if "rows" in rule.owns and not isinstance(rule, DrawsRows):
            raise ValueError(f"{rule} owns 'rows' and gives no chances: derive it from DrawsRows")
    for hook, what in (("loss", "replace the task loss"), ("rows", "choose the rows of a batch")):
        owners = [str(rule) for rule in rules if hook in rule.owns]
        if len(owners) > 1:
            raise ValueError(f"only one rule may {what}, but {' and '.join(owners)} do; drop one")

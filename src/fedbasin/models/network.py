"""What every network of the catalogue looks like: a body that makes features, and a linear head."""

from __future__ import annotations

from torch import Tensor, nn

from fedbasin.models.dropout import number_sites


class Network(nn.Module):
    """A classifier ``logits(x) = head(features(x))``.

    Methods that work on features or on the classifier alone (anchors, prototypes, classifier
    retraining) need this cut; all others only call the network.

    Args:
        body: maps a batch [B, ...] to features [B, d].
        head: the last linear layer, d to the number of classes.
        compiles: whether ``torch.compile`` is worth its time; False for long unrolled loops.
        stacks: whether training several clients as one matrix is; False where a step of one
            client is mostly large products already.
    """

    def __init__(
        self, body: nn.Module, head: nn.Linear, *, compiles: bool = True, stacks: bool = True
    ) -> None:
        super().__init__()
        self.body = body
        self.head = head
        self.compiles = compiles
        self.stacks = stacks
        number_sites(self)

    def features(self, x: Tensor) -> Tensor:
        """Return the input of the head, [B, d]."""
        features: Tensor = self.body(x)
        return features

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, [B, classes]."""
        logits: Tensor = self.head(self.features(x))
        return logits

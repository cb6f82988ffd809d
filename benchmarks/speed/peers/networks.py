"""The networks in plain PyTorch, as a user of any PyTorch simulator would write them."""

import torch
from torch import nn

from peers.work import CLASSES, Work


class Classifier(nn.Sequential):
    """A network with the two methods that pfl-research wants of it."""

    def loss(self, inputs, labels, eval=False):
        self.eval() if eval else self.train()
        return nn.functional.cross_entropy(self(inputs), labels)

    @torch.no_grad()
    def metrics(self, inputs, labels, eval=False):
        from pfl.metrics import Weighted

        self.eval()
        right = (self(inputs).argmax(1) == labels).sum().item()
        return {"accuracy": Weighted(right, len(labels))}


def network(work: Work, device="cpu") -> Classifier:
    """Return the network of a shape with the initial weights."""
    layers = {
        "fmnist_cnn": lambda: [
            nn.Conv2d(1, 32, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 32, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(512, 384),
            nn.ReLU(),
            nn.Linear(384, 128),
            nn.ReLU(),
            nn.Linear(128, CLASSES),
        ],
        "pfl_cnn": lambda: [
            nn.Conv2d(3, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(12544, 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, CLASSES),
        ],
        "logistic": lambda: [nn.Flatten(), nn.Linear(784, CLASSES)],
    }[work.shape.model]()
    made = Classifier(*layers)
    with torch.no_grad():
        for parameter, values in zip(made.parameters(), work.weights, strict=True):
            parameter.copy_(torch.from_numpy(values))
    return made.to(device)


def prepare(device: str) -> None:
    """Set torch up the same for everyone: one thread, and on CUDA tf32 and tuned convolutions."""
    torch.set_num_threads(1)
    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True


def synchronise(device: str) -> None:
    """Wait for the device: a round is over when its work is."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


@torch.no_grad()
def score(net: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the accuracy on the test rows, thousands in one pass."""
    net.eval()
    right = sum(
        (net(part).argmax(1) == answer).sum().item()
        for part, answer in zip(inputs.split(5000), labels.split(5000), strict=True)
    )
    net.train()
    return right / len(labels)

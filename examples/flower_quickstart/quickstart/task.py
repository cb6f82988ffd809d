"""Model, data, training and testing: plain PyTorch, nothing of fedbasin."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """A small network for 8 x 8 digits."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        """Return logits."""
        return self.fc2(F.relu(self.fc1(x)))


def load_data(partition_id, num_partitions, batch_size):
    """Return the training and test rows of one client."""
    digits = load_digits()
    mine = slice(partition_id, None, num_partitions)
    inputs = torch.tensor(digits.data[mine] / 16, dtype=torch.float32)
    rows = TensorDataset(inputs, torch.tensor(digits.target[mine]))
    cut = int(0.8 * len(rows))
    train, test = TensorDataset(*rows[:cut]), TensorDataset(*rows[cut:])
    return DataLoader(train, batch_size=batch_size), DataLoader(test, batch_size=batch_size)


def train(net, loader, epochs, lr):
    """Train and return the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    total = 0.0
    for _ in range(epochs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(inputs), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(loader))


@torch.no_grad()
def test(net, loader):
    """Return loss and accuracy."""
    loss, right, rows = 0.0, 0, 0
    for inputs, labels in loader:
        logits = net(inputs)
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
        right += int((logits.argmax(1) == labels).sum())
        rows += len(labels)
    return loss / rows, right / rows

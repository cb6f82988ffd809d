"""FedAvg in one file of plain PyTorch, following the pseudo-code; no fedbasin.

    python examples/fedavg_by_hand.py

The library does the same with any network, split and method; a test checks that both agree.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

CLIENTS, COHORT, ROUNDS, EPOCHS, BATCH, LR = 20, 10, 60, 2, 16, 0.2


def load():
    """Return images in [0, 1] and labels: 1,500 rows to train on, 297 to score."""
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1500], order[1500:]
    return images[train], labels[train], images[test], labels[test]


def deal(labels):
    """Give every client two shards of rows sorted by label: strong skew."""
    shards = labels.argsort(stable=True).chunk(2 * CLIENTS)
    order = torch.randperm(2 * CLIENTS, generator=torch.Generator().manual_seed(1)).tolist()
    return [torch.cat([shards[i], shards[j]]) for i, j in zip(order[::2], order[1::2], strict=True)]


def train_at_home(model, images, labels, generator):
    """Run SGD on one client's rows."""
    optimiser = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(EPOCHS):
        for index in torch.randperm(len(labels), generator=generator).split(BATCH):
            loss = nn.functional.cross_entropy(model(images[index]), labels[index])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()


def main():
    """Train and print the accuracy every few rounds; return the last one."""
    images, labels, test_images, test_labels = load()
    clients = deal(labels)
    with torch.random.fork_rng():
        torch.manual_seed(0)  # noqa: TID251
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    generator = torch.Generator().manual_seed(2)
    accuracy = 0.0
    for number in range(ROUNDS):
        cohort = torch.randperm(CLIENTS, generator=generator)[:COHORT].tolist()
        start = {name: value.clone() for name, value in model.state_dict().items()}
        total = {name: torch.zeros_like(value) for name, value in start.items()}
        rows = sum(len(clients[i]) for i in cohort)
        for i in cohort:
            model.load_state_dict(start)
            train_at_home(model, images[clients[i]], labels[clients[i]], generator)
            for name, value in model.state_dict().items():
                total[name] += len(clients[i]) / rows * value
        model.load_state_dict(total)
        with torch.no_grad():
            accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
        if (number + 1) % 10 == 0:
            print(f"round {number + 1:3d}: accuracy {100 * accuracy:.1f} %")
    return accuracy


if __name__ == "__main__":
    main()

"""Texts of your own: what a request asks for, by domain, with a network of your own.

    FEDBASIN_DATA=FOLDER python examples/own_texts.py

Each domain (banking, travel, ...) is a client, and no two share an intent: the hardest skew of
labels. Words are hashed to numbers, and the network averages their embeddings. Without
FOLDER/local/clinc150 texts are made on the spot.
"""

import os
from pathlib import Path

import numpy as np
import pandas
import torch
from torch import nn

import fedbasin as fb


def read():
    """Return training and test rows of clinc150 without out-of-scope requests, or made ones."""
    folder = Path(os.environ.get("FEDBASIN_DATA", "")) / "local" / "clinc150" / "full"
    if not folder.is_dir():
        return make(2000, 0), make(500, 1)
    parts = [pandas.read_parquet(next(folder.glob(f"{part}-*"))) for part in ("train", "test")]
    return tuple(part[part["domain"] != "oos"] for part in parts)


def make(count, seed):
    """Return texts of five words, of which one tells the intent."""
    rng = np.random.default_rng(seed)
    intents = rng.integers(0, 20, count)
    words = [[f"filler{word}" for word in row] for row in rng.integers(0, 50, (count, 4))]
    texts = [" ".join([f"key{intent}", *row]) for intent, row in zip(intents, words, strict=True)]
    names = {
        "intent": [f"intent {i:02}" for i in intents],
        "domain": [f"d{i % 5}" for i in intents],
    }
    return pandas.DataFrame({"text": texts} | names)


class MeanOfWords(nn.Module):
    """The mean embedding of a text's words, then a linear layer; token 0 is padding."""

    def __init__(self, shape, outputs, words=4096, width=64):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.head = nn.Linear(width, outputs)

    def forward(self, tokens):
        """Return one output an intent for tokens [rows, length]."""
        real = (tokens > 0).to(self.head.weight.dtype).unsqueeze(-1)
        return self.head((self.words(tokens) * real).sum(1) / real.sum(1).clamp(min=1))


def main(out="runs/own_texts", rounds=30, seeds=(0,), rows=None, jobs=None):
    """Compare three methods."""
    train, test = (part[:rows] for part in read())
    data = fb.data.from_texts(
        train["text"].tolist(),
        train["intent"].tolist(),
        tokenizer=fb.data.HashedWords(4096),
        length=16,
        clients=train["domain"].tolist(),
        test=tuple(test[name].tolist() for name in ("text", "intent", "domain")),
        name="requests",
    )
    result = fb.compare(
        data,
        [fb.fedavg(), fb.scaffold(), fb.wima(window=5)],
        model=MeanOfWords,
        rounds=rounds,
        seeds=seeds,
        local={"optimiser": fb.adam(), "lr": 0.01},
        out=out,
        jobs=jobs,
    )
    print(result)
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

"""From a trained model to words, and from the sum of words to what the round merges."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedbasin.core.method import Replies
from fedbasin.core.vectors import Layout
from fedbasin.deploy.secure.quantise import Numbers, Sums, quantise, restore
from fedbasin.deploy.secure.settings import Session
from fedbasin.local.train import Trained

_MOST_ROWS = (1 << 31) - 1


def size_of(session: Session, parameters: int, statistics: int) -> int:
    """Return how many words an update has."""
    return parameters + (statistics if session.statistics else 0)


def words_of(
    session: Session, vector: Tensor, buffers: Tensor, trained: Trained
) -> tuple[np.ndarray, np.ndarray]:
    """Return what a client has learnt as words and numbers: the client's part.

    Args:
        session: what was agreed on.
        vector: the model it was sent [P].
        buffers: the statistics it was sent [Q].
        trained: what came of training.
    """
    rows = int(trained.examples)
    most = session.rows or _MOST_ROWS
    examples = min(rows, most)
    weight = examples if session.weighting == "samples" else int(rows > 0)
    share = weight / session.rows if session.weighting == "samples" else float(weight)
    parameters = vector.numel()
    words = np.empty(size_of(session, parameters, buffers.numel()), np.uint32)
    clipped = quantise(
        _change(trained.vector, vector), words[:parameters], session.clip, share, session
    )
    clipped_statistics = 0
    if session.statistics:
        clipped_statistics = quantise(
            _change(trained.buffers, buffers),
            words[parameters:],
            session.statistics,
            examples / session.rows,  # statistics are always weighed by rows
            session,
        )
    numbers = Numbers(
        examples=examples,
        weight=weight,
        clipped=clipped,
        clipped_statistics=clipped_statistics,
        over=int(rows > most),
        steps=float(trained.steps),
        lr_sum=float(trained.lr_sum),
        length=float(trained.length),
        last_loss=float(trained.last_loss),
        mean_loss=float(trained.mean_loss),
    )
    return words, numbers.words(session)


def _change(after: Tensor, before: Tensor) -> np.ndarray:
    change: np.ndarray = (after - before).detach().cpu().numpy()
    return change


def reply_of(
    session: Session,
    words: np.ndarray,
    sums: Sums,
    survivors: list[int],
    server: Tensor,
    buffers: Tensor,
    statistics: Layout,
) -> Replies:
    """Return the opened sum as one client that sent the mean: the server's part.

    Args:
        session: what was agreed on.
        words: the sum of the clients' words.
        sums: the sum of their numbers.
        survivors: whose words were added up.
        server: the model that clients started from [P].
        buffers: the statistics that they started from [Q].
        statistics: the parts of these.
    """
    vector = server.detach().cpu().clone()
    restore(words[: len(vector)], vector.numpy(), session.clip, sums.shares, sums, session)
    renewed = buffers.detach().cpu().clone()
    if session.statistics:
        restore(
            words[len(vector) :],
            renewed.numpy(),
            session.statistics,
            sums.examples / session.rows,
            sums,
            session,
        )
        for name, place in statistics.slices.items():
            if name.endswith("running_var"):  # rounding must not make a small variance negative
                renewed[place].clamp_(min=0)

    def one(value: float, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor([value], dtype=dtype, device=server.device)

    return Replies(
        models=vector.to(server.device)[None],
        weights=one(sums.examples),
        clients=torch.tensor(survivors[:1], device=server.device),
        steps=one(sums.steps),
        lr_sum=one(sums.lr_sum),
        effective_steps=one(sums.length),
        last_loss=one(sums.last_loss, server.dtype),
        train_loss=one(sums.mean_loss),
        buffers=renewed.to(server.device)[None],
    )

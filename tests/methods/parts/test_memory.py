"""The memory of clients' models against lists of records that nothing is ever kept up in."""

import numpy as np
import pytest
import torch

from fedbasin.core.archive import Archive
from fedbasin.core.method import Replies
from fedbasin.core.tree import tensors
from fedbasin.methods.parts.memory import empty

CLIENTS, RECORDS, SIZE = 5, 3, 4


def replies_in(rng, cohort):
    count = len(cohort)
    numbers = (torch.from_numpy(rng.uniform(1, 9, size=count)) for _ in range(5))
    models = torch.from_numpy(rng.normal(size=(count, SIZE))).float()
    weights, steps, lr_sum, effective, losses = numbers
    clients = torch.from_numpy(cohort)
    none = models[:, :0]
    return Replies(models, weights, clients, steps, lr_sum, effective, losses, losses, none)


def check(memory, records, picked, weights, archive):
    """`records` holds (round, model, loss, work) of each client, oldest first."""
    for n, known in records.items():
        assert memory.history(n) == [round for round, *_ in known][::-1]
        for round, model, *_ in known:
            np.testing.assert_array_equal(memory.model(n, round, archive), model)
    found = memory.picks(torch.zeros(SIZE, dtype=torch.float64), archive)
    chosen = [next(r for r in records[n] if r[0] == picked[n]) for n in sorted(picked)]
    models, losses = np.array([r[1] for r in chosen], float), np.array([r[2] for r in chosen])
    share = np.array([weights[n] for n in sorted(picked)])
    assert found.clients.tolist() == sorted(picked)
    np.testing.assert_array_equal(found.models, models)
    np.testing.assert_array_equal(found.last_loss, losses)
    np.testing.assert_array_equal(found.weights, share)
    work = torch.stack([found.steps, found.lr_sum, found.effective_steps], 1)
    np.testing.assert_array_equal(work, [r[3] for r in chosen])
    np.testing.assert_allclose(memory.total, share @ models, rtol=1e-10)
    assert memory.picked_weight == pytest.approx(share.sum())
    assert memory.mean(memory.losses) == pytest.approx(np.average(losses, weights=share))
    far = ((models - np.average(models, axis=0, weights=share)) ** 2).sum(1)
    assert memory.divergence() == pytest.approx(np.average(far, weights=share), rel=1e-10)


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_memory_is_the_last_records_of_each_client(on_disk, tmp_path):
    rng, archive = np.random.default_rng(0), Archive(tmp_path) if on_disk else None
    memory = empty(CLIENTS, RECORDS, torch.zeros(SIZE), where=None if on_disk else "cpu")
    records, picked, weights = {n: [] for n in range(CLIENTS)}, {}, {}
    for round in range(12):
        cohort = rng.permutation(CLIENTS - (round < 6))[:3]  # one client comes late
        replies = replies_in(rng, cohort)
        before = [(memory, [each.clone() for each in tensors(memory)])]
        memory = memory.let_go(cohort.tolist(), archive)
        assert (memory.picked >= 0).nonzero()[:, 0].tolist() == sorted({*picked} - {*cohort})
        if {*picked} - {*cohort}:
            assert memory.mean(torch.ones_like(memory.losses)) == pytest.approx(1)
        before.append((memory, [each.clone() for each in tensors(memory)]))
        memory = memory.remember(replies, replies.weights, round, archive)
        before.append((memory, [each.clone() for each in tensors(memory)]))
        for row, n in enumerate(cohort.tolist()):
            columns = (replies.steps, replies.lr_sum, replies.effective_steps)
            work = [float(each[row]) for each in columns]
            record = (
                round,
                replies.models[row].numpy().copy(),
                float(replies.last_loss[row]),
                work,
            )
            records[n] = [*records[n], record][-RECORDS:]
            weights[n] = float(replies.weights[row])
            picked[n] = records[n][rng.integers(len(records[n]))][0]
        replies.models.zero_()  # what is remembered is a copy
        memory = memory.pick(cohort.tolist(), [picked[n] for n in cohort.tolist()], archive)
        check(memory, records, picked, weights, archive)
        for old, kept in before:
            assert all(map(torch.equal, tensors(old), kept))


def test_models_that_are_equal_do_not_diverge_by_less_than_nothing():
    like, found = torch.zeros(SIZE), []
    for seed in range(10):
        replies = replies_in(np.random.default_rng(seed), np.arange(3))
        replies.models[:] = 1e8 * replies.models[:1].clone()
        memory = empty(3, 1, like).remember(replies, replies.weights, 0, None)
        found.append(memory.pick([0, 1, 2], [0, 0, 0], None).divergence())
    assert min(found) == 0 and max(found) < 100  # where squares are of size 1e16


def test_an_empty_memory_has_room_and_a_sum_in_double_precision():
    memory = empty(2, 3, torch.zeros(SIZE))
    assert memory.total.dtype == torch.float64 and memory.total.tolist() == [0] * SIZE
    assert [[slot.dtype for slot in slots] for slots in memory.models] == [[torch.float32] * 3] * 2
    assert memory.history(1) == [] and empty(2, 3, memory.total, where=None).models == ()

"""One compiled graph for all numbers of clients."""

import pytest
import torch
from torch.nn import functional as F

from fedbasin.sim.tracing import WIDTHS, Compiled, Unlike, generalised, traced


def rows(clients, seed=0):
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(clients, 6, generator=draws, dtype=torch.float64)


def step(progress, batches, data):
    """Rows of clients against data that they share; two sizes depend on their number."""
    each = torch.func.vmap(lambda row, scale: (row * scale).softmax(0))(progress[0], batches[0])
    flat = (each[:, None, :] + data).reshape(-1, 3)
    return (flat.sum(1).reshape(len(each), -1), progress[1] + 1)


def arguments(clients):
    return (rows(clients), torch.tensor(4)), (rows(clients, 1)[:, :1],), rows(2, 2)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_graph_for_one_client_and_one_for_all_other_numbers(backend):
    compiled = Compiled(step, backend)
    for clients in (3, 1, 2, 5, 7, 10, 3, 1, 40):
        ours = compiled(*arguments(clients))
        theirs = step(*arguments(clients))
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-14, atol=0)
        assert int(ours[1]) == 5
    assert compiled.count == 2 and not compiled.fixed


def test_values_are_read_anew_and_not_kept_from_the_trace():
    compiled = Compiled(step, "aot_eager")
    progress, batches, data = arguments(3)
    compiled(progress, batches, data)
    again = compiled((progress[0] * 2, torch.tensor(8)), batches, data + 1)
    wanted = step((progress[0] * 2, torch.tensor(8)), batches, data + 1)
    torch.testing.assert_close(again[0], wanted[0], rtol=1e-14, atol=0)
    assert int(again[1]) == 9


@pytest.mark.parametrize("clients", [1, 3])
def test_several_steps_at_once_are_one_after_another(clients):
    def onwards(progress, batches, data):
        return progress[0] * batches[0] + data.sum(), progress[1] + 1

    compiled = Compiled(onwards, "aot_eager")
    progress, batches, data = arguments(clients)
    before = progress[0].clone()
    ours = compiled(progress, batches, data, count=4)
    theirs = progress
    for _ in range(4):
        theirs = onwards(theirs, batches, data)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-14, atol=0)
    assert int(ours[1]) == 8
    assert torch.equal(progress[0], before) and int(progress[1]) == 4  # what is given stays
    assert compiled.count == 1


def by_square(progress, batches, data):
    """The number of clients as it is not a multiple: torch sees another constant every time."""
    return (progress[0] / len(progress[0]) ** 2,)


def by_cases(progress, batches, data):
    return (progress[0].exp() if len(progress[0]) > 6 else progress[0].sin(),)


def by_length(progress, batches, data):
    total = progress[0]
    for _ in range(len(total)):
        total = total + 1
    return (total,)


def by_groups(progress, batches, data):
    """A convolution of torch's own: `vmap` makes clients its groups."""
    images = torch.arange(2 * 25, dtype=torch.float64).reshape(1, 2, 5, 5)
    convolve = torch.func.vmap(lambda row: F.conv2d(images + row[0], row.reshape(3, 2, 1, 1)))
    return (convolve(progress[0]),)


@pytest.mark.parametrize("odd", [by_square, by_cases, by_length, by_groups])
def test_a_step_that_knows_its_number_of_clients_is_compiled_for_each(odd):
    compiled = Compiled(odd, "aot_eager")
    for clients in (2, 9, 2, 9):
        ours = compiled(*arguments(clients))
        theirs = odd(*arguments(clients))
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-14, atol=0)
    assert compiled.count == 2 and compiled.fixed
    leaves = [arguments(2)[0][0]]
    flat = lambda x: [odd((x,), None, None)[0]]  # noqa: E731
    with pytest.raises(Unlike):
        generalised([traced(flat, leaves, [True], clients) for clients in WIDTHS])


def test_a_mutation_of_the_rows_is_seen_by_the_caller():
    def advance(progress, batches, data):
        progress[0].copy_(progress[0] + batches[0])

    compiled = Compiled(advance, "aot_eager")
    for clients in (3, 5):
        progress, batches, data = arguments(clients)
        before = progress[0].clone()
        assert compiled(progress, batches, data) is None
        torch.testing.assert_close(progress[0], before + batches[0])

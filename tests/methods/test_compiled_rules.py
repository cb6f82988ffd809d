"""The compiled step takes the rules that draw, look at features or replace the loss."""

import pytest
import torch

from fedbasin.core.expressions import parse
from fedbasin.core.round import Launch, Sent
from fedbasin.sim.cohort import CohortExecutor
from fedbasin.testing import toy_federation


@pytest.mark.parametrize(
    "text",
    [
        "fedavg(local=(focal, balanced_rows))",
        "fedavg(local=kept_momentum)",
        "fedfa(head_lr=0.1)",
        "balancefl",
        "fedgrab",
        "fedgen",
    ],
)
def test_the_compiled_step_gives_what_the_loop_gives(text):
    """One client, in the second round, when generators and controllers have begun."""
    method = parse(text, "method")
    federation = toy_federation(method)
    one = federation.executor
    whole = CohortExecutor(one.trainer, one.population, one.key, True, backend="eager")
    server, states = federation.begin()
    server, _ = next(iter(federation.rounds_from(server, states)))
    shared = method.broadcast(server.state, server.send, federation.context.at(1, 0.1))
    sent = Sent(server.send, server.buffers, shared, 1)
    plan = federation.schedule(1)
    a, b = (
        e.train([Launch(federation.eligible[:1], sent, plan, states)])[0].replies
        for e in (one, whole)
    )
    torch.testing.assert_close(a.models, b.models, rtol=1e-9, atol=1e-12)
    assert whole.facts()["shapes_compiled"] > 0

import pytest
import torch
from local.directions import small_net
from torch import nn

from fedbasin.core.net import Net
from fedbasin.methods.parts.heads import Head


@pytest.mark.parametrize("bias", [True, False])
def test_the_matrix_is_the_head_the_network_runs(bias):
    net = small_net(bias)
    head, vector = Head.of(net.layout), net.initial()[0]
    features = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits = head.inputs(features) @ head.matrix(vector).T
    torch.testing.assert_close(logits, net.classify(vector, features))
    other = head.matrix(vector) * 2 + 1
    changed = head.put(vector, other)
    assert torch.equal(head.matrix(changed), other)
    body = net.layout.mask(net.layout.head, vector) == 0
    assert torch.equal(changed[body], vector[body]) and body.sum() == 25
    stacked = torch.stack([vector, changed])
    assert torch.equal(head.matrix(stacked)[1], other)


def test_a_head_that_lies_first_is_put_back_where_it_was():
    class Early(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(2, 3)
            self.body = nn.Linear(2, 2)

    layout = Net(Early()).layout
    head = Head.of(layout)
    vector = torch.arange(float(layout.size))
    assert torch.equal(head.put(vector, head.matrix(vector)), vector)
    assert torch.equal(head.put(vector, torch.zeros(3, 3))[9:], vector[9:])


def test_a_network_without_a_linear_head_is_told_what_is_missing():
    for module in (nn.Conv2d(1, 1, 3), nn.Linear(4, 3)):
        with pytest.raises(ValueError, match="a linear `head`"):
            Head.of(Net(module).layout)

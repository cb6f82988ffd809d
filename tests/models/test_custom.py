import pytest
import torch
from torch import nn

from fedbasin import models

SOURCE = """
import torch
from torch import nn
from fedbasin.models import Dropout, Network

class Plain(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.layer = nn.Linear(shape[0], classes)

    def forward(self, x):
        return self.layer(x)

def full(shape, classes):
    return Network(nn.Sequential(Dropout(0.5), Dropout(0.5)), nn.Linear(shape[0], classes))

def keyed(shape, classes):
    return nn.Sequential(Dropout(0.5), Dropout(0.5), nn.Linear(shape[0], classes))

def three(shape, classes, more):
    return Plain(shape, classes)

def number(shape, classes):
    return 3

ready = nn.Linear(2, 2)
text = "text"
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_networks.py").write_text(SOURCE)
    (tmp_path / "needs_more.py").write_text("import a_module_that_is_not_there\n")
    yield "my_networks"
    monkeypatch.delitem(__import__("sys").modules, "my_networks", raising=False)


def test_a_class_and_a_function_by_their_path(mine):
    plain = models.custom((4,), 3, path=f"{mine}:Plain")
    assert plain(torch.zeros(2, 4)).shape == (2, 3)
    full = models.custom((4,), 3, path=f"{mine}:full")
    assert isinstance(full, models.Network) and full.head.out_features == 3


def test_dropout_sites_are_numbered(mine):
    network = models.custom((4,), 3, path=f"{mine}:keyed")
    assert [network[0].site, network[1].site] == [0, 1]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_networks", "must look like 'package.module:factory', got 'my_networks'"),
        (":full", "must look like"),
        ("my_networks:", "must look like"),
        ("no_such_module:full", "no module 'no_such_module'; install it, or add its folder"),
        ("no_such.module:full", "no module 'no_such.module'"),
        ("my_networks.inner:full", "no module 'my_networks.inner'"),
        ("my_networks:absent", "my_networks has no 'absent'"),
        ("my_networks:text", "is a str; it must be a function"),
        ("my_networks:ready", "is a Linear; it must be a function"),
        ("my_networks:three", "cannot be called with .shape, outputs.: missing .* 'more'"),
        ("my_networks:number", "returned a int, not a torch.nn.Module"),
    ],
)
def test_what_is_wrong_with_the_path_is_said(mine, path, message):
    with pytest.raises(ValueError, match=message):
        models.custom((4,), 3, path=path)


def test_a_missing_import_of_the_users_module_is_not_blamed_on_the_path(mine):
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        models.custom((4,), 3, path="needs_more:factory")


def test_the_users_own_error_comes_through(mine):
    with pytest.raises(ValueError, match=r"Plain.*failed .empty.*a class is called with"):
        models.custom((None,), 3, path=f"{mine}:Plain")


def test_plain_modules_need_no_head(mine):
    assert not hasattr(models.custom((4,), 3, path=f"{mine}:Plain"), "head")
    assert isinstance(models.custom((4,), 3, path=f"{mine}:Plain").layer, nn.Linear)

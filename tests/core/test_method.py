from collections import namedtuple
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from fedbasin.core.method import Context, ReplyError
from fedbasin.core.rng import root
from fedbasin.core.vectors import Layout
from fedbasin.testing import replies_of

SERVER = torch.zeros(2)
GOOD = replies_of(torch.ones(3, 2), weights=[1, 2, 0], clients=[7, 8, 9])


def test_good_replies_pass():
    GOOD.check(SERVER)


def test_huge_finite_models_pass_and_opposite_infinities_do_not():
    huge = torch.finfo(torch.float32).max
    replace(GOOD, models=torch.full((3, 2), huge)).check(SERVER)  # their sum is not finite
    models = torch.ones(3, 2)
    models[1] = torch.tensor([float("inf"), float("-inf")])
    with pytest.raises(ReplyError, match="client 8"):
        replace(GOOD, models=models).check(SERVER)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([1, -1, 1], "client 8"),
        ([1, 1, float("nan")], "client 9"),
        ([float("inf"), 1, 1], "client 7"),
        ([0, 0, 0], "weight zero"),
    ],
)
def test_bad_weights_are_refused_with_the_client_named(weights, words):
    with pytest.raises(ReplyError, match=words):
        replace(GOOD, weights=torch.tensor(weights)).check(SERVER)


def test_empty_or_misshapen_replies_are_refused():
    with pytest.raises(ReplyError, match="at least one"):
        GOOD.take(torch.tensor([], dtype=torch.int64)).check(SERVER)
    with pytest.raises(ReplyError, match="3 clients x 5"):
        GOOD.check(torch.zeros(5))
    with pytest.raises(ReplyError, match="2 clients"):
        replace(GOOD, clients=GOOD.clients[:2]).check(SERVER)


def test_rows_are_taken_in_order():
    taken = GOOD.take(torch.tensor([2, 0]))
    assert taken.clients.tolist() == [9, 7] and taken.weights.tolist() == [0, 1]


class Change(NamedTuple):
    control: torch.Tensor


class Counts(NamedTuple):
    rows: torch.Tensor
    classes: torch.Tensor


def test_a_report_is_found_by_its_type_wherever_it_stands():
    change, counts = Change(torch.ones(3, 2)), Counts(torch.zeros(3), torch.zeros(3, 4))
    for reports in ((change, (), counts), ((), counts, change), (counts, torch.ones(3, 2), change)):
        replies = replace(GOOD, reports=reports)
        assert replies.report(Change) is change and replies.report(Counts) is counts


def test_of_two_reports_of_one_type_the_first_counts():
    first, second = Change(torch.ones(3, 2)), Change(torch.zeros(3, 2))
    assert replace(GOOD, reports=(first, second)).report(Change) is first


def test_a_report_that_travelled_is_known_by_its_fields():
    received = namedtuple("Received", ["rows", "classes"])(torch.ones(3), torch.zeros(3, 4))
    found = replace(GOOD, reports=((), received)).report(Counts)
    assert type(found) is Counts and found.rows is received.rows


def test_a_report_that_nobody_sends_is_named():
    with pytest.raises(ReplyError, match=r"reports a Change; reported: \[\('rows', 'classes'\)\]"):
        replace(GOOD, reports=(Counts(torch.ones(3), torch.zeros(3, 4)),)).report(Change)
    with pytest.raises(ReplyError, match="reports a Change"):
        GOOD.report(Change)


@pytest.mark.parametrize("what", ["proxy", "class_counts", "archive", "permutations"])
def test_what_a_context_lacks_is_named_with_who_needs_it(what):
    bare = Context(Layout.of([("w", SERVER)]), 3, 5, root(0))
    with pytest.raises(ValueError, match=rf"^mine needs .*, or give Context\({what}=\.\.\.\)$"):
        bare.need(what, "mine")
    given = ()  # what is there counts, also where it is empty
    assert replace(bare, **{what: given}).need(what, "mine") is given

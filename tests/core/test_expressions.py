import string
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedbasin.experiment
from fedbasin.core.catalogue import CATALOGUE, cards, entry
from fedbasin.core.expressions import Choice, ExpressionError, parse, text
from fedbasin.local import Prox
from fedbasin.methods import FedAvg, FedProx, Scaffold

numbers = st.floats(min_value=0, max_value=1e6, allow_nan=False)
rules = st.recursive(
    st.builds(Prox, mu=numbers), lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=1
)
many_rules = st.one_of(rules, st.lists(st.builds(Prox, mu=numbers), max_size=3).map(tuple))
weightings = st.sampled_from(["samples", "uniform"])
methods = st.one_of(
    st.builds(FedAvg, weighting=weightings, local=many_rules),
    st.builds(FedProx, mu=numbers, weighting=weightings, local=many_rules),
    st.builds(
        Scaffold,
        server_lr=st.floats(min_value=1e-9, max_value=1e9),
        option=st.sampled_from(["steps", "full"]),
        weighting=weightings,
        local=many_rules,
    ),
)


@given(methods)
@settings(max_examples=200)
def test_the_text_of_a_method_reads_back_as_the_same_method(method):
    assert parse(text(method)) == method
    assert str(method) == text(method)


@given(
    alpha=st.floats(min_value=1e-6, max_value=1e6),
    minimum=st.integers(0, 1000),
    balance=st.booleans(),
)
def test_the_text_of_a_function_reads_back(alpha, minimum, balance):
    choice = parse(f"dirichlet(alpha={alpha!r}, minimum={minimum}, balance={balance})", "partition")
    assert parse(text(choice)) == choice
    assert dict(choice.arguments)["alpha"] == alpha


def test_canonical_text_leaves_defaults_out_and_keeps_order():
    assert text(parse("fedavg()")) == "fedavg"
    assert text(parse("fedprox(weighting='samples', mu=0.5)")) == "fedprox(mu=0.5)"
    assert text(parse("fedprox(0.5)")) == "fedprox(mu=0.5)"
    assert text(parse("fedavg(local=prox)")) == "fedavg(local=prox)"
    assert text(parse("fedavg(local=[prox(mu=1)])")) == "fedavg(local=(prox(mu=1.0),))"
    assert text(parse("dirichlet(0.1, balance=True)")) == "dirichlet(alpha=0.1)"


def test_whole_numbers_become_floats_where_a_float_is_wanted():
    assert parse("fedprox(mu=1)") == FedProx(mu=1.0)
    assert isinstance(parse("fedprox(mu=1)").mu, float)


def test_infinity_has_a_text():
    assert parse(text(FedProx(mu=float("inf")))) == FedProx(mu=float("inf"))


def test_a_choice_calls_its_function_with_what_is_supplied():
    plan = fedbasin.core.method.Plan(lr=2.0)
    assert parse("exponential(decay=0.5)", "schedule")(plan, 2, 10).lr == 0.5


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        ("fedavgg", "method", ["fedavgg", "fedavg"]),
        ("fedprox(nu=1)", "method", ["'nu'", "mu"]),
        ("fedprox(mu='a')", "method", ["mu", "'a'", "a number"]),
        ("fedprox(mu=True)", "method", ["mu", "True"]),
        ("fedprox(mu=-1)", "method", ["mu", "-1"]),
        ("fedprox(1, mu=2)", "method", ["mu", "twice"]),
        ("fedavg(weighting='x')", "method", ["weighting", "'samples' or 'uniform'"]),
        ("fedavg(1, 2, 3)", "method", ["at most 2"]),
        ("fedavg(**{})", "method", ["**"]),
        ("dirichlet(alpha=0.1)", "method", ["dirichlet", "partition", "not a method"]),
        ("dirichlet", "partition", ["alpha"]),
        ("fedavg(local=1 + 1)", "method", ["1 + 1", "literal"]),
        ("fedavg(local=(lambda: 1))", "method", ["literal"]),
        ("__import__('os').system('x')", None, ["catalogue"]),
        ("open('x')", None, ["open"]),
        ("1", None, ["not a name"]),
        ("fedavg(", None, ["cannot read"]),
        ("", None, ["cannot read"]),
        ("fedavg; fedavg", None, ["cannot read"]),
        ("constant(1)", "schedule", ["at most 0"]),
        ("constant(a=1)", "schedule", ["takes none"]),
    ],
)
def test_bad_text_gives_an_error_that_names_it(source, kind, words):
    with pytest.raises(ExpressionError) as error:
        parse(source, kind)
    for word in words:
        assert word in str(error.value)


MINE = """
from dataclasses import dataclass
from fedbasin.core.catalogue import entry
from fedbasin.methods import FedAvg

@entry("method", name="halfway")
@dataclass(frozen=True)
class Halfway(FedAvg):
    \"\"\"Goes half of the way.\"\"\"
    share: float = 0.5

def unmarked():
    pass
"""


@pytest.fixture
def my_rules(tmp_path, monkeypatch):
    package = tmp_path / "my_rules"
    package.mkdir()
    (package / "__init__.py").write_text("from my_rules import ways\n")
    (package / "ways.py").write_text(MINE)
    (tmp_path / "wants_more.py").write_text("import something_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_rules"
    CATALOGUE.pop("halfway", None)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("my_rules", "ways")]:
        del sys.modules[name]


@pytest.mark.parametrize("module", ["my_rules", "my_rules.ways"])
def test_a_method_of_one_s_own_is_named_by_its_module(my_rules, module):
    assert "halfway" not in CATALOGUE
    found = parse(f"ima({module}.halfway(share=0.25), window=3)", "method")
    assert found.inner.share == 0.25 and type(found.inner).__module__ == "my_rules.ways"
    assert text(found) == "ima(my_rules.ways.halfway(share=0.25), window=3)"
    assert parse(text(found)) == found
    assert parse(f"{module}.halfway") == parse("halfway"), "entered, it has its plain name too"
    assert text(parse("ima(fedavg)")) == "ima"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("my_rules.ways.unmarked", "my_rules.ways enters nothing called 'unmarked'; mark it"),
        ("my_rules.fedavg", "my_rules enters nothing called 'fedavg'"),
        ("my_rules.other.halfway", "no module 'my_rules.other'; install it, or add its folder"),
        ("os.system('x')", "os enters nothing called 'system'"),
        ("ima(no_such.halfway)", "no module 'no_such'"),
        ("my_rules.ways.halfway(near=1)", "halfway has no argument 'near'"),
        ("my_rules.ways.halfway()()", "only names from the catalogue can be called"),
        ("my_rules.ways.halfway().name", "not a name or a call"),
    ],
)
def test_what_a_module_does_not_enter_cannot_be_named(my_rules, source, told):
    with pytest.raises(ExpressionError) as error:
        parse(source, "method")
    assert told in str(error.value)


def test_a_module_that_cannot_be_imported_says_what_it_misses(my_rules):
    with pytest.raises(ModuleNotFoundError, match="something_that_is_not_there"):
        parse("wants_more.halfway", "method")


def test_very_long_or_deep_text_is_refused():
    for source in ("a" * 5000, "(" * 3000):
        with pytest.raises(ExpressionError):
            parse(source)


@given(st.text(alphabet=string.printable, max_size=60))
@settings(max_examples=300)
def test_any_text_either_parses_or_is_refused_kindly(source):
    try:
        found = parse(source)
    except ExpressionError:
        return
    assert text(found)


def test_a_name_taken_twice_is_an_error():
    with pytest.raises(ValueError, match="'fedavg' is taken by fedbasin"):
        entry("method", name="fedavg")(lambda: None)
    assert CATALOGUE["fedavg"].make is FedAvg


def test_what_cannot_be_written_is_refused():
    with pytest.raises(ExpressionError):
        text(FedAvg(local=object()))
    with pytest.raises(ExpressionError):
        text(Choice("exponential", (("decay", float("nan")),)))


def test_every_card_has_a_summary_and_every_method_its_paper():
    for card in CATALOGUE.values():
        assert card.summary.endswith((".", ":")) or card.summary, card.name
        assert card.parameters is not None
    for card in cards("method"):
        assert card.paper and card.url.startswith("https://"), card.name

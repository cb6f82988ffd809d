import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fedbasin.cli.app import app
from fedbasin.core.rng import root
from fedbasin.local import private_counts as he
from fedbasin.local.private_counts import PrivateCountsError


def test_without_the_extra_the_user_is_told_what_to_install_and_what_it_means(monkeypatch):
    monkeypatch.setitem(sys.modules, "tenseal", None)
    with pytest.raises(PrivateCountsError, match=r"pip install 'fedbasin\[he\]'.*in plain"):
        he.make_keys()


def test_holders_are_drawn_by_the_seed_and_within_reason():
    drawn = [he.draw_holders(range(50), 3, root(seed)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2] and len(set(drawn[0])) == 3
    assert {h for s in range(200) for h in he.draw_holders([4, 7, 9], 1, root(s))} == {4, 7, 9}
    assert all(he.draw_holders([4, 7, 9], 3, root(s)) == [4, 7, 9] for s in range(5))
    for bad in (0, 4):
        with pytest.raises(PrivateCountsError, match=f"holders is {bad}: .* the 3 clients"):
            he.draw_holders([4, 7, 9], bad, root(0))


@pytest.fixture(scope="module")
def tenseal():
    return pytest.importorskip("tenseal", reason="needs the extra fedbasin[he]")


@pytest.fixture(scope="module")
def keys(tenseal):
    return he.make_keys()


@pytest.fixture(scope="module")
def message(keys):
    return he.encrypt_counts(keys.public, [3, 1, 4])


@settings(max_examples=5, deadline=None)
@given(
    st.integers(1, 12).flatmap(
        lambda c: st.lists(
            st.lists(st.integers(0, 60_000), min_size=c, max_size=c), min_size=3, max_size=6
        )
    ),
    st.randoms(use_true_random=False),
)
def test_the_decrypted_sum_is_the_sum_in_any_order(keys, counts, random):
    classes, rows = len(counts[0]), int(np.sum(counts))
    messages = [he.encrypt_counts(keys.public, row) for row in counts]
    random.shuffle(messages)
    added = he.add_counts(keys.public, messages, classes)
    found = he.decrypt_counts(keys.secret, added, classes, rows)
    assert found == np.sum(counts, axis=0).tolist()


def test_the_same_counts_never_look_the_same(keys):
    assert he.encrypt_counts(keys.public, [1, 2]) != he.encrypt_counts(keys.public, [1, 2])
    assert he.make_keys().public != keys.public


def test_the_whole_protocol_with_one_holder_and_with_several(keys):
    counts = root(0).numpy().integers(0, 500, (11, 10))
    for holders in (1, 3):
        assert he.gather_counts(counts, root(5), holders).tolist() == counts.sum(0).tolist()
    with pytest.raises(PrivateCountsError, match="fewer than 3 clients"):
        he.gather_counts(counts, root(5), 4)


def test_the_server_never_holds_a_secret_key(keys, message, tenseal):
    assert not tenseal.context_from(keys.public).has_secret_key()
    assert "secret" not in repr(keys)
    with pytest.raises(PrivateCountsError, match="holds a secret key, which must stay"):
        he.add_counts(keys.secret, [message] * 3, 3)
    with pytest.raises(PrivateCountsError, match="holds a secret key"):
        he.encrypt_counts(keys.secret, [1, 2])
    added = he.add_counts(keys.public, [message] * 3, 3)
    with pytest.raises(ValueError, match="secret"):
        tenseal.bfv_vector_from(tenseal.context_from(keys.public), added).decrypt()
    with pytest.raises(PrivateCountsError, match="holds no secret"):
        he.decrypt_counts(keys.public, added, 3, 24)


def test_where_nobody_knows_the_rows_every_client_bounds_its_own(keys):
    most = he.MOST // 3
    messages = [he.encrypt_share(keys.public, [most, 1], 3) for _ in range(3)]
    added = he.add_counts(keys.public, messages, 2)
    assert he.decrypt_counts(keys.secret, added, 2, 0) == [3 * most, 3]
    with pytest.raises(PrivateCountsError, match=f"the most of a class is {most} for each of 3"):
        he.encrypt_share(keys.public, [1, most + 1], 3)
    wrapped = he.add_counts(keys.public, [he.encrypt_counts(keys.public, [he.MOST])] * 3, 1)
    with pytest.raises(PrivateCountsError, match="a class has more than"):
        he.decrypt_counts(keys.secret, wrapped, 1, 3 * he.MOST)


@pytest.mark.parametrize("parts", [(he.MOST, 1, 0), (he.MOST, he.MOST, 5), (he.MOST,) * 4])
def test_a_total_that_wraps_around_is_refused(keys, parts):
    messages = [he.encrypt_counts(keys.public, [part, 7]) for part in parts]
    added = he.add_counts(keys.public, messages, 2)
    with pytest.raises(PrivateCountsError, match=f"a class has more than {he.MOST} rows"):
        he.decrypt_counts(keys.secret, added, 2, sum(parts) + 7 * len(parts))


def test_the_largest_total_passes_and_one_more_is_refused_at_once(keys):
    messages = [he.encrypt_counts(keys.public, [n]) for n in (he.MOST - 3, 3, 0)]
    added = he.add_counts(keys.public, messages, 1)
    assert he.decrypt_counts(keys.secret, added, 1, he.MOST) == [he.MOST]
    with pytest.raises(
        PrivateCountsError, match=f"counts holds {he.MOST + 1}, the most of a class"
    ):
        he.encrypt_counts(keys.public, [he.MOST + 1])


@pytest.mark.parametrize(
    ("counts", "match"),
    [
        ([1, -2], "whole numbers of at least 0"),
        ([1.5, 2], "whole numbers of at least 0"),
        ([True, False], "whole numbers of at least 0"),
        ([[1, 2], [3, 4]], "one number for each of 1 to 4096 classes"),
        ([], "one number for each"),
        ([0] * 4097, "one number for each"),
    ],
)
def test_what_is_not_a_histogram_is_refused(keys, counts, match):
    with pytest.raises(PrivateCountsError, match=match):
        he.encrypt_counts(keys.public, counts)


def test_another_holders_key_decrypts_nothing(keys, message):
    added = he.add_counts(keys.public, [message] * 3, 3)
    assert he.decrypt_counts(keys.secret, added, 3, 24) == [9, 3, 12]
    with pytest.raises(PrivateCountsError, match="the key is not the one they encrypted with"):
        he.decrypt_counts(he.make_keys().secret, added, 3, 24)
    with pytest.raises(PrivateCountsError, match="do not add up to 25 rows"):
        he.decrypt_counts(keys.secret, added, 3, 25)


def test_foreign_bytes_are_refused_before_and_after_reading(keys, message, tenseal, monkeypatch):
    for bad in (
        b"",
        b"x" * 100,
        message[:-10],
        keys.public,
        b"\0" * 5000,
        "text",
        b"x" * (1 << 18),
    ):
        with pytest.raises(PrivateCountsError, match="encrypted counts: "):
            he.add_counts(keys.public, [bad] * 3, 3)
    with pytest.raises(PrivateCountsError, match="encrypted counts: 3 classes, expected 4"):
        he.add_counts(keys.public, [message] * 3, 4)
    for bad in (b"", b"x" * 100, keys.public[:-10], message):
        with pytest.raises(PrivateCountsError, match="public key: "):
            he.encrypt_counts(bad, [1])
    other = tenseal.context(tenseal.SCHEME_TYPE.BFV, poly_modulus_degree=4096, plain_modulus=40_961)
    with pytest.raises(PrivateCountsError, match="made for another scheme than BFV of degree 4096"):
        he.encrypt_counts(other.serialize(save_secret_key=False, save_relin_keys=False), [1])

    def never(data):
        raise AssertionError("too long a message was read")

    monkeypatch.setattr(tenseal, "context_from", never)
    with pytest.raises(PrivateCountsError, match="expected 1 to 262144 bytes, got 262145 bytes"):
        he.encrypt_counts(b"x" * ((1 << 18) + 1), [1])


def test_sizes_are_those_of_the_paper(keys, message):
    """FedWCM, Table 2: 88,548 to 88,631 bytes whatever the number of classes."""
    for classes in (10, 100):
        assert 88_300 < len(he.encrypt_counts(keys.public, [5000] * classes)) < 88_900
    assert 130_000 < len(keys.public) < 140_000


def test_the_command_prints_the_paper_beside_ours(tenseal):
    shown = CliRunner().invoke(app, ["private-counts", "--clients", "4", "--classes", "10,30"])
    assert shown.exit_code == 0, shown.output
    assert "88556" in shown.output and "1.7" in shown.output and "13.05 MB" in shown.output
    assert "296" in shown.output and "sums were decrypted and are exact" in shown.output


@pytest.mark.parametrize(
    ("arguments", "match"),
    [(["--classes", "ten"], "--classes is 'ten'"), (["--clients", "0"], "0 clients and 10")],
)
def test_bad_options_are_named(arguments, match):
    with pytest.raises(ValueError, match=match):
        CliRunner().invoke(app, ["private-counts", *arguments], catch_exceptions=False)

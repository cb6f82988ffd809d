"""Shared by all tests: one thread, and helpers that lie beside the tests can be imported."""

import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
torch.set_num_threads(1)
# The command line's console is as wide as it was when the room was first imported. That must not
# depend on which test comes first.
with mock.patch.dict("os.environ", COLUMNS="200"):
    import fedbasin.cli.app  # noqa: F401


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Fail where a test module cannot be imported.

    The option that skips doctests of modules whose extra is not installed would skip the tests of
    a broken test module, too, without a word.
    """
    report = yield
    place = getattr(collector, "path", HERE)
    broken = report.skipped and "unable to import module" in str(report.longrepr)
    if broken and HERE in place.parents and place.name.startswith("test_"):
        report.outcome = "failed"
    return report

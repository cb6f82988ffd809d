"""Shared by all tests: one thread, the same draws each time, and helpers that can be imported."""

import os
import random
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, settings

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
torch.set_num_threads(1)
# Settings of a terminal, of a CI service or of the user's own cluster. They change what is shown.
for name in ("CLICOLOR_FORCE", "COLORTERM", "COLUMNS", "FEDBASIN_DEBUG", "FORCE_COLOR",
             "GITHUB_ACTIONS", "LINES", "NO_COLOR", "PY_COLORS", "RAY_ADDRESS", "TERM",
             "TERMINAL_WIDTH", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):  # fmt: skip
    os.environ.pop(name, None)
# The command line's console is as wide as it was when the room was first imported. That must not
# depend on which test comes first.
with mock.patch.dict("os.environ", COLUMNS="200"):
    import fedbasin.cli.app  # noqa: F401

# Examples are the same each time, and no clock judges them: a busy machine is no failure.
# `--hypothesis-profile search` draws new ones.
UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "database": None}
settings.register_profile("search", **UNTIMED)
settings.register_profile("fixed", derandomize=True, **UNTIMED)
settings.load_profile("fixed")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Let what a test draws without a seed not depend on the tests before it."""
    random.seed(0)
    torch.manual_seed(0)


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

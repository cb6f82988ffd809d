import pytest
from counting import Clock


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """The clock of servers inside the test: they wait seconds of this clock, and none of ours."""
    pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")
    made = Clock(tick=0.01)
    for module in ("clients", "cohort", "mail", "probe", "secure.cohort"):
        monkeypatch.setattr(f"fedbasin.deploy.{module}.time", made)
    return made

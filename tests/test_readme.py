"""README.md: its Python runs as written, its links lead somewhere, and it stays short."""

import re
from pathlib import Path

from test_own_problem_page import patients

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_its_python_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    patients().to_csv("patients.csv", index=False)
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert sum(bool(line.strip()) for line in block.splitlines()) <= 12
    names = {"__name__": "readme"}
    exec(compile(block, "README.md", "exec"), names)
    assert "Highest mean auroc" in capsys.readouterr().out
    assert len(names["result"].frame) == 4 and (tmp_path / "report.html").is_file()


def test_its_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", README)
    assert len(links) > 15
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_it_stays_short():
    assert len(README.splitlines()) <= 150

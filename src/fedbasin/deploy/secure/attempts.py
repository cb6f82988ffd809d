"""How often a run was started. Every start masks anew and draws new batches.

A server that was stopped in a round may have opened that round's sum. The same round with the same
batches and other survivors would show a single client's update by subtraction.
"""

from __future__ import annotations

import json
from pathlib import Path


def next_attempt(folder: Path | None) -> int:
    """Count this start of the run in its folder, and return its number, from 1."""
    if folder is None:
        return 1  # it cannot be resumed, and has a new name every time
    file = folder / "secure.json"
    before = 0
    if file.exists():
        before = int(json.loads(file.read_text(encoding="utf-8"))["starts"])
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps({"starts": before + 1}), encoding="utf-8")
    fresh.replace(file)
    return before + 1

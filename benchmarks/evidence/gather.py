"""Print one JSON line for each finished run below a folder: what it was and how it ended.

python benchmarks/evidence/gather.py OUT
"""

import json
import sys
from pathlib import Path

KEEP = (
    "method", "seed", "dataset", "partition", "clients", "rounds", "status",
    "accuracy_mean_last10", "accuracy_last", "loss_last", "seconds", "device", "executor",
    "shapes_compiled", "share_useful_steps", "commit", "versions",
)  # fmt: skip

for path in sorted(Path(sys.argv[1]).rglob("summary.json")):
    summary = json.loads(path.read_text())
    line = {"setting": path.parts[-4]} | {key: summary.get(key) for key in KEEP}
    print(json.dumps(line))

"""What replies cost a server: fedbasin averaging as they arrive, beside Flower's own FedAvg.

    python benchmarks/deploy/aggregation.py --replies 200 --flower-replies 20

Replies are messages of a ResNet-18 (11 M parameters), made anew for each client as they would come
off the wire; making them is not counted. Flower's FedAvg holds all replies at once, so it is given
fewer: its time per reply does not depend on how many there are. CPU time on one thread, each in
a process of its own, repeated in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def resident(what: str) -> int:
    """Return VmRSS or VmHWM in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def reply(arrays, number: int):
    """Return a client's message with arrays of its own, as they come off the wire."""
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

    fresh = ArrayRecord(
        {n: Array(a.dtype, a.shape, a.stype, bytes(bytearray(a.data))) for n, a in arrays.items()}
    )
    metrics = MetricRecord({"num-examples": 100 + number, "train_loss": 1.0})
    message = Message(RecordDict({"arrays": fresh, "metrics": metrics}), 1, "train")
    message.metadata.__dict__["_src_node_id"] = number
    return message


def prepared():
    """Return the network's arrays and its number of parameters."""
    import torch
    from flwr.app import ArrayRecord
    from flwr.supercore.task_identity import TaskIdentity

    import fedbasin.models  # noqa: F401
    from fedbasin.core.expressions import parse

    torch.set_num_threads(1)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    module = parse("resnet18", "model")((3, 32, 32), 10)
    size = sum(p.numel() for p in module.parameters())
    return ArrayRecord(module.state_dict()), size


def ours(replies: int) -> dict[str, float]:
    """Average `replies` messages one after another with fedbasin."""
    from fedbasin.core.method import Plan
    from fedbasin.deploy.bounds import Bounds, reply_bytes
    from fedbasin.deploy.replies import Collector
    from fedbasin.deploy.wire import Codec
    from fedbasin.methods import FedAvg

    arrays, size = prepared()
    codec = Codec.of(arrays)
    server, _ = codec.read(arrays)
    Path("/proc/self/clear_refs").write_text("5")
    before, spent = resident("VmRSS"), 0.0
    bounds = Bounds(Plan(0.1), most_bytes=reply_bytes(codec.model_bytes, 0))
    collector = Collector(codec, 0, bounds, stream="samples")
    for number in range(replies):
        arrived = [reply(arrays, number)]
        began = time.process_time()
        collector.take(number, number, arrived.pop(), 100 + number)
        spent += time.process_time() - began
    began = time.process_time()
    collected = collector.finish(server)
    served, _ = FedAvg().aggregate((), server, collected.replies, None)
    spent += time.process_time() - began
    peak = resident("VmHWM") - before
    assert served.send.numel() == codec.layout.size
    return {"ms_per_reply": 1e3 * spent / replies, "models": peak / (4 * size), "size": size}


def checks(replies: int) -> dict[str, float]:
    """Say what the checks of a reply take, of all that the server does with it.

    Flower puts the message together from bytes, then fedbasin takes it. The checks are timed apart,
    on the same reply: its size, its numbers, and that every value is finite and within bounds.
    """
    from flwr.app import MetricRecord
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    from fedbasin.core.method import Plan
    from fedbasin.deploy.bounds import Bounds, reply_bytes
    from fedbasin.deploy.replies import Collector
    from fedbasin.deploy.wire import Codec, check_values, number, the_record

    arrays, size = prepared()
    codec = Codec.of(arrays)
    bounds = Bounds(Plan(0.1), most_bytes=reply_bytes(codec.model_bytes, 0))
    collector = Collector(codec, 0, bounds, stream="samples")
    flower = taken = checked = 0.0
    for client in range(replies):
        sent = reply(arrays, client)
        contents = {i: part.deflate() for i, part in get_all_nested_objects(sent).items()}
        began = time.process_time()
        arrived = inflate_object_from_contents(sent.object_id, contents)
        flower += time.process_time() - began
        del contents, sent
        arrived.metadata.__dict__["_src_node_id"] = client
        values = [part.values for part in codec.parts(arrived.content["arrays"])]
        began = time.process_time()
        bounds.size(arrived.content)
        metrics = the_record(arrived.content, MetricRecord)
        bounds.rows(metrics, "num-examples", 100 + client)
        number(metrics, "train_loss")
        for each in values:
            check_values(each, "")
        checked += time.process_time() - began
        began = time.process_time()
        collector.take(client, client, arrived, 100 + client)
        taken += time.process_time() - began
    spent = flower + taken
    return {
        "ms_per_reply": 1e3 * spent / replies,
        "ms_of_flower": 1e3 * flower / replies,
        "ms_of_checks": 1e3 * checked / replies,
        "share": checked / spent,
        "models": 0.0,
        "size": size,
    }


def flowers(replies: int) -> dict[str, float]:
    """Average `replies` messages with Flower's own strategy."""
    from flwr.serverapp.strategy import FedAvg

    arrays, size = prepared()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    messages = [reply(arrays, number) for number in range(replies)]
    began = time.process_time()
    found, _ = FedAvg().aggregate_train(1, messages)
    spent = time.process_time() - began
    peak = resident("VmHWM") - before
    assert found is not None
    return {"ms_per_reply": 1e3 * spent / replies, "models": peak / (4 * size), "size": size}


def main() -> None:
    """Run both in turns and print what they took."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--replies", type=int, default=200)
    options.add_argument("--flower-replies", type=int, default=20)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--one", choices=["ours", "flowers", "checks"], help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.one:
        work = {"ours": ours, "flowers": flowers, "checks": checks}[chosen.one]
        print("RESULT " + json.dumps(work(chosen.replies)))
        return
    wanted = (
        ("ours", chosen.replies),
        ("flowers", chosen.flower_replies),
        ("checks", chosen.flower_replies),
    )
    found: dict[str, list[dict[str, float]]] = {name: [] for name, _ in wanted}
    for _ in range(chosen.repeats):
        for name, count in wanted:
            command = [sys.executable, __file__, "--one", name, "--replies", str(count)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900)
            line = next(ln for ln in done.stdout.splitlines() if ln.startswith("RESULT "))
            found[name].append(json.loads(line.removeprefix("RESULT ")))
    print(f"{found['ours'][0]['size']:.0f} parameters, {chosen.repeats} repeats, median")
    for name, count in wanted[:2]:
        times = [run["ms_per_reply"] for run in found[name]]
        models = max(run["models"] for run in found[name])
        print(
            f"{name:8} {count:4d} replies  {statistics.median(times):7.1f} ms of CPU time a reply "
            f"(least {min(times):.1f})  peak memory {models:6.2f} models"
        )
    checked = found["checks"]
    middle = {key: statistics.median(run[key] for run in checked) for key in checked[0]}
    print(
        f"of {middle['ms_per_reply']:.1f} ms in which Flower puts a message together "
        f"({middle['ms_of_flower']:.1f}) and fedbasin takes it, the checks are "
        f"{middle['ms_of_checks']:.1f} ms: {100 * middle['share']:.1f} %"
    )


if __name__ == "__main__":
    main()

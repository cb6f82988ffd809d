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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection
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


def serve_objects(objects: dict[str, bytes], port: Connection) -> None:
    """Answer requests for objects as Flower's SuperLink does, in a process of its own."""
    from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            content = objects[PullObjectRequest.FromString(body).object_id]
            found = PullObjectResponse(
                object_found=True, object_available=True, object_content=content
            ).SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", self.headers["Content-Type"])
            self.send_header("Content-Length", str(len(found)))
            self.end_headers()
            self.wfile.write(found)

        def log_message(self, *args: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    port.send(server.server_address[1])
    server.serve_forever()


def checks(replies: int) -> dict[str, float]:
    """Say what the checks of a reply take, of all that the ServerApp does with it.

    Flower receives the parts of the message over HTTP from another process and puts them together,
    then fedbasin takes it. The checks are timed apart, on the same reply: its size, its numbers,
    and that every value is finite and within bounds.
    """
    from flwr.app import MetricRecord
    from flwr.proto.node_pb2 import Node
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
    from flwr.supercore.inflatable.inflatable_utils import (
        inflate_object_from_contents,
        pull_objects,
    )
    from flwr.supercore.runtime import RuntimeHttpClient

    from fedbasin.core.method import Plan
    from fedbasin.deploy.bounds import Bounds, reply_bytes
    from fedbasin.deploy.replies import Collector
    from fedbasin.deploy.wire import Codec, check_values, number, the_record

    arrays, size = prepared()
    codec = Codec.of(arrays)
    bounds = Bounds(Plan(0.1), most_bytes=reply_bytes(codec.model_bytes, 0))
    collector = Collector(codec, 0, bounds, stream="samples")
    sent = reply(arrays, 0)
    objects = {i: part.deflate() for i, part in get_all_nested_objects(sent).items()}
    here, there = Pipe()
    superlink = Process(target=serve_objects, args=(objects, there), daemon=True)
    superlink.start()
    client = RuntimeHttpClient(f"http://127.0.0.1:{here.recv()}")
    pull = make_pull_object_fn_protobuf(client.PullObject, Node(node_id=1), 1)
    network = flower = taken = checked = 0.0
    for number_of in range(replies):
        began = time.process_time()
        contents = pull_objects(list(objects), pull)
        network += time.process_time() - began
        began = time.process_time()
        arrived = inflate_object_from_contents(sent.object_id, contents)
        flower += time.process_time() - began
        del contents
        arrived.metadata.__dict__["_src_node_id"] = number_of
        values = [part.values for part in codec.parts(arrived.content["arrays"])]
        began = time.process_time()
        bounds.size(arrived.content)
        metrics = the_record(arrived.content, MetricRecord)
        bounds.rows(metrics, "num-examples", 100)
        number(metrics, "train_loss")
        for each in values:
            check_values(each, "")
        checked += time.process_time() - began
        began = time.process_time()
        collector.take(number_of, number_of, arrived, 100)
        taken += time.process_time() - began
    superlink.terminate()
    spent = network + flower + taken
    return {
        "ms_per_reply": 1e3 * spent / replies,
        "ms_of_network": 1e3 * network / replies,
        "ms_of_flower": 1e3 * flower / replies,
        "ms_of_checks": 1e3 * checked / replies,
        "share": checked / spent,
        "share_without_network": checked / (flower + taken),
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
        f"of {middle['ms_per_reply']:.1f} ms in which Flower receives a message over HTTP "
        f"({middle['ms_of_network']:.1f}), puts it together ({middle['ms_of_flower']:.1f}) and "
        f"fedbasin takes it, the checks are {middle['ms_of_checks']:.1f} ms: "
        f"{100 * middle['share']:.1f} %, and {100 * middle['share_without_network']:.1f} % of the "
        "time without receiving it"
    )


if __name__ == "__main__":
    main()

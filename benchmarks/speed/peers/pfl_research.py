"""pfl-research 0.6.0: `FederatedAveraging` on its `SimulatedBackend`, rows on the device."""

import importlib.metadata
import os
import socket
import subprocess
import sys

import numpy as np
import torch

from peers import command, networks, protocol
from peers.work import pixels


def followers(processes):
    """Start the other processes of a distributed simulation; each is told how many rounds to run.

    pfl's processes share a cohort and sum their updates with `torch.distributed`.
    """
    if processes == 1:
        return []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ["PFL_WORKER_ADDRESSES"] = ",".join([f"127.0.0.1:{port}"] * processes)
    os.environ["PFL_WORKER_RANK"] = "0"
    return [
        subprocess.Popen(
            sys.orig_argv,
            env={**os.environ, "PFL_WORKER_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(1, processes)
    ]


class Pfl:
    """One block of rounds is one `run` of the algorithm; scoring is the model's own `evaluate`."""

    def __init__(self, work, options):
        os.environ["PFL_PYTORCH_DEVICE"] = options.device
        self.followers = [] if "PFL_WORKER_RANK" in os.environ else followers(options.processes)
        networks.prepare(options.device)
        from pfl.aggregate.simulate import SimulatedBackend
        from pfl.aggregate.weighting import WeightByUser
        from pfl.algorithm.base import NNAlgorithmParams
        from pfl.algorithm.federated_averaging import FederatedAveraging
        from pfl.data.dataset import Dataset
        from pfl.data.federated_dataset import FederatedDataset
        from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
        from pfl.model.pytorch import PyTorchModel

        shape, self.device = work.shape, options.device
        net = networks.network(work, self.device)
        self.model = PyTorchModel(
            model=net,
            local_optimizer_create=lambda parameters, lr: torch.optim.SGD(
                parameters, lr=lr, momentum=shape.momentum
            ),
            central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
        )

        def on_device(*arrays):
            return [torch.from_numpy(part).to(self.device) for part in arrays]

        users = [
            Dataset(on_device(pixels(work.inputs[i]), work.labels[i])) for i in range(shape.clients)
        ]
        self.test = Dataset(
            on_device(pixels(work.test_inputs), work.test_labels), eval_kwargs={"eval": True}
        )
        turn = iter(np.tile(work.cohorts.reshape(-1), 2))
        training = FederatedDataset(lambda user: users[user], lambda: int(next(turn)))
        self.backend = SimulatedBackend(training, training, postprocessors=[WeightByUser()])
        self.algorithm = FederatedAveraging
        self.settings = lambda count: NNAlgorithmParams(
            central_num_iterations=count,
            evaluation_frequency=count + 1,
            train_cohort_size=shape.cohort,
            val_cohort_size=0,
        )
        self.training = NNTrainHyperParams(
            local_batch_size=shape.batch, local_num_epochs=1, local_learning_rate=shape.lr
        )
        self.scoring = NNEvalHyperParams(local_batch_size=10_000)
        self.facts = {"torch": torch.__version__, "pfl": importlib.metadata.version("pfl")}

    def rounds(self, count):
        if not count:
            return
        for follower in self.followers:
            follower.stdin.write(f"{count}\n")
            follower.stdin.flush()
        # The first iteration always scores every client before and after its training; starting
        # at the second leaves that out, which is to pfl's advantage.
        algorithm = self.algorithm()
        algorithm._current_central_iteration = 1
        self.model = algorithm.run(
            self.settings(count + 1),
            self.backend,
            self.model,
            self.training,
            self.scoring,
            send_metrics_to_platform=False,
        )
        networks.synchronise(self.device)

    def accuracy(self):
        found = self.model.evaluate(self.test, eval_params=self.scoring)
        return float(next(iter(found.to_simple_dict().values())))


def main() -> None:
    if "PFL_WORKER_RANK" not in os.environ:
        protocol.serve(lambda: Pfl(*command.read()))
        return
    follower = Pfl(*command.read())
    for line in sys.stdin:
        follower.rounds(int(line))


if __name__ == "__main__":
    main()

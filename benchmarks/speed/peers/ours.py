"""fedbasin: a whole `Federation`, with the executor that `auto` chooses for device and model."""

import numpy as np
import torch

import fedbasin.experiment  # noqa: F401  (fills the catalogue)
from fedbasin.core.evaluator import Evaluator
from fedbasin.core.expressions import parse
from fedbasin.core.method import Context, Plan
from fedbasin.core.net import Net
from fedbasin.core.rng import root
from fedbasin.core.task import Classification
from fedbasin.data.transform import Transform
from fedbasin.experiment import Experiment, LocalConfig, SimConfig
from fedbasin.experiment.executors import pick_device, pick_executor, pick_precision
from fedbasin.local import SGD, Trainer
from fedbasin.sim import Federation, Population
from peers import command, networks, protocol
from peers.work import CLASSES


class Ours:
    """Rounds of a federation; the test rows are scored when asked for, not every round."""

    def __init__(self, work, options):
        networks.prepare(options.device)
        shape, self.device = work.shape, options.device
        experiment = Experiment(
            rounds=1_000_000,  # as in a long run, where compiling pays
            local=LocalConfig(batch=shape.batch),
            sim=SimConfig(
                device=options.device,
                workers=options.processes,
                compile=options.compile,
                precision=options.precision,
            ),
        )
        device = pick_device(options.device)
        dtype = pick_precision(options.precision, device)
        module = parse(shape.model, "model")(shape.image, CLASSES)
        with torch.no_grad():
            for parameter, values in zip(module.parameters(), work.weights, strict=True):
                parameter.copy_(torch.from_numpy(values))
        net, key = Net(module, device, dtype, mixed=options.precision == "bf16"), root(0)
        channels = shape.image[0]
        transform = Transform((0.5,) * channels, (0.25,) * channels)
        rows = np.arange(shape.clients * shape.rows).reshape(shape.clients, shape.rows)
        population = Population.of(
            work.inputs.reshape(-1, *shape.image), work.labels.reshape(-1), rows, device
        )
        trainer = Trainer(net, (), SGD(shape.momentum), shape.batch, transform, CLASSES)
        test = [torch.from_numpy(part).to(device) for part in (work.test_inputs, work.test_labels)]
        executor = pick_executor(experiment, trainer, population, key)
        self.federation = Federation(
            method=parse("fedavg", "method"),
            net=net,
            trainer=trainer,
            population=population,
            evaluator=Evaluator(net, *test, transform, Classification()),
            executor=executor,
            context=Context(net.layout, shape.clients, 1_000_000, key, batch=shape.batch),
            schedule=lambda round: Plan(shape.lr, 1),
            participation=parse(f"count(clients={shape.cohort})", "participation"),
            eligible=np.arange(shape.clients),
            key=key,
            rounds=1_000_000,
            evaluate_every=1_000_000,
        )
        self.server, self.states = self.federation.begin()
        self.facts = {"torch": torch.__version__, **executor.facts()}

    def rounds(self, count):
        going = self.federation.rounds_from(self.server, self.states)
        for _ in range(count):
            self.server, _ = next(going)
        networks.synchronise(self.device)

    def accuracy(self):
        return self.federation.evaluator.score(self.server.score, self.server.buffers)["accuracy"]


if __name__ == "__main__":
    protocol.serve(lambda: Ours(*command.read()))

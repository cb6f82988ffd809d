"""A GPU against the CPU: kernels, executors, every method. Skips without a GPU.

FEDBASIN_TEST_DEVICE=cpu runs the same comparisons on a CPU, to try the tests themselves.
"""

import gc
import os
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from models.interpreted_kernels import SHAPES, one_by_one, pair, problem

from fedbasin import Experiment, run
from fedbasin.core.catalogue import cards
from fedbasin.core.expressions import parse, text
from fedbasin.core.method import Plan
from fedbasin.core.net import Net
from fedbasin.core.rng import root, torch_draws_from
from fedbasin.core.round import Launch, Sent
from fedbasin.data import Dataset, Rows
from fedbasin.data.transform import Transform
from fedbasin.experiment.config import DataConfig, LocalConfig, PartitionConfig, SimConfig
from fedbasin.local import SGD, Trainer
from fedbasin.models.convolution import image_gradients, outputs_of, weight_gradients
from fedbasin.sim import LoopExecutor, Population
from fedbasin.sim.clients import ClientStates
from fedbasin.sim.cohort import CohortExecutor

DEVICE = os.environ.get("FEDBASIN_TEST_DEVICE", "cuda")
KEY = root(5)

pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="there is no GPU"
)


@pytest.fixture(autouse=True)
def rounded():
    """Let products round to tf32, which is where the kernels are at work."""
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("high")
    yield
    torch.backends.cudnn.allow_tf32 = before[0]
    torch.set_float32_matmul_precision(before[1])


def distance(ours, theirs):
    """How far two tensors are apart, as a share of the second's length."""
    ours, theirs = ours.double().cpu(), theirs.double().cpu()
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [*SHAPES, (64, 64, 5, 1, 0, 14, 50, 3), (128, 128, 3, 1, 1, 8, 9, 2)]
)
def test_kernels_are_convolutions_one_by_one(shape, dtype):
    _, _, window, stride, padding, size, *_ = shape
    exact = problem(shape)
    x, w, bias, dy = (t.to(DEVICE, dtype) for t in exact)
    wanted = one_by_one(*(t.to(dtype).double() for t in exact), stride, padding)
    found = (
        outputs_of(x, w, bias, stride, padding),
        image_gradients(dy, w, pair(size), stride, padding),
        weight_gradients(dy, x, pair(window), stride, padding),
    )
    for ours, theirs in zip(found, wanted, strict=True):
        assert distance(ours, theirs) < (2e-3 if dtype == torch.float32 else 1e-2)


def trainer_and_people(model, mixed):
    rng, shape, sizes = KEY.fold("data").numpy(), (3, 32, 32), (95, 40, 11, 7, 130, 64)
    inputs = rng.integers(0, 256, (sum(sizes), *shape), dtype=np.uint8)
    ends = np.cumsum(sizes)
    rows = [np.arange(end - n, end) for n, end in zip(sizes, ends, strict=True)]
    people = Population.of(inputs, rng.integers(0, 10, sum(sizes)), rows, DEVICE)
    with torch_draws_from(KEY):
        net = Net(parse(model, "model")(shape, 10), DEVICE, mixed=mixed)
    transform = Transform((0.5,) * 3, (0.25,) * 3, augment=True, kind="image")
    return Trainer(net, (), SGD(0.9, 1e-3), 16, transform, 10), people


def update_of(executor, epochs=2):
    """What two epochs change in the models of everyone."""
    vector, buffers = executor.trainer.net.initial()
    everyone = np.arange(len(executor.population.sizes))
    states = ClientStates((), vector)
    gathered = executor.train(
        [Launch(everyone, Sent(vector, buffers, (), 0), Plan(0.01, epochs), states)]
    )[0]
    return gathered.replies.models - vector


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("mixed", [False, True], ids=["tf32", "bf16"])
@pytest.mark.parametrize("model", ["cifar_cnn", "pfl_cnn", "resnet8"])
def test_a_cohort_is_as_exact_as_a_loop(model, mixed):
    """Rounded products part ways as steps go by; a cohort may lie no further off than a loop."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    exact = update_of(LoopExecutor(*trainer_and_people(model, False), KEY))
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    trainer, people = trainer_and_people(model, mixed)
    of_loop = distance(update_of(LoopExecutor(trainer, people, KEY)), exact)
    compiled = CohortExecutor(trainer, people, KEY, compiled=True)
    for executor in (
        CohortExecutor(trainer, people, KEY, compiled=False),
        compiled,
        CohortExecutor(trainer, people, KEY, compiled=False, chunk=2),
    ):
        assert distance(update_of(executor), exact) < 2 * of_loop + 1e-4
    assert DEVICE != "cuda" or compiled.counters.compiled <= 2


def test_graphs_that_die_meanwhile_do_not_disturb_a_capture():
    trainer, people = trainer_and_people("cifar_cnn", False)
    thresholds = gc.get_threshold()
    try:
        gc.disable()
        old = CohortExecutor(trainer, people, KEY, compiled=False)
        first = update_of(old, epochs=1)
        old.counters.itself = old  # only the collector can free it, and its captured steps
        del old
        gc.enable()
        gc.set_threshold(1, 1, 1)
        again = update_of(CohortExecutor(trainer, people, KEY, compiled=False), epochs=1)
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
    assert torch.equal(first, again)


METHODS = [text(card.make()) for card in cards("method")]


@pytest.mark.parametrize(
    "method", [*METHODS, "ima(fedadam(lr=0.01), window=2)", "fedcda(merge=fedlaw, warmup=0)"]
)
def test_every_method_does_on_a_gpu_what_it_does_on_a_cpu(method, tmp_path):
    base = Experiment(
        method=method,
        model="lenet",
        rounds=3,
        data=DataConfig(name="digits", proxy_per_class=5),
        partition=PartitionConfig(how="dirichlet(alpha=0.5, minimum=4)", clients=10),
        local=LocalConfig(lr=0.02, epochs=1, batch=16, clip=10.0),
        sim=SimConfig(participation="fraction(rate=0.4)", compile="off"),
    )
    assert_alike_on_both(base, tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("compiled", ["off", "on"])
@pytest.mark.parametrize("kept", [False, True], ids=["fresh", "kept"])
@pytest.mark.parametrize("optimiser", ["sgd(momentum=0.9, nesterov=True)", "adam", "adamw"])
def test_every_optimiser_does_on_a_gpu_what_it_does_on_a_cpu(optimiser, kept, compiled, tmp_path):
    local = LocalConfig(lr=0.002, batch=16, optimiser=optimiser, keep_optimiser=kept)
    base = Experiment(
        method="scaffold",
        model="mlp(widths=(16,))",
        rounds=4,
        partition=PartitionConfig(how="dirichlet(alpha=0.5, minimum=4)", clients=10),
        local=local,
        sim=SimConfig(participation="fraction(rate=0.4)", compile=compiled),
    )
    assert_alike_on_both(base, tmp_path)


TASKS = {
    "binary": ("accuracy", "brier"),
    "regression": ("mae", "r2"),
    "regression(loss='quantile', quantile=0.8)": ("mae",),
    "multilabel": ("accuracy", "auroc"),
    "survival": (),
}


def table_for(task):
    """A table of drawn numbers whose targets can be learnt; its clients have 3 to 60 rows."""
    rng = KEY.fold("table").numpy()
    inputs = rng.normal(size=(304, 6)).astype(np.float32)
    signal = inputs[:, :3] + 0.5 * rng.normal(size=(304, 3)).astype(np.float32)
    if task == "binary":
        targets = (signal[:, 0] > 0).astype(np.int64)
    elif task == "multilabel":
        targets = (signal > 0).astype(np.int64)
    elif task == "survival":
        targets = np.stack([np.exp(-signal[:, 0]), signal[:, 1] > -0.5], 1).astype(np.float32)
    else:
        targets = signal[:, 0]
    clients = np.repeat(np.arange(8), (60, 41, 40, 24, 17, 12, 7, 3))
    train = Rows(inputs[:204], targets[:204], clients)
    test = Rows(inputs[204:], targets[204:], np.arange(100) % 8)
    classes = ("no", "yes") if task == "binary" else ()
    names = tuple(f"site {number}" for number in range(8))
    return Dataset("drawn", "table", train, test, classes, group_names=names)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize(
    ("method", "compiled"),
    [
        ("fedavg", "off"),
        ("fedavg", "on"),
        ("scaffold", "off"),
        ("fedlaw(epochs=3)", "off"),
        ("wima(serverft(epochs=1), window=2)", "off"),
    ],
)
@pytest.mark.parametrize("task", TASKS)
def test_every_task_does_on_a_gpu_what_it_does_on_a_cpu(task, method, compiled, tmp_path):
    base = Experiment(
        method=method,
        task=task,
        model="mlp(widths=(16,))",
        rounds=4,
        data=DataConfig(name="drawn", proxy_rows=20),
        partition=PartitionConfig(how="natural", clients=8),
        local=LocalConfig(lr=0.1, epochs=2, batch=16),
        sim=SimConfig(
            participation="count(clients=5)",
            compile=compiled,
            metrics=TASKS[task],
            evaluate_train=True,
        ),
    )
    cpu, gpu = assert_alike_on_both(base, tmp_path, table_for(task))
    for ours, theirs in zip(gpu, cpu, strict=True):
        assert ours.metrics.keys() == theirs.metrics.keys() and len(ours.metrics) >= 3
        for name, value in theirs.metrics.items():
            found, wanted = (np.array(each, float) for each in (ours.metrics[name], value))
            np.testing.assert_allclose(found, wanted, rtol=1e-6, err_msg=name)


def assert_alike_on_both(base, tmp_path, data=None):
    """Compare the records of a loop on the CPU and of a cohort on the GPU, in double precision."""
    sims = {
        "cpu": replace(base.sim, device="cpu", executor="loop", precision="fp64"),
        "gpu": replace(base.sim, device=DEVICE, executor="cohort", precision="fp64"),
    }
    found = {}
    for name, sim in sims.items():
        records = found[name] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # cautions of methods about their settings
            run(replace(base, sim=sim), tmp_path / name, data=data, on_round=records.append)
    for field in ("train_loss", "model_norm", "update_norm"):
        cpu, gpu = ([getattr(r, field) for r in found[name]] for name in sims)
        np.testing.assert_allclose(gpu, cpu, rtol=1e-6, err_msg=field)
    return found["cpu"], found["gpu"]

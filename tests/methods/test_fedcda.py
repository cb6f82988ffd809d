import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from counting import allocated
from methods.numpy_clients import NumpyClients, linear_federation, models

from fedbasin import Experiment
from fedbasin import resume as resume_run
from fedbasin import run as run_experiment
from fedbasin.core.archive import Archive, ArchiveError
from fedbasin.core.expressions import ExpressionError, parse
from fedbasin.core.method import Context, ReplyError
from fedbasin.core.record import RunFolder
from fedbasin.core.rng import root
from fedbasin.core.state import same
from fedbasin.core.vectors import Layout
from fedbasin.experiment.config import LocalConfig, PartitionConfig, SimConfig
from fedbasin.local import Prox
from fedbasin.methods import IMA, WIMA, FedAvg, FedAvgM, FedCDA, FedLAW, FedProx
from fedbasin.sim import run
from fedbasin.testing import replies_of, toy_federation, trajectory


def objective(models, losses, weights, smoothness):
    p = np.array(weights) / np.sum(weights)
    gaps = np.array(models) - p @ np.array(models)
    return p @ np.array(losses) + smoothness / 2 * (p @ (gaps**2).sum(1))


def loss(world, vector, inputs, labels):
    logits = inputs @ vector[:12].reshape(3, 4).T + vector[12:]
    logits = logits - logits.max(1, keepdims=True)
    return np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(labels)), labels])


class NumpyFedCDA:
    """Wang et al., Algorithm 1: lists of (round, model, loss), everything tried, no sums kept."""

    def __init__(self, federation, method):
        self.world, self.method, self.federation = NumpyClients(federation), method, federation
        self.server = self.world.start.copy()
        self.cache = {}  # client -> records, oldest first
        self.picked = {}  # client -> record

    def weight(self, client):
        return self.world.sizes[client] if self.method.weighting == "samples" else 1

    def train(self, t, client):
        v, losses, counts = self.server.copy(), [], []
        for inputs, labels in self.world.steps(t, client):
            losses.append(loss(self.world, v, inputs, labels))
            counts.append(len(labels))
            v = v - self.world.lr(t) * self.world.gradient(v, inputs, labels)
        last = len(losses) // 2  # two epochs
        return v, np.average(losses[-last:], weights=counts[-last:])

    def value(self, picked):
        records = [(r, self.weight(n)) for n, r in picked.items()]
        return objective(
            [r[1] for r, _ in records],
            [r[2] * self.method.loss_term for r, _ in records],
            [w for _, w in records],
            self.method.smoothness,
        )

    def select(self, t, cohort):
        how, key = self.method, self.federation.context.at(t, 0.0).key.fold("fedcda")
        if how.strategy == "newest":
            return {n: self.cache[n][-1] for n in cohort}
        if how.strategy == "random":
            draws = key.numpy()
            return {n: self.cache[n][::-1][self.draw(draws, n)] for n in cohort}
        order = key.numpy().permutation(len(cohort))
        cuts = 1 if how.strategy == "exact" else min(how.batches, len(cohort))
        chosen = {n: r for n, r in self.picked.items() if n not in cohort}
        if how.strategy == "global":  # everyone seen is picked for, all at once
            seen = sorted(self.cache)
            ways = (
                dict(zip(seen, way, strict=True))
                for way in itertools.product(*(self.cache[n][::-1] for n in seen))
            )
            return min(ways, key=self.value)
        for part in np.array_split(order, cuts):
            batch = [cohort[i] for i in part]
            ways = [
                dict(zip(batch, way, strict=True))
                for way in itertools.product(*(self.cache[n] for n in batch))
            ]
            chosen |= min(ways, key=lambda way: self.value(chosen | way))
        return {n: chosen[n] for n in cohort}

    def merge(self, t, picked, weights):
        return np.average(picked, axis=0, weights=weights)

    def draw(self, draws, client):
        rounds = [r[0] for r in self.cache[client][::-1]]
        return rounds.index(int(draws.choice(rounds)))

    def rounds(self, count, begins):
        for t in range(count):
            cohort = self.world.cohort(t)
            trained = {n: self.train(t, n) for n in cohort}
            for n, (model, last) in trained.items():
                self.cache[n] = [*self.cache.get(n, []), (t, model, last)][-self.method.memory :]
            newest = self.picked | {n: self.cache[n][-1] for n in cohort}
            warm = t < begins
            if self.method.strategy == "global" and not warm:
                newest = {n: records[-1] for n, records in self.cache.items()}
            self.picked = newest if warm else self.picked | self.select(t, cohort)
            weights = [self.weight(n) for n in self.picked]
            picked = np.array([r[1] for r in self.picked.values()])
            mean = np.average(picked, axis=0, weights=weights)
            self.server = mean if warm else self.merge(t, picked, weights)
            if warm and self.method.warmup_by == "fedavg":
                sizes = [self.world.sizes[n] for n in cohort]
                self.server = np.average([trained[n][0] for n in cohort], axis=0, weights=sizes)
            yield cohort, newest


CASES = [
    FedCDA(warmup=2, strategy="global", weighting="samples"),
    FedCDA(warmup=2),
    FedCDA(warmup=0.25, batches=2, smoothness=3.0),
    FedCDA(warmup=0, strategy="exact", memory=2, loss_term=False),
    FedCDA(warmup=1, batches=5, weighting="samples", loss_term=False, smoothness=0.5),
    FedCDA(warmup=4, strategy="newest", warmup_by="newest"),
    FedCDA(warmup=3, strategy="random", weighting="samples", warmup_by="newest"),
]


@pytest.mark.parametrize("method", CASES, ids=str)
def test_fedcda_equals_a_plain_numpy_loop(method):
    federation = linear_federation(method, rounds=12, participation="count(clients=4)")
    oracle = NumpyFedCDA(federation, method)
    begins = {0.25: 3}.get(method.warmup, method.warmup)
    server, states = federation.begin()
    rounds = federation.rounds_from(server, states)
    older = 0
    for (after, record), (cohort, newest) in zip(rounds, oracle.rounds(12, begins), strict=True):
        np.testing.assert_allclose(after.send.numpy(), oracle.server, rtol=1e-8, atol=1e-11)
        assert torch.equal(after.send, after.score)
        picked = {n: r for n, r in enumerate(after.state.picked.tolist()) if r >= 0}
        assert picked == {n: r[0] for n, r in oracle.picked.items()}
        weights = {n: oracle.weight(n) for n in picked}

        def spread(of, weights=weights):
            order = [weights[n] for n in of]
            return 2 * objective([r[1] for r in of.values()], [0] * len(of), order, 1.0)

        notes, t = record.notes, record.round - 1
        total = sum(weights.values())
        assert notes["divergence"] == pytest.approx(spread(oracle.picked), abs=1e-10)
        assert notes["divergence_newest"] == pytest.approx(spread(newest), abs=1e-10)
        mean_loss = sum(weights[n] * r[2] for n, r in oracle.picked.items()) / total
        assert notes["loss"] == pytest.approx(mean_loss, rel=1e-8)
        assert notes["age"] == pytest.approx(np.mean([t - r for r in picked.values()]))
        assert notes["picked_age"] == [t - picked[n] for n in cohort]
        pickers = newest if method.strategy == "global" and t >= begins else cohort
        missed = [picked[n] != newest[n][0] for n in pickers]
        assert notes["older"] == pytest.approx(np.mean(missed))
        older += notes["older"]
    assert (older > 0) == (method.strategy != "newest")  # the choice was a real one


def after_each(method, **settings):
    federation = linear_federation(method, **settings)
    server, states = federation.begin()
    yield server.state, []
    for after, _ in federation.rounds_from(server, states):
        yield after.state, NumpyClients(federation).cohort(after.round - 1)


@pytest.mark.parametrize("strategy", ["greedy", "exact", "random"])
def test_only_participants_change_and_what_is_picked_is_remembered(strategy):
    method = FedCDA(warmup=2, strategy=strategy, memory=2)
    states = list(after_each(method, rounds=14))
    for (before, _), (after, cohort) in itertools.pairwise(states):
        for n in range(6):
            if n not in cohort:
                assert after.models[n] is before.models[n]
                assert after.picked[n] == before.picked[n]
                assert torch.equal(after.rounds[n], before.rounds[n])
            assert after.picked[n] == -1 or after.picked[n] in after.history(n)
    assert [len(after.history(n)) for n in range(6)] == [2] * 6
    kept = [model for records in after.models for model in records]
    assert all(m.untyped_storage().nbytes() == 15 * 8 for m in kept)  # no reply matrix behind it


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_the_running_sum_is_the_sum_and_the_mean_lies_among_the_models(weighting):
    federation = linear_federation(FedCDA(warmup=0, weighting=weighting), rounds=60)
    server, states = federation.begin()
    for after, _ in federation.rounds_from(server, states):
        memory = after.state
        seen = [n for n in range(6) if memory.picked[n] >= 0]
        picked = torch.stack([memory.model(n, int(memory.picked[n]), None) for n in seen])
        sizes = torch.tensor([16, 9, 7, 5, 3, 1.0], dtype=torch.float64)
        weights = sizes[seen] if weighting == "samples" else torch.ones(len(seen)).double()
        torch.testing.assert_close(memory.total, weights @ picked, rtol=1e-12, atol=1e-12)
        assert (after.send <= picked.max(0).values + 1e-12).all()
        assert (after.send >= picked.min(0).values - 1e-12).all()


def test_a_memory_of_one_is_the_newest_of_all_clients_seen():
    for strategy in ("greedy", "exact", "random"):
        ours = models(linear_federation(FedCDA(1, warmup=0, strategy=strategy), rounds=8))
        newest = models(linear_federation(FedCDA(3, warmup=0, strategy="newest"), rounds=8))
        np.testing.assert_allclose(ours, newest, rtol=1e-12)
    everyone = {"rounds": 5, "participation": "count(clients=6)"}
    ours = models(linear_federation(FedCDA(1, warmup=0), **everyone))
    fedavg = models(linear_federation(FedAvg("uniform"), **everyone))
    np.testing.assert_allclose(ours, fedavg, rtol=1e-9, atol=1e-12)


def test_warm_up_is_fedavg_to_the_bit_and_a_share_of_the_rounds_or_a_number():
    fedavg = [s.send for s in trajectory(FedAvg(), rounds=8)]
    for warmup, rounds in ((0.25, 2), (5, 5), (0.99, 7), (0.0, 0)):
        ours = [s.send for s in trajectory(FedCDA(warmup=warmup), rounds=8)]
        equal = [torch.equal(a, b) for a, b in zip(ours, fedavg, strict=True)]
        assert equal[:rounds] == [True] * rounds and not equal[rounds]


def context(clients, round=0, seed=0, **settings):
    layout = Layout(("w",), ((5,),))
    return Context(layout, clients, 100, root(seed), **settings).at(round, 0.1)


def test_a_share_of_the_rounds_is_not_rounded_down_by_its_last_digit():
    assert 0.29 * 100 < 29
    assert FedCDA(warmup=0.29).begins(context(2)) == FedCDA(warmup=29).begins(context(2)) == 29


def filled(method, rounds=3, clients=6, seed=0):
    """A memory after rounds in which all clients sent random models."""
    generator = torch.Generator().manual_seed(seed)
    server = torch.zeros(5, dtype=torch.float64)
    state = method.init(server, context(clients))
    for t in range(rounds):
        sent = replies_of(torch.randn(clients, 5, generator=generator, dtype=torch.float64))
        _, state = method.aggregate(state, server, sent, context(clients, t))
    return state, server, sent


def test_batches_are_drawn_from_the_key_and_not_from_the_order_of_replies():
    method, outcomes = FedCDA(warmup=0, smoothness=50.0), set()
    state, server, sent = filled(method)
    sent = replace(sent, last_loss=torch.linspace(0, 1, 6))
    for seed in range(30):
        now = context(6, 3, seed)
        _, once = method.aggregate(state, server, sent, now)
        _, again = method.aggregate(state, server, sent, now)
        order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
        _, shuffled = method.aggregate(state, server, sent.take(order), now)
        assert same(once, again) and same(once, shuffled)
        outcomes.add(tuple(once.picked.tolist()))
    assert len(outcomes) > 1


def test_models_may_stay_on_the_device():
    pairs = zip(trajectory(FedCDA(store="device")), trajectory(FedCDA()), strict=True)
    assert all(same(a, b) for a, b in pairs)


def test_equal_models_are_the_newest():
    method = FedCDA(warmup=0)
    state, server, sent = filled(method)
    for t in range(3, 7):
        served, state = method.aggregate(state, server, sent, context(6, t))
    assert state.picked.tolist() == [6] * 6 and served.notes.older == 0


def test_without_smoothness_the_model_of_least_loss_is_picked():
    method = FedCDA(warmup=0, smoothness=0.0)
    server = torch.zeros(5, dtype=torch.float64)
    state = method.init(server, context(2))
    for t, losses in enumerate([[3.0, 1.0], [1.0, 2.0], [2.0, 3.0]]):
        models = torch.tensor([[9.0], [-4.0]]).double() * (t + 1) * torch.ones(5)
        sent = replace(replies_of(models), last_loss=torch.tensor(losses))
        served, state = method.aggregate(state, server, sent, context(2, t))
    assert state.picked.tolist() == [1, 0] and served.notes.loss == 1.0


def test_polish_never_diverges_more_than_greedy():
    differs = False
    for seed in range(30):
        greedy = FedCDA(warmup=0, batches=6, loss_term=False)
        state, server, sent = filled(greedy, clients=8, seed=seed)
        plain, _ = greedy.aggregate(state, server, sent, context(8, 3))
        better, _ = replace(greedy, polish=True).aggregate(state, server, sent, context(8, 3))
        best, _ = replace(greedy, strategy="exact").aggregate(state, server, sent, context(8, 3))
        assert best.notes.divergence <= better.notes.divergence + 1e-12
        assert better.notes.divergence <= plain.notes.divergence + 1e-12
        assert best.notes.divergence <= best.notes.divergence_newest + 1e-12
        differs |= better.notes.divergence < plain.notes.divergence - 1e-9
    assert differs


def test_global_selection_diverges_least_of_all_and_is_refused_where_it_is_too_large():
    smaller = False
    for seed in range(20):
        exact = FedCDA(warmup=0, strategy="exact", loss_term=False)
        state, server, sent = filled(exact, clients=8, seed=seed)
        part = sent.take(torch.arange(3))
        cohort, _ = exact.aggregate(state, server, part, context(8, 3))
        everyone, after = replace(exact, strategy="global").aggregate(
            state, server, part, context(8, 3)
        )
        assert everyone.notes.divergence <= cohort.notes.divergence + 1e-12
        smaller |= everyone.notes.divergence < cohort.notes.divergence - 1e-9
        picked = [after.model(n, int(after.picked[n]), None) for n in range(8)]
        torch.testing.assert_close(everyone.send, torch.stack(picked).mean(0))
    assert smaller
    with pytest.raises(ValueError, match="a batch of 33 clients with up to 3 models each"):
        FedCDA(strategy="global").init(server, context(33))


def test_a_client_whose_size_changes_counts_with_its_new_weight():
    method = FedCDA(warmup=0, weighting="samples", memory=1)
    server = torch.zeros(1, dtype=torch.float64)
    state = method.init(server, context(2))
    for t, (weight, expected) in enumerate([(1, 2.0), (3, 1.0)]):
        sent = replies_of(torch.tensor([[0.0], [4.0]]).double(), [weight, 1])
        served, state = method.aggregate(state, server, sent, context(2, t))
        assert served.send.item() == pytest.approx(expected)


@pytest.mark.parametrize("wrap", [lambda m: WIMA(m, window=2), lambda m: IMA(m, window=2)])
def test_wrappers_see_the_merged_models(wrap):
    plain = [s.score for s in trajectory(FedCDA(warmup=1), rounds=6)]
    wrapped = [s.score for s in trajectory(wrap(FedCDA(warmup=1)), rounds=6)]
    assert torch.equal(plain[0], wrapped[0]) and not torch.allclose(plain[-1], wrapped[-1])
    if isinstance(wrap(FedCDA()), WIMA):
        torch.testing.assert_close(wrapped[-1], (plain[-1] + plain[-2]) / 2)


def test_clients_follow_further_rules():
    prox = parse("fedcda(warmup=10, local=prox(mu=0.1))")
    assert prox == FedCDA(warmup=10, local=Prox(0.1))
    for a, b in zip(trajectory(prox), trajectory(FedProx(mu=0.1)), strict=True):
        assert torch.equal(a.send, b.send)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fedcda(memory=0)", "memory must be at least 1, got 0"),
        ("fedcda(batches=0)", "batches must be at least 1, got 0"),
        ("fedcda(warmup=-1)", r"warmup is a number of rounds \(50\) or a share .* got -1"),
        ("fedcda(warmup=1.0)", r"warmup .* share of them in \[0, 1\) \(0.25\), got 1.0"),
        ("fedcda(smoothness=-1.0)", "smoothness must be at least 0"),
        ("fedcda(strategy='exact', polish=True)", "polish improves strategy='greedy', got .*exact"),
        ("fedcda(strategy='best')", "'greedy' or 'exact' or 'global' or 'newest' or 'random'"),
    ],
)
def test_bad_settings_are_refused(text, words):
    with pytest.raises(ExpressionError, match=words):
        parse(text)


def test_bad_rounds_are_refused_naming_the_client_or_the_setting():
    method = FedCDA()
    server = torch.zeros(5)
    state = method.init(server, context(40))
    sent = replies_of(torch.zeros(2, 5), clients=[3, 3])
    with pytest.raises(ReplyError, match="client 3 answers twice"):
        method.aggregate(state, server, sent, context(40))
    sent = replace(replies_of(torch.zeros(2, 5)), last_loss=torch.tensor([0.0, float("nan")]))
    with pytest.raises(ReplyError, match="client 1 reports a loss of nan"):
        method.aggregate(state, server, sent, context(40))
    lossless = FedCDA(loss_term=False, warmup=0, memory=2)
    state, server, sent = filled(lossless, rounds=2)
    sent = replace(sent, models=sent.models * 10)  # too far off to be picked
    expected, _ = lossless.aggregate(state, server, sent, context(6, 2))
    assert expected.notes.older > 0
    sent = replace(sent, last_loss=torch.full((6,), float("nan")))
    assert torch.equal(
        lossless.aggregate(state, server, sent, context(6, 2))[0].send, expected.send
    )
    server, state = torch.zeros(5), method.init(torch.zeros(5), context(40))
    crowd = replies_of(torch.zeros(40, 5))
    for wide in (FedCDA(batches=2), FedCDA(strategy="exact")):  # in the first round, not after T_w
        with pytest.raises(ValueError, match=r"combinations, more than 20,000,000: .*`batches`"):
            wide.aggregate(state, server, crowd, context(40))
    method.aggregate(state, server, crowd, context(40))
    halves = FedCDA(batches=2)  # of 30: 3^15 combinations; the larger one of 31: 3^16
    halves.aggregate(state, server, replies_of(torch.zeros(30, 5)), context(40))
    with pytest.raises(ValueError, match="combinations, more than 20,000,000"):
        halves.aggregate(state, server, replies_of(torch.zeros(31, 5)), context(40))
    with pytest.raises(ValueError, match=r"store='disk'\) needs files .*archive="):
        FedCDA(store="disk").init(server, context(40))


def on_disk(method, folder, **settings):
    federation = toy_federation(method, **settings)
    archive = Archive(folder)
    return replace(federation, context=replace(federation.context, archive=archive))


def timeless(folder):
    gone = {"seconds": 0, "seconds_train": 0, "seconds_merge": 0, "seconds_evaluate": 0}
    return [replace(record, **gone) for record in folder.read_rounds()]


@pytest.mark.parametrize(
    ("inner", "stop"),
    [(FedCDA(2, warmup=1), s) for s in (1, 3, 5)]
    + [(WIMA(FedCDA(2, warmup=1), window=3), 5)]
    + [(FedCDA(2, warmup=1, merge=FedAvgM(FedLAW(epochs=2))), 5)],
    ids=str,
)
def test_files_and_memory_and_a_run_killed_at_any_point_end_in_the_same_bits(tmp_path, inner, stop):
    def stored(method, store):
        if isinstance(method, WIMA):
            return replace(method, inner=stored(method.inner, store))
        return replace(method, store=store)

    folders = {name: RunFolder(tmp_path / name) for name in ("memory", "disk")}
    for name, folder in folders.items():
        folder.path.mkdir()
        federation = on_disk(stored(inner, name), folder.archive, rounds=9)
        federation = replace(federation, dropout=0.4)
        if name == "disk":
            crash_and_resume(federation, folder, stop)
        else:
            run(federation, folder, {}, checkpoint_every=3)
    assert folders["disk"].model.read_bytes() == folders["memory"].model.read_bytes()
    assert timeless(folders["disk"]) == timeless(folders["memory"])
    assert not folders["memory"].archive.exists()
    assert folders["disk"].checkpoint.stat().st_size < folders["memory"].checkpoint.stat().st_size
    kept = {path.name for path in folders["disk"].archive.iterdir()}
    assert 6 < len(kept) <= 12  # what the last checkpoint speaks of, and no more
    assert not any(name.endswith(".part") for name in kept)


def crash_and_resume(federation, folder, stop):
    """Die in round `stop`, and again as soon as a finished checkpoint's files are swept."""

    class Crash(Exception):
        pass

    def crash(record):
        if record.round == stop:
            raise Crash

    with pytest.raises(Crash):
        run(federation, folder, {}, checkpoint_every=3, on_round=crash)
    (folder.archive / "client000000-round000001.npy.part").write_bytes(b"cut short")

    class Dying(Archive):
        def sweep(self):
            super().sweep()
            raise Crash

    fresh = replace(federation.context, archive=Dying(folder.archive))
    with pytest.raises(Crash):
        run(replace(federation, context=fresh), folder, {}, checkpoint_every=3)
    fresh = replace(federation.context, archive=Archive(folder.archive))
    run(replace(federation, context=fresh), folder, {}, checkpoint_every=3)


def test_files_are_needed_until_the_next_checkpoint_and_a_lost_one_is_named(tmp_path):
    folder = RunFolder(tmp_path)
    federation = on_disk(FedCDA(memory=1, warmup=0, store="disk"), folder.archive, rounds=6)
    counts = []

    def look(record):
        counts.append(len(list(folder.archive.iterdir())))

    run(federation, folder, {}, checkpoint_every=3, on_round=look)
    assert counts[:3] == [3, 6, 9] and counts[3] <= 6 + 3
    assert len(list(folder.archive.iterdir())) <= 6
    folder.model.unlink()
    for path in folder.archive.iterdir():
        path.unlink()
    longer = replace(federation, rounds=8, context=replace(federation.context, rounds=8))
    with pytest.raises(ArchiveError, match=r"client \d sent in round \d; start the run again"):
        run(longer, folder, {})


def test_a_run_with_files_from_an_expression(tmp_path):
    experiment = Experiment(
        model="mlp(widths=(8,))",
        method="fedcda(warmup=1, memory=2, store='disk')",
        rounds=4,
        partition=PartitionConfig(how="dirichlet(alpha=0.3, minimum=2)", clients=6),
        local=LocalConfig(lr=0.2, epochs=1, batch=16),
        sim=SimConfig(participation="count(clients=3)", checkpoint_every=2),
    )

    class Crash(Exception):
        pass

    def crash(record):
        if record.round == 3:
            raise Crash

    with pytest.raises(Crash):
        run_experiment(experiment, tmp_path / "disk", on_round=crash)
    resume_run(tmp_path / "disk")
    run_experiment(replace(experiment, method="fedcda(warmup=1, memory=2)"), tmp_path / "memory")
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("disk", "memory")]
    assert models[0] == models[1]
    assert 3 <= len(list((tmp_path / "disk" / "archive").glob("*.npy"))) <= 12
    assert not (tmp_path / "memory" / "archive").exists()


def most_held(store, clients, folder, size=50_000, cohort=4):
    """How many models are in main memory at once when each client has trained three times."""
    archive = Archive(folder)
    rounds = 3 * clients // cohort
    context = Context(Layout(("w",), ((size,),)), clients, rounds, root(0), archive=archive)
    method = FedCDA(warmup=0, store=store)
    server = torch.zeros(size)
    with allocated() as memory:
        state = method.init(server, context)
        for t in range(rounds):
            drawn = [(t * cohort + place) % clients for place in range(cohort)]
            models = torch.randn(cohort, size, generator=torch.Generator().manual_seed(t))
            sent = replies_of(models, clients=drawn)
            served, state = method.aggregate(state, server, sent, context.at(t, 0.1))
            server = served.send
            archive.sweep()
    return memory.most / (4 * size)


def test_models_on_disk_stay_out_of_main_memory(tmp_path):
    """24 clients more are 72 models more in memory; on disk they are none."""
    few = most_held("disk", 8, tmp_path / "few")
    many = most_held("disk", 32, tmp_path / "many")
    in_memory = most_held("memory", 32, tmp_path / "none")
    assert many - few < 3
    assert in_memory - many > 72

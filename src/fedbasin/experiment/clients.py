"""Sets up how clients are scored: on which rows, and beside which other models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fedbasin.core.evaluator import Evaluator
from fedbasin.core.expressions import parse
from fedbasin.core.method import Plan
from fedbasin.core.rng import Key
from fedbasin.core.served import Cell
from fedbasin.data import Dataset
from fedbasin.experiment.config import ConfigError, Experiment
from fedbasin.experiment.executors import pick_executor
from fedbasin.experiment.rows import Rows
from fedbasin.experiment.training import schedule_of
from fedbasin.local import Personalisation, Trainer
from fedbasin.sim import Population
from fedbasin.sim.home import Baselines, ClientScores, HomeTraining, alone_plan, pooled_steps
from fedbasin.sim.population import as_tensor


@dataclass(frozen=True, eq=False)
class Clients:
    """What is needed to score clients.

    Args:
        experiment: the settings.
        dataset: where the rows come from.
        rows: who trains on what, and who holds out what.
        population: what clients train on.
        trainer: how they do.
        key: the run's randomness.
    """

    experiment: Experiment
    dataset: Dataset
    rows: Rows
    population: Population
    trainer: Trainer
    key: Key

    def scores(self, test: Evaluator, cohort: Callable[[int], np.ndarray]) -> ClientScores | None:
        """Return how clients are scored; None where that is not asked for.

        Args:
            test: scores the test rows; clients' rows are scored alike.
            cohort: returns who is drawn in a round.
        """
        sim = self.experiment.sim
        if not (sim.evaluate_clients or sim.personalise or sim.baselines):
            return None
        held = self.rows.held
        if not held.order.size:
            raise ConfigError(
                f"partition.hold_out is {self.experiment.partition.hold_out}, and no client has "
                "two rows to hold one out of: use fewer clients"
            )
        train = self.rows.splits.train
        device = test.labels.device
        groups = None if train.groups is None else as_tensor(train.groups[held.order], device)
        evaluator = test.on(
            as_tensor(train.inputs[held.order], device),
            as_tensor(train.labels[held.order], device),
            groups,
        )
        return ClientScores(
            evaluator=evaluator,
            offsets=held.offsets,
            unseen=self.rows.unseen,
            facts=self._facts(),
            every=sim.evaluate_clients or self.experiment.rounds,
            rounds=self.experiment.rounds,
            start=self.trainer.net.initial(),
            home=self._home(),
            baselines=self._baselines(cohort),
        )

    def _facts(self) -> dict[str, list[Cell]]:
        """Return the columns that say what clients are."""
        train = self.rows.splits.train
        count = len(self.rows.home.clients)
        never = set(self.rows.unseen.tolist())
        facts: dict[str, list[Cell]] = {"client": list(range(count))}
        if train.groups is not None:
            facts["group"] = [self._group(client) for client in range(count)]
        facts["seen"] = [client not in never for client in range(count)]
        facts["rows"] = list(self.rows.parts.sizes().tolist())
        facts["home_rows"] = list(self.rows.home.sizes().tolist())
        facts["held_out"] = list(self.rows.held.sizes().tolist())
        if self.rows.classes:
            counts = self.rows.home.counts(train.labels, self.rows.classes)
            facts["classes"] = list((counts > 0).sum(1).tolist())
        else:
            each = [train.labels[mine] for mine in self.rows.home.clients]
            facts["target_mean"] = [float(mine.mean()) if len(mine) else None for mine in each]
        return facts

    def _group(self, client: int) -> str:
        """Return the group that all of a client's rows have; empty where they have several."""
        groups = self.rows.splits.train.groups
        assert groups is not None
        mine = np.unique(groups[self.rows.home.clients[client]])
        if len(mine) != 1:
            return ""
        names = self.dataset.group_names
        number = int(mine[0])
        return names[number] if number < len(names) else str(number)

    def _trainer(self, personal: Personalisation | None = None) -> Trainer:
        """Return how a client trains at home: without the method's rules."""
        rules = personal.rules() if personal else ()
        return replace(self.trainer, rules=rules, keep_optimiser=False)

    def _training(self, name: str, trainer: Trainer, plan: Plan) -> HomeTraining:
        """Return what trains clients on the rows that they have at home."""
        population = self.population
        if len(self.rows.unseen):
            train = self.rows.splits.train
            device = population.labels.device
            population = Population.of(train.inputs, train.labels, self.rows.home.clients, device)
        sim = self.experiment.sim
        here = replace(
            self.experiment,
            sim=replace(
                sim,
                executor="auto" if sim.executor == "ray" else sim.executor,
                workers=0 if sim.executor == "ray" else sim.workers,
                address="",
                compile="on" if sim.compile == "on" else "off",
            ),
        )
        executor = pick_executor(here, trainer, population, self.key)
        return HomeTraining(name, trainer, executor, plan, self.key)

    def _home(self) -> HomeTraining | None:
        expression = self.experiment.sim.personalise
        if not expression:
            return None
        personal: Personalisation = parse(expression, "personalisation")
        if personal.head and not self.trainer.net.layout.head:
            raise ConfigError(
                f"sim.personalise is {expression}: {self.experiment.model} has no linear head to "
                "train alone; leave head out"
            )
        plan = personal.plan(self.experiment.local.lr)
        return self._training("home", self._trainer(personal), plan)

    def _baselines(self, cohort: Callable[[int], np.ndarray]) -> Baselines | None:
        if not self.experiment.sim.baselines:
            return None
        schedule = schedule_of(self.experiment)
        rounds = self.experiment.rounds
        people = self.population
        whole = Population(people.inputs, people.labels, people.offsets[[0, -1]])
        steps = pooled_steps(schedule, cohort, people.sizes, rounds, self.trainer.batch)
        alone = self._training("alone", self._trainer(), alone_plan(schedule, rounds))
        return Baselines(alone, whole, steps)

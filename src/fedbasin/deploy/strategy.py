"""Any method as a Flower strategy."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any, Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from fedbasin.core.catalogue import needs_of
from fedbasin.core.expressions import Choice, parse
from fedbasin.core.method import Context, Method, Plan, Probe, Sampling
from fedbasin.core.metric import Metric
from fedbasin.core.needs import check_network, check_task
from fedbasin.core.protocols import check_private, guarantee_of, is_private
from fedbasin.core.record import RoundRecord
from fedbasin.core.rng import root
from fedbasin.core.round import (
    Launch,
    ProbeRequest,
    Returned,
    RoundSetup,
    Scoring,
    Server,
    begin_round,
    end_round,
    merge_refused,
    probe_of,
)
from fedbasin.core.vectors import Weighting
from fedbasin.deploy.audit import AuditedRound, MergedReply, Refusal
from fedbasin.deploy.bounds import Bounds, reply_bytes
from fedbasin.deploy.client_state import StatesOnClients
from fedbasin.deploy.clients import Clients, TooFewNodes
from fedbasin.deploy.cohort import Cohort, content_of
from fedbasin.deploy.evaluation import (
    bounded,
    entered,
    evaluations,
    mean_of,
    per_client,
    sums_only,
    unheard,
)
from fedbasin.deploy.frozen import FrozenParts
from fedbasin.deploy.mail import GaveUp, Mailbox
from fedbasin.deploy.merge import Lenient, NothingMerged, gathered_of, merged_replies
from fedbasin.deploy.private import gather_private
from fedbasin.deploy.probe import gather_gradients
from fedbasin.deploy.replies import Collector
from fedbasin.deploy.resume import ServerJournal
from fedbasin.deploy.secure import Secure
from fedbasin.deploy.secure.attempts import next_attempt
from fedbasin.deploy.secure.cohort import MaskedCollector, SecureCohort
from fedbasin.deploy.secure.fitness import check_cohorts, check_noise, check_secure, session_of
from fedbasin.deploy.secure.server import ServerProtocol
from fedbasin.deploy.secure.update import size_of
from fedbasin.deploy.settings import Handling, Records, ServerSide
from fedbasin.deploy.wire import Codec
from fedbasin.sim.participation import draw_cohort, sampling_of

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
_MOST_FAILED = 10  # rounds running whose merges may fail before the run is stopped
_STREAM_ABOVE = 256 << 20  # bytes of replies that are worth averaging as they arrive
_log = logging.getLogger("flwr")


class FedbasinStrategy(Strategy):  # type: ignore[misc]
    """Merge with any method of the catalogue, or with one of your own.

    In an app written for Flower's FedAvg, one line changes:

        strategy = FedbasinStrategy("ima(fedavg)", fraction_train=0.5)

    Args:
        method: how the server merges: an expression, or the method itself.
        fraction_train: share of the connected clients that train in a round.
        fraction_evaluate: share of them that evaluate the scored model.
        min_train_nodes: a round waits until so many good replies are there.
        min_evaluate_nodes: least number of clients that evaluate.
        min_available_nodes: clients that must be connected before a round begins.
        weighted_by_key: the metric in which clients say how many samples they hold.
        arrayrecord_key: where clients find the model.
        configrecord_key: where they find the round's settings.
        participation: who trains, such as ``"count(clients=3)"``, in place of `fraction_train`.
        seed: draws cohorts, and batches on clients of fedbasin.
        evaluate: what the server keeps of clients' evaluations: ``"sums"``, the means over their
            rows, or ``"per-client"``, every client's scores, in ``clients.csv`` and as columns of
            the records. Single scores are information about a client.
        server: what the server has, such as rows to learn from or to test on.
        handling: how replies are waited for and taken.
        records: where records and checkpoints go.
        secure: add replies up masked, so that the server sees their sum alone.
    """

    # Set up by `start`, and by the round under way.
    _codec: Codec
    _clients: Clients
    _context: Context
    _setup: RoundSetup
    _policy: Lenient
    _timeout: float
    _server: Server
    _launch: Launch
    _began: float  # when the cohort was drawn
    _cohort: Cohort
    _record: RoundRecord
    _audited: AuditedRound
    _attempt: int

    def __init__(
        self,
        method: Method | str = "fedavg",
        *,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        participation: str | None = None,
        seed: int = 0,
        evaluate: Literal["sums", "per-client"] = "sums",
        server: ServerSide | None = None,
        handling: Handling | None = None,
        records: Records | None = None,
        secure: Secure | None = None,
    ) -> None:
        import fedbasin.methods  # noqa: F401  (fills the catalogue)

        self.method: Method = parse(method, "method") if isinstance(method, str) else method
        self.participation: Choice = parse(
            participation or f"fraction(rate={fraction_train})", "participation"
        )
        self.fraction_evaluate = fraction_evaluate
        self.min_train_nodes = min_train_nodes
        self.min_evaluate_nodes = min_evaluate_nodes
        self.min_available_nodes = min_available_nodes
        self.weighted_by_key = weighted_by_key
        self.arrayrecord_key = arrayrecord_key
        self.configrecord_key = configrecord_key
        if evaluate not in ("sums", "per-client"):
            raise ValueError(f"evaluate is {evaluate!r}: write 'sums' or 'per-client'")
        self.evaluate = evaluate
        self.seed = seed
        self.key = root(seed)
        self.server_side = server or ServerSide()
        self.handling = handling or Handling()
        self.secure = secure
        if secure is not None:
            check_secure(secure, self.method, self.server_side, self.handling, fraction_evaluate)
            check_cohorts(secure, self.participation)
        self._private = is_private(self.method)
        # Clients know the seed, and who takes part must be hidden where privacy counts on it.
        self._cohorts = self.key.fold(secrets.randbits(64)) if self._private else self.key
        if self._private and self.handling.guard is not None:
            raise ValueError(
                f"{self.method}: a guard lets one client's update decide what becomes of the "
                "others', which no accounting allows; leave guard out (dp clips every update)"
            )
        headline = self.server_side.headline()
        records = records or Records()
        records = replace(records, facts={**records.facts, **guarantee_of(self.method)})
        self.journal = ServerJournal(records, str(self.method), seed, headline)

    def summary(self) -> None:
        """Log what the strategy is."""
        _log.info("\t├──> Method: %s", self.method)
        _log.info("\t├──> Sampling: %s, seed %d", self.participation, self.seed)
        _log.info("\t├──> Minimum replies: train (%d)", self.min_train_nodes)
        _log.info("\t└──> Minimum available nodes: %d", self.min_available_nodes)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run all rounds, or resume after the last round of a checkpoint.

        Args:
            grid: Flower's way to the nodes.
            initial_arrays: the first model.
            num_rounds: how many rounds there are.
            timeout: seconds that a round waits for replies.
            train_config: what clients are told beside the model.
            evaluate_config: the same for evaluation.
            evaluate_fn: tests the scored model on the server.
        """
        _log.info("Starting %s strategy:", type(self).__name__)
        _log.info("\t├── Number of rounds: %d", num_rounds)
        self.summary()
        train = train_config or ConfigRecord()
        evaluate = evaluate_config or ConfigRecord()
        self._timeout = timeout
        with self.journal.alone():
            self._begin(grid, initial_arrays, num_rounds, train)
            result = Result()
            try:
                self._run(grid, num_rounds, train, evaluate, evaluate_fn, result)
            except (NothingMerged, TooFewNodes) as error:
                self._finish(result, str(error))
                raise
            self._finish(result)
            return result

    def _run(
        self,
        grid: Grid,
        rounds: int,
        train: ConfigRecord,
        evaluate: ConfigRecord,
        evaluate_fn: EvaluateFn | None,
        result: Result,
    ) -> None:
        """Run the rounds that are left, and fill in the result."""
        arrays = self._arrays(self._server.send)
        result.arrays = self._scored(arrays)
        if evaluate_fn is not None and self._server.round == 0:
            first = evaluate_fn(0, result.arrays)
            _log.info("Initial global evaluation results: %s", first)
            if first is not None:
                result.evaluate_metrics_serverapp[0] = first
        for now in range(self._server.round + 1, rounds + 1):
            began = time.perf_counter()
            _log.info("")
            _log.info("[ROUND %s/%s]", now, rounds)
            messages = list(self.configure_train(now, arrays, train, grid))
            arrays, metrics = self.aggregate_train(now, self._cohort.replies(messages))
            self._check_merged()
            if metrics is not None:
                _log.info("\t└──> Aggregated MetricRecord: %s", metrics)
                result.train_metrics_clientapp[now] = metrics
            result.arrays = self._scored(arrays)
            record = self._examine(self._record, grid, evaluate, evaluate_fn, result)
            record = replace(record, seconds=time.perf_counter() - began)
            self.journal.append_audited(record, self._audited)
            self.journal.checkpoint(self._server, last=now == rounds)
        # Of a private method, a round in which chance drew nobody adds its noise all the same.
        changed = any(record.update_norm for record in self.journal.records)
        if self.journal.records and not changed and not self.journal.merged.any():
            known = "; ".join(why for why, _ in self.journal.refused.most_common(3))
            why = known or self._cohort.reasons() or "the log says why"
            raise NothingMerged(f"no round of {rounds} merged a reply: {why}")

    def _check_merged(self) -> None:
        """Stop a run that learns nothing. Its last round is noted, and repeated after a restart.

        It learns nothing if no round was ever merged and this one's merge fails or all of its
        clients are refused, or if the merges of many rounds running fail.
        """
        round = self._record.round
        learnt = bool(self.journal.merged.any())
        running = [self._record, *reversed(self.journal.records)]
        failed = sum(1 for _ in takewhile(merge_refused, running))
        if failed and (not learnt or failed >= _MOST_FAILED):
            why = f"the merge failed, for no single client's fault: {self._policy.failed}"
        elif not learnt and self._cohort.hopeless(()):
            why = f"all replies were refused: {self._cohort.reasons()}"
        else:
            return
        before = f"{failed} rounds running" if learnt else "no round was merged before"
        self.journal.append_audited(self._record, self._audited)
        raise NothingMerged(
            f"round {round} ({before}): {why}; correct this and start the run again"
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the cohort and say what each client is sent."""
        asked_for = dict(self.participation.arguments).get("clients", 1)
        online = self._clients.wait(max(self.min_available_nodes, asked_for, 1))
        able = np.array(sorted(online))
        drawn = draw_cohort(self.participation, able, self._cohorts, server_round - 1)
        _log.info("configure_train: Sampled %s nodes (out of %s)", len(drawn), len(online))
        self._began = time.perf_counter()
        request = probe_of(self._setup, self._server, drawn)
        probe = None
        if request is not None:
            drawn, probe = self._probed(request, online, arrays)
        launch = begin_round(self._setup, self._server, drawn, StatesOnClients(), probe)
        self._launch = launch
        # Clients that are asked in place of others were not drawn: no accounting allows that.
        least = 0 if self._private else min(self.min_train_nodes, len(launch.cohort))
        common: dict[str, Any] = dict(
            round=server_round,
            clients=self._clients,
            tally=self.journal.refused,
            content=content_of(
                {self.arrayrecord_key: arrays, self.configrecord_key: config},
                server_round,
                launch.plan,
                launch.sent.shared,
                {"method": str(self.method), "name": self.journal.name, "seed": self.seed},
            ),
            merged=self.journal.merged,
            asked={client: online[client] for client in launch.cohort.tolist()},
            least=least,
            timeout=self._timeout,
            patience=self.handling.patience,
            votes=not self._private,
        )
        if self.secure is None:
            collector = Collector(
                self._codec,
                launch.sent.round,
                self._bounds(launch.plan),
                self.weighted_by_key,
                len(self.method.rules()),
                self._streams(len(launch.cohort)),
                "losses" in needs_of(self.method),
            )
            self._cohort = Cohort(collector=collector, **common)
        else:
            self._cohort = self._secure_cohort(self.secure, launch, common)
        self._cohort.name_late()
        return self._cohort.messages(launch.cohort.tolist())

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, MetricRecord | None]:
        """Check replies one by one, then merge what is left; returns what clients start from."""
        cohort = self._cohort
        cohort.collect(replies)
        failures = len(cohort.asked) - cohort.count
        _log.info("aggregate_train: Received %s results and %s failures", cohort.count, failures)
        gathered = None
        counted: frozenset[int] = frozenset()
        merged: dict[int, MergedReply] = {}
        bounded: list[Refusal] = []
        taken = cohort.collected(self._server.send)
        if taken is not None:
            gathered, excess = gathered_of(taken, self._server.send, self.handling.guard)
            counted = cohort.collector.counted - excess.dropped
            for client, why in excess.far:
                cohort.refuse(client, cohort.asked[client], why)
            for client, why in excess.heavy:
                _log.warning("round %d: client %d: %s", server_round, client, why)
                bounded.append(self._clients.refusal(cohort.asked[client], why))
            if self.journal.folder is not None:
                keys = {client: self._clients.key(node) for client, node in cohort.asked.items()}
                merged = merged_replies(
                    cohort.collector, counted, gathered.replies, self._server.send, keys
                )
        seconds = time.perf_counter() - self._began
        returned = Returned(gathered, cohort.traffic(), seconds)
        self._server, self._record = end_round(self._setup, self._server, self._launch, returned)
        del self._launch  # it may hold a gradient of every client
        for client, why in self._policy.blamed:
            cohort.refuse(client, cohort.asked[client], why)
        self._record = replace(self._record, refused=cohort.refused)
        if isinstance(cohort, SecureCohort):
            noted = cohort.notes(self._codec.layout.size)
            self._record = replace(self._record, notes={**self._record.notes, **noted})
        if gathered is not None and not merge_refused(self._record):
            spoilt = {client for client, _ in self._policy.blamed}
            self.journal.mark_merged(counted - spoilt, server_round)
            merged = {client: reply for client, reply in merged.items() if client not in spoilt}
        else:
            merged = {}
        refused = [*self._clients.refusals(), *cohort.refusals]
        self._audited = AuditedRound(
            server_round,
            sorted(cohort.asked),
            list(merged.values()),
            [*bounded, *(r for r in refused if r.client in merged)],
            [r for r in refused if r.client not in merged],
        )
        spent = self._record.seconds_merge
        _log.info("\t├──> Merged by %s in %.3f s", self.method, spent)
        loss = self._record.train_loss
        metrics = None
        if loss is not None and math.isfinite(loss):
            metrics = MetricRecord({"train_loss": loss})
        return self._arrays(self._server.send), metrics

    def _sampling(self, clients: int) -> Sampling:
        """Return how cohorts are drawn; who is online is no draw that privacy could count on."""
        drawn = sampling_of(self.participation, np.arange(clients), self._cohorts)
        return drawn if drawn.kind == "poisson" else drawn._replace(kind="other")

    def _bounds(self, plan: Plan) -> Bounds:
        """Return what replies to a round may say."""
        most = self.handling.most_bytes
        if most is None:
            most = reply_bytes(self._codec.model_bytes, len(self.method.rules()))
        context = self._context
        rows = self.handling.most_rows
        return Bounds(plan, context.batch, context.effective_steps, rows, most)

    def _secure_cohort(
        self, secure: Secure, launch: Launch, common: dict[str, Any]
    ) -> SecureCohort:
        """Return a cohort whose replies are added up masked."""
        session = session_of(
            secure,
            self.method,
            self.server_side,
            run=self.journal.name,
            round=launch.sent.round + 1,
            attempt=self._attempt,
            cohort=len(launch.cohort),
            statistics=self._codec.statistics.size,
        )
        size = size_of(session, self._codec.layout.size, self._codec.statistics.size)
        protocol = ServerProtocol(session, size, secure.neighbours)
        return SecureCohort(
            collector=MaskedCollector(protocol, launch.sent.round),
            protocol=protocol,
            buffers=launch.sent.buffers,
            statistics=self._codec.statistics,
            **common,
        )

    def _probed(
        self, request: ProbeRequest, online: Mapping[int, int], arrays: ArrayRecord
    ) -> tuple[np.ndarray, Probe]:
        """Ask a cohort for its gradients. Clients that send none are left out of the round."""
        nodes = {client: online[client] for client in request.cohort.tolist()}
        least = min(self.min_train_nodes, len(nodes))
        clients, probe = gather_gradients(
            self._clients,
            nodes,
            arrays,
            request.sent.vector,
            self._timeout,
            least,
            self.handling.guard,
        )
        return np.array(clients, dtype=np.int64), probe

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let clients evaluate the scored model on data of their own."""
        if self.fraction_evaluate == 0:
            return []
        online = self._clients.online()
        wanted = max(int(self.fraction_evaluate * len(online)), self.min_evaluate_nodes)
        size = min(wanted, len(online))
        draws = self.key.fold("evaluate", server_round - 1).numpy()
        chosen = draws.choice(sorted(online), size, replace=False).tolist() if size else []
        _log.info("configure_evaluate: Sampled %s nodes (out of %s)", size, len(online))
        settings = ConfigRecord({**config, "server-round": server_round})
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: settings})
        kind = MessageType.EVALUATE
        ttl = 2 * self._timeout
        frozen = self._clients.frozen
        nodes = [online[client] for client in chosen]
        return [Message(frozen.content_for(n, content), n, kind, ttl=ttl) for n in nodes]

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the mean of what clients measured, weighted by their samples."""
        task = self.server_side.known_task()
        found = evaluations(
            replies,
            self.weighted_by_key,
            most_rows=self.handling.most_rows,
            ratios=[name for name in task.metrics if _is_ratio(name)],
            who=self._clients.who,
            refuse=self._clients.refuse,
        )
        guard = self.handling.guard
        found, heavy = bounded(found, None if guard is None else guard.weight)
        for node, why in heavy:
            _log.warning("round %d: %s: %s", server_round, self._clients.who(node), why)
        shortened = [self._clients.refusal(node, why) for node, why in heavy]
        self._audited = replace(
            self._audited,
            bounded=[*self._audited.bounded, *shortened],
            refused=[*self._audited.refused, *self._clients.refusals()],
        )
        means = mean_of(found)
        headlines = self.server_side.client_headlines()
        if self.evaluate == "sums":
            columns = sums_only(means, headlines)
        else:
            online = self._clients.online()
            client_of = {node: client for client, node in online.items()}
            columns, table = per_client(found, headlines, client_of)
            self.journal.keep_clients(table)
        self._record = replace(self._record, metrics={**self._record.metrics, **columns})
        return means

    def _begin(
        self, grid: Grid, arrays: ArrayRecord, rounds: int, train_config: ConfigRecord
    ) -> None:
        """Wait for clients, set up the method, and restore a checkpoint if there is one."""
        here = self.server_side
        self._codec = Codec.of(arrays, here.network)
        here.check_type(self._codec.dtype)
        vector, buffers = (part.to(here.device) for part in self._codec.read(arrays))
        check_private(self.method, buffers.numel() > 0 and here.statistics.policy != "keep")
        known = here.context or Context(
            self._codec.layout, 0, 0, self.key, batch=here.batch, proxy=here.proxy_rows
        )
        check_task(self.method, here.known_task())
        if here.network is not None:
            check_network(self.method, here.network, "the network of ServerSide(net=...)")
        needs = needs_of(self.method)
        if "proxy" in needs and known.proxy is None:
            raise ValueError(
                f"{self.method} learns from data on the server: give server=ServerSide(proxy=...)"
            )
        counted = here.counts if "class_counts" in needs else None
        self._clients = Clients(
            Mailbox(grid),
            counted == "plain",
            self.handling.patience,
            total=known.clients,
            before=self.journal.clients(),
            frozen=FrozenParts.of(self._codec),
            classes=here.known_classes(),
            most_rows=self.handling.most_rows,
            seats=self.journal.seats() if self.handling.bind_keys else None,
            secure=self.secure is not None,
        )
        self._clients.wait(max(self.min_available_nodes, 1))
        guard = self.handling.guard
        counts = None
        if counted == "plain":
            counts = self._clients.class_counts(None if guard is None else guard.weight)
        private = None
        if counted == "private":
            private = gather_private(self._clients, self.key, here.known_classes(), self.method)
        self._context = replace(
            known,
            layout=self._codec.layout,
            clients=self._clients.total,
            holders=self._clients.holders(),
            rounds=rounds,
            key=self.key,
            examples=self._clients.mean_examples(),
            class_counts=counts,
            private_counts=private,
            sampling=self._sampling(self._clients.total) if self._private else known.sampling,
            real=True,
            archive=self.journal.open_archive(),
            net=here.network,
        )
        self._policy = Lenient()
        self._setup = RoundSetup(
            method=self.method,
            context=self._context,
            schedule=here.schedule or _constant(train_config),
            key=self.key,
            policy=self._policy,
            scoring=Scoring(rounds, here.test_rows),
            statistics=here.statistics,
        )
        fresh = Server(0, vector, vector, buffers, self.method.init(vector, self._context))
        if self.secure is not None:
            sent = self.method.broadcast(fresh.state, vector, self._context)
            check_noise(self.secure, self.method.rules(), sent)
        self._server = self.journal.restored(fresh, self._clients.total)
        if self.secure is not None:
            folder = self.journal.folder
            self._attempt = next_attempt(None if folder is None else folder.path)

    def _arrays(self, vector: Tensor) -> ArrayRecord:
        return self._codec.write(vector, self._server.buffers)

    def _scored(self, sent: ArrayRecord) -> ArrayRecord:
        """Return the scored model as arrays; `sent` if it is the same model."""
        score = self._server.score
        return sent if score is self._server.send else self._arrays(score)

    def _streams(self, cohort: int) -> Weighting | None:
        """Return how replies are averaged as they arrive, or None to store them all."""
        large = cohort * self._codec.vector_bytes > _STREAM_ABOVE
        wanted = large if self.handling.stream == "auto" else self.handling.stream
        if self.handling.guard is not None or not wanted:
            return None
        return self.method.streams()

    def _examine(
        self,
        record: RoundRecord,
        grid: Grid,
        config: ConfigRecord,
        evaluate_fn: EvaluateFn | None,
        result: Result,
    ) -> RoundRecord:
        """Let clients, then the user's function, evaluate the scored model."""
        began = time.perf_counter()
        now = record.round
        measured = None
        tested = None
        messages = list(self.configure_evaluate(now, result.arrays, config, grid))
        if messages:
            self._record = record
            measured = self.aggregate_evaluate(now, self._evaluations(messages))
            record = self._record
        if evaluate_fn is not None:
            tested = evaluate_fn(now, result.arrays)
        record = entered(record, result, measured, tested)
        spent = record.seconds_evaluate + time.perf_counter() - began
        return replace(record, seconds_evaluate=spent)

    def _evaluations(self, messages: list[Message]) -> Iterator[Message]:
        """Yield the clients' evaluations, and log who sends none."""
        sent = self._clients.send(messages)
        for arrived in self._clients.replies(sent, self._timeout):
            if isinstance(arrived, GaveUp):
                unheard(arrived.node, arrived.reason)
            else:
                yield arrived

    def _finish(self, result: Result, failed: str | None = None) -> None:
        model = result.arrays.to_torch_state_dict()
        status = "finished" if failed is None else "failed"
        summary = self.journal.finish(model, status, failed)
        _log.info("")
        _log.info("Strategy execution %s in %.2fs", summary["status"], summary["seconds"])
        if failed is not None:
            _log.error("\t%s", failed)
        for reason, times in self.journal.refused.items():
            _log.info("\trefused %d times: %s", times, reason)
        for line in str(result).splitlines():
            _log.info("\t%s", line)


def _constant(train_config: ConfigRecord) -> Callable[[int], Plan]:
    """Return the schedule of an app that gives none: its learning rate, and one epoch."""
    lr = train_config.get("lr", 0.0)
    plan = Plan(float(lr) if isinstance(lr, int | float) else 0.0, 1)
    return lambda round: plan


def _is_ratio(metric: str) -> bool:
    """Whether a metric is from 0 to 1, shown in percent."""
    known: Metric = parse(metric, "metric")
    return known.unit == "%"

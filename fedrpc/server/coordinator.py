"""The run: set-up, rounds, evaluation, checkpoints and the summary; it knows no method by name, and no gRPC."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors.torch import save as save_tensors

from fedrpc import clock, log
from fedrpc.checkout import find_commit
from fedrpc.device import describe
from fedrpc.errors import Diverged, QuorumError
from fedrpc.files import write_checksums, write_durably
from fedrpc.methods.builtin import EVALUATION, LEDGER, Candidate, ClientEvaluation
from fedrpc.methods.runtime import SETUP_ROUND
from fedrpc.metrics.records import RecordsFile
from fedrpc.metrics.timing import TIMING_FILE, summarise_time
from fedrpc.privacy import summary as privacy
from fedrpc.privacy.accountant import describe_weak_delta
from fedrpc.privacy.unaccounted import describe_unaccounted, find_unaccounted
from fedrpc.seeds import derive, seed_torch
from fedrpc.server import evaluation, summary
from fedrpc.server.attendance import EVERYBODY, Attendance, plan_attendance
from fedrpc.server.checkpoint import Checkpoint, CheckpointFolder
from fedrpc.server.code_changes import describe_code
from fedrpc.server.formula import compare_with_formula
from fedrpc.server.overlap import FEATURES, TEST, EvaluationThread, FinishedRound
from fedrpc.server.roster import Roster
from fedrpc.server.rounds import ServerContext, ServerRound
from fedrpc.server.selection import select_cohort
from fedrpc.server.timing import StageClock
from fedrpc.wire import ledger, stored
from fedrpc.wire.codec import check_finite
from fedrpc.wire.kinds import Kind
from fedrpc.wire.ledger import LedgerAnswer, LedgerFile, LedgerQuestion
from fedrpc.wire.message import Tensors, flatten
from fedrpc.wire.tcpinfo import Meter

# What does not change any more; privacy rows may come late.
_FINAL = ("partition.json", "model.safetensors", "records.jsonl", "ledger.jsonl", TIMING_FILE)
_REMIND_S = 60.0  # between two lines about clients that have not joined
_QUIET_S = 0.06  # longer than a delayed TCP acknowledgement
_MORE_ROWS = 1000  # of a client's ledger, of which the server saw nothing


class Coordinator:
    """Runs one run from its last checkpoint to its end.

    Args:
        server: What the rounds share.
        roster: The clients that have joined.
        out: The run directory.
        book: The server's ledger of bytes.
        meter: The kernel's counters.
        beside: One thread for evaluations beside rounds; a new one when None.
        has_wire: Whether clients come over a network; if not, there are no kernel's bytes, and records say so.
    """

    def __init__(
        self,
        server: ServerContext,
        roster: Roster,
        out: Path,
        book: LedgerFile,
        meter: Meter,
        beside: ThreadPoolExecutor | None = None,
        *,
        has_wire: bool = True,
    ) -> None:
        self.has_wire = has_wire
        self._server, self._roster, self._out, self._book, self._meter = server, roster, out, book, meter
        self._problem, self._config = server.problem, server.problem.config
        self._method = server.problem.method
        self._checkpoints = CheckpointFolder(out / "checkpoints", server.run_id)
        self._log = log.get("coordinator")
        self._evaluation = EvaluationThread(evaluation.Evaluator(server.problem, server.device), server.device, beside)
        self._pending: asyncio.Task[None] | None = None  # the evaluation of the last durable round
        self._clock = StageClock()
        self.round = SETUP_ROUND  # under which traffic outside tasks is booked
        self._was_resumed = False
        self._kernel_before = [0, 0]
        self._seconds_before = 0.0
        self._commit = find_commit()
        self._devices = [describe(server.device)]  # that this run was computed on, the last one last
        self._aggregation: dict[str, Any] = {}  # the aggregators' states, by name
        self._started = time.monotonic()
        self._warning = ""  # about the run's privacy settings
        self._num_rounds = self._config.rounds  # fewer when a budget ends the run before
        self._stopped: dict[str, int] | None = None  # by a budget: what it was, and what was spent

    async def run(self) -> dict[str, Any]:
        """Runs all rounds and returns the summary."""
        try:
            async with asyncio.TaskGroup() as self._group:  # an evaluation that fails beside a round ends the round
                return await self._run()
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            self._evaluation.close()

    async def _run(self) -> dict[str, Any]:
        state, first, steps, unfinished = self._resume()
        if unfinished:
            await self._evaluation.load(self._method.model(state))
            self._write(unfinished.complete(await self._evaluation.evaluate_alone(unfinished.owed)))
        self._check_delta()
        if advice := summary.get_advice(self._method, self._problem.env):
            self._log.warning("training_unsuitable", why=advice)
        await self._wait_for_clients()
        self._clock.start()
        if first == SETUP_ROUND:
            state = await self._setup(state, steps)
            first, steps = 0, {}
        for index in range(first, self._config.rounds):
            if self._stopped:
                break
            state = await self._round(state, index, steps)
            steps = {}
        return await self._finish(state)

    # Before the first round

    def _check_delta(self) -> None:
        if not self._problem.expects_cost:
            return
        self._warning = describe_weak_delta(self._config.privacy.delta, self._problem.env.num_examples())
        if self._warning:
            self._log.warning("weak_delta", why=self._warning)

    def _resume(self) -> tuple[Any, int, dict[str, int], FinishedRound | None]:
        """The state to resume from, the next stage, its steps that are done, and the round to evaluate first."""
        self._seed_torch(SETUP_ROUND - 1)
        state = self._method.init(self._problem.env)
        self._aggregation = {layer.name: layer.init(self._problem.env) for layer in self._problem.aggregators}
        kept = self._checkpoints.load()
        done = SETUP_ROUND - 1 if kept is None else kept.round - (1 if kept.steps is not None else 0)
        # Lines that owe an evaluation are written once they are complete; a crash may have come just after that.
        last = (kept.round, [] if kept.owed else kept.records) if kept else (done, [])
        self._records = RecordsFile(self._out / "records.jsonl", *last)
        if kept or self._book.num_resumed:
            self._take_up_kernel(kept.kernel if kept else [0, 0])
        if not self._book.num_resumed:  # nothing of the next round is booked, so it has no answer yet
            self._server.timing.drop_from(done + 1)
        if kept is None:
            return state, SETUP_ROUND, {}, None
        self._seconds_before = kept.seconds
        self._compare_device(kept.devices)
        if any("stopped" in record for record in kept.records):
            self._stop_if_spent(kept.round)  # a kill may have come before the summary
        self._server.mailbox.durable = kept.point
        self._log.info("resumed", after_round=done)
        if done >= 0:
            self._server.progress("resumed", {"round": done})
        for layer, data in kept.aggregation.items():
            self._aggregation[layer] = stored.loads(type(self._aggregation[layer]), data)
        unfinished = None
        if kept.owed:
            finished, evaluated = kept.records
            unfinished = FinishedRound(finished, evaluated, kept.owed, self._read_traffic())
        return stored.loads(type(state), kept.state), done + 1, kept.steps or {}, unfinished

    def _compare_device(self, before: Sequence[dict[str, Any]]) -> None:
        """Notes when a run goes on with another device or PyTorch: the same model is promised for one of each."""
        now = self._devices[-1]
        if before and before[-1] != now:
            self._log.warning("device_changed", before=before[-1], now=now, promised="equal models on one device")
        self._devices = [device for device in before if device != now] + [now]

    def _take_up_kernel(self, checkpointed: Sequence[int]) -> None:
        """Counts the kernel's bytes on from the last ones that were noted, and not below the messages in them."""
        messages = (self._book.message_bytes["down"], self._book.message_bytes["up"])
        self._kernel_before = [max(sizes) for sizes in zip(checkpointed, self._book.kernel, messages, strict=True)]
        self._meter.note = "the run was resumed: kernel bytes of up to a second before each stop may not be counted"
        self._was_resumed = True

    @property
    def place(self) -> tuple[int, str, str]:
        """Where the run is: the round, the phase, and what the server does or waits for."""
        return self.round, self._clock.phase, self._clock.part

    def note_kernel(self) -> None:
        """Notes the kernel's bytes so far in the ledger's journal; to be called about every second."""
        self._book.note_kernel(*self._kernel())

    def _seed_torch(self, index: int) -> None:
        """Seeds torch's global stream, which the server half may use, by the stage and the durable point alone."""
        point = self._server.mailbox.durable
        seed_torch(derive(self._config.seed, "torch", "server", index, point), self._server.device)

    async def _wait_for_clients(self) -> None:
        self._server.progress("waiting", {"of": self._config.clients})
        await self._wait_for(1, self._config.limits.queue_s)
        await self._wait_for(self._config.clients, self._config.limits.join_s)
        absent = self._roster.list_absent()
        here = self._config.clients - len(absent)
        if (absent and here < self._config.limits.quorum * self._config.clients) or not here:
            raise QuorumError(
                f"{here} of {self._config.clients} clients joined within {self._config.limits.join_s:g} s; "
                f"missing {', '.join(map(str, absent[:10]))}{' ...' if len(absent) > 10 else ''}"
            )
        if absent:
            self._log.warning("starting_without", clients=absent[:20], num_absent=len(absent))

    async def _wait_for(self, number: int, timeout_s: float) -> None:
        """Waits for so many clients, and says from time to time how many have joined."""
        give_up = clock.monotonic() + timeout_s
        while (left := give_up - clock.monotonic()) > 0:
            self._log.info("waiting_for_clients", joined=len(self._roster), of=self._config.clients)
            if await self._roster.wait_for(number, min(left, _REMIND_S)):
                return

    # Rounds

    def _open_stage(
        self,
        index: int,
        cohort: Sequence[int],
        steps: Mapping[str, int] | None = None,
        attendance: Attendance = EVERYBODY,
    ) -> ServerRound:
        """A round object for a stage of the method; with `steps` it can have durable points within it."""
        self.round = index
        self._clock.enter(ledger.SESSION, "aggregate")
        self._seed_torch(index)
        return ServerRound(
            self._server,
            index,
            cohort,
            self._config.limits.quorum,
            aggregation=self._aggregation,
            attempts=self._book.find_next_attempts(index),
            attendance=attendance,
            steps=steps,
            save=None if steps is None else self._save_within,
            clock=self._clock,
        )

    def _open_own_stage(self, index: int, cohort: Sequence[int]) -> ServerRound:
        """A round for the coordinator's own questions, which have no quorum."""
        self.round = index
        attempts = self._book.find_next_attempts(index)
        return ServerRound(self._server, index, cohort, quorum=0.0, attempts=attempts, clock=self._clock)

    def select_cohort(self, index: int) -> list[int]:
        """The clients asked in a round: the same for every method with the same seed."""
        return select_cohort(self._config, self._problem.env, index)

    async def _setup(self, state: Any, steps: Mapping[str, int]) -> Any:
        records: list[dict[str, Any]] = []
        if type(self._method).overrides("setup"):
            rnd = self._open_stage(SETUP_ROUND, range(self._config.clients), steps)
            started = time.monotonic()
            state = await self._method.setup(state, rnd)
            await self._check_state(state, rnd)
            self._aggregation = rnd.aggregation
            rnd.close()
            seconds = time.monotonic() - started
            record = {"event": "setup_finished", "round": SETUP_ROUND, "seconds": seconds}
            records = [record | rnd.recorded | self._describe_stage(rnd)]
        await self._make_durable(state, SETUP_ROUND, records)
        return state

    async def _round(self, state: Any, index: int, steps: Mapping[str, int]) -> Any:
        started = time.monotonic()
        attendance = plan_attendance(self._config, index)
        rnd = self._open_stage(index, self.select_cohort(index), steps, attendance)
        state = await self._method.round(state, rnd)
        await self._check_state(state, rnd)
        self._aggregation = rnd.aggregation
        rnd.close()
        record = {"event": "round_finished", "round": index, "num_clients": len(rnd.answered)}
        record |= rnd.recorded | self._describe_stage(rnd)
        if not rnd.answered:
            record["unanswered"] = next(iter(rnd.missing.values()), "")
        self._clock.enter(ledger.EVALUATE, "evaluate")
        self._stop_if_spent(index)
        record |= {"stopped": self._stopped} if self._stopped else {}
        weights, last = self._method.model(state), index == self._num_rounds - 1
        evaluated = {"event": "evaluated", "round": index} | await self._evaluate_on_clients(weights, index, last=last)
        self._clock.enter(ledger.EVALUATE, "evaluate")
        await self._settle()  # the evaluation holds one model at a time
        found = FinishedRound(record, evaluated, self._list_owed(index, last=last), {})
        if found.owed:
            await self._evaluation.load(weights)
        # The last round has no next one to overlap with, and a longer run resumes from its checkpoint with whole lines.
        if last or not self._evaluation.may_overlap(found.owed):
            found = found.complete(await self._evaluation.evaluate_alone(found.owed))
        found.finished["seconds"] = time.monotonic() - started
        await self._make_durable(state, index, found.lines, found.owed)
        found = dataclasses.replace(found, traffic=self._read_traffic())
        if found.owed:
            self._pending = self._group.create_task(self._evaluate_beside(found))
        else:
            self._show(found)
        return state

    def _stop_if_spent(self, index: int) -> None:
        """Makes a round the last one when the method's own messages have passed the budget."""
        budget = self._config.limits.byte_budget
        if budget is not None and self._book.own_bytes > budget and index + 1 < self._config.rounds:
            self._num_rounds = index + 1
            self._stopped = {"byte_budget": budget, "message_bytes": self._book.own_bytes}
            self._log.info("byte_budget_spent", round=index, **self._stopped)

    def _describe_stage(self, rnd: ServerRound) -> dict[str, Any]:
        """Who took part, and for how many rounds the run was planned then: noise for a target epsilon follows it.

        Links and devices, too, can change when a run is resumed.
        """
        found = {"participation": rnd.describe_participation(), "planned_rounds": self._config.rounds}
        found |= {"device": self._devices[-1]} if len(self._devices) > 1 else {}
        found |= {} if self.has_wire else {"in_process": True}
        return found | ({"link": self._config.link} if self._config.link else {})

    async def _evaluate_beside(self, found: FinishedRound) -> None:
        """Evaluates a durable round while the next one runs, and writes its lines."""
        started = time.monotonic()
        self._write(found.complete(await self._evaluation.evaluate(found.owed)))
        self._clock.note_beside(ledger.EVALUATE, time.monotonic() - started)

    async def _settle(self) -> None:
        """Waits until the lines of every durable round are written."""
        if self._pending:
            await self._pending
            self._pending = None

    def _write(self, found: FinishedRound) -> None:
        self._records.add(found.lines)
        self._show(found)

    def _show(self, found: FinishedRound) -> None:
        record = found.finished
        shown = {name: record[name] for name in ("accuracy", "loss", "num_clients", "seconds") if name in record}
        self._log.info("round_finished", round=record["round"], **shown)
        self._server.progress("round_finished", record | found.traffic)

    def _read_traffic(self) -> dict[str, int]:
        return {f"bytes_{direction}": size for direction, size in self._book.message_bytes.items()}

    async def _make_durable(
        self, state: Any, index: int, records: list[dict[str, Any]], owed: Sequence[str] = ()
    ) -> None:
        """Writes state and records to disk, then reports the round durable: in this order.

        Args:
            owed: What the server has still to evaluate; then the checkpoint alone has the records so far.
        """
        self._write_timing(index)
        await self._checkpoint(state, self._aggregation, index, records, None, owed)
        self._book.end_round()
        self.round = index + 1  # traffic between rounds belongs to the next one, since written rows are not rewritten
        if not owed:
            self._records.add(records)
        self._reach_durable_point()

    async def _check_state(self, state: Any, rnd: ServerRound) -> None:
        """Raises Diverged when a stage gave a state with NaN or infinity: it must not become a checkpoint."""
        layers = [layer for layer in rnd.aggregation.values() if layer is not None]
        try:
            for part in (part for found in (state, *layers) for part in flatten(found)):
                if part.kind != Kind.SCALARS:
                    await self._server.off_loop(check_finite, part.name, part.tensors)
        except Diverged as error:
            raise Diverged(
                f"round {rnd.index}: after aggregation {error}. The checkpoint of the round before is kept; lower "
                "train.lr (or the server's rate), and start in another --out"
            ) from None

    async def _save_within(self, rnd: ServerRound, state: Any) -> None:
        await self._check_state(state, rnd)
        phase = self._clock.phase
        self._write_timing(rnd.index)
        await self._checkpoint(state, rnd.aggregation, rnd.index, [], dict(rnd.steps))
        self._book.forget_tasks()
        self._reach_durable_point()
        self._seed_torch(rnd.index)
        self._clock.enter(phase, "aggregate")

    def _write_timing(self, index: int) -> None:
        """Writes where the time since the last checkpoint went, before the next one: a kill may come in between."""
        self._clock.enter(ledger.SESSION, "checkpoint")
        self._server.timing.write_phases(self._clock.take(index, self._server.mailbox.durable))

    async def _checkpoint(
        self,
        state: Any,
        aggregation: Mapping[str, Any],
        index: int,
        records: list[dict[str, Any]],
        steps: dict[str, int] | None,
        owed: Sequence[str] = (),
    ) -> None:
        await self._settle()  # a checkpoint can name one unevaluated round: its own
        point, kernel = self._server.mailbox.durable + 1, list(self._kernel())
        data = await self._server.off_loop(stored.dumps, state)
        layers = {
            name: await self._server.off_loop(stored.dumps, layer)
            for name, layer in aggregation.items()
            if layer is not None
        }
        kept = Checkpoint(
            point, index, steps, data, layers, records, kernel, self._seconds(), list(owed), self._devices
        )
        await self._server.off_loop(self._checkpoints.save, kept)

    def _reach_durable_point(self) -> None:
        self._server.mailbox.durable += 1
        self._server.spool.clear(self._server.mailbox.durable)

    def _kernel(self) -> tuple[int, int]:
        sent, received = self._meter.read()
        return sent + self._kernel_before[0], received + self._kernel_before[1]

    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._started

    # Evaluation

    def _list_owed(self, index: int, *, last: bool) -> list[str]:
        """What the server itself evaluates of a round."""
        every = {TEST: self._config.eval_every, FEATURES: self._config.feature_eval_every}
        return [what for what, rounds in every.items() if last or (index + 1) % rounds == 0]

    async def _evaluate_on_clients(self, weights: Tensors, index: int, *, last: bool) -> dict[str, Any]:
        """Has the clients evaluate when it is due, and returns what belongs into the `evaluated` line.

        The next round waits for this: a client has one task at a time, so it would only start later, and the answers
        and bytes belong to this round's durable point.
        """
        if not self._config.local_test or not (last or (index + 1) % self._config.client_eval_every == 0):
            return {}
        return evaluation.summarise_clients(await self._ask_clients(weights, index))

    async def _ask_clients(self, weights: Tensors, index: int) -> dict[int, dict[str, int]]:
        rnd = self._open_own_stage(index, range(self._config.clients))

        def check_size(client: int, _: Candidate, answer: ClientEvaluation) -> None:
            size = len(self._problem.partition.indices[client]) - self._problem.num_examples[client]
            if answer.num_examples != size:
                raise ValueError(f"the client's test set has {size} examples, got a result on {answer.num_examples}")

        return {
            reply.client: {"correct": reply.body.num_correct, "of": reply.body.num_examples}
            async for reply in rnd.ask(EVALUATION, Candidate(weights), inspect=check_size)
        }

    # The end

    async def _finish(self, state: Any) -> dict[str, Any]:
        await self._settle()
        if type(self._method).overrides("finalize") and self._config.rounds:
            state = await self._finalize(state)
        self._write_timing(self._num_rounds)
        weights = self._method.model(state)
        check = await self._compare_ledgers()
        kernel = await self._await_quiet_kernel()  # the last receipts are on their way
        self._book.end_round()
        rows = self._book.read_all_rows()  # now, as ledger.jsonl has them: heartbeats go on
        self._server.progress("snapshot", {"monotonic": time.monotonic()} | kernel)
        # Off the event loop: privacy accountants are slow.
        result = await self._server.off_loop(self._summarise, weights, kernel, rows) | {"ledger_check": check}
        tensors = {name: tensor.contiguous().clone() for name, tensor in weights.items()}
        write_durably(self._out / "model.safetensors", save_tensors(tensors))
        self._records.close()
        text = (json.dumps(result, indent=1) + "\n").encode()
        write_checksums(self._out, _FINAL, {"summary.json": text})
        write_durably(self._out / "summary.json", text)
        return result

    async def _finalize(self, state: Any) -> Any:
        """Finalizes after the last round; the checkpoint stays before it, for a longer run to resume from."""
        index = self._num_rounds
        rnd = self._open_stage(index, range(self._config.clients))
        state = await self._method.finalize(state, rnd)
        await self._check_state(state, rnd)
        rnd.close()
        self._clock.enter(ledger.EVALUATE, "evaluate")
        weights = self._method.model(state)
        await self._evaluation.load(weights)
        evaluated = {"event": "evaluated", "round": index} | await self._evaluation.evaluate_alone([TEST, FEATURES])
        evaluated |= await self._evaluate_on_clients(weights, index, last=True)
        self._records.add([evaluated | {"final": True} | rnd.recorded | self._describe_stage(rnd)])
        return state

    async def _compare_ledgers(self) -> dict[str, Any]:
        ours = ledger.group_by_client(
            {key: sums for key, sums in self._book.read_all_rows().items() if key.phase != ledger.SESSION}
        )
        # Only those that had a task: the others have no rows to compare.
        asked = [session.client for session in self._roster if session.client in ours]
        rnd = self._open_own_stage(self._num_rounds, asked)
        sums = {"compared": 0, "differing": 0, "only_server": 0, "only_client": 0}
        # A new question each time, so that no answer from before a restart is reused.
        question = LedgerQuestion(f"what did you count? {uuid.uuid4().hex}")
        theirs: dict[int, ledger.Rows] = {}

        def parse(client: int, _: LedgerQuestion, answer: LedgerAnswer) -> None:
            theirs[client] = ledger.parse_rows(answer.rows, client, 2 * len(ours[client]) + _MORE_ROWS)

        async for reply in rnd.ask(LEDGER, question, inspect=parse):
            resumed = self._was_resumed
            interrupted = resumed or self._roster.has_rejoined(reply.client)
            mine, other = ours[reply.client], theirs.pop(reply.client)
            found = ledger.compare(mine, other, interrupted=interrupted, resumed=resumed)
            for name, value in found.items():
                sums[name] += value
        if sums["differing"]:
            self._log.error("ledgers_differ", rows=sums["differing"])
        return sums | {"clients": len(rnd.answered), "missing": len(rnd.missing)}

    async def _await_quiet_kernel(self) -> dict[str, int]:
        """Waits until no bytes move and every client has its stream, and returns the kernel's counters."""
        before = self._kernel()
        for _ in range(50):
            await asyncio.sleep(_QUIET_S)
            now = self._kernel()
            if now == before and self._roster.all_linked:
                break
            before = now
        return {"down": before[0], "up": before[1]}

    def _select_present(self, index: int) -> list[int]:
        """The cohort of a round without those that had dropped out of it."""
        gone = plan_attendance(self._config, index).gone
        return [client for client in self.select_cohort(index) if client not in gone]

    def _summarise(self, weights: Tensors, kernel: dict[str, int], rows: ledger.Rows) -> dict[str, Any]:
        cohorts = [self._select_present(index) for index in range(self._num_rounds)]
        shapes = summary.build_shapes(self._problem, weights, cohorts)
        cost, fedavg = summary.predict_cost(self._problem, shapes), summary.compute_fedavg_cost(self._problem, shapes)
        wireless = summary.describe_missing_wire(self._records.all(), has_wire=self.has_wire)
        note = wireless or self._meter.note
        sizes = summary.summarise_bytes(rows, cost, fedavg, None if wireless else kernel, note)
        return (
            summary.describe_run(self._config, self._server.run_id, self._num_rounds, self._commit)
            | {
                "stopped": self._stopped,
                "caveat": summary.get_caveat(self._method, self._problem.params),
                "accuracy": summary.summarise_accuracy(
                    self._records.all(), "validation" if self._config.validation else "test"
                ),
                "reported": summary.collect_reported(
                    summary.list_reported(self._method, self._problem.params), self._records.all()
                ),
                "unanswered": summary.describe_unanswered(self._records.all()),
                "privacy": self._summarise_privacy(rows),
                "seconds": self._seconds(),
                "time": summarise_time(self._server.timing.read()),
                "devices": self._devices,
                "client_devices": self._roster.count_devices(),
                "model_sha256": summary.hash_model(weights),
                "bytes": sizes,
                "formula": compare_with_formula(sizes, cost, self._records.all()),
                "exposure": summary.compute_exposure(rows, self._config.clients),
            }
            | describe_code(self._out, self._config)
            | ({"in_process": True} if wireless else {})
        )

    def _summarise_privacy(self, rows: ledger.Rows) -> dict[str, Any]:
        path, config = self._out / "privacy.jsonl", self._config.privacy
        unaccounted = find_unaccounted(rows.items(), privacy.read_rows(path))
        if unaccounted:
            self._log.warning("privacy_rows_missing", what=describe_unaccounted(unaccounted))
        stated = privacy.summarise(privacy.read_rows(path), config.delta, config.noise, unaccounted)
        return stated | ({"warning": self._warning} if self._warning else {})

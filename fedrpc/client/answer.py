"""Answers one task: decodes it, runs the method's client half, and commits the answer before it leaves."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import torch

from fedrpc.aggregation.aggregator import Aggregator, Update
from fedrpc.client.context import AnswerContext
from fedrpc.client.limits import OwnLimits
from fedrpc.client.machine import Machine
from fedrpc.client.store import ClientStore, Kept, Transaction
from fedrpc.client.transport import Task
from fedrpc.device import give_back_gpu_memory
from fedrpc.errors import MethodFailed, WireError
from fedrpc.methods.builtin import BUILTIN, LEDGER, Candidate, ClientEvaluation
from fedrpc.methods.phases import Phase
from fedrpc.metrics.evaluate import BATCH_SIZE, evaluate
from fedrpc.models.state import load
from fedrpc.privacy.ledger import list_releases
from fedrpc.problem import Problem
from fedrpc.process import give_back_memory
from fedrpc.seeds import seed_torch
from fedrpc.training.batches import RESIDENT
from fedrpc.wire.codec import Payload, decode, encode
from fedrpc.wire.envelope import Envelope
from fedrpc.wire.frames import check_name, serialise_file
from fedrpc.wire.ledger import EVALUATE, SESSION, LedgerAnswer, Rows, to_json
from fedrpc.wire.message import averaged_fields

_LONG_S = 0.3


class Answerer:
    """Answers tasks one at a time, in the training thread.

    Args:
        limits: The client's own; None for a client that has none and keeps no ledger of all runs.
        machine: What the client computes on; this one when None.
    """

    def __init__(
        self,
        problem: Problem,
        client: int,
        store: ClientStore,
        device: torch.device,
        limits: OwnLimits | None = None,
        machine: Machine | None = None,
    ) -> None:
        self._problem, self._client, self._store, self._device = problem, client, store, device
        self._limits, self._machine = limits, machine or Machine()
        self._data = problem.load_client_data(client)
        self._cache: dict[str, Any] = {}
        self.cpu_s = 0.0  # CPU time of the answers, most of it training

    def answer(self, task: Task, stop: threading.Event) -> Kept:
        """Answers a task; the same question again gives the same bytes again.

        Args:
            stop: Set when the server withdraws the task.
        """
        question = task.envelope
        if question.phase == SESSION:
            return report_ledger(task, self._store.read_ledger())
        kept = self._store.find_answer(check_name(question.task_id), question.digest)
        if kept is not None:
            return kept
        phase = self._phase(question.phase)
        message = decode(phase.down, question.parts, task.buffers)
        transaction = Transaction(self._store)
        context = self._context(question, transaction, stop)
        started, began_at = time.thread_time(), time.monotonic()
        body = self._body(phase, context, message)
        took = time.thread_time() - started
        self.cpu_s += took
        self._machine.finish_computing(time.monotonic() - began_at, stop)
        payload = _encode_answer(phase.name, body)  # checked before anything of it is committed
        reply = _build_reply(question, payload)
        where = {
            "client": self._client,
            "round": question.round,
            "phase": question.phase,
            "step": question.step,
            "task": question.task_id,
            "answer": payload.digest.hex(),
        }
        noise = self._problem.config.privacy.noise
        released = list_releases(payload.kinds, context.guarantees, where, noise, context.trained)
        if self._limits:
            self._limits.check(released)
            self._limits.book(released)
        kept = self._store.commit(reply, payload, transaction.writes, released)
        if took > _LONG_S:
            # A client is idle for most of a run, and must not hold its training's memory: 75 idle clients of a small
            # network held 140 MB each. Short answers come in quick succession, and are not worth it.
            del context, body, payload, message
            give_back_memory()
            RESIDENT.trim(self._device)
            give_back_gpu_memory(self._device)
        return kept

    def _phase(self, name: str) -> Phase[Any, Any]:
        if name in BUILTIN:
            return BUILTIN[name]
        half = self._problem.find_half(name)
        if half is None:
            method = self._problem.method
            raise WireError(f"{method.name} has no phase '{name}'; it has {', '.join(sorted(method.phases))}")
        return half.phases[name][0]

    def _context(self, question: Envelope, transaction: Transaction, stop: threading.Event) -> AnswerContext:
        context = AnswerContext(
            self._problem,
            self._data,
            self._client,
            question,
            device=self._device,
            store=transaction,
            stop=stop,
            spent=self._store.get_histories,
            afford=self._limits.check_cost if self._limits else lambda _: None,
            num_released=self._store.num_released(),
            cache=self._cache,
        )
        # Dropout and the like draw from torch's global stream, which is set anew for each answer.
        seed_torch(context.rng("torch"), self._device)
        return context

    def _body(self, phase: Phase[Any, Any], context: AnswerContext, message: Any) -> Any:
        if phase.name == EVALUATE:
            return self._evaluate(context, message)
        method = self._problem.method
        if phase.name in method.phases:
            return self._transform(phase, context, message, method.answer(phase.name, context, message))
        layer = self._problem.find_half(phase.name)
        assert isinstance(layer, Aggregator), "`_phase` has looked"
        return layer.answer(phase.name, context.for_layer(layer.name), message)

    def _transform(self, phase: Phase[Any, Any], context: AnswerContext, message: Any, body: Any) -> Any:
        """An answer after the run's aggregators had the fields that only count in the mean."""
        for name, weigh in averaged_fields(phase.up).items():
            tensors = sent = getattr(body, name)
            received = getattr(message, name) if name in phase.same else None
            for layer in self._problem.aggregators if sent is not None else ():
                update = Update(name, tensors, float(weigh(body)), received)
                tensors = layer.transform(context.for_layer(layer.name), update)
            if tensors is not sent:
                body = replace(body, **{name: tensors})
        return body

    def _evaluate(self, context: AnswerContext, message: Candidate) -> ClientEvaluation:
        model = context.model()
        load(model, message.weights)
        result = evaluate(
            model,
            self._data.test.batches(BATCH_SIZE),
            num_classes=self._data.num_classes,
            device=self._device,
        )
        return ClientEvaluation(result.num_examples, result.num_correct, result.loss_sum)


def report_ledger(task: Task, rows: Rows) -> Kept:
    """Answers the question for a client's ledger, which is asked anew each time: the answer is not kept."""
    decode(LEDGER.down, task.envelope.parts, task.buffers)
    lines = "\n".join(to_json(key, sums) for key, sums in rows.items())
    payload = encode(LedgerAnswer(lines))
    return serialise_file(_build_reply(task.envelope, payload), payload)


def _encode_answer(phase: str, body: Any) -> Payload:
    try:
        return encode(body, finite=True)
    except WireError as error:
        raise MethodFailed(f"the answer to phase '{phase}' cannot be sent: {error}") from None


def _build_reply(question: Envelope, payload: Payload) -> Envelope:
    return Envelope(
        task_id=question.task_id,
        round=question.round,
        phase=question.phase,
        step=question.step,
        parts=payload.parts,
        digest=payload.digest,
        question=question.digest,
        epoch=question.epoch,
    )

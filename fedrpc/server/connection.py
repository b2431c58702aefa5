"""One client process's stream: sends the tasks of its clients, and receives, checks and acknowledges their results.

Frames of a stream go out one at a time. The chunks of a large message follow its envelope; small frames of other
messages may come between them, chunks may not, so that a chunk needs no address and a broadcast's chunks are the same
bytes for everybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from fedrpc import clock as time  # without the time in which this process stood still
from fedrpc import log
from fedrpc.errors import AnswerRefused, FedrpcError, Refused, Unavailable, WireError
from fedrpc.files import explain_full
from fedrpc.log import MAX_TEXT, clean_text
from fedrpc.server.desk import Desk
from fedrpc.server.mailbox import Delivery, Task
from fedrpc.server.pace import PATIENCE_S, PERMIT_BYTES_S, Pace, Permit
from fedrpc.server.roster import Session, UnknownSession
from fedrpc.server.timing import LinkReader
from fedrpc.server.upload import Upload
from fedrpc.wire import tcpinfo
from fedrpc.wire.codec import MAX_PARTS
from fedrpc.wire.envelope import DEVICE_BYTES, FAILURE_CODES, Cancel, Finished, read_timing
from fedrpc.wire.frames import (
    MAX_MISSED_HEARTBEATS,
    announces_chunks,
    assemble_frame,
    check_envelope,
    check_name,
    count_field_bytes,
    read_chunk,
    read_frame,
    seal_frame,
    serialise_frame,
)
from fedrpc.wire.ledger import (
    SESSION,
    Attempt,
    Rows,
    count_other_fields,
    list_inline,
    merge,
)
from fedrpc.wire.receiving import LEAST_BYTES_S
from fedrpc.wire.sealing import SEAL_BYTES
from fedrpc.wire.v2 import coordinator_pb2 as pb

_RECEIPT_S = 0.01  # how long a receipt waits for a task with which it can travel
_MAX_OUTBOX = 1000  # frames that wait to be sent: beyond it nothing more is read, so that a client cannot fill memory
_ATTACH_S = 10.0  # how long a stream may belong to nobody; a client says at once whose it is
_LAST_WRITE_S = 1.0  # how long a stream that ends waits for the frame that is being written
# Bytes of an envelope without its parts, which spend the method's budget; an abstention has a text.
_MAX_ENVELOPE = 4 * MAX_TEXT + 1000
MAX_ATTEMPT = 1000  # uploads of one answer that have rows of their own in the ledger; all further ones share a row
_Status = pb.Receipt.Status


@dataclass
class _Sent:
    """The bytes of a delivery, which are booked once."""

    task_id: str
    attempt: Attempt
    rows: Rows = field(default_factory=dict)
    booked: bool = False


class Connection:
    """Implements `roster.Link`.

    Args:
        read: Gives the next frame, None at the end of the stream.
        write: Sends a frame.
        measure: Gives the kernel's counters, whose bytes move within a frame, too: on a slow link one frame takes
            minutes. None when the kernel does not tell; then frames count when they are complete.
        certificate: Tells the certificate of the other end from others, b"" when it has shown none.
    """

    def __init__(
        self,
        desk: Desk,
        read: Callable[[], Awaitable[bytes | None]],
        write: Callable[[bytes], Awaitable[None]],
        measure: Callable[[], tcpinfo.Connection | None] = lambda: None,
        certificate: bytes = b"",
    ) -> None:
        self._desk, self._read, self._write_frame = desk, read, write
        self._mailbox = desk.mailbox
        self._sessions: dict[int, Session] = {}
        self._outbox: deque[tuple[Session, Delivery | pb.Frame]] = deque()
        self._large: asyncio.Queue[tuple[Session, Delivery]] = asyncio.Queue()
        self._receipts: dict[Session, pb.Receipt] = {}
        self._due: asyncio.TimerHandle | None = None  # when receipts go out by themselves
        self._filled, self._has_room = asyncio.Event(), asyncio.Event()
        self._has_room.set()
        self._writing = asyncio.Lock()
        self._measure, self._link = measure, LinkReader()
        self._certificate = certificate
        self._num_written, self._num_read = 0, 0  # bytes in frames
        self._is_writing = self._is_reading = False
        self._written_pace, self._heard_pace = Pace(LEAST_BYTES_S), Pace(LEAST_BYTES_S)
        self._delivering: tuple[Task, Permit, Pace] | None = None  # a large task on its way
        self._sent: dict[str, _Sent] = {}  # small tasks that are being written, by id
        self._opened_at = self._heard_at = time.monotonic()
        self._attached = False
        self._upload: Upload | None = None
        self._ending: set[asyncio.Task[None]] = set()  # uploads that were cancelled
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._log = log.get("connection")

    # As the mailbox sees it

    @property
    def num_sessions(self) -> int:
        """How many clients' sessions the stream serves."""
        return len(self._sessions)

    def send_task(self, delivery: Delivery) -> None:
        """Sends a task."""
        session = self._desk.roster.get(delivery.task.client)
        assert session is not None, "leased to a client that has no session"
        if delivery.task.question.prepared and delivery.task.question.is_small:
            self._queue(session, delivery)
        else:
            self._large.put_nowait((session, delivery))

    def send_cancel(self, session: Session, cancel: Cancel) -> None:
        """Tells a client that nobody waits for an answer any more; one that is on its way is not kept."""
        if self._upload and self._upload.task.task_id == cancel.task_id:
            self._end_upload_soon(self._upload)
        self._queue(session, pb.Frame(cancel=pb.Cancel(task_id=cancel.task_id, reason=cancel.reason)))

    def drop_session(self, session: Session) -> None:
        """Gives up a session that the client has opened anew, and the stream when it serves no other."""
        self._sessions.pop(session.number, None)
        if self._upload and self._upload.session is session:
            self._end_upload_soon(self._upload)
        if not self._sessions:
            self._fail(UnknownSession("its clients have joined anew"))

    def send_finished(self, finished: Finished) -> None:
        """Tells all clients of the stream that the run is over, once for all of them."""
        if self._sessions:
            self._flush_receipts()  # a client hangs up when it reads the end
            frame = pb.Frame(finished=pb.Finished(reason=finished.reason, durable=finished.durable))
            self._queue(next(iter(self._sessions.values())), frame)

    def _queue(self, session: Session, item: Delivery | pb.Frame) -> None:
        self._outbox.append((session, item))
        self._filled.set()
        if len(self._outbox) >= _MAX_OUTBOX:
            self._has_room.clear()

    # The stream's life

    async def run(self) -> None:
        """Serves the stream until it ends; raises what broke it."""
        receiving = asyncio.ensure_future(self._receive())
        sending = [asyncio.ensure_future(part) for part in (self._send(), self._send_large())]
        try:
            done, _ = await asyncio.wait([receiving, *sending, self._broken], return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
        finally:
            self._broken.cancel()  # nobody waits for it any more
            receiving.cancel()
            self._detach()
            # In a task of its own: a second cancellation of this call must not keep permits and files.
            await asyncio.shield(asyncio.ensure_future(self._clean_up(receiving, sending)))

    def _detach(self) -> None:
        if self._due:
            self._due.cancel()
        self._mailbox.detach(self)
        for session in self._sessions.values():
            if session.link is self:
                self._desk.roster.detach(session)

    async def _clean_up(self, receiving: asyncio.Future[None], sending: Iterable[asyncio.Future[None]]) -> None:
        # A frame that is being written may have reached its client before gRPC says so; then it was sent.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WRITE_S):
                await self._writing.acquire()
        for part in sending:
            part.cancel()
        await asyncio.gather(receiving, *sending, return_exceptions=True)
        await self._drop_upload()

    def check_idle(self, now: float) -> None:
        """Ends the stream when what should move does not, or too slowly; called several times a second."""
        found = self._measure()
        sent, received = (found.sent, found.received) if found else (self._num_written, self._num_read)
        limit_s, silence_s = self._desk.limits.transfer_idle_s, MAX_MISSED_HEARTBEATS * self._desk.limits.heartbeat_s
        slow = f"less than {LEAST_BYTES_S} bytes a second on average over {limit_s:g} s; the transfer was aborted"
        if self._is_writing:
            self._written_pace.note(now, sent)
        self._heard_pace.note(now, received)
        behind_s = self._upload.note_received(now, received, waiting=self._is_reading) if self._upload else 0.0
        if not self._attached and now - self._opened_at > _ATTACH_S:
            self._break(f"no Attach within {_ATTACH_S:g} s")
        elif self._written_pace.behind_s > limit_s:
            self._break(f"the client read {slow}")
        elif behind_s > limit_s:
            self._break(f"the client sent {slow}")
        elif now - self._heard_at > silence_s and self._heard_pace.behind_s > silence_s - PATIENCE_S:
            self._break(f"no heartbeat for {silence_s:g} s")
        elif self._delivering:
            self._check_delivery(*self._delivering, now, sent)

    def _check_delivery(self, task: Task, permit: Permit, pace: Pace, now: float, sent: int) -> None:
        """Takes the permit of a large task that is slow, and ends the stream when nobody waits for such a one."""
        pace.note(now, sent)
        if pace.behind_s > PATIENCE_S:
            permit.give_back()
            if task.done:  # its chunks have no address: the next task would have to wait for the last of them
                self._break("the client reads a task slowly that nobody waits for any more")

    def end(self) -> None:
        """Ends the stream because the server stops; its client looks for the server again."""
        if not self._broken.done():
            self._broken.set_result(None)

    def _break(self, reason: str) -> None:
        self._fail(Unavailable(reason))

    def _fail(self, error: FedrpcError) -> None:
        if not self._broken.done():
            self._broken.set_exception(error)

    # Sending

    async def _write(self, frame: bytes, count: Callable[[], None]) -> None:
        """Writes a frame when it is its turn, and counts it then: the stream may end before."""
        async with self._writing:
            count()
            self._is_writing = True
            self._written_pace.restart()
            await self._write_frame(frame)
            self._is_writing = False
            self._num_written += len(frame)

    async def _send(self) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._outbox:
                session, item = self._outbox.popleft()
                if len(self._outbox) < _MAX_OUTBOX:
                    self._has_room.set()
                if isinstance(item, Delivery):
                    await self._deliver(session, item)
                else:
                    await self._send_notice(session, item)

    async def _send_notice(self, session: Session, frame: pb.Frame) -> None:
        frame.session = session.number
        if not frame.HasField("receipt") and (receipt := self._receipts.pop(session, None)):
            frame.receipt.CopyFrom(receipt)
        data = seal_frame(frame)
        if frame.HasField("finished"):
            # This frees the ids for other processes. Before the write, since a client that has read this frame hangs
            # up, which can cancel this call.
            for other in self._sessions.values():
                self._desk.roster.close(other)
        rows = self._desk.count_session("down", session.client, len(data))
        await self._write(data, lambda: self._desk.book.book(rows))

    async def _send_large(self) -> None:
        """Sends what is too large for one frame, or not yet encoded, one message at a time."""
        while True:
            session, delivery = await self._large.get()
            if not delivery.current or not await self._prepare(delivery.task):
                continue
            if delivery.task.question.is_small:
                await self._deliver(session, delivery)
                continue
            async with Permit(self._desk.sending) as permit:
                self._delivering = delivery.task, permit, Pace(PERMIT_BYTES_S)
                await self._deliver(session, delivery)
                self._delivering = None

    async def _prepare(self, task: Task) -> bool:
        try:
            if not task.question.prepared:
                await self._desk.server.off_loop(task.question.prepare)
            return True
        except Exception as error:
            self._mailbox.fail_question(task, error)
            return False

    async def _deliver(self, session: Session, delivery: Delivery) -> None:
        if not delivery.current or session.link is not self:
            return  # withdrawn while it waited
        task, whole = delivery.task, False
        attempt = Attempt(task.round, task.phase, "down", task.client, delivery.attempt)
        receipt = self._receipts.pop(session, None)
        others = pb.Frame(receipt=receipt).SerializeToString() if receipt else b""
        body = task.question.body
        head = serialise_frame(session.number, self._build_envelope(delivery), body, others)
        self._desk.privacy.expect_rows(task.client)
        self._mailbox.start_delivery(delivery)
        frames = task.question.iter_frames()  # now: once the answer is there, the question may be forgotten
        sent = _Sent(task.task_id, attempt)

        def count_first() -> None:
            merge(sent.rows, attempt.add_first(len(head), body.inline, len(others)))
            if task.question.is_small:
                self._sent[task.task_id] = sent

        task.times.note_begun(len(head))
        try:
            await self._write(head, count_first)
            for kind, size, data in frames:
                await self._write(data, functools.partial(attempt.add, kind, len(data), size))
            whole = True
        finally:
            self._sent.pop(task.task_id, None)
            overtaken = sent.booked
            self._book_sent(sent, whole=whole)
            if whole:
                task.times.note_sent()
                if session.link is self:  # else the stream has ended, and the mailbox knows what its client was at
                    self._mailbox.mark_delivered(delivery)
                if task.done and not overtaken:  # a Cancel that came before the last chunk found no task there
                    self._queue(session, pb.Frame(cancel=pb.Cancel(task_id=task.task_id, reason="no longer needed")))
            else:
                self._mailbox.return_to_queue(delivery)

    def _book_sent(self, sent: _Sent, *, whole: bool) -> None:
        if not sent.booked:
            sent.booked = True
            merge(sent.rows, sent.attempt.close(aborted=not whole))
            self._desk.book.book(sent.rows, whole=sent.task_id if whole else "")

    def _build_envelope(self, delivery: Delivery) -> pb.Envelope:
        task = delivery.task
        return pb.Envelope(
            task_id=task.task_id,
            round=task.round,
            phase=task.phase,
            step=task.step,
            attempt=delivery.attempt,
            durable=self._mailbox.durable,
            epoch=task.epoch,
        )

    # Receiving

    async def _receive(self) -> None:
        while True:
            self._is_reading = True
            data = await self._read()
            self._is_reading = False
            if data is None:
                return
            self._heard_at = time.monotonic()
            self._heard_pace.restart()
            self._num_read += len(data)
            await self._has_room.wait()
            chunk = read_chunk(data)
            if chunk:
                await self._receive_chunk(*chunk, len(data))
            else:
                await self._handle(read_frame(data), len(data))

    async def _handle(self, frame: pb.Frame, size: int) -> None:
        if frame.HasField("attach"):
            self._attach(frame.attach)
        session = self._sessions.get(frame.session)
        if session is None or session.link is not self:
            raise UnknownSession("unknown session; join again")
        if frame.HasField("envelope"):
            await self._receive_result(session, frame, size)
            return
        self._desk.book.book(self._desk.count_session("up", session.client, size))
        if frame.HasField("heartbeat"):
            self._queue(session, pb.Frame(heartbeat=pb.Heartbeat(durable=self._mailbox.durable)))

    def _attach(self, attach: pb.Attach) -> None:
        if attach.config_hash != (ours := self._desk.config_hash):
            raise Refused(
                f"this client trains with another configuration: expected the hash {ours}, got "
                f"{clean_text(attach.config_hash)[:40] or 'none'}; start it anew, with the same fedrpc as the server's"
            )
        device = clean_text(attach.device[:DEVICE_BYTES]).strip()
        sessions = self._desk.roster.attach(attach.token, self, self._certificate, device)
        self._attached = True
        self._sessions |= {session.number: session for session in sessions}
        self._mailbox.attach(sessions, self)

    async def _receive_result(self, session: Session, frame: pb.Frame, size: int) -> None:
        """Receives the first frame of a result: all of a small one, the headers of a large one."""
        envelope = frame.envelope
        task = self._mailbox.find(envelope.task_id)
        if task is None or task.client != session.client:
            task = None
        # A result for a task that is not open gets no row of its own: its envelope is not trusted.
        where = (task.round, task.phase) if task else (self._desk.round(), SESSION)
        attempt = Attempt(*where, "up", session.client, min(envelope.attempt, MAX_ATTEMPT) if task else 0)
        # Looked at one by one only where they can be right: a frame has room for two million chunks.
        fits = task is not None and max(len(frame.chunks), len(envelope.parts)) <= MAX_PARTS
        if fits:
            frame.DiscardUnknownFields()  # both sides have the same schema: whoever sends some only wants them counted
        inline, others = list_inline(frame) if fits else [], count_other_fields(frame)
        rows = attempt.add_first(size, inline, others)
        status, reason = _Status.STATUS_REFUSED, ""
        try:
            # Rows are kept whatever becomes of the result: what they describe has left the client.
            if frame.HasField("privacy"):
                self._desk.file_rows(session.client, frame.privacy)
            if task is None or not self._is_wanted(task, envelope):
                status = self._describe_unwanted(task, envelope)
            elif not fits:
                raise WireError(f"a message of {len(envelope.parts)} parts has {len(frame.chunks)} chunks in its frame")
            else:
                self._check_headers(task, envelope, size - SEAL_BYTES - others - sum(each[1] for each in inline))
                self._desk.check_rows(session.client, envelope)
                task.times.note_answer(size, read_timing(frame.timing) if frame.HasField("timing") else None)
                if announces_chunks(frame) and not envelope.HasField("failure"):
                    await self._begin_upload(task, session, envelope, attempt, rows)
                    return
                self._accept_small(task, frame, attempt, rows)
                self._acknowledge(session, envelope.task_id, _Status.STATUS_ACCEPTED, {})
                return
        except WireError as error:
            reason = clean_text(str(error))
            self._log.warning("result_refused", client=session.client, error=reason)
        merge(rows, attempt.close(aborted=True))
        self._acknowledge(session, envelope.task_id, status, rows, reason)

    def _check_headers(self, task: Task, envelope: pb.Envelope, size: int) -> None:
        """Raises WireError when a result cannot be right; ends the task when sending it again would not help.

        Args:
            size: The bytes of the envelope in its frame.
        """
        check_envelope(envelope, self._desk.limits.most_bytes)
        failed = envelope.HasField("failure") and envelope.failure.code != pb.Failure.CODE_ABSTAINED
        beside = size - sum(count_field_bytes(part) for part in envelope.parts)
        try:
            if beside > _MAX_ENVELOPE and not failed:  # what failed is not counted as the method's
                raise WireError(f"an envelope has {beside} bytes beside its parts, expected {_MAX_ENVELOPE} at most")
            if not envelope.HasField("failure"):
                task.question.check_answer(envelope.parts)
        except WireError as error:
            self._mailbox.accept_failure(task, clean_text(str(error)), failed=AnswerRefused)
            raise

    @staticmethod
    def _is_wanted(task: Task, envelope: pb.Envelope) -> bool:
        # A question that is not encoded was not sent by this server: the client gets it, and sends its answer again.
        return not task.done and task.question.prepared and envelope.question == task.question.payload.digest

    def _describe_unwanted(self, task: Task | None, envelope: pb.Envelope) -> _Status.ValueType:
        """The receipt for a result that nobody waits for."""
        held = task is None and self._mailbox.was_answered(envelope.task_id)
        if held or (task is None and self._desk.server.spool.exists(envelope.epoch, check_name(envelope.task_id))):
            return _Status.STATUS_DUPLICATE
        return _Status.STATUS_LATE

    def _accept_small(self, task: Task, frame: pb.Frame, attempt: Attempt, rows: Rows) -> None:
        """Books and accepts a failure, or a result that came whole.

        Booked first: after a kill between the two the client sends the result again, which then counts as repeated.
        """
        envelope = frame.envelope
        if sent := self._sent.get(task.task_id):  # gRPC has not said yet that the question is sent
            self._book_sent(sent, whole=True)
        if envelope.HasField("failure"):
            abstained = envelope.failure.code == pb.Failure.CODE_ABSTAINED
            merge(rows, attempt.close(aborted=not abstained))
            self._desk.book.book(rows, whole=task.task_id if abstained else "")
            reason = clean_text(envelope.failure.reason) or "the client gave no reason"
            failed = next((what for what, code in FAILURE_CODES.items() if code == envelope.failure.code), None)
            self._mailbox.accept_failure(task, reason, abstained=abstained, failed=failed)
            return
        data = io.BytesIO()
        assemble_frame(frame, self._desk.limits.most_bytes, data)
        merge(rows, attempt.close())
        self._desk.book.book(rows, whole=task.task_id)
        self._write_timing(task)
        kept = self._desk.server.spool.keep_small(data.getvalue(), task.epoch, task.task_id)
        self._mailbox.accept_reply(task, kept)

    def _write_timing(self, task: Task) -> None:
        said = task.times.said
        link = self._link.read(self._measure(), said.resent if said else 0)
        self._desk.server.timing.write_answer(task, link)

    # Large results

    async def _begin_upload(
        self, task: Task, session: Session, envelope: pb.Envelope, attempt: Attempt, rows: Rows
    ) -> None:
        try:
            await self._drop_upload()  # the client has given up the one before
        except asyncio.CancelledError:  # the stream ends
            merge(rows, attempt.close(aborted=True))
            self._desk.book.book(rows)
            raise
        upload = Upload(task, session, envelope, attempt, rows, self._desk.limits.most_bytes)
        self._upload = upload
        upload.begin(
            self._desk.receiving,
            self._desk.server.spool,
            self._desk.server.io,
            grant=lambda: self._queue(session, pb.Frame(grant=pb.Grant(task_id=task.task_id))),
            refuse=lambda reason: self._acknowledge(session, task.task_id, _Status.STATUS_REFUSED, {}, reason),
            fail=self._fail,
        )

    async def _receive_chunk(self, part: int, data: memoryview, size: int) -> None:
        upload = self._upload
        if upload is None:
            raise WireError("got a chunk that no message announced")
        try:
            with explain_full(self._desk.server.spool.folder):
                if not await upload.receive(part, data, size):
                    return
        except (WireError, OSError) as error:
            self._log.warning("result_refused", client=upload.session.client, error=str(error))
            await upload.end()
            # What is still under way is booked when another message begins, or the stream ends.
            self._acknowledge(upload.session, upload.task.task_id, _Status.STATUS_REFUSED, {}, str(error))
            return
        status = _Status.STATUS_LATE
        if not upload.task.done:
            self._desk.book.book(upload.take_rows(accepted=True), whole=upload.task.task_id)  # see `_accept_small`
            self._write_timing(upload.task)
            self._mailbox.accept_reply(upload.task, upload.keep(self._desk.server.spool))
            status = _Status.STATUS_ACCEPTED
        self._acknowledge(upload.session, upload.task.task_id, status, upload.take_rows(accepted=False))
        await self._drop_upload()

    async def _drop_upload(self) -> None:
        upload, self._upload = self._upload, None
        if upload:
            try:
                await upload.end()
            finally:  # also when the stream ends meanwhile
                if rows := upload.take_rows(accepted=False):
                    self._desk.book.book(rows)

    def _end_upload_soon(self, upload: Upload) -> None:
        ending = asyncio.ensure_future(upload.end())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    # Receipts

    def _acknowledge(
        self, session: Session, task_id: str, status: _Status.ValueType, rows: Rows, reason: str = ""
    ) -> None:
        """Books a result's bytes and queues its receipt, which travels with the next task if that comes soon."""
        if rows:
            self._desk.book.book(rows)
        if session in self._receipts:
            self._flush_receipts()
        held = self._desk.privacy.get_head(session.client)[0]
        self._receipts[session] = pb.Receipt(
            task_id=task_id, status=status, durable=self._mailbox.durable, privacy_rows=held, reason=clean_text(reason)
        )
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(_RECEIPT_S, self._flush_receipts)

    def _flush_receipts(self) -> None:
        if self._due:
            self._due.cancel()
        self._due = None
        for session, receipt in self._receipts.items():
            self._queue(session, pb.Frame(receipt=receipt))
        self._receipts.clear()

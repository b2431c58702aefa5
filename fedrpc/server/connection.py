"""One client process's stream: sends the tasks of its clients, and receives, checks and acknowledges their results.

Frames of a stream go out one at a time. The chunks of a large message follow its envelope; small frames of other
messages may come between them, chunks may not, so that a chunk needs no address and a broadcast's chunks are the same
bytes for everybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fedrpc import log
from fedrpc.config import LimitsConfig
from fedrpc.errors import Unavailable, WireError
from fedrpc.privacy.ledger import PrivacyFile
from fedrpc.server.mailbox import Delivery, Mailbox, Task
from fedrpc.server.roster import Roster, Session, UnknownSession
from fedrpc.server.rounds import ServerContext
from fedrpc.wire.envelope import Cancel, Finished
from fedrpc.wire.frames import (
    SMALL_BYTES,
    Assembler,
    check_name,
    parse,
    read_chunk,
    serialise_frame,
)
from fedrpc.wire.kinds import Direction
from fedrpc.wire.ledger import (
    SESSION,
    Attempt,
    LedgerFile,
    Rows,
    Sums,
    count_other_fields,
    count_session,
    list_inline,
    merge,
)
from fedrpc.wire.receiving import Receiver
from fedrpc.wire.v2 import coordinator_pb2 as pb

_RECEIPT_S = 0.01  # how long a receipt waits for a task with which it can travel
_MISSED = 3  # heartbeats that a client may miss
_Status = pb.Receipt.Status


@dataclass(frozen=True)
class Desk:
    """What the streams of a server share.

    Args:
        round: The round under which traffic outside tasks is booked.
        sending: Permits for large messages to clients.
        receiving: Permits for large messages from clients.
    """

    server: ServerContext
    roster: Roster
    book: LedgerFile
    privacy: PrivacyFile
    limits: LimitsConfig
    round: Callable[[], int]
    sending: asyncio.Semaphore
    receiving: asyncio.Semaphore

    @property
    def mailbox(self) -> Mailbox:
        """The tasks."""
        return self.server.mailbox

    def count_session(self, direction: Direction, client: int, size: int) -> Rows:
        """The rows of a frame that belongs to no task."""
        return count_session(self.round(), direction, client, size)

    def count_field(self, direction: Direction, client: int, size: int) -> Rows:
        """The rows of a field in a message that is booked under another client."""
        return {key: Sums(0, size, 0) for key in self.count_session(direction, client, 0)}


@dataclass(eq=False)
class _Upload:
    """A large result on its way: waiting for its permit, coming, or refused and only counted."""

    task: Task
    session: Session
    envelope: pb.Envelope
    attempt: Attempt
    rows: Rows
    permit: asyncio.Task[None] | None = None
    receiver: Receiver | None = None
    file: BinaryIO | None = None
    path: Path | None = None


class Connection:
    """Implements `roster.Link`.

    Args:
        read: Gives the next frame, None at the end of the stream.
        write: Sends a frame.
    """

    def __init__(
        self, desk: Desk, read: Callable[[], Awaitable[bytes | None]], write: Callable[[bytes], Awaitable[None]]
    ) -> None:
        self._desk, self._read, self._write_frame = desk, read, write
        self._mailbox = desk.mailbox
        self._sessions: dict[int, Session] = {}
        self._outbox: deque[tuple[Session, Delivery | pb.Frame]] = deque()
        self._large: asyncio.Queue[tuple[Session, Delivery]] = asyncio.Queue()
        self._receipts: dict[Session, pb.Receipt] = {}
        self._due: asyncio.TimerHandle | None = None  # when receipts go out by themselves
        self._filled = asyncio.Event()
        self._writing = asyncio.Lock()
        self._writing_since: float | None = None
        self._heard_at = time.monotonic()
        self._upload: _Upload | None = None
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
            self._ending.add(task := asyncio.ensure_future(self._end_upload(self._upload)))
            task.add_done_callback(self._ending.discard)
        self._queue(session, pb.Frame(cancel=pb.Cancel(task_id=cancel.task_id, reason=cancel.reason)))

    def send_finished(self, finished: Finished) -> None:
        """Tells all clients of the stream that the run is over, once for all of them."""
        if self._sessions:
            frame = pb.Frame(finished=pb.Finished(reason=finished.reason, durable=finished.durable))
            self._queue(next(iter(self._sessions.values())), frame)

    def _queue(self, session: Session, item: Delivery | pb.Frame) -> None:
        self._outbox.append((session, item))
        self._filled.set()

    # The stream's life

    async def run(self) -> None:
        """Serves the stream until it ends; raises what broke it."""
        work = [asyncio.ensure_future(part) for part in (self._receive(), self._send(), self._send_large())]
        try:
            done, _ = await asyncio.wait([*work, self._broken], return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
        finally:
            for part in work:
                part.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            await self._close()

    async def _close(self) -> None:
        if self._due:
            self._due.cancel()
        await self._drop_upload()
        self._mailbox.detach(self)
        for session in self._sessions.values():
            if session.link is self:
                self._desk.roster.detach(session)

    def check_idle(self, now: float) -> None:
        """Ends the stream when nothing moves that should; called several times a second."""
        limit = self._desk.limits.transfer_idle_s
        upload = self._upload.receiver if self._upload and self._upload.permit else None
        if self._writing_since is not None and now - self._writing_since > limit:
            self._break(f"the client read nothing for {limit:g} s; the transfer was aborted")
        elif upload and now - upload.moved_at > limit:
            self._break(f"the client sent nothing for {limit:g} s; the transfer was aborted")
        elif now - self._heard_at > _MISSED * self._desk.limits.heartbeat_s:
            self._break(f"no heartbeat for {_MISSED * self._desk.limits.heartbeat_s:g} s")

    def _break(self, reason: str) -> None:
        if not self._broken.done():
            self._broken.set_exception(Unavailable(reason))

    # Sending

    async def _write(self, frame: bytes) -> None:
        async with self._writing:
            self._writing_since = time.monotonic()
            await self._write_frame(frame)
            self._writing_since = None

    async def _send(self) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._outbox:
                session, item = self._outbox.popleft()
                if isinstance(item, Delivery):
                    await self._deliver(session, item)
                else:
                    await self._send_notice(session, item)

    async def _send_notice(self, session: Session, frame: pb.Frame) -> None:
        frame.session = session.number
        if not frame.HasField("receipt") and (receipt := self._receipts.pop(session, None)):
            frame.receipt.CopyFrom(receipt)
        data = frame.SerializeToString()
        self._desk.book.book(self._desk.count_session("down", session.client, len(data)))
        if frame.HasField("finished"):
            # This frees the ids for other processes. Before the write, since a client that has read this frame hangs
            # up, which can cancel this call.
            for other in self._sessions.values():
                self._desk.roster.close(other)
        await self._write(data)

    async def _send_large(self) -> None:
        """Sends what is too large for one frame, or not yet encoded, one message at a time."""
        while True:
            session, delivery = await self._large.get()
            if not await self._prepare(delivery.task):
                continue
            if delivery.task.question.is_small:
                await self._deliver(session, delivery)
                continue
            async with self._desk.sending:
                await self._deliver(session, delivery)

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
        rows = attempt.add_first(len(head), body.inline, len(others))
        try:
            await self._write(head)
            for kind, size, data in task.question.iter_frames():
                attempt.add(kind, len(data), size)
                await self._write(data)
            whole = True
        finally:
            merge(rows, attempt.close(aborted=not whole))
            self._desk.book.book(rows)
            if whole:
                self._mailbox.mark_delivered(delivery)
            else:
                self._mailbox.return_to_queue(delivery)

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
        while (data := await self._read()) is not None:
            self._heard_at = time.monotonic()
            chunk = read_chunk(data)
            if chunk:
                await self._receive_chunk(*chunk, len(data))
            else:
                await self._handle(parse(pb.Frame, data), len(data))

    async def _handle(self, frame: pb.Frame, size: int) -> None:
        if frame.HasField("attach"):
            self._attach(frame.attach.token)
        session = self._sessions.get(frame.session)
        if session is None or session.link is not self:
            raise UnknownSession("unknown session; join again")
        if frame.HasField("envelope"):
            await self._receive_result(session, frame, size)
            return
        self._desk.book.book(self._desk.count_session("up", session.client, size))
        if frame.HasField("heartbeat"):
            self._queue(session, pb.Frame(heartbeat=pb.Heartbeat(durable=self._mailbox.durable)))

    def _attach(self, token: bytes) -> None:
        sessions = self._desk.roster.attach(token, self)
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
        attempt = Attempt(*where, "up", session.client, envelope.attempt if task else 0)
        rows = attempt.add_first(size, list_inline(frame), count_other_fields(frame))
        status, reason = _Status.STATUS_REFUSED, ""
        try:
            # Rows are kept whatever becomes of the result: what they describe has left the client.
            if frame.HasField("privacy"):
                self._desk.privacy.extend(session.client, frame.privacy.first, frame.privacy.rows)
            found = self._check_wanted(task, envelope)
            if found is None and task is not None:
                found = self._accept_small(task, frame)
                if found is None:
                    await self._begin_upload(_Upload(task, session, envelope, attempt, rows))
                    return
            assert found is not None
            status = found
        except WireError as error:
            reason = str(error)
            self._log.warning("result_refused", client=session.client, error=reason)
        self._acknowledge(session, envelope.task_id, status, attempt, rows, reason)

    def _check_wanted(self, task: Task | None, envelope: pb.Envelope) -> _Status.ValueType | None:
        """The receipt for a result that nobody waits for; None when somebody does."""
        if task is None:
            held = self._mailbox.was_answered(envelope.task_id)
            again = held or self._desk.server.spool.exists(envelope.epoch, check_name(envelope.task_id))
            return _Status.STATUS_DUPLICATE if again else _Status.STATUS_LATE
        if task.done or envelope.question != task.question.payload.digest:
            return _Status.STATUS_LATE
        return None

    def _accept_small(self, task: Task, frame: pb.Frame) -> _Status.ValueType | None:
        """Accepts a failure, or a result that came whole; None for one whose chunks are to come."""
        envelope = frame.envelope
        if envelope.HasField("failure"):
            abstained = envelope.failure.code == pb.Failure.CODE_ABSTAINED
            reason = envelope.failure.reason or "the client gave no reason"
            self._mailbox.accept_failure(task, reason, abstained=abstained)
            return _Status.STATUS_ACCEPTED
        if not frame.chunks and sum(part.size for part in envelope.parts) > SMALL_BYTES:
            return None
        data = io.BytesIO()
        assembler = Assembler(envelope, self._desk.limits.max_message_bytes, data)
        for chunk in frame.chunks:
            assembler.add(chunk.part, chunk.data)
        assembler.finish()
        self._mailbox.accept_reply(task, self._desk.server.spool.keep_small(data.getvalue(), task.epoch, task.task_id))
        return _Status.STATUS_ACCEPTED

    def _acknowledge(
        self, session: Session, task_id: str, status: _Status.ValueType, attempt: Attempt, rows: Rows, reason: str = ""
    ) -> None:
        """Books a result's bytes and queues its receipt, which travels with the next task if that comes soon."""
        held = self._desk.privacy.get_head(session.client)[0]
        receipt = pb.Receipt(
            task_id=task_id, status=status, durable=self._mailbox.durable, privacy_rows=held, reason=reason[:1000]
        )
        merge(rows, attempt.close(aborted=status != _Status.STATUS_ACCEPTED))
        if session in self._receipts:
            self._flush_receipts()
        self._receipts[session] = receipt
        self._desk.book.book(rows)  # together: every booking is a write to the journal
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(_RECEIPT_S, self._flush_receipts)

    def _flush_receipts(self) -> None:
        if self._due:
            self._due.cancel()
        self._due = None
        for session, receipt in self._receipts.items():
            self._queue(session, pb.Frame(receipt=receipt))
        self._receipts.clear()

    # Large results

    async def _begin_upload(self, upload: _Upload) -> None:
        await self._drop_upload()  # the client has given up the one before
        Assembler(upload.envelope, self._desk.limits.max_message_bytes, io.BytesIO())  # refuses bad headers at once
        self._upload = upload
        upload.task.receiving += 1
        upload.permit = asyncio.ensure_future(self._grant(upload))

    async def _grant(self, upload: _Upload) -> None:
        """Holds a permit until the upload has ended."""
        async with self._desk.receiving:
            task, server = upload.task, self._desk.server
            upload.path = server.spool.make_incoming_path(task.epoch, task.task_id)
            try:
                upload.file = upload.path.open("wb")
            except OSError as error:
                self._refuse(upload, f"the server cannot write: {error.strerror}")
                return
            assembler = Assembler(upload.envelope, self._desk.limits.max_message_bytes, upload.file)
            upload.receiver = Receiver(assembler, upload.attempt, server.io)
            self._queue(upload.session, pb.Frame(grant=pb.Grant(task_id=task.task_id)))
            await asyncio.get_running_loop().create_future()  # until it is cancelled

    async def _receive_chunk(self, part: int, data: memoryview, size: int) -> None:
        upload = self._upload
        if upload is None or upload.receiver is None:
            raise WireError("got a chunk that no message announced")
        upload.receiver.count(part, data, size)
        if upload.permit is None:
            return  # refused: what was under way is only counted
        try:
            await upload.receiver.add(part, data)
            if upload.receiver.is_complete:
                await upload.receiver.finish()
                self._accept_upload(upload)
                await self._drop_upload()
        except (WireError, OSError) as error:
            self._log.warning("result_refused", client=upload.session.client, error=str(error))
            await self._end_upload(upload)
            self._refuse(upload, str(error))

    def _accept_upload(self, upload: _Upload) -> None:
        task, status = upload.task, _Status.STATUS_LATE
        assert upload.file is not None and upload.path is not None
        upload.file.close()
        if not task.done:
            kept = self._desk.server.spool.keep(upload.path, task.epoch, task.task_id)
            self._mailbox.accept_reply(task, kept)
            status = _Status.STATUS_ACCEPTED
        self._acknowledge(upload.session, task.task_id, status, upload.attempt, upload.rows)
        upload.rows = {}
        upload.attempt = Attempt(task.round, task.phase, "up", task.client)

    def _refuse(self, upload: _Upload, reason: str) -> None:
        """Sends the receipt now; the bytes are booked when the last of them has come, or another message begins."""
        receipt = pb.Receipt(
            task_id=upload.task.task_id,
            status=_Status.STATUS_REFUSED,
            durable=self._mailbox.durable,
            privacy_rows=self._desk.privacy.get_head(upload.session.client)[0],
            reason=reason[:1000],
        )
        self._queue(upload.session, pb.Frame(receipt=receipt))

    async def _end_upload(self, upload: _Upload) -> None:
        """Gives back the permit and removes the file, unless the spool has it."""
        if upload.permit is None:
            return
        upload.permit.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await upload.permit
        upload.permit = None
        upload.task.receiving -= 1
        if upload.receiver:
            await upload.receiver.abandon()
        if upload.file and upload.path:
            upload.file.close()
            upload.path.unlink(missing_ok=True)

    async def _drop_upload(self) -> None:
        upload, self._upload = self._upload, None
        if upload:
            await self._end_upload(upload)
            merge(upload.rows, upload.attempt.close(aborted=True))
            if upload.rows:
                self._desk.book.book(upload.rows)

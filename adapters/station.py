"""One worker's control plane, wired: its post, its session, the lead of its group on rank 0, the conductor on one.

Which part a message is for follows from who sent it:

::

    trainer/0     a trainer rank -> lead       an engine's lead -> conductor
    engine/a/0    a rank -> lead               the parent (conductor) -> lead
    other ranks                                the parent (lead) -> session
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
import time
import weakref
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path

from adapters.arguments import check_seconds
from adapters.conductor import Conductor
from adapters.control import Post
from adapters.failures import ClosedError, Failure, UsageError, failure_of
from adapters.lead import GroupLead
from adapters.messages import (
    Agreed,
    AgreeValue,
    Answer,
    AnswerStop,
    Ask,
    Begin,
    Call,
    Cancel,
    Committed,
    End,
    FromLead,
    FromRank,
    Gathered,
    Member,
    Note,
    ProposeStop,
    Relay,
    Roster,
    Stop,
    ToChild,
    ToLead,
    ToParent,
    ToRank,
)
from adapters.planning import group_of
from adapters.rendezvous import SENDER, Rendezvous
from adapters.session import Session
from adapters.steps import TRAINERS, GroupLost
from layout_algebra.signal_safe import Condition
from transfer_exec.errors import DeadlineError

__all__ = ["Station", "host_identity"]

_BEFORE_OTHERS = 100
_LOOK_S = 0.1
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Station:
    """The control plane of one worker.

    Parameters
    ----------
    group
        ``"trainer"`` or ``"engine/<name>"``.
    rank, world_size
        In the group.
    rendezvous
        Where workers find each other.
    transport
        What this worker asks for.
    deadline_s
        Of every wait.
    version
        What this worker holds now.
    beside
        As for `Session`.

    Raises
    ------
    UsageError
        If the rank is outside the group.
    RendezvousError
        If rank 0 cannot listen or publish its address.
    """

    def __init__(
        self,
        group: str,
        rank: int,
        world_size: int,
        rendezvous: Rendezvous,
        *,
        transport: str,
        deadline_s: float,
        version: Callable[[], int | None],
        beside: bool = False,
    ) -> None:
        _check_rank(group, rank, world_size)
        check_seconds("deadline_s", deadline_s)
        self.worker = f"{group}/{rank}"
        self._group, self._rank, self._world_size = group, rank, world_size
        self._transport, self._version = transport, version
        self._deadline_s = deadline_s
        self._incarnation = secrets.token_hex(8)
        self._host = host_identity()
        self._meeting = Condition()
        self._joined = is_root = rank == 0 and group == TRAINERS
        self.session = Session(self.worker, self._send_up, deadline_s=deadline_s, beside=beside)
        self._lead: GroupLead | None = None
        self.conductor: Conductor | None = None
        ranks = tuple(f"{group}/{each}" for each in range(world_size))
        if is_root:
            self.conductor = Conductor(
                ranks,
                self._to_lead,
                deadline_s=deadline_s,
                turned_away=lambda: self._post.turned_away,
                progress=self.session.tell,
            )
        if rank == 0:
            self._lead = GroupLead(
                group,
                ranks,
                to_rank=self._to_rank,
                to_conductor=self._to_conductor,
                clock=time.monotonic,
                own_counter=lambda: self.session.counter,
            )
        own_name = SENDER if group == TRAINERS else group
        self.meets_as = own_name if rank == 0 else self.worker
        parent = None if is_root else (SENDER if rank == 0 or group == TRAINERS else group)
        self._post = Post(
            self._member,
            rendezvous,
            self,
            listens_as=own_name if rank == 0 else None,
            parent=parent,
        )
        if self._lead is not None:
            self._lead.joined(self._member())
        self._post.start()
        if self.conductor is not None:
            self.conductor.start()
        # Also in processes of multiprocessing, which do not run what atexit knows. A process that ends by an exception
        # waits for nothing.
        self._at_exit = Finalize(None, _leave_at_exit, (weakref.ref(self),), exitpriority=_BEFORE_OTHERS)

    @property
    def dropped(self) -> int:
        """Messages that were none, or came from strangers."""
        return self._post.dropped

    def check(self) -> None:
        """Raise if this worker cannot take part: closed, forked, refused, or its control thread has ended."""
        self._post.check_process()
        self.session.check()

    def wait_joined(self, what: str = "joining") -> None:
        """Wait, for a call of that name, until the parent has said welcome.

        Raises
        ------
        DeadlineError
            If it does not in time.
        """
        stop_at = time.monotonic() + self._deadline_s
        while not self._has_joined():
            self.check()
            if time.monotonic() >= stop_at:
                raise DeadlineError(
                    f"{self.worker}: {what}: did not find the rank 0 it belongs to within {self._deadline_s:g} s"
                    f"{': ' if self._post.trouble else ''}{self._post.trouble}; start all ranks with the same "
                    "rendezvous"
                )

    def close(self) -> None:
        """End all threads and close all sockets. May be called again."""
        if self._post.closed:
            return
        self.session.wait_settled()
        self._end()

    def _end(self) -> None:
        self._at_exit.cancel()
        self.session.stop(Failure(ClosedError.__name__, self.worker, "the adapter was closed"))
        if self.conductor is not None:
            self.conductor.close()
        self._post.close()

    # From other threads

    def _send_up(self, message: FromRank) -> None:
        lead = self._lead
        if lead is not None:
            self._post.run(lambda: lead.from_rank(self.worker, message))
        else:
            self._post.to_parent(message)

    def _to_lead(self, group: str, message: ToLead) -> None:
        lead = self._lead
        if group == self._group and lead is not None:
            self._post.run(lambda: lead.from_conductor(message))
        elif not isinstance(message, Begin):
            self._post.to_child(f"{group}/0", message)

    # On the control thread

    def _to_rank(self, worker: str, message: ToRank) -> None:
        if worker == self.worker:
            self.session.deliver(message)
        else:
            self._post.to_child(worker, message)

    def _to_conductor(self, message: FromLead) -> None:
        if self.conductor is not None:
            self.conductor.hear(message)
        elif not isinstance(message, Call):
            self._post.to_parent(message)

    def _member(self) -> Member:
        return Member(
            self.worker, self._rank, self._world_size, self._incarnation, self._host, self._transport, self._version()
        )

    def admit(self, member: Member) -> Failure | None:
        """Take in a rank of this group, or an engine's lead."""
        group, lead = group_of(member.worker), self._lead
        assert lead is not None
        if group == self._group:
            if member.world_size != self._world_size or not 0 < member.rank < self._world_size:
                return self._refusal(
                    f"{member.worker} says world_size={member.world_size}, {self.worker} says {self._world_size}"
                )
            if member.worker != f"{group}/{member.rank}":
                return self._refusal(f"{member.worker} says it is rank {member.rank}")
            lead.joined(member)
            return None
        if self.conductor is None or member.rank != 0 or not group.startswith("engine/"):
            return self._refusal(f"{member.worker} has no business with {self.worker}")
        return None

    def newest(self) -> int:
        """The newest transaction of the group that this worker leads."""
        assert self._lead is not None
        return self._lead.newest

    def from_child(self, worker: str, message: ToParent) -> None:
        """A rank or an engine's lead spoke."""
        lead, conductor = self._lead, self.conductor
        if group_of(worker) == self._group and lead is not None:
            if isinstance(message, Call) and message.worker != worker:
                return
            if isinstance(message, (Call, Answer, AnswerStop, AgreeValue)):
                lead.from_rank(worker, message)
        elif conductor is not None and isinstance(message, (Roster, Gathered)) and message.group == group_of(worker):
            conductor.hear(message)

    def child_lost(self, worker: str, reason: str) -> None:
        """A rank or an engine's lead is gone."""
        if group_of(worker) == self._group and self._lead is not None:
            self._lead.lost(worker, reason)
        elif self.conductor is not None:
            self.conductor.hear(GroupLost(group_of(worker), reason))

    def from_parent(self, message: ToChild) -> None:
        """The lead spoke to a rank, or the conductor to a lead."""
        if self._lead is not None:
            if isinstance(message, (Stop, Relay, Note, Cancel, End)):
                self._lead.from_conductor(message)
        elif isinstance(message, (Ask, ProposeStop, Committed, Agreed, Note, Cancel, End)):
            self.session.deliver(message)

    def parent_joined(self, txn: int) -> None:
        """The parent knows this worker."""
        if self._lead is not None:
            # A new conductor must hear which version is here by now.
            self._lead.joined(self._member())
        else:
            self.session.joined(txn)
        self._note_joined(True)

    def parent_lost(self, failure: Failure, *, final: bool) -> None:
        """The parent is gone, or will not have this worker."""
        self._note_joined(False)
        if final:
            self.session.stop(failure)
        elif self._lead is not None:
            self._lead.conductor_lost(failure)
        else:
            self.session.lead_lost(failure)

    def broken(self, failure: Failure) -> None:
        """The control thread has ended by an error."""
        self.session.stop(failure)

    def tick(self) -> None:
        """Look at deadlines."""
        if self._lead is not None:
            self._lead.tick()

    def _note_joined(self, joined: bool) -> None:
        with self._meeting:
            self._joined = joined
            self._meeting.notify_all()

    def _has_joined(self) -> bool:
        """Whether the parent has said welcome; waits a moment for it."""
        with self._meeting:
            return self._joined or (self._meeting.wait(_LOOK_S) and self._joined)

    def _refusal(self, text: str) -> Failure:
        return failure_of(UsageError(f"{text}; give all ranks of a group one world_size and each its own rank"), "")


def _leave_at_exit(made: weakref.ref[Station]) -> None:
    """Say goodbye for an adapter that nobody closed."""
    station = made()
    if station is not None:
        if getattr(sys, "last_value", None) is None:
            station.session.wait_settled()
        station._end()


def host_identity() -> str:
    """This machine and its boot; workers that have it in common can share memory."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = _BOOT_ID.read_text().strip()
    return f"{socket.gethostname()} {boot}".strip()


def _check_rank(group: str, rank: int, world_size: int) -> None:
    whole = all(isinstance(value, int) and not isinstance(value, bool) for value in (rank, world_size))
    if not whole or not 0 <= rank < world_size:
        raise UsageError(f"{group}: rank {rank!r} of world_size {world_size!r}; expected 0 <= rank < world_size")

"""A job in one thread at a time: the real adapters, sessions, leads and conductor over a network that is made of lists.

Every worker's calling thread, and the conductor's, runs only when it is told to, and hands back when it waits. Time is
a number. Messages between two workers stay in order, as over one connection, and are lost when it breaks; messages of
different connections overtake each other as the test likes. Only sockets and bytes of weights are not real: a `Post`
is a list of messages, and a rollout's weights are two numbers, the version of its first half and of its second.
"""

from __future__ import annotations

import queue
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from adapters import (
    conductor,
    connecting,
    fleet,
    paths,
    pending_update,
    receiver,
    sender,
    session,
    station,
    steps,
    updating,
)
from adapters.duty_messages import (
    Assess,
    Assessed,
    Bind,
    Bound,
    Done,
    Duty,
    GiveMap,
    Install,
    Installed,
    MapGiven,
    Prepare,
    Prepared,
    Probe,
    Probed,
    Publish,
    Published,
    Ready,
    Result,
    Stay,
    Transfer,
    Transferred,
)
from adapters.failures import Failure, HookError, LostWorkerError, VersionError
from adapters.handler import Handler
from adapters.messages import Member, ToChild, ToParent, decode, encode
from adapters.planning import Connection, make_connection
from adapters.receiver import ReceiverAdapter
from adapters.rendezvous import Addresses
from adapters.sender import SenderAdapter
from adapters.session import Session
from adapters.worker import Worker
from layout_algebra.source_map import SourceMap
from tests.adapters.scheduler import Condition, Queue, Scheduler, Thread
from tests.adapters.toy import SPACE
from transfer_exec import errors
from transfer_exec.errors import DeadlineError, TransportError

REPORT = object()
DEADLINE_S = 20.0
HANGS_S = 3 * DEADLINE_S
HALVES = 2


class Line:
    """A child's connection to its parent, and what is on its way."""

    def __init__(self, child: Post, parent: Post) -> None:
        self.child, self.parent = child, parent
        self.up: deque[bytes] = deque()
        self.down: deque[bytes | int] = deque([parent.handler.newest()])  # a number is the welcome
        self.joined = False


class Post:
    """Stands for `adapters.control.Post`."""

    dropped = turned_away = 0
    trouble = ""
    closed = False

    def __init__(
        self,
        member: Callable[[], Member],
        rendezvous: object,
        handler: Handler,
        *,
        network: Network,
        listens_as: str | None,
        parent: str | None,
    ) -> None:
        self.member, self.handler, self.parent = member, handler, parent
        self.worker = member().worker
        self.actions: deque[Callable[[], None]] = deque()
        self._network = network
        self._listens_as = listens_as
        if listens_as is not None:
            network.names[listens_as] = self

    def start(self) -> None:
        self._network.posts.append(self)

    def run(self, action: Callable[[], None]) -> None:
        self.actions.append(action)

    def to_parent(self, message: ToParent) -> None:
        self.run(lambda: self._network.send_up(self, message))

    def to_child(self, worker: str, message: ToChild) -> None:
        self.run(lambda: self._network.send_down(self, worker, message))

    def check_process(self) -> None:
        pass


class Network:
    """Who is connected to whom, and whose control threads are frozen."""

    def __init__(self) -> None:
        self.posts: list[Post] = []
        self.names: dict[str, Post] = {}
        self.connections: list[Line] = []
        self.messages = 0
        self.frozen: set[str] = set()

    def send_up(self, child: Post, message: ToParent) -> None:
        self.messages += 1
        for connection in self.connections:
            if connection.child is child and connection.joined:
                connection.up.append(encode(message))

    def send_down(self, parent: Post, worker: str, message: ToChild) -> None:
        self.messages += 1
        for connection in self.connections:
            if connection.parent is parent and connection.child.worker == worker:
                connection.down.append(encode(message))

    def waiting(self) -> list[Callable[[], None]]:
        """What may happen next: an action of a control thread, a message that arrives, a worker that joins."""
        awake = [post for post in self.posts if post.worker not in self.frozen]
        actions = [lambda post=post: post.actions.popleft()() for post in awake if post.actions]  # type: ignore[misc]
        ups = [lambda c=c: self._arrive_up(c) for c in self.connections if c.up and c.parent in awake]  # type: ignore[misc]
        downs = [lambda c=c: self._arrive_down(c) for c in self.connections if c.down and c.child in awake]  # type: ignore[misc]
        connected = {id(connection.child) for connection in self.connections}
        joins = [
            lambda post=post: self._join(post)  # type: ignore[misc]
            for post in self.posts
            if post.parent in self.names and id(post) not in connected
        ]
        return [*actions, *ups, *downs, *joins]

    def tick(self) -> None:
        for post in self.posts:
            if post.worker not in self.frozen:
                post.handler.tick()

    def cut(self, connection: Line) -> None:
        """A connection breaks; both ends learn it, what was on its way does not arrive."""
        self.connections.remove(connection)
        connection.parent.handler.child_lost(connection.child.worker, "its connection closed")
        if connection.joined:
            failure = Failure(LostWorkerError.__name__, connection.child.worker, "its connection closed")
            connection.child.handler.parent_lost(failure, final=False)

    def crash(self, post: Post) -> None:
        """A process ends: it says nothing more, and what it has said may still arrive."""
        self.posts.remove(post)
        self.names = {name: other for name, other in self.names.items() if other is not post}
        for connection in [each for each in self.connections if post in (each.child, each.parent)]:
            self.connections.remove(connection)
            if connection.child is post:
                while connection.up:
                    self._arrive_up(connection)
                connection.parent.handler.child_lost(post.worker, "its process ended")
            else:
                while connection.down:
                    self._arrive_down(connection)
                failure = Failure(LostWorkerError.__name__, connection.child.worker, "its process ended")
                connection.child.handler.parent_lost(failure, final=False)

    def _join(self, child: Post) -> None:
        parent = self.names[child.parent or ""]
        assert parent.handler.admit(child.member()) is None
        self.connections.append(Line(child, parent))

    def _arrive_up(self, connection: Line) -> None:
        message = decode(connection.up.popleft(), from_child=True)
        connection.parent.handler.from_child(connection.child.worker, message)  # type: ignore[arg-type]

    def _arrive_down(self, connection: Line) -> None:
        data = connection.down.popleft()
        if isinstance(data, int):
            connection.joined = True
            connection.child.handler.parent_joined(data)
        else:
            connection.child.handler.from_parent(decode(data, from_child=False))  # type: ignore[arg-type]


class Duties:
    """Stands for `adapters.duties.Duties`: weights are two numbers, and bytes move, or are installed, in two steps."""

    def __init__(self, worker: Worker, session: Session, *, job: Simulation) -> None:
        self._job, self._worker, self._session = job, worker, session
        self.weights: list[int | None] = [None] * HALVES
        self.staged: list[int | None] = [None] * HALVES
        self.stalled_since = 0.0
        self.version: int | None = None
        self.metadata = b""
        self.report = REPORT
        self.wrote = False
        job.duties[worker.name] = self

    def perform(self, duty: Duty) -> Result:
        name, job = self._worker.name, self._job
        if not self._worker.staging or isinstance(duty, _STOPPED):
            job.acts(name, self._session)
        fault = job.faults.pop((name, type(duty).__name__), "")
        if fault == "raise":
            raise HookError(f"{type(duty).__name__} raised on {name}")
        if fault in ("UnreadableError", "UnmappableError"):
            raise getattr(errors, fault)(f"{name} may not")
        if fault == "die":
            job.doomed.append(name)
        if fault == "die" or (fault == "hang" and not isinstance(duty, Transfer)):
            job.scheduler.wait(lambda: False, HANGS_S)
        match duty:
            case Probe():
                return Probed(job.maps[name].digest(), 0.0)
            case GiveMap():
                return MapGiven(job.maps[name].to_bytes())
            case Bind():
                return Bound(b"", 0.0)
            case Prepare(version, metadata):
                if self._worker.receives and self.version is not None and version <= self.version:
                    raise VersionError(f"version {version} is not newer than {self.version}, which {name} has")
                self.metadata = metadata
                return Prepared({}, False, 0.0)
            case Transfer(version):
                return self._transfer(version, fault)
            case Install():
                if self._worker.staging:
                    self._install(fault)
                return Installed()
            case Assess():
                return Assessed(self.wrote)
            case Publish(version):
                self.version, self.wrote = version, False
                return Published((self.stalled_since, job.scheduler.now))
            case _:
                return Done(0.0)

    def check_storage(self) -> None:
        pass

    def _transfer(self, version: int, fault: str) -> Result:
        cancelled: list[str] = []
        self._session.on_cancel(cancelled.append)
        try:
            for half in range(HALVES):
                # Other threads go on; a fault of the kind "hang" waits for a peer that never comes.
                late = self._job.scheduler.now + self._worker.deadline_s
                self._job.scheduler.wait(lambda: bool(cancelled) or fault != "hang", self._worker.deadline_s)
                if cancelled:
                    raise TransportError(f"aborted: {cancelled[0]}")
                if fault == "hang" and self._job.scheduler.now >= late:
                    raise DeadlineError(f"{self._worker.name}: version {version}, round {half}: nobody wrote")
                if self._worker.staging:
                    self.staged[half] = version
                elif self._worker.receives:
                    self.wrote, self.weights[half] = True, version
                if fault == "lose":
                    raise TransportError(f"{self._worker.name}: version {version}, round {half}: a write failed")
        finally:
            self._session.on_cancel(None)
        stall = None if self._worker.receives else (self.stalled_since, self._job.scheduler.now)
        return Transferred(b"", {}, 0.0, stall)

    def _install(self, fault: str) -> None:
        for half in range(HALVES):
            self._job.scheduler.wait(lambda: True)
            self.wrote, self.weights[half] = True, self.staged[half]
            if fault == "lose":
                raise HookError(f"{self._worker.name}: its loader raised")


_STOPPED = (Probe, GiveMap, Stay, Ready, Install, Publish)
"""What ranks that stage do at one poll, all of them."""


class Caller:
    """The thread that calls one worker's adapter: what it is told to do, and what came of it."""

    def __init__(self, job: Simulation, worker: str) -> None:
        self.worker = worker
        self.orders: deque[Callable[[], object]] = deque()
        self.busy = False
        self.results: list[object] = []
        self.thread = job.scheduler.spawn(worker, self._run)
        self._job = job

    def _run(self) -> None:
        while True:
            self._job.scheduler.wait(lambda: bool(self.orders))
            order = self.orders.popleft()
            try:
                self.results.append(order())
            except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the test looks at it
                self.results.append(error)
            self.busy = False

    def order(self, call: Callable[[], object]) -> None:
        assert not self.busy
        self.busy = True
        self.orders.append(call)


class Simulation:
    """A job: trainers and engines by name and size, what they are told, and what was seen of them.

    Attributes
    ----------
    faults
        ``(worker, duty)`` -> ``"raise"``, ``"lose"`` (a write fails half way), ``"hang"``, ``"die"`` or
        the name of an error of transports: happens once.
    doomed
        Workers whose process ends as soon as `run` sees them.
    held
        Rollouts that do not poll.
    staging
        Groups that stage.
    activation
        As for a sender.
    acted
        Engine, number of its start and transaction -> the poll at which its ranks did their duties.
    """

    def __init__(
        self,
        maps: Mapping[str, SourceMap],
        sizes: Mapping[str, int],
        staging: Collection[str] = (),
        activation: str = "engine",
    ) -> None:
        self.maps, self.sizes = maps, sizes
        self.staging, self.activation = staging, activation
        self.scheduler = Scheduler()
        self.network = Network()
        self.duties: dict[str, Duties] = {}
        self.faults: dict[tuple[str, str], str] = {}
        self.doomed: list[str] = []
        self.held: set[str] = set()
        self.adapters: dict[str, SenderAdapter | ReceiverAdapter] = {}
        self.callers: dict[str, Caller] = {}
        self.acted: dict[tuple[str, int, int], int] = {}
        self._lives: dict[str, int] = dict.fromkeys(sizes, 0)

    # Workers

    def start(self, group: str) -> None:
        """Start every rank of a group that is not there."""
        self._lives[group] += 1
        for rank in range(self.sizes[group]):
            worker = f"{group}/{rank}"
            if worker not in self.adapters:
                self.adapters[worker] = self._make(group, rank)
                self.callers[worker] = Caller(self, worker)

    def interrupt(self, worker: str) -> None:
        """Interrupt a worker's call, if it is in one."""
        caller = self.callers[worker]
        if caller.busy and not caller.orders:
            caller.thread.interrupt()

    def crash(self, worker: str) -> None:
        """End a worker's process."""
        adapter = self.adapters.pop(worker)
        post = adapter._station._post
        self.callers.pop(worker).thread.kill()
        beside = adapter._beside
        if isinstance(beside, _Started) and beside.thread is not None:
            beside.thread.kill()
        if worker == "trainer/0":
            for thread in self.scheduler.threads:
                if thread.name == "transload conductor":
                    thread.kill()
        self.network.crash(post)  # type: ignore[arg-type]

    def _make(self, group: str, rank: int) -> SenderAdapter | ReceiverAdapter:
        meeting = Addresses({"sender": "tcp://10.0.0.1:1"}, key="0" * 64)
        common = {"rank": rank, "world_size": self.sizes[group], "rendezvous": meeting, "deadline_s": DEADLINE_S}
        common["staging"] = group in self.staging
        if group == "trainer":
            return SenderAdapter(_no_loader, {}, SPACE, activation=self.activation, **common)  # type: ignore[arg-type]
        return ReceiverAdapter(_no_loader, {}, SPACE, engine=group, **common)  # type: ignore[arg-type]

    def receivers(self, engine: str) -> dict[str, ReceiverAdapter]:
        """Ranks of an engine that are there."""
        return {w: a for w, a in self.adapters.items() if w.startswith(f"{engine}/") and isinstance(a, ReceiverAdapter)}

    def senders(self) -> dict[str, SenderAdapter]:
        """Trainers that are there."""
        return {w: a for w, a in self.adapters.items() if isinstance(a, SenderAdapter)}

    def whole(self, group: str) -> bool:
        """Whether every rank of a group is there."""
        return all(f"{group}/{rank}" in self.adapters for rank in range(self.sizes[group]))

    def call_all(self, call: Callable[[SenderAdapter], object]) -> None:
        """Let every trainer make a call."""
        for worker, adapter in self.senders().items():
            self.callers[worker].order(partial(call, adapter))

    def calling(self) -> bool:
        """Whether a trainer is in a call."""
        return any(self.callers[worker].busy for worker in self.senders())

    def poll(self, worker: str) -> None:
        """Let a rollout begin its next poll."""
        adapter = self.adapters[worker]
        assert isinstance(adapter, ReceiverAdapter)
        self.callers[worker].order(adapter.poll_requests)

    def acts(self, worker: str, session: Session) -> None:
        """A worker does a duty: every rank of its engine must be at this poll."""
        group = worker.rpartition("/")[0]
        if group == "trainer":
            return
        at = self.acted.setdefault((group, self._lives[group], session.txn), session.counter)
        assert at == session.counter, f"{worker} acts at poll {session.counter}, another rank at {at}"

    # Time

    def choices(self) -> list[Callable[[], None]]:
        """Everything that may happen next without time passing."""
        return [*self.network.waiting(), *(thread.resume for thread in self.scheduler.runnable())]

    def happen(self, made: random.Random) -> None:
        """Let one of the `choices` happen, or a rollout poll if it is there and free."""
        choices = self.choices()
        if choices and made.random() >= 0.3:
            made.choice(choices)()
            return
        rollouts = [
            f"{group}/{rank}" for group, size in self.sizes.items() if group != "trainer" for rank in range(size)
        ]
        worker = made.choice(rollouts)
        if worker in self.callers and not self.callers[worker].busy:
            self.poll(worker)

    def pass_time(self, seconds: float) -> None:
        """Let time pass; control threads look at their deadlines."""
        self.scheduler.now += seconds
        self.network.tick()

    def drain(self) -> None:
        """Let everything happen that can without time passing."""
        for _ in range(5_000):
            choices = self.choices()
            if not choices:
                return
            choices[0]()
        raise AssertionError(f"the job talks for ever: {choices}")

    def run(self, until: Callable[[], bool], *, within_s: float) -> None:
        """Let the job go on as real ones do: messages are quick, and engines step and step, all ranks together."""
        stop_at = self.scheduler.now + within_s
        while not until():
            assert self.scheduler.now < stop_at, f"stuck: {self.stuck()}"
            for worker, caller in self.callers.items():
                if worker.startswith("trainer/") or caller.busy or worker in self.held or self.is_ahead(worker):
                    continue
                self.poll(worker)
            self.drain()
            while self.doomed:
                self.crash(self.doomed.pop())
            self.pass_time(0.25)

    def is_ahead(self, worker: str) -> bool:
        """Whether a rank's next step needs another of its engine that has not come so far."""
        ranks = self.receivers(worker.rpartition("/")[0])
        counters = {name: rank._station.session.counter for name, rank in ranks.items() if name not in self.held}
        return counters[worker] > min(counters.values())

    def stuck(self) -> str:
        """Who is in a call."""
        return ", ".join(worker for worker, caller in self.callers.items() if caller.busy)

    def end(self) -> None:
        """Let go of all threads."""
        for thread in self.scheduler.threads:
            thread.kill()


@contextmanager
def simulated(
    maps: Mapping[str, SourceMap],
    sizes: Mapping[str, int],
    staging: Collection[str] = (),
    activation: str = "engine",
) -> Iterator[Simulation]:
    """A job in whose adapters sockets, threads, clocks and bytes are simulated."""
    job = Simulation(maps, sizes, staging, activation)
    scheduler = job.scheduler
    clock = SimpleNamespace(
        monotonic=lambda: scheduler.now, perf_counter=lambda: scheduler.now, time_ns=lambda: int(scheduler.now * 1e9)
    )
    threads = SimpleNamespace(Thread=_thread_maker(scheduler))
    with pytest.MonkeyPatch.context() as patch:
        for module in (conductor, connecting, paths, sender, session, station, steps):
            patch.setattr(module, "time", clock)
        for module in (conductor, receiver, sender):
            patch.setattr(module, "threading", threads)
        for module in (session, station):
            patch.setattr(module, "Condition", lambda: Condition(scheduler))
        patch.setattr(steps, "queue", SimpleNamespace(SimpleQueue=lambda: Queue(scheduler), Empty=queue.Empty))
        patch.setattr(station, "Post", partial(Post, network=job.network))
        patch.setattr(station, "Finalize", lambda *given, **named: None)  # what is simulated ends with the test
        for module in (sender, receiver):
            patch.setattr(module, "Duties", partial(Duties, job=job))
        # A report is made of what executors saw, and there are none.
        patch.setattr(updating, "gather_report", lambda *given, **named: None)
        patch.setattr(updating, "report_bytes", lambda report: b"")
        patch.setattr(pending_update, "read_report", lambda data: REPORT)
        patch.setattr(fleet, "make_connection", _plan_once)
        try:
            yield job
        finally:
            job.end()


_PLANS: dict[tuple[str, ...], Connection] = {}


def _plan_once(
    holders: Mapping[str, SourceMap], needers: Mapping[str, SourceMap], *given: Any, **named: Any
) -> Connection:
    workers = tuple(f"{worker} {held.digest()}" for worker, held in (*holders.items(), *needers.items()))
    if workers not in _PLANS:
        _PLANS[workers] = make_connection(holders, needers, *given, **named)
    return _PLANS[workers]


class _Started:
    """Of `threading`: a thread that the scheduler runs."""

    def __init__(self, scheduler: Scheduler, name: str, target: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._make = lambda: scheduler.spawn(name, target)
        self.thread: Thread | None = None

    def start(self) -> None:
        self.thread = self._make()

    def join(self, timeout: float) -> None:
        thread = self.thread
        assert thread is not None
        if not thread.over:
            self._scheduler.wait(lambda: thread.over, timeout)


def _thread_maker(scheduler: Scheduler) -> Callable[..., _Started]:
    return lambda target, name, daemon: _Started(scheduler, name, target)


def _no_loader(pairs: object) -> None:
    raise AssertionError("nothing is loaded in a simulation")

"""Runs one worker's program, once for every version.

::

    program   = compile_program(plan, worker, source_map)
    executor  = Executor(program, memory, SharedMemoryTransport(worker), deadline_s=60)
    # publish executor.endpoint over the control plane, gather those of the peers
    executor.connect({peer: endpoint, ...})
    report = executor.run(version)

The program is stepped by a generator (`transfer_exec.update`) that yields whenever it cannot go on; `Executor.run`
polls it against a deadline, and `transfer_exec.in_process` polls many workers' side by side in one thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from layout_algebra.dtypes import IdArray, dtype_of
from layout_algebra.signal_safe import ThreadPool
from transfer_exec.binding import LiveTensor, bind, live_tensors, stretches_of
from transfer_exec.buffers import Buffers, open_buffers
from transfer_exec.device import Device
from transfer_exec.errors import DeadlineError, ProgramError, TransportError
from transfer_exec.fetching import chunks_of
from transfer_exec.kernels.base import Kernels
from transfer_exec.kernels.cpu import CpuKernels
from transfer_exec.program import Program, StripColumn
from transfer_exec.report import WorkerReport
from transfer_exec.signals import Steps, Wait, first_number
from transfer_exec.transport.base import Endpoint, Transport, check_process
from transfer_exec.transport.reading import Reading, Strips, Sums
from transfer_exec.transport.stretches import Stretches
from transfer_exec.update import Update

DEPTH = 2
"""Rounds under way at once, where nobody says otherwise."""

_SEQUENCE_LIMIT = 1 << 63


class Executor:
    """One worker's program, bound to its memory and its transport.

    Parameters
    ----------
    program
        From `compile_program`.
    memory
        A numpy array or torch tensor (any strides) for every parameter with traffic, written in place; other names are
        ignored.
    transport
        This worker's own end, fresh: the buffers are allocated from it and registered here.
    deadline_s
        Longest time that any single wait may take.
    kernels
        Backend; numba by default.
    devices
        Where tensors may be beside the host; the kernels move them (`transfer_exec.kernels.placed`), after all that the
        thread which runs an update has given its current streams.
    depth
        Rounds under way at once, equal on all workers; the buffers' memory is that many times a round's.
    before_read
        Called in every update before anything is read straight into memory.
    strips
        What of the program's fetches is to be digested as it lands; int64, columns as in `StripColumn`, disjoint.

    Raises
    ------
    ProgramError
        If memory does not fit the program; nothing has been written.
    TransportError
        If the buffers cannot be registered.
    """

    def __init__(
        self,
        program: Program,
        memory: Mapping[str, object],
        transport: Transport,
        *,
        deadline_s: float = 60.0,
        kernels: Kernels | None = None,
        devices: Sequence[Device] = (),
        depth: int = DEPTH,
        before_read: Callable[[], None] = lambda: None,
        strips: IdArray | None = None,
    ) -> None:
        if transport.worker != program.worker:
            raise TransportError(
                f"program is of {program.worker}, transport of {transport.worker}; expected one worker"
            )
        self._pid = os.getpid()
        self._program = program
        self._transport = transport
        self._deadline_s = deadline_s
        self._kernels: Kernels = CpuKernels() if kernels is None else kernels
        self._staged = {
            tensor.name: np.zeros(tensor.shape, dtype_of(tensor.dtype).storage)
            for tensor in program.tensors
            if tensor.staged
        }
        self._devices = tuple(devices)
        self._tensors = live_tensors(program, memory, self._staged, [device.name for device in devices])
        memory_of_tensors = stretches_of(program, self._tensors)
        if program.lent:
            transport.lend(memory_of_tensors.only(program.lent))
        self._before_read = before_read
        self._memory = memory_of_tensors
        self._strips = np.empty((0, len(StripColumn)), dtype=np.int64) if strips is None else strips
        self._readings: dict[str, Reading] = {}
        self._buffers = open_buffers(program, transport, depth)
        addresses = self._buffers.addresses
        self._pack, self._assemble = (
            [
                self._kernels.prepare(rows, packing=packing)
                for rows in bind(table, self._tensors, addresses, packing=packing)
            ]
            for table, packing in ((program.pack, True), (program.assemble, False))
        )
        self._layout = f"{program.plan_digest} at depth {self._buffers.depth}"
        self._endpoint = transport.endpoint(self._layout)
        self._pool = ThreadPool(1, "transload-kernels")
        self._connected: set[str] = set()
        self._newest = -1
        self._failure = ""
        self._abort_reason = ""
        self._progress: Callable[[int, int], None] | None = None

    @property
    def program(self) -> Program:
        """The program."""
        return self._program

    @property
    def tensors(self) -> tuple[LiveTensor, ...]:
        """Where each of the program's tensors is."""
        return self._tensors

    @property
    def endpoint(self) -> Endpoint:
        """What peers need to write here."""
        return self._endpoint

    @property
    def buffers(self) -> Buffers:
        """The buffers; for reports and tests."""
        return self._buffers

    @property
    def staged(self) -> Mapping[str, npt.NDArray[np.generic]]:
        """Checkpoint tensors that opaque parameters depend on, by name; whole after `run`, until the next one."""
        return self._staged

    def connect(self, endpoints: Mapping[str, Endpoint]) -> None:
        """Get to know the peers; workers that this program has nothing to do with are ignored.

        Raises
        ------
        TransportError
            If a peer is missing, its endpoint is another worker's, it compiled another plan, or it is unreachable.
        UnreadableError, UnmappableError
            If this program reads from a peer, and the system does not allow that.
        """
        check_process(self._pid, self._program.worker)
        for peer in self._program.peers:
            endpoint = endpoints.get(peer)
            if endpoint is None:
                raise TransportError(f"{self._program.worker}: no endpoint of {peer}, which its program writes to")
            if endpoint.worker != peer:
                raise TransportError(f"{self._program.worker}: got the endpoint of {endpoint.worker} as that of {peer}")
            if endpoint.program != self._layout:
                raise TransportError(
                    f"{peer}: laid out its buffers for plan {endpoint.program}, {self._program.worker} for "
                    f"{self._layout}; both must compile one plan for one depth"
                )
            self._transport.connect(endpoint)
            self._connected.add(peer)
        self._readings = {reading.peer: reading for reading in self._prepared(endpoints)}

    def tell(self, progress: Callable[[int, int], None] | None) -> None:
        """Whom runs tell, in their own thread, how many rounds are over, and of how many."""
        self._progress = progress

    def run(self, version: int, *, trace: bool = False, sums: Sums | None = None) -> WorkerReport:
        """Take part in one update, from the first byte to the last.

        Parameters
        ----------
        version
            Greater than that of any earlier run, and the same on all workers.
        trace
            Keep spans in the report (`transfer_exec.trace`).
        sums
            To which the digests of all strips are added; None if nobody wants them. After an error they mean nothing.

        Raises
        ------
        DeadlineError
            If a wait took longer than ``deadline_s``; names version, round, stage and peer.
        TransportError
            If a write failed, a peer is at another version, or `abort` was called.
        ProgramError
            If the version is not greater, or an earlier run failed.

        After an error parameters may be half written, and the executor does not run again: peers may still be at
        the old version. Make a new one on a new transport.
        """
        steps = self.start(version, self._pool, trace=trace, sums=sums)
        previous: Wait | None = None
        since, reached = 0.0, 0
        try:
            while True:
                try:
                    wait = next(steps)
                except StopIteration as done:
                    report: WorkerReport = done.value
                    if self._progress is not None:
                        self._progress(self._program.rounds, self._program.rounds)
                    return report
                now = time.monotonic()
                if wait is not previous:
                    since = now
                    if self._progress is not None and wait.round > reached:
                        reached = wait.round
                        self._progress(reached, self._program.rounds)
                if self._abort_reason:
                    raise TransportError(f"{self._program.worker}: aborted ({self._abort_reason}) at {wait}")
                if now - since > self._deadline_s and not wait.on_itself:
                    raise DeadlineError(f"{self._program.worker}: waited {self._deadline_s:g} s at {wait}")
                if wait is previous:
                    time.sleep(self._transport.patience.sleep_s(now - since))
                previous = wait
        except BaseException as error:
            # Also of an interrupt: peers are left in the middle, so this executor must not run again.
            self._failure = f"version {version} failed: {error}"
            raise
        finally:
            steps.close()

    def start(
        self, version: int, pool: ThreadPool | None = None, *, trace: bool = False, sums: Sums | None = None
    ) -> Steps:
        """The steps of one update: a generator that yields a `Wait` whenever it cannot go on.

        It returns the `WorkerReport`. `run` is the usual way to drive it, with kernels in a pool of one thread, so that
        they run beside the wire; without a pool they run inside the steps.
        """
        check_process(self._pid, self._program.worker)
        if self._abort_reason:
            raise TransportError(f"{self._program.worker}: aborted ({self._abort_reason}) before version {version}")
        if self._failure:
            raise ProgramError(f"{self._program.worker}: {self._failure}; make a new executor on a new transport")
        if version <= self._newest or first_number(version + 1, self._program.rounds) >= _SEQUENCE_LIMIT:
            raise ProgramError(
                f"{self._program.worker}: version {version} after version {self._newest}; expected a greater one, "
                f"below 2**63 / {self._program.rounds + 1}"
            )
        unknown = [peer for peer in self._program.peers if peer not in self._connected]
        if unknown:
            raise TransportError(f"{self._program.worker}: is not connected to {', '.join(unknown)}")
        self._newest = version
        for device in self._devices:
            device.follow()
        update = Update(
            self._program,
            self._transport,
            self._kernels.name,
            self._buffers,
            self._readings,
            version,
            pool=pool,
            trace=trace,
            before_read=self._before_read,
            sums=sums,
        )
        return update.steps(self._pack, self._assemble)

    def abort(self, reason: str) -> None:
        """Make a run, on whatever thread, stop with a TransportError at its next wait; later ones at once."""
        self._abort_reason = reason or "no reason given"

    def close(self) -> None:
        """Stop a run at its next wait, and let go of peers; what peers still write lands in memory nobody reads."""
        self._abort_reason = self._abort_reason or "the executor was closed"
        self._pool.shutdown()
        self._transport.close()

    def _prepared(self, endpoints: Mapping[str, Endpoint]) -> Iterator[Reading]:
        rows = self._strips[:, StripColumn.OFFSET :].copy()
        rows[:, 0] += self._memory.starts[self._strips[:, StripColumn.TENSOR]]
        strips = Strips.of(rows)
        for fetch, rows in zip(self._program.fetches, self._program.fetch_rows, strict=True):
            lent = endpoints[fetch.peer].lent
            if lent is None:
                raise TransportError(f"{self._program.worker}: reads from {fetch.peer}, which lends nothing")
            chunks = chunks_of(self._program.worker, fetch.peer, rows, Stretches.of(lent), self._memory)
            yield self._transport.prepare_read(fetch.peer, self._memory, chunks, strips)

"""What a worker does in a transaction: probe, bind, prepare, transfer, install. Trainers and rollouts alike.

`Duties` owns a worker's side of the data plane: its source map, the executor that is bound to its memory, and what is
to be digested. It runs in the thread that called the adapter, one duty at a time, in the order in which the conductor
asks for them:

::

    connect   Probe -> Probed, GiveMap -> MapGiven, Bind -> Bound, Attach -> Done
    update    Prepare -> Prepared, Transfer -> Transferred, Install -> Installed, Publish -> Published

A worker that stages (`adapters.host_staging`) has its executor bound to copies in host memory. A trainer fills them
first (Stage), and a thread of its own does everything after that. On a rollout such a thread does everything up to the
transfer, and the copies are installed when the ranks have stopped (Ready, Install).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from adapters.duty_messages import (
    Assess,
    Assessed,
    Attach,
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
    Stage,
    Stay,
    Transfer,
    Transferred,
)
from adapters.events import log_event
from adapters.failures import HookError, StaleError, VerificationError, VersionError
from adapters.host_staging import HostCopies, shared_copies
from adapters.own_load import OwnLoad
from adapters.placing import place
from adapters.probe_settle import leave_to_loader
from adapters.probe_worker import run_loader
from adapters.probing import probe
from adapters.session import Session
from adapters.storage import Storage, live_memory
from adapters.torch_bits import bits_view, tensor_of_bits
from adapters.transports import make_transport
from adapters.verification import Proof, plan_proof
from adapters.watched_kernels import WatchedKernels
from adapters.worker import Hook, Worker
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace
from transfer_exec.binding import scattered_names, shared_names
from transfer_exec.executor import Executor
from transfer_exec.kernels.cpu import CpuKernels
from transfer_exec.program import Program
from transfer_exec.report import WorkerReport
from transfer_exec.transport.base import Endpoint, Transport

__all__ = ["Duties"]

_CONNECT_S = 10.0


class Duties:
    """One worker's side of the data plane.

    Attributes
    ----------
    stalled_since
        When the caller's computing stopped for what is being done; CLOCK_MONOTONIC, set by the adapter.
    version
        What a rollout holds; None before its first update.
    report
        Of the update that is being done, or was done last.
    """

    def __init__(self, worker: Worker, session: Session) -> None:
        self._worker = worker
        self._session = session
        self._probed: SourceMap | None = None
        self._map: SourceMap | None = None
        self._shown: SourceMap | None = None
        self._storage: Storage | None = None
        self._proof: Proof | None = None
        self._rest: Proof | None = None
        self._looks_at_rest = True
        self._landed: dict[int, int] = {}
        self._own_load: OwnLoad | None = None
        self._executor: Executor | None = None
        self._transport: Transport | None = None
        self._gets_bytes = False
        self._kernels = WatchedKernels()
        self._moved = False
        self._one_at_a_time = threading.Lock()
        self._copies: HostCopies | None = None
        self._copies_of: SourceMap | None = None
        self._staged_in: tuple[float, float] | None = None
        self._staged: int | None = None
        self.stalled_since = 0.0
        self.version: int | None = None
        self.report: WorkerReport | None = None

    @property
    def wrote(self) -> bool:
        """Whether parameters of a rollout were written since the last update began."""
        return self._worker.receives and self._kernels.ran

    @property
    def source_map(self) -> SourceMap | None:
        """What the worker was found to hold by the connect that it is bound to."""
        return self._shown

    def perform(self, duty: Duty) -> Result:
        """Do one duty; of two threads that want to, one waits."""
        with self._one_at_a_time:
            return self._perform(duty)

    def _perform(self, duty: Duty) -> Result:
        start = time.perf_counter()
        match duty:
            case Probe():
                return self._probe(start)
            case Stay():
                return Done(time.perf_counter() - start)
            case GiveMap():
                return MapGiven(self._found().to_bytes())
            case Bind():
                return self._bind(duty, start)
            case Attach(endpoints):
                self._bound().connect({name: Endpoint.from_bytes(data) for name, data in endpoints.items()})
                return Done(time.perf_counter() - start)
            case Stage(version):
                self._stage(version)
                return Done(time.perf_counter() - start)
            case Prepare():
                return self._prepare(duty)
            case Transfer(version, trace):
                return self._transfer(version, trace=trace)
            case Ready():
                self._ready()
                return Done(time.perf_counter() - start)
            case Install():
                return self._install()
            case Assess():
                return Assessed(self.wrote)
            case Publish(version):
                self.version = version
                self._kernels.ran = False
                self._looks_at_rest = False
                return Published((self.stalled_since, time.monotonic()))

    def check_storage(self) -> None:
        """Refuse to go on if a tensor that takes part is somewhere else than at connect.

        Raises
        ------
        StaleError
            Naming the tensor.
        """
        if self._storage is not None:
            now = Storage.of(live_memory(self._worker.parameters), mapped=self._storage.mapped)
            self._storage.check(now, self._worker.name)

    def memory_moved(self) -> None:
        """The engine released its memory and mapped it again: what was registered is void."""
        self._moved = True

    def close(self) -> None:
        """Let go of all memory that peers could write, and of host copies."""
        self._let_go()
        self._copies = None

    def _let_go(self) -> None:
        executor, self._executor = self._executor, None
        transport, self._transport = self._transport, None
        if executor is not None:
            executor.close()
        if transport is not None:
            transport.close()

    # Connect

    def _probe(self, start: float) -> Probed:
        worker = self._worker
        found = probe(
            worker.load_weights,
            worker.parameters,
            worker.space,
            agree=self._session.agree,
            progress=self._session.report,
        )
        if worker.receives:
            found = leave_to_loader(found)
        self._probed = found
        live = live_memory(worker.parameters)
        scattered = tuple(sorted(scattered_names(live)))
        shared: tuple[str, ...] = ()
        if not worker.receives:
            shared = shared_copies(live, found) if worker.staging else tuple(sorted(shared_names(live)))
        return Probed(found.digest(), time.perf_counter() - start, worker.staging, scattered, shared)

    def _bind(self, duty: Bind, start: float) -> Bound:
        self._let_go()
        worker = self._worker
        program = Program.from_bytes(duty.program)
        if program.worker != worker.name:
            raise StaleError(f"{worker.name}: got the program of {program.worker}; call connect again")
        self._map = source_map = self._map_of(program, duty)
        self._shown = self._found()
        memory: Mapping[str, torch.Tensor]
        if worker.staging:
            memory = self._host_copies(source_map).tensors
        else:
            memory = live_memory(worker.parameters)
            takes_part = {tensor.name for tensor in program.tensors if not tensor.staged} | set(source_map.opaque)
            mapped = [program.tensors[position].name for position in program.mapped]
            self._storage = Storage.of(memory, mapped=mapped).only(sorted(takes_part), worker.name)
            self._moved = False
        staged = [tensor.name for tensor in program.tensors if tensor.staged]
        self._proof = plan_proof(source_map, duty.cells, staged=staged, threads=torch.get_num_threads(), tensors=memory)
        self._own_load = None
        if duty.own_load:
            self._own_load = OwnLoad(worker.load_weights, worker.parameters, source_map)
        self._gets_bytes = worker.receives and program.receives
        mine = {t.name: memory[t.name] for t in program.tensors if not t.staged and t.name in memory}
        placement = place(worker.name, mine, staged, duty.transport, host=CpuKernels())
        self._kernels.use(placement.kernels)
        self._transport = make_transport(
            duty.transport,
            worker.name,
            address=lambda: worker.address(duty.machines),
            deadline_s=min(worker.deadline_s, _CONNECT_S),
            cards=worker.cards,
            devices=placement.devices,
        )
        if self._transport.place:
            log_event("reachable", worker.name, at=self._transport.place, over=duty.transport)
        beside = worker.staging  # what is written then are no parameters
        strips, self._rest = self._proof.divide(program) if worker.receives else (None, None)
        self._executor = Executor(
            program,
            memory,
            self._transport,
            deadline_s=worker.deadline_s,
            kernels=CpuKernels() if beside else self._kernels,
            devices=placement.devices,
            before_read=(lambda: None) if beside else self._kernels.before_run,
            strips=strips,
        )
        self._looks_at_rest = True
        self._warm_up()
        return Bound(self._executor.endpoint.to_bytes(), time.perf_counter() - start, self._transport.place)

    def _map_of(self, program: Program, duty: Bind) -> SourceMap:
        """The map that the program was compiled with: that of the connect at hand, of a newer one, or the one given."""
        for known in (self._map, self._probed):
            if known is not None and known.digest() == program.map_digest:
                return known
        return SourceMap.from_bytes(duty.source_map) if duty.source_map else self._found()

    def _host_copies(self, source_map: SourceMap) -> HostCopies:
        """The copies for a map: those at hand, unless it is another map or the worker was probed anew.

        Only then live tensors are looked at, so that a worker may be bound again while its caller goes on.
        """
        worker, copies = self._worker, self._copies
        if copies is None or self._copies_of is not self._probed or copies.source_map.digest() != source_map.digest():
            self._copies = None
            live = live_memory(worker.parameters)
            self._storage = Storage.of(live).only(_taking_part(source_map), worker.name)
            copies = HostCopies(
                worker.name,
                live,
                source_map,
                outwards=worker.receives,
                threads=torch.get_num_threads(),
                arena=None if copies is None else copies.arena,
            )
            self._copies, self._copies_of = copies, self._probed
            self._moved, self._staged_in = False, None
        return copies

    def _warm_up(self) -> None:
        """Compile, or read from disk, what an update runs, so that the first one stalls nobody for it."""
        self._digests()

    # Update

    def _stage(self, version: int) -> None:
        """Copy the weights into host memory; from here on the caller's tensors are not looked at."""
        copies = self._known_copies()
        copies.copy(live_memory(self._worker.parameters))
        self._copies_of = self._probed  # of a connect that failed, whose finds are not used
        self._staged_in, self._staged = (self.stalled_since, time.monotonic()), version

    def _prepare(self, duty: Prepare) -> Prepared:
        worker = self._worker
        if not worker.receives:
            self._bound()
            if not worker.staging:
                self.check_storage()
            elif self._staged_in is None:
                raise StaleError(f"{worker.name}: bound to another layout since its weights were staged; send again")
            elif self._staged != duty.version:
                raise StaleError(
                    f"{worker.name}: version {self._staged} is in its host memory, and version {duty.version} was to "
                    "be sent; send again"
                )
            start = time.monotonic()
            return Prepared(self._digests(), False, time.monotonic() - start, start)
        if self.version is not None and duty.version <= self.version:
            raise VersionError(f"version {duty.version} is not newer than {self.version}, which {worker.name} has")
        if worker.staging:
            return Prepared({}, False, 0.0)
        self._bound()
        if not self._moved:
            self.check_storage()
        self._before_update()
        return Prepared({}, self._moved, 0.0)

    def _transfer(self, version: int, *, trace: bool) -> Transferred:
        executor = self._bound()
        self._session.on_cancel(executor.abort)
        executor.tell(partial(self._session.report, f"rounds, version {version}"))
        sums = self._proof.zeros() if self._worker.receives and self._proof is not None else None
        try:
            report = executor.run(version, trace=trace, sums=sums)
        finally:
            self._session.on_cancel(None)
        if self._copies is not None:
            report = replace(report, host_bytes=self._copies.bytes)
        self.report = report
        start = time.perf_counter()
        digests = self._landed = {} if sums is None else self._landed_digests(sums)
        verify_s = time.perf_counter() - start
        stall = None
        if not self._worker.receives:
            stall = self._staged_in or (self.stalled_since, time.monotonic())
        return Transferred(msgspec.msgpack.encode(report), digests, verify_s, stall)

    def _ready(self) -> None:
        worker = self._worker
        if self._moved:
            live = live_memory(worker.parameters)
            self._storage = Storage.of(live).only(_taking_part(self._known_map()), worker.name)
            self._known_copies().attach(live)
            self._moved = False
        else:
            self.check_storage()
        self._before_update()

    def _install(self) -> Installed:
        worker, source_map = self._worker, self._known_map()
        if self._copies is not None and self._gets_bytes:
            self._kernels.before_run()
            self._copies.copy(live_memory(worker.parameters))
        if source_map.opaque:
            staged = self._bound().staged
            pairs = [(name, _tensor(source_map.space, name, staged[name])) for name in source_map.staged_tensors()]
            try:
                run_loader(worker.load_weights, pairs)
            except Exception as error:
                raise HookError(f"load_weights raised for {', '.join(n for n, _ in pairs)}: {error!r}") from error
        start = time.monotonic()
        if self._own_load is not None:
            self._check_in_place()
            self._own_load.check(self._bound().staged)
        installed = Installed(time.monotonic() - start, start)
        if self._gets_bytes:
            _run_hook(worker.after_update, "after_update_hook")
        return installed

    # Inside

    def _before_update(self) -> None:
        """Call the user's hook, after which everything must still be where it was."""
        if self._gets_bytes and self._worker.before_update is not None:
            _run_hook(self._worker.before_update, "before_update_hook")
            if not self._moved:
                self.check_storage()

    def _check_in_place(self) -> None:
        """Whether parameters hold what has landed: it may have landed beside them, and a loader has run since.

        Raises
        ------
        VerificationError
            If they do not.
        """
        now = self._digests(live_memory(self._worker.parameters))
        wrong = [number for number, landed in self._landed.items() if now.get(number) != landed]
        if wrong:
            raise VerificationError(
                f"{len(wrong)} of {len(now)} sets of elements that landed are not in the parameters as they landed: "
                "the copy out of host memory, or load_weights for computed parameters, wrote something else"
            )

    def _landed_digests(self, sums: npt.NDArray[np.uint64]) -> dict[int, int]:
        """Of what has landed, of which some was digested on its way.

        Until an update has been published, all of it is looked at where it is: so the copying that later updates trust
        is proven too.
        """
        if self._looks_at_rest or self._rest is None:
            return self._digests()
        return self._digests_by(self._rest, landed=sums)

    def _digests(self, tensors: Mapping[str, torch.Tensor] | None = None) -> dict[int, int]:
        """Of what will be sent or is there: of the copies if the worker stages, or of some tensors."""
        return {} if self._proof is None else self._digests_by(self._proof, tensors)

    def _digests_by(
        self,
        proof: Proof,
        tensors: Mapping[str, torch.Tensor] | None = None,
        landed: npt.NDArray[np.uint64] | None = None,
    ) -> dict[int, int]:
        if not proof.numbers:
            return {}
        if tensors is None:
            tensors = live_memory(self._worker.parameters) if self._copies is None else self._copies.tensors
        memory = {name: _bits(tensors[name]) for name in proof.plan.parameters}
        return proof.digests(memory, self._bound().staged, landed)

    def _found(self) -> SourceMap:
        if self._probed is None:
            raise StaleError(f"{self._worker.name}: not probed yet; call connect")
        return self._probed

    def _known_map(self) -> SourceMap:
        if self._map is None:
            raise StaleError(f"{self._worker.name}: not connected; call connect")
        return self._map

    def _known_copies(self) -> HostCopies:
        if self._copies is None:
            raise StaleError(f"{self._worker.name}: not connected; call connect")
        return self._copies

    def _bound(self) -> Executor:
        if self._executor is None:
            raise StaleError(f"{self._worker.name}: not connected; call connect")
        return self._executor


def _taking_part(source_map: SourceMap) -> list[str]:
    """Parameters that copy, or are computed from, checkpoint elements."""
    copying = [name for name in source_map.parameters if len(source_map[name].copies)]
    return sorted({*copying, *source_map.opaque})


def _run_hook(hook: Hook | None, name: str) -> None:
    if hook is not None:
        try:
            hook()
        except Exception as error:
            raise HookError(f"{name} raised {error!r}") from error


def _bits(tensor: torch.Tensor) -> npt.NDArray[np.generic]:
    return bits_view(tensor if tensor.device.type == "cpu" else tensor.cpu())


def _tensor(space: CheckpointSpace, name: str, staged: npt.NDArray[np.generic]) -> torch.Tensor:
    """A staged checkpoint tensor as loaders expect it; a copy, since loaders may keep what they get."""
    spec = space.spec(name)
    bits = np.array(staged, copy=True, order="C").reshape(-1).view(f"<u{spec.element_type.item_bytes}")
    return tensor_of_bits(bits, spec.dtype, spec.shape)

"""Discovery without values: follow a worker's own ``load_weights`` operation by operation, and read off what it copies.

The loader is called once. Its checkpoint tensors have shapes and no values, its live tensors are stood in for, and
every torch operation is followed instead of run (``trace_operations``). Live memory is neither read nor written.

>>> from layout_algebra.space import TensorSpec
>>> space = CheckpointSpace([TensorSpec("q", (2, 3), "F32"), TensorSpec("a_log", (3,), "F32")])
>>> held = {"q": torch.zeros(3, 2), "a": torch.zeros(3)}
>>> def load_weights(weights):
...     loaded = dict(weights)
...     held["q"].copy_(loaded["q"].t())
...     held["a"].copy_(-torch.exp(loaded["a_log"]))
>>> traced = trace(load_weights, held, space)
>>> [str(copy) for copy in traced.source_map.slice_copies("q")], traced.operations("a")
(['0+(3:2,2:1) <- 4+(3:1,2:3)'], ('aten.exp', 'aten.neg'))
>>> traced.source_map.depends_on("a"), held["q"].sum().item()
(('a_log',), 0.0)

It follows loaders made of torch operations. ``adapters.probing`` runs any loader, and needs room for values.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import GeneratorType, MappingProxyType

import torch
from torch.utils._python_dispatch import _disable_current_modes

from adapters.probe_feed import Feed
from adapters.probe_live import LiveTensor, Parameters, check_same, find_live
from adapters.probe_worker import LoadWeights, Progress
from adapters.torch_bits import torch_dtype
from adapters.trace_operations import Guard, Recorder, line_of
from adapters.trace_result import Settled, settle
from layout_algebra.errors import LoaderRaisedError, LoaderWroteNothingError, MapError, TracingError
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace

__all__ = ["TracedMap", "trace"]

_REPORTS = 100
_HIDDEN = "Cannot access data pointer"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class TracedMap:
    """What tracing found.

    Attributes
    ----------
    source_map
        As ``probe`` gives it; opaque parameters name the checkpoint tensors they depend on.
    """

    source_map: SourceMap
    _operations: Mapping[str, tuple[str, ...]]

    def operations(self, parameter: str) -> tuple[str, ...]:
        """Casts and computations behind a parameter's opaque elements, in order; views and copies are left out.

        Raises
        ------
        MapError
            If there is no such parameter.
        """
        found = self._operations.get(parameter)
        if found is None:
            raise MapError(f"{parameter}: no such parameter in a map of {len(self._operations)}")
        return found


def trace(
    load_weights: LoadWeights, parameters: Parameters, space: CheckpointSpace, *, progress: Progress | None = None
) -> TracedMap:
    """Find the source map of a worker by following its loader, without values and without touching live memory.

    Parameters
    ----------
    load_weights, parameters, space
        As for ``adapters.probing.probe``. The loader gets all tensors of the checkpoint as tensors in host memory
        whose shapes and dtypes are right and whose values do not exist.
    progress
        Told about every hundredth of the checkpoint's tensors that the loader asks for.

    Returns
    -------
    TracedMap
        For every name the final tensor's elements, and the operations behind those that are no copies.

    Raises
    ------
    UnsupportedDtypeError
        If a checkpoint tensor's or a live tensor's dtype has no torch tensor; nothing was called.
    TracingError
        If the loader needs values (``item``, ``numpy``, an index that depends on them), calls a collective or foreign
        code, or works in another thread; the message names the operation, the tensor and the loader's line.
    LoaderRaisedError
        If the loader raised something else; its exception is chained.
    LoaderWroteNothingError
        If no element came from the checkpoint.
    ParameterReplacedError
        If the live tensors' names or sizes change.

    Notes
    -----
    Costs part of a millisecond for every operation of the loader, whatever the sizes. Tensors that the loader keeps
    outside of ``parameters`` have no values until it really loads. In every case all live tensors are what they were
    before. Those on a device are followed too, but nothing stands in for them: foreign code that reaches them is not
    noticed.
    """
    for spec in space.specs:
        torch_dtype(spec.dtype)
    recorder = Recorder(space)
    stage = _Stage(parameters, recorder)
    try:
        stage.enter()
        with torch.no_grad(), Guard(recorder), recorder:
            _run(load_weights, Feed(partial(_fed, recorder, space, progress)), recorder)
            now = find_live(parameters)
            check_same(stage.first, now, sharing=False)
            found = {one.name: _settled(recorder, one) for one in now}
        _check_untouched(recorder)
    finally:
        stage.leave()
    _check_wrote(found)
    names = {name: one.name for one in now for name in one.names}
    source_map = SourceMap(space, {name: found[first].entry for name, first in names.items()})
    operations = {name: found[names[name]].operations for name in source_map.parameters}
    return TracedMap(source_map, MappingProxyType(operations))


def _fed(recorder: Recorder, space: CheckpointSpace, progress: Progress | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that stand for the checkpoint's, in the order of the space."""
    total = len(space)
    for done, name in enumerate(space.names):
        if progress is not None and done % (total // _REPORTS + 1) == 0:
            progress("tracing load_weights", done, total)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            tensor = recorder.moves.checkpoint_tensor(name)
        yield name, tensor


class _Stage:
    """The live tensors off stage, and others in their places while the loader runs."""

    def __init__(self, parameters: Parameters, recorder: Recorder) -> None:
        self._parameters = parameters
        self._recorder = recorder
        self._mapping = dict(parameters() if callable(parameters) else parameters)
        self.first = find_live(self._mapping)
        self._own = {name: one for one in self.first for name in one.names}
        self._swapped: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._versions: list[tuple[torch.Tensor, int]] = []

    def enter(self) -> None:
        """Put a tensor without values into the place of every live one in host memory."""
        stand_ins = self._recorder.moves.memories.stand_in(self.first)
        for name, owner in self._mapping.items():
            live, mine = self._own[name], _plain(owner)
            if not mine.is_inference():
                self._versions.append((mine, mine._version))
            if live.tensor.numel() and live.tensor.device.type == "cpu":
                self._swapped.append((mine, live.tensor))
                mine.data = stand_ins[live.name]

    def leave(self) -> None:
        """Give every live tensor its memory back, also where the loader put another into its place."""
        for mine, own in self._swapped:
            mine.data = own
        for mine, version in self._versions:
            torch._C._autograd._unsafe_set_version_counter((mine,), (version,))
        for tensor, own in self._strays():
            tensor.data = own
        for tensor, own in self._strays():
            with torch.no_grad():
                tensor.copy_(own)

    def _strays(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Live tensors that lie in the trace's memory now, and what was there before."""
        try:
            mapping = self._parameters() if callable(self._parameters) else self._parameters
            now = {name: _plain(tensor) for name, tensor in mapping.items() if name in self._own}
        except Exception:  # noqa: BLE001 the user's callable may be what fails
            return []
        return [
            (tensor, self._own[name].tensor)
            for name, tensor in now.items()
            if tensor.numel() and self._recorder.moves.memories.lent(tensor)
        ]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose memory is meant: a sharded tensor's local part."""
    sharded = sys.modules.get("torch.distributed.tensor")
    if sharded is not None and isinstance(tensor, sharded.DTensor):
        local: torch.Tensor = tensor._local_tensor
        return local
    return tensor


def _run(load_weights: LoadWeights, feed: Feed, recorder: Recorder) -> None:
    """Call the loader; whatever it does with a refusal, it stays refused."""
    try:
        result = load_weights(feed)
        if isinstance(result, GeneratorType):
            deque(result, maxlen=0)
        elif inspect.iscoroutine(result):
            result.close()
            raise TypeError("load_weights is a coroutine function; expected one that loads before it returns")
    except TracingError:
        raise
    except Exception as error:
        if recorder.refusal is not None:
            raise recorder.refusal from error
        if isinstance(error, RuntimeError) and _HIDDEN in str(error):
            raise TracingError(
                f"load_weights hands a tensor to code outside of torch's operations at {_raised_at(error)}: it asks "
                "for the tensor's memory, which has no values. Probe this loader instead"
            ) from error
        raise LoaderRaisedError(f"load_weights raised while traced: {type(error).__name__}: {error}") from error
    if recorder.refusal is not None:
        raise recorder.refusal


def _raised_at(error: BaseException) -> str:
    at = "a line that is not known"
    trail = error.__traceback__
    while trail is not None:
        at = line_of(trail.tb_frame, trail.tb_lineno) or at
        trail = trail.tb_next
    return at


def _settled(recorder: Recorder, one: LiveTensor) -> Settled:
    return settle(recorder.moves.labels, recorder.moves.view(one.tensor), one.shape, one.dtype)


def _check_untouched(recorder: Recorder) -> None:
    """Refuse a trace during which somebody read or wrote a tensor's memory behind its back."""
    arena = recorder.moves.memories.arena
    if not arena.can_tell:
        _log.warning("this system does not tell which pages of memory exist; a loader's other threads go unnoticed")
        return
    address = arena.touched()
    if address is not None:
        raise TracingError(
            f"{recorder.moves.memories.owner(address)}: its memory was read or written outside of torch's operations, "
            "by foreign code, through its address or in another thread, which tracing cannot see. Probe this loader "
            "instead"
        )


def _check_wrote(found: Mapping[str, Settled]) -> None:
    elements = sum(one.entry.elements for one in found.values())
    if elements and not any(len(one.entry.copies) or one.entry.opaque for one in found.values()):
        raise LoaderWroteNothingError(
            f"load_weights returned, but none of the {elements:,} elements of {len(found)} live tensors came from the "
            "checkpoint; expected some. Check that the names it knows are the checkpoint's, and that `parameters` "
            "lists the tensors it writes (a callable, if it replaces them)"
        )

"""Every torch operation of a loader, followed instead of run.

``Recorder`` is a dispatch mode. Views run as they are, on tensors that stand for others (``trace_memory``); copies,
casts and joins move pieces (``trace_rules``); whatever computes leaves a note of what it was and what it was computed
from; and whatever needs a value that is not there is refused, with the line of the loader that asked for it.

>>> from layout_algebra.space import TensorSpec
>>> recorder = Recorder(CheckpointSpace([TensorSpec("w", (4, 2), "F32")]))
>>> weight = recorder.moves.checkpoint_tensor("w")
>>> with recorder:
...     rows = torch.cat([weight[2:], weight[:1]])
>>> [(piece.grid.start, piece.grid.other) for piece in recorder.moves.followed(rows).content.pieces]
[(0, 5), (16, 1)]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import NoReturn

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from adapters.torch_bits import dtype_name
from adapters.trace_calls import Call, Kind, kind_of, makes_floats, returned, tensors_in
from adapters.trace_moves import Moves
from adapters.trace_pieces import CONSTANT
from adapters.trace_rules import RULES
from layout_algebra.errors import TracingError
from layout_algebra.space import CheckpointSpace

_LIKE = frozenset(f"aten::{name}" for name in (
    "empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full",
    "new_empty_strided",
))  # fmt: skip
_ONLY_SHAPES = frozenset(f"aten::{name}" for name in (
    "is_same_size", "is_pinned", "_has_compatible_shallow_copy_type", "set_", "resize_", "detach_", "record_stream",
    "_unsafe_view", "_reshape_alias", "is_set_to",
))  # fmt: skip
_LAZY = frozenset(("aten::_conj", "aten::_neg_view"))
_COLLECTIVE = frozenset(("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "symm_mem"))
_RAW = frozenset((
    "numpy", "tolist", "data_ptr", "__array__", "__dlpack__", "__reduce_ex__", "__deepcopy__", "apply_", "map_",
    "map2_", "share_memory_",
))  # fmt: skip
_HERE = os.path.dirname(os.path.abspath(__file__))
_LIBRARY = os.path.dirname(os.path.abspath(os.__file__))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))


_NO_LIVE_VALUES = (
    "it needs values of live or traced memory, which is not read; a tensor that only steers the loader can be left out "
    "of `parameters`"
)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The dispatch mode under which a loader is followed.

    Parameters
    ----------
    space
        The checkpoint.

    Attributes
    ----------
    moves
        What every tensor holds.
    refusal
        The first operation that could not be followed; kept, since a loader may catch what it raises.
    """

    def __init__(self, space: CheckpointSpace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moves = Moves(space)
        self.refusal: TracingError | None = None
        self._kinds: dict[torch._ops.OpOverload, Kind] = {}

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if any(_has_own_dispatch(one) for one in types):
            # Fake tensors, as sharded ones use to find shapes, are for the mode below; other subclasses for themselves.
            fake = any(one.__name__ == "FakeTensor" for one in types)
            return func(*args, **(kwargs or {})) if fake else NotImplemented
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = kind_of(func)
        call = Call(func, kind, args, kwargs or {})
        with torch._C.DisableTorchFunction():
            try:
                return self._follow(call)
            except TracingError as error:
                if self.refusal is None:
                    self.refusal = TracingError(f"load_weights calls {call.text} at {loader_line()}: {error}")
                    raise self.refusal from error
                raise

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would load its compiler, which takes seconds, to keep it away from this mode."""
        return False

    def refuse(self, what: str, tensors: Iterable[torch.Tensor], why: str) -> NoReturn:
        """Say where the loader left the ground.

        Raises
        ------
        TracingError
            Always.
        """
        known = sorted({self._described(one) for one in tensors if self.moves.view(one) is not None})
        on = f" on {', '.join(known[:3])}" if known else ""
        error = TracingError(
            f"load_weights calls {what}{on} at {loader_line()}: {why}. Tracing follows torch operations on tensors "
            "without values; probe this loader instead"
        )
        self.refusal = self.refusal or error
        raise error

    def outputs(self, call: Call) -> object:
        """New followed tensors of the shapes that an operation would return."""
        return tree_map_only(torch.Tensor, lambda one: self.moves.blank(one, call.text), self._shapes(call))

    def knows(self, call: Call, tensors: Iterable[torch.Tensor], *, shape: bool = False) -> bool:
        """Whether the values of an index or a mask are known; if they come from the checkpoint, results are computed.

        Parameters
        ----------
        shape
            Whether the shape of a result hangs on a mask's values.

        Raises
        ------
        TracingError
            If it does and they are not known, or they are those of a live tensor.
        """
        known = True
        for one in tensors:
            view = self.moves.view(one)
            if view is None:
                continue
            known = False
            if shape and one.dtype in (torch.bool, torch.uint8):
                self.refuse(call.text, [one], "the shape of its result depends on values")
            if not self.moves.behind(view)[0]:
                self.refuse(call.text, [one], _NO_LIVE_VALUES)
        return known

    def compute(self, call: Call) -> object:
        """Follow an operation that computes: its results depend on its inputs, and are copies of none."""
        sources = [one for one in call.inputs if self.moves.view(one) is not None]
        results = self._shapes(call) if call.kind.written else self.outputs(call)
        targets = call.written or tensors_in([results])
        if call.kind.pointwise and not call.kind.random and len(sources) == 1 and len(targets) == 1:
            self._change(call, sources[0], targets[0])
        else:
            self._mix(call, sources, targets)
        return returned(call) if call.kind.written else results

    def _change(self, call: Call, source: torch.Tensor, target: torch.Tensor) -> None:
        """An operation element by element: every result depends on one element."""
        name, labels = dtype_name(source.dtype), self.moves.labels

        def change(label: int, tensors: frozenset[int]) -> int:
            if label == CONSTANT:
                return CONSTANT
            return labels.computed(labels.seen_as(label, name), call.text, tensors)

        self.moves.transfer(target, source.expand(target.shape), change)

    def _mix(self, call: Call, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Any other operation: every result depends on all inputs."""
        tensors: frozenset[int] = frozenset()
        steps: list[int] = []
        changing = call.kind.random
        for source in sources:
            more, before, not_constant = self.moves.behind(self.moves.followed(source))
            tensors |= more
            steps += before
            changing |= not_constant
        label = self.moves.labels.computed(steps, call.text, tensors) if changing else CONSTANT
        for target in targets:
            self.moves.fill(target, label)

    def _follow(self, call: Call) -> object:
        func, kind = call.func, call.kind
        if func.namespace in _COLLECTIVE:
            self.refuse(call.text, call.inputs, "a collective needs the other ranks and their values")
        follows = any(self.moves.memories.place(one) is not None for one in call.inputs)
        if not follows and not (kind.random and makes_floats(call)):
            return func(*call.args, **call.kwargs)
        if kind.name in _LAZY:
            self.refuse(call.text, call.inputs, "lazy negation and conjugation are not followed")
        if kind.name in _ONLY_SHAPES or (kind.view and not kind.composite):
            return func(*call.args, **call.kwargs)
        rule = RULES.get(kind.name)
        if rule is not None:
            done = rule(self, call)
            if done is not NotImplemented:
                return done
        if kind.composite:
            with self:
                return func.decompose(*call.args, **call.kwargs)
        if kind.view_copy:
            view = getattr(getattr(torch.ops.aten, kind.name[6:].removesuffix("_copy")), func._overloadname)
            with self:
                return tree_map_only(torch.Tensor, torch.clone, view(*call.args, **call.kwargs))
        if kind.name in _LIKE:
            shapes = self._shapes(call)
            floats = isinstance(shapes, torch.Tensor) and shapes.is_floating_point()
            return self.outputs(call) if floats else func(*call.args, **call.kwargs)
        if kind.needs_values:
            self.refuse(call.text, call.inputs, self._why_values(call))
        return self.compute(call)

    def _shapes(self, call: Call) -> object:
        """What the operation returns, on the meta device."""

        def bare(one: object) -> object:
            if isinstance(one, torch.Tensor):
                return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta")
            return torch.device("meta")

        args, kwargs = tree_map_only((torch.Tensor, torch.device), bare, (call.args, dict(call.kwargs)))
        for name in ("pin_memory", "generator"):
            kwargs.pop(name, None)
        try:
            return call.func(*args, **kwargs)
        except Exception as error:
            if call.func.namespace not in ("aten", "prims") or isinstance(error, NotImplementedError):
                self.refuse(call.text, call.inputs, f"nothing says what it returns ({type(error).__name__})")
            raise

    def _why_values(self, call: Call) -> str:
        views = [view for view in map(self.moves.view, call.inputs) if view is not None]
        loaded = any(self.moves.behind(view)[0] for view in views)
        return "it needs values, which the checkpoint has and tracing has not" if loaded else _NO_LIVE_VALUES

    def _described(self, tensor: torch.Tensor) -> str:
        """A followed tensor as a person knows it."""
        view = self.moves.followed(tensor)
        tensors, _, _ = self.moves.behind(view)
        names = [self.moves.labels.space.specs[position].name for position in sorted(tensors)]
        if not names or view.content.name.startswith("checkpoint tensor"):
            return view.content.name
        return f"{view.content.name} (made of {', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"


class Guard(TorchFunctionMode):
    """Refuses what reaches a tensor's memory without an operation: ``numpy``, ``tolist``, pickling."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        if name in _RAW and isinstance(first, torch.Tensor) and func is getattr(torch.Tensor, name, None):
            memories = self._recorder.moves.memories
            if name == "data_ptr" and first.device.type == "cpu":
                address = memories.address(first)
                if address is not None:
                    return address
            elif memories.place(first) is not None:
                self._recorder.refuse(f"Tensor.{name}", [first], "it reaches for memory, which has no values")
        return func(*args, **(kwargs or {}))


def loader_line() -> str:
    """The innermost line of the stack that is neither Python's own, nor torch's, nor of these modules."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = line_of(frame, frame.f_lineno)
        if found is not None:
            return found
        frame = frame.f_back
    return "a line that is not on the stack"


def line_of(frame: FrameType, number: int) -> str | None:
    """A line of code as a person finds it, or None if it is a library's or of these modules."""
    path = os.path.abspath(frame.f_code.co_filename)
    folder, file = os.path.split(path)
    ours = folder == _HERE and file.startswith(("trace_", "tracing", "probing"))
    library = folder.startswith(_LIBRARY) and "site-packages" not in folder
    if ours or library or folder.startswith(_TORCH) or frame.f_code.co_filename.startswith("<frozen"):
        return None
    return f"{frame.f_code.co_filename}:{number} in {frame.f_code.co_name}"


def _has_own_dispatch(one: type) -> bool:
    return getattr(one, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__

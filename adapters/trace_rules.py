"""Operations that only move elements: what each of them does to the pieces.

A rule is told of a call and says what the results hold, in views and transfers: ``cat`` is a transfer into each part
of a new tensor. What moves by an irregular table is done on plain lists of ids with the operation itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from adapters.trace_calls import tensors_in
from adapters.trace_content import MOST_LISTED
from adapters.trace_pieces import CONSTANT, Table

if TYPE_CHECKING:
    from adapters.trace_calls import Call
    from adapters.trace_operations import Recorder

Rule: TypeAlias = "Callable[[Recorder, Call], object]"

_MANY_RUNS = 256
_VALUES = ("index", "indices", "mask", "condition")
_NUMBERS = ("self", "other", "value")


def _copy(recorder: Recorder, call: Call) -> object:
    target, source = call.tensor("self"), call.tensor("src")
    recorder.moves.transfer(target, source.expand(target.shape))
    return target


def _foreach_copy(recorder: Recorder, call: Call) -> object:
    for target, source in zip(call.tensors("self"), call.tensors("src"), strict=True):
        recorder.moves.transfer(target, source.expand(target.shape))
    return None


def _same(recorder: Recorder, call: Call) -> object:
    out = _one(recorder.outputs(call))
    recorder.moves.transfer(out, call.tensor("self"))
    return out


def _clear(recorder: Recorder, call: Call) -> object:
    for target in call.written:
        recorder.moves.fill(target, CONSTANT)
    return call.written[0] if call.kind.results else None


def _fill(recorder: Recorder, call: Call) -> object:
    target, value = call.tensor("self"), call.named["value"]
    if isinstance(value, torch.Tensor):
        recorder.moves.transfer(target, value.expand(target.shape))
    else:
        recorder.moves.fill(target, CONSTANT)
    return target


def _cat(recorder: Recorder, call: Call) -> object:
    out = _target(recorder, call)
    axis = call.number("dim") % max(out.ndim, 1)
    begin = 0
    for part in call.tensors("tensors"):
        if part.shape == (0,):
            continue
        recorder.moves.transfer(out.narrow(axis, begin, part.shape[axis]), part)
        begin += part.shape[axis]
    return out


def _stack(recorder: Recorder, call: Call) -> object:
    out = _target(recorder, call)
    axis = call.number("dim") % out.ndim
    for index, part in enumerate(call.tensors("tensors")):
        recorder.moves.transfer(out.select(axis, index), part)
    return out


def _repeat(recorder: Recorder, call: Call) -> object:
    out, shown = _one(recorder.outputs(call)), call.tensor("self")
    if out.numel():
        lead = out.ndim - shown.ndim
        owns = [*[1] * lead, *shown.shape]
        split = [part for extent, own in zip(out.shape, owns, strict=True) for part in (extent // own, own)]
        for axis in range(shown.ndim - 1, -1, -1):
            shown = shown.unsqueeze(axis)
        for _ in range(2 * lead):
            shown = shown.unsqueeze(0)
        recorder.moves.transfer(out.view(split), shown.expand(split))
    return out


def _flip(recorder: Recorder, call: Call) -> object:
    out, source = _one(recorder.outputs(call)), recorder.moves.view(call.tensor("self"))
    axes = call.named["dims"]
    assert source is not None
    assert isinstance(axes, list | tuple)
    if source.elements:
        for axis in axes:
            extent = source.shape[axis]
            source = source.rows(axis % len(source.shape), extent - 1, -1, extent)
        recorder.moves.transfer(out, source)
    return out


def _roll(recorder: Recorder, call: Call) -> object:
    shifts, axes = call.named["shifts"], call.named.get("dims") or []
    source = call.tensor("self")
    assert isinstance(shifts, list | tuple)
    assert isinstance(axes, list | tuple)
    if not axes:
        return (
            NotImplemented
            if not source.is_contiguous()
            else _rolled(recorder, call, source.view(-1), [0], shifts).view(source.shape)
        )
    return _rolled(recorder, call, source, axes, shifts)


def _rolled(
    recorder: Recorder, call: Call, source: torch.Tensor, axes: Sequence[int], shifts: Sequence[int]
) -> torch.Tensor:
    for axis, shift in zip(axes, shifts, strict=True):
        out = recorder.moves.blank(torch.empty(source.shape, dtype=source.dtype, device="meta"), call.text)
        extent = source.shape[axis]
        cut = shift % extent if extent else 0
        recorder.moves.transfer(out.narrow(axis, cut, extent - cut), source.narrow(axis, 0, extent - cut))
        recorder.moves.transfer(out.narrow(axis, 0, cut), source.narrow(axis, extent - cut, cut))
        source = out
    return source


def _pad(recorder: Recorder, call: Call) -> object:
    out, source, widths = _one(recorder.outputs(call)), call.tensor("self"), call.named["pad"]
    assert isinstance(widths, list | tuple)
    inside, taken = out, source
    for place in range(len(widths) // 2):
        axis, before, after = source.ndim - 1 - place, widths[2 * place], widths[2 * place + 1]
        extent = source.shape[axis]
        taken = taken.narrow(axis, max(0, -before), extent - max(0, -before) - max(0, -after))
        inside = inside.narrow(axis, max(0, before), taken.shape[axis])
    recorder.moves.transfer(inside, taken)
    return out


def _index_select(recorder: Recorder, call: Call) -> object:
    index, source = call.tensor("index").reshape(-1), call.tensor("self")
    if not recorder.knows(call, [index]):
        return recorder.compute(call)
    out = _target(recorder, call)
    if not source.ndim:
        recorder.moves.transfer(out.view(()), source)
        return out
    _take_rows(recorder, out, source, call.number("dim") % source.ndim, index)
    return out


def _index(recorder: Recorder, call: Call) -> object:
    source = call.tensor("self")
    if not recorder.knows(call, call.tensors("indices"), shape=True):
        return recorder.compute(call)
    found = _single_index(call)
    if found is None:
        return _listed(recorder, call)
    axis, index = found
    shape = (*source.shape[:axis], *index.shape, *source.shape[axis + 1 :])
    out = recorder.moves.blank(torch.empty(shape, dtype=source.dtype, device="meta"), call.text)
    flat = (*source.shape[:axis], index.numel(), *source.shape[axis + 1 :])
    _take_rows(recorder, out.view(flat), source, axis, index.reshape(-1))
    return out


def _index_put(recorder: Recorder, call: Call) -> object:
    """In place: rows by an index; anything else on lists."""
    target, found = call.tensor("self"), _single_index(call)
    if call.named.get("accumulate", False) or not recorder.knows(call, call.tensors("indices")):
        return recorder.compute(call)
    if found is None or found[1].ndim != 1:
        return _listed(recorder, call)
    axis, index = found
    shape = (*target.shape[:axis], index.numel(), *target.shape[axis + 1 :])
    return _put_rows(recorder, target, axis, index, call.tensor("values").expand(shape))


def _index_copy(recorder: Recorder, call: Call) -> object:
    target, index = call.tensor("self"), call.tensor("index")
    if not recorder.knows(call, [index]):
        return recorder.compute(call)
    return _put_rows(recorder, target, call.number("dim") % max(target.ndim, 1), index, call.tensor("source"))


def _index_fill(recorder: Recorder, call: Call) -> object:
    target, index = call.tensor("self"), call.tensor("index")
    if isinstance(call.named["value"], torch.Tensor) or not recorder.knows(call, [index]):
        return recorder.compute(call)
    view = recorder.moves.followed(target)
    axis = call.number("dim") % max(target.ndim, 1)
    for _, first, step, count in _runs(_positive(index, target.shape[axis])):
        for row in range(first, first + step * count, step) if step else (first,):
            recorder.moves.fill(view.rows(axis, row, 1, 1), CONSTANT)
    return target


def _slice_scatter(recorder: Recorder, call: Call) -> object:
    """A clone with one view of it written: the view is made by the operation of that name."""
    name = call.kind.name[6:].removesuffix("_scatter")
    out = _one(recorder.outputs(call))
    recorder.moves.transfer(out, call.tensor("self"))
    rest = {key: value for key, value in call.named.items() if key not in ("self", "src")}
    selected = _one(getattr(torch.ops.aten, name)(out, **rest))
    recorder.moves.transfer(selected, call.tensor("src").expand(selected.shape))
    return out


def _listed(recorder: Recorder, call: Call) -> object:
    """Any operation that moves elements by a table: done on lists of ids and of labels."""
    choosing = [one for name in _VALUES for one in tensors_in([call.named.get(name)])]
    adding = call.named.get("accumulate", False) or call.named.get("reduce") is not None
    if adding or not recorder.knows(call, choosing):
        return recorder.compute(call)
    out = call.written[0] if call.kind.written else _one(recorder.outputs(call))
    ids: dict[str, object] = {}
    labels: dict[str, object] = {}
    for name, value in call.named.items():
        if name in _VALUES:
            ids[name] = labels[name] = value
        elif isinstance(value, torch.Tensor):
            table = recorder.moves.listed(value, out.dtype)
            ids[name] = torch.from_numpy(table.ids).view(value.shape)
            labels[name] = torch.from_numpy(table.labels.astype(np.int64)).view(value.shape)
        else:
            ids[name] = labels[name] = 0 if name in _NUMBERS else value
    found_ids = _one(call.func(**ids)).contiguous()
    found_labels = _one(call.func(**labels)).contiguous()
    table = Table(found_ids.view(-1).numpy(), found_labels.view(-1).numpy().astype(np.int32))
    recorder.moves.put_list(out, table)
    return out


def _single_index(call: Call) -> tuple[int, torch.Tensor] | None:
    """The axis and the integer index where just one axis is indexed, else None."""
    given = call.named["indices"]
    assert isinstance(given, list | tuple)
    used = [(axis, one) for axis, one in enumerate(given) if isinstance(one, torch.Tensor)]
    if len(used) != 1:
        return None
    axis, index = used[0]
    if index.dtype in (torch.bool, torch.uint8):
        if index.ndim != 1:
            return None
        index = index.nonzero().view(-1)
    return axis, index


def _take_rows(recorder: Recorder, out: torch.Tensor, source: torch.Tensor, axis: int, index: torch.Tensor) -> None:
    """``out`` is ``source`` at some indices of one axis."""
    target, rows = recorder.moves.followed(out), recorder.moves.view(source)
    if rows is None:
        recorder.moves.fill(target, CONSTANT)
        return
    chosen = _positive(index, source.shape[axis])
    runs = _runs(chosen)
    if len(runs) > _MANY_RUNS and max(source.numel(), out.numel()) <= MOST_LISTED:
        table = recorder.moves.listed(source, source.dtype)
        order = np.arange(source.numel(), dtype=np.int64).reshape(source.shape)
        order = np.take(order, chosen, axis=axis).reshape(-1)
        recorder.moves.put_list(target, Table(table.ids[order], table.labels[order]))
        return
    for place, first, step, count in runs:
        recorder.moves.transfer(target.rows(axis, place, 1, count), rows.rows(axis, first, step, count))


def _put_rows(
    recorder: Recorder, target: torch.Tensor, axis: int, index: torch.Tensor, source: torch.Tensor
) -> torch.Tensor:
    """Some indices of one axis of ``target`` become ``source``."""
    chosen = _positive(index, target.shape[axis] if target.ndim else 1)
    runs = _runs(chosen)
    if len(runs) > _MANY_RUNS and max(source.numel(), target.numel()) <= MOST_LISTED:
        held, new = recorder.moves.listed(target, target.dtype), recorder.moves.listed(source, target.dtype)
        order = np.arange(target.numel(), dtype=np.int64).reshape(target.shape)
        order = np.take(order, chosen, axis=axis).reshape(-1)
        ids, labels = held.ids.copy(), held.labels.copy()
        ids[order], labels[order] = new.ids, new.labels
        recorder.moves.put_list(target, Table(ids, labels))
        return target
    view, rows = recorder.moves.followed(target), recorder.moves.view(source)
    for place, first, step, count in runs:
        if step == 0 and count > 1:
            place, count = place + count - 1, 1
        chosen_rows = view.rows(axis, first, step, count) if target.ndim else view
        if rows is None:
            recorder.moves.fill(chosen_rows, CONSTANT)
        else:
            recorder.moves.transfer(chosen_rows, rows.rows(axis, place, 1, count) if source.ndim else rows)
    return target


def _positive(index: torch.Tensor, extent: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    chosen = index.to(torch.int64).cpu().numpy().reshape(-1)
    if len(chosen) and (int(chosen.min()) < -extent or int(chosen.max()) >= extent):
        raise IndexError(f"index {int(chosen.min())}..{int(chosen.max())} is out of bounds for an axis of {extent}")
    return np.where(chosen < 0, chosen + extent, chosen)


def _runs(index: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[tuple[int, int, int, int]]:
    """A list of numbers as arithmetic runs: place, first number, step, length."""
    out: list[tuple[int, int, int, int]] = []
    values, place = index.tolist(), 0
    while place < len(values):
        stop, step = place + 1, 0
        if stop < len(values):
            step = values[stop] - values[place]
            while stop + 1 < len(values) and values[stop + 1] - values[stop] == step:
                stop += 1
            stop += 1
        out.append((place, values[place], step, stop - place))
        place = stop
    return out


def _target(recorder: Recorder, call: Call) -> torch.Tensor:
    """Where results go: an ``out=`` tensor or a new one."""
    return call.written[0] if call.kind.written else _one(recorder.outputs(call))


def _one(value: object) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        f"aten::{name}": rule
        for rule, names in (
            (_copy, ("copy_",)),
            (_foreach_copy, ("_foreach_copy_",)),
            (_same, ("clone", "_to_copy", "_pin_memory", "lift_fresh_copy", "_reshape_copy")),
            (_clear, ("zero_", "_foreach_zero_")),
            (_fill, ("fill_",)),
            (_cat, ("cat",)),
            (_stack, ("stack",)),
            (_repeat, ("repeat",)),
            (_flip, ("flip",)),
            (_roll, ("roll",)),
            (_pad, ("constant_pad_nd",)),
            (_index_select, ("index_select",)),
            (_index, ("index",)),
            (_index_put, ("index_put_", "_index_put_impl_")),
            (_index_copy, ("index_copy_",)),
            (_index_fill, ("index_fill_",)),
            (_slice_scatter, ("slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter")),
            (
                _listed,
                ("where", "gather", "take", "masked_fill", "masked_fill_", "masked_scatter", "masked_scatter_",
                 "scatter", "scatter_", "index_put", "index_copy", "index_fill", "put", "put_", "tril", "triu", "tril_",
                 "triu_", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "diag_embed"),
            ),
        )
        for name in names
    }
)  # fmt: skip

"""Where a worker's tensors live, to be compared before every update with where they lived at connect.

Values may change freely; an address, a shape, a stride or a dtype that changed means that bytes would go to, or come
from, memory the worker no longer uses. Of what others have mapped the file is compared too: another may lie at the same
address by now. Only tensors that take part are compared: a table that the engine reallocates as it pleases does not
matter.

>>> tensors = {"w": torch.zeros(2, 3), "scratch": torch.zeros(4)}
>>> before = Storage.of(tensors).only(["w"], "engine/a/0")
>>> tensors["w"].add_(1); tensors["scratch"] = torch.zeros(4)         # doctest: +SKIP
>>> before.check(Storage.of(tensors), "engine/a/0")
>>> before.check(Storage.of({"w": torch.zeros(2, 3)}), "engine/a/0")
Traceback (most recent call last):
...
adapters.failures.StaleError: w on engine/a/0: parameter storage replaced since connect ...
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch

from adapters.failures import StaleError
from adapters.probe_live import Parameters, find_live
from transfer_exec.transport.shared_files import SharedRanges

__all__ = ["Storage", "live_memory"]


class Place(NamedTuple):
    """Where one tensor is; device, inode and offset of the file if others map it."""

    device: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    file: tuple[int, int, int] | None = None


def live_memory(parameters: Parameters) -> dict[str, torch.Tensor]:
    """Every live tensor by every name it has, as a plain detached tensor: of a sharded one the local part."""
    return {name: live.tensor for live in find_live(parameters) for name in live.names}


@dataclass(frozen=True, slots=True)
class Storage:
    """The places of some tensors by name."""

    places: Mapping[str, Place]

    @property
    def mapped(self) -> tuple[str, ...]:
        """Tensors whose file is known."""
        return tuple(name for name, place in self.places.items() if place.file is not None)

    @staticmethod
    def of(tensors: Mapping[str, torch.Tensor], *, mapped: Collection[str] = ()) -> Storage:
        """Where these tensors are now, and in which file those are that others have mapped.

        Costs about a microsecond a tensor, and one for each of the process' mappings if any is in a file.
        """
        places = {
            name: Place(str(t.device), t.data_ptr(), tuple(t.shape), t.stride(), str(t.dtype))
            for name, t in tensors.items()
        }
        ranges = SharedRanges.of_this_process() if mapped else SharedRanges(())
        for name in mapped:
            if name in tensors:
                found = ranges.whereabouts(tensors[name].data_ptr(), tensors[name].nbytes)
                file = None if found is None else (found.device, found.inode, found.offset)
                places[name] = places[name]._replace(file=file)
        return Storage(MappingProxyType(places))

    def only(self, names: Iterable[str], worker: str) -> Storage:
        """The places of these tensors.

        Raises
        ------
        StaleError
            Naming the first one that is not there.
        """
        names = list(names)
        for name in names:
            if name not in self.places:
                raise StaleError(
                    f"{name} on {worker}: it is not among `parameters` any more, as it was when the worker was probed; "
                    "nothing was written, call connect again"
                )
        return Storage(MappingProxyType({name: self.places[name] for name in names}))

    def check(self, now: Storage, worker: str) -> None:
        """Refuse to go on if a tensor of this storage is somewhere else now.

        Raises
        ------
        StaleError
            Naming the first tensor, what it was and what it is.
        """
        for name, was in self.places.items():
            found = now.places.get(name)
            if found == was:
                continue
            if found is None:
                change = "it is gone"
            else:
                changed = [pair for pair in zip(Place._fields, was, found, strict=True) if pair[1] != pair[2]]
                change = ", ".join(f"{field} was {_shown(field, a)}, is {_shown(field, b)}" for field, a, b in changed)
            raise StaleError(
                f"{name} on {worker}: parameter storage replaced since connect ({change}); nothing was written, "
                "call connect again"
            )


def _shown(field: str, value: object) -> str:
    return hex(value) if field == "address" and isinstance(value, int) else str(value)

"""One call of a torch operation, and what its schema says of it.

>>> kind = kind_of(torch.ops.aten.copy_.default)
>>> kind.name, kind.written, kind.view
('aten::copy_', ('self',), False)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

_VALUE_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_PLAIN = ("bool", "int", "float", "number", "SymInt")


@dataclass(frozen=True, slots=True)
class Kind:
    """What the schema of an operation says of it."""

    name: str
    composite: bool
    view: bool
    pointwise: bool
    random: bool
    needs_values: bool
    view_copy: bool
    written: tuple[str, ...]
    arguments: tuple[str, ...]
    results: int


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of one operation.

    Attributes
    ----------
    func, args, kwargs
        As dispatched.
    kind
        Of ``func``.
    """

    func: torch._ops.OpOverload
    kind: Kind
    args: tuple[object, ...]
    kwargs: Mapping[str, object]

    @property
    def named(self) -> Mapping[str, object]:
        """Arguments by the names of the schema; defaults left out."""
        return {**dict(zip(self.kind.arguments, self.args, strict=False)), **self.kwargs}

    @property
    def text(self) -> str:
        """The operation and its plain numbers, as a person reads it."""
        numbers = [str(one) for one in self.named.values() if isinstance(one, int | float) and type(one) is not bool]
        return self.kind.name.replace("::", ".") + (f"({', '.join(numbers)})" if numbers else "")

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor argument by name."""
        found = self.named[name]
        assert isinstance(found, torch.Tensor)
        return found

    def tensors(self, name: str) -> list[torch.Tensor]:
        """A list of tensors by name."""
        found = self.named[name]
        assert isinstance(found, list | tuple)
        return [one for one in found if isinstance(one, torch.Tensor)]

    def number(self, name: str, default: int = 0) -> int:
        """An integer argument by name."""
        found = self.named.get(name, default)
        assert isinstance(found, int)
        return found

    @property
    def inputs(self) -> list[torch.Tensor]:
        """All tensors among the arguments."""
        return tensors_in([self.args, self.kwargs])

    @property
    def written(self) -> list[torch.Tensor]:
        """Tensors that the operation writes into."""
        return tensors_in([self.named[name] for name in self.kind.written if name in self.named])


def kind_of(func: torch._ops.OpOverload) -> Kind:
    """Read an operation's schema and tags."""
    schema, overload = func._schema, f"{func._schema.name}.{func._schema.overload_name}".removesuffix(".")
    aliases = [one.alias_info for one in schema.returns]
    return Kind(
        name=schema.name,
        composite=torch._C._dispatch_has_kernel_for_dispatch_key(overload, "CompositeImplicitAutograd"),
        view=bool(aliases) and all(one is not None and not one.is_write for one in aliases),
        pointwise=torch.Tag.pointwise in func.tags,
        random=torch.Tag.nondeterministic_seeded in func.tags,
        needs_values=any(tag in func.tags for tag in _VALUE_TAGS)
        or any(str(one.type) in _PLAIN for one in schema.returns),
        view_copy=torch.Tag.view_copy in func.tags and schema.name.endswith("_copy"),
        written=tuple(one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write),
        arguments=tuple(one.name for one in schema.arguments),
        results=len(schema.returns),
    )


def returned(call: Call) -> object:
    """What an operation that writes into its arguments returns."""
    written = call.written
    return None if not call.kind.results else written[0] if call.kind.results == 1 else tuple(written)


def makes_floats(call: Call) -> bool:
    """Whether a random operation fills floating-point tensors; random integers are tables, and made as they are."""
    if call.written:
        return any(one.is_floating_point() for one in call.written)
    dtype = call.named.get("dtype")
    if isinstance(dtype, torch.dtype):
        return dtype.is_floating_point
    return "rand" in call.kind.name and "int" not in call.kind.name and "perm" not in call.kind.name


def tensors_in(values: Iterable[object]) -> list[torch.Tensor]:
    """All tensors in nested lists and dicts."""
    out: list[torch.Tensor] = []
    for one in values:
        if isinstance(one, torch.Tensor):
            out.append(one)
        elif isinstance(one, list | tuple):
            out += tensors_in(one)
        elif isinstance(one, dict):
            out += tensors_in(one.values())
    return out

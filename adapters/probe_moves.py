"""Whether a loader only moves what it is given, as far as its torch calls tell.

What a loader picks by looking at values, a whole tensor among two by their norms for instance, may well be the same in
every load, whatever is fed: only more loads tell. So loads are saved only where nothing looks: all torch functions of
one load are noted by name, on this thread, and any beside those that move, cast, make and describe tensors counts as
looking. Reading a number does not if it is a whole one in memory that was there before, such as an expert's place in a
table. Whatever fills memory that no such call wrote may look, too. Not seen is a look on another thread, or by a script
or C code, at what is then moved here. It costs about two microseconds a call.

>>> import torch
>>> held, other = torch.zeros(4), torch.zeros(4)
>>> with MoveWatch(lambda tensor: False) as watch:
...     held[:2].copy_(torch.ones(4)[2:].flip(0)).view(2, 1).shape, watch.looked_by
...     watch.wrote(held), watch.wrote(other)
...     bool(held.sum() > 0), watch.looked_by
(torch.Size([2, 1]), '')
(True, False)
(True, 'sum')
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["MoveWatch"]

_MOVES = frozenset(
    # attributes and items; views; copies; casts and places; new tensors; descriptions
    """
    __get__ __set__ __delete__ __getitem__ __setitem__ __len__ __iter__ __hash__ __reversed__
    view view_as reshape reshape_as flatten unflatten ravel squeeze squeeze_ unsqueeze unsqueeze_ expand expand_as
    broadcast_to t t_ transpose transpose_ adjoint permute movedim moveaxis swapaxes swapdims narrow select unbind
    chunk split split_with_sizes tensor_split hsplit vsplit dsplit unfold as_strided diagonal
    copy_ _foreach_copy_ __deepcopy__ set_ fill_ zero_ clone contiguous detach detach_ cat concat concatenate stack
    hstack vstack dstack row_stack column_stack block_diag flip fliplr flipud roll rot90 repeat tile repeat_interleave
    index_select index_copy index_copy_ index_put index_put_ gather scatter scatter_ take take_along_dim pad
    constant_pad_nd
    to type type_as float half bfloat16 double cpu cuda pin_memory share_memory_ requires_grad_ resize_
    empty empty_like empty_strided zeros zeros_like ones ones_like full full_like arange tensor as_tensor from_numpy
    frombuffer new_empty new_zeros new_ones new_full new_tensor
    size stride dim ndimension numel nelement element_size storage_offset storage untyped_storage data_ptr get_device
    is_contiguous is_floating_point is_complex is_signed is_pinned is_shared is_same_size
    _set_grad_enabled is_grad_enabled is_inference_mode_enabled
    """.split()  # noqa: SIM905
)


_WRITES = frozenset(
    "copy_ _foreach_copy_ __setitem__ __set__ set_ fill_ zero_ index_copy_ index_put_ scatter_".split()  # noqa: SIM905
)
_READS = frozenset(["item", "tolist", "__bool__", "__int__", "__index__"])


class MoveWatch(TorchFunctionMode):
    """While entered, notes whether a loader does more than move tensors.

    Parameters
    ----------
    may_be_fed
        Whether a tensor's memory may be that of a checkpoint tensor.

    Attributes
    ----------
    looked_by
        The first function that does more, by name; empty if none did.
    """

    def __init__(self, may_be_fed: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self._may_be_fed = may_be_fed
        self._written: set[int] = set()
        self._made: set[int] = set()
        self.looked_by = ""

    def clear(self) -> None:
        """Forget what was noted, before another load."""
        self._written.clear()
        self._made.clear()
        self.looked_by = ""

    def wrote(self, tensor: torch.Tensor) -> bool:
        """Whether some call that was seen wrote into a tensor's memory, or made it."""
        return _place(tensor) in self._written

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        name = getattr(func, "__name__", "an operation")
        if not self.looked_by and name not in _MOVES and self._looks(name, args):
            self.looked_by = name
        result = func(*args, **(kwargs or {}))
        if not self.looked_by:
            self._note(name, args[0] if args else None, result)
        return result

    def _looks(self, name: str, args: tuple[object, ...]) -> bool:
        of = args[0] if args else None
        if name not in _READS or not isinstance(of, torch.Tensor):
            return True
        if of.is_floating_point() or of.is_complex() or self._may_be_fed(of):
            return True
        return _place(of) in self._made

    def _note(self, name: str, first: object, result: object) -> None:
        """Note the memory that a call made or wrote."""
        given, gave = _places(first), _places(result)
        self._made |= gave - given
        self._written |= gave - given
        if name in _WRITES:
            self._written |= given


def _places(value: object) -> set[int]:
    """Where the memory of one tensor or of several begins; nothing for those that have none."""
    several = value if isinstance(value, (list, tuple)) else (value,)
    return {place for one in several if isinstance(one, torch.Tensor) and (place := _place(one)) is not None}


def _place(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a sparse one, a wrapper
        return None

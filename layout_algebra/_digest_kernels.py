# numba types the intrinsics, not mypy:
# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg"
"""The loop under ``fingerprint``: dot products of element bits with a periodic table of weights.

``weight(id) = A(id >> 12) * V[id & 4095]``: within a block of 4,096 ids the sum is one dot product with a slice of V,
and the 64-bit mix A is computed once a block. For elements of 32 and 64 bits V is a table B of odd 32-bit numbers.
Those of 8 and 16 bits are taken a 32-bit word at a time, four or two consecutive ids beginning at a multiple of that,
and the word has one weight: ``V[i] = B[i // 4] << 8 * (i % 4)``, or ``B[i // 2] << 16 * (i % 2)``. Words are what
memory and processors are fast at, and no two contents of a word are one number.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from layout_algebra._jit import inlined, kernel
from layout_algebra._prefetch import prefetch_line
from layout_algebra.dtypes import IdArray

_SHIFT = 12
_BLOCK = 1 << _SHIFT
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MASK = 0xFFFFFFFF
_WORD = ir.IntType(64)
_LANES, _VECTORS = 4, 4
_VECTOR = ir.VectorType(_WORD, _LANES)
_GROUP_WORDS = _LANES * _VECTORS
_AHEAD_BYTES = 2048
_LONG_WORDS = 128
"""Shorter runs gain nothing from groups."""
_ABREAST, _TALL, _PITCH = 64, 256, 256 + 32
"""So many strips beside each other are turned at once, so many elements of each; the pitch keeps them apart."""


def block_factors(blocks: IdArray) -> npt.NDArray[np.uint64]:
    """The factor A of every block of ids: odd numbers of 64 bits."""
    return _mixed(blocks) | np.uint64(1)


def block_weights() -> npt.NDArray[np.uint32]:
    """The table B: 4,096 odd numbers, all different."""
    return (_mixed(np.arange(_BLOCK)) >> np.uint64(32)).astype(np.uint32) | np.uint32(1)


def _mixed(numbers: IdArray) -> npt.NDArray[np.uint64]:
    state = (numbers + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def element_weights(item_bytes: int) -> npt.NDArray[np.uint64]:
    """The table V for elements of a width."""
    place = np.arange(_BLOCK) * min(item_bytes, 4)
    return _WORD_WEIGHTS[place // 4].astype(np.uint64) << (8 * (place % 4)).astype(np.uint64)


_WORD_WEIGHTS = block_weights()
_WEIGHTS = {item_bytes: element_weights(item_bytes) for item_bytes in (1, 2, 4, 8)}


def element_at(array: npt.NDArray[np.unsignedinteger], index: int) -> np.uint64:
    """An element, as a number of 64 bits; without the look whether the index is negative, which costs the vectors."""
    return np.uint64(array[index])


def word_at(array: npt.NDArray[np.unsignedinteger], start: int, number: int) -> np.uint64:
    """The elements from one on, eight bytes at a time, at whatever address."""
    each = 8 // array.itemsize
    return array[start + number * each : start + (number + 1) * each].view(np.uint64)[0]  # type: ignore[no-any-return]


def dot_words(
    bits: npt.NDArray[np.unsignedinteger], start: int, weights: npt.NDArray[np.uint64], first: int, groups: int
) -> np.uint64:
    """Of groups of 128 bytes of elements from one on, with as many bytes of word weights from one on."""
    dot = 0
    for number in range(groups * _GROUP_WORDS):
        word, weight = int(word_at(bits, start, number)), int(element_at(weights, first + number))
        dot += (word & _MASK) * (weight & _MASK) + (word >> 32) * (weight >> 32)
    return np.uint64(dot & ((1 << 64) - 1))


@intrinsic
def _element_at(typing_context, array, index):
    def build(context, builder, signature, arguments):
        found = context.make_array(signature.args[0])(context, builder, arguments[0])
        value = builder.load(builder.gep(found.data, [arguments[1]]))
        return builder.zext(value, _WORD) if array.dtype.bitwidth < _WORD.width else value

    return types.uint64(array, types.int64), build


@intrinsic
def _word_at(typing_context, array, start, number):
    def build(context, builder, signature, arguments):
        found = context.make_array(signature.args[0])(context, builder, arguments[0])
        words = builder.bitcast(builder.gep(found.data, [arguments[1]]), _WORD.as_pointer())
        word = builder.load(builder.gep(words, [arguments[2]]))
        word.align = 1
        return word

    return types.uint64(array, types.int64, types.int64), build


@intrinsic
def _dot_words(typing_context, bits, start, weights, first, groups):
    """Four vectors a step, so that adding waits for nothing, and memory asked for early: processors stop at a page."""

    def build(context, builder, signature, arguments):
        sources = [
            builder.ptrtoint(
                builder.gep(
                    context.make_array(signature.args[k])(context, builder, arguments[k]).data, [arguments[k + 1]]
                ),
                _WORD,
            )
            for k in (0, 2)
        ]
        low, half = (ir.Constant(_VECTOR, [value] * _LANES) for value in (_MASK, 32))
        sums = [cgutils.alloca_once_value(builder, ir.Constant(_VECTOR, [0] * _LANES)) for _ in range(_VECTORS)]
        with cgutils.for_range(builder, arguments[4]) as loop:
            places = [builder.add(source, builder.mul(loop.index, _WORD(_GROUP_WORDS * 8))) for source in sources]
            for line in range(0, _GROUP_WORDS * 8, 64):
                prefetch_line(builder, builder.add(places[0], _WORD(_AHEAD_BYTES + line)))
            for number, total in enumerate(sums):
                word, weight = (_vector_at(builder, place, number * _LANES * 8) for place in places)
                products = builder.mul(builder.and_(word, low), builder.and_(weight, low))
                products = builder.add(products, builder.mul(builder.lshr(word, half), builder.lshr(weight, half)))
                builder.store(builder.add(builder.load(total), products), total)
        vector = builder.load(sums[0])
        for total in sums[1:]:
            vector = builder.add(vector, builder.load(total))
        dot = _WORD(0)
        for lane in range(_LANES):
            dot = builder.add(dot, builder.extract_element(vector, ir.IntType(32)(lane)))
        return dot

    return types.uint64(bits, types.int64, weights, types.int64, types.int64), build


def _vector_at(builder, place, offset):
    return builder.load(builder.inttoptr(builder.add(place, _WORD(offset)), _VECTOR.as_pointer()), align=1)


@overload(element_at)
def _compiled_element_at(array, index):
    return lambda array, index: _element_at(array, index)


@overload(word_at)
def _compiled_word_at(array, start, number):
    return lambda array, start, number: _word_at(array, start, number)


@overload(dot_words)
def _compiled_dot_words(bits, start, weights, first, groups):
    return lambda bits, start, weights, first, groups: _dot_words(bits, start, weights, first, groups)


@inlined
def _block_factor(block: int) -> np.uint64:
    """One of `block_factors`."""
    mix = np.uint64(block + 1) * np.uint64(0x9E3779B97F4A7C15)
    mix = (mix ^ (mix >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mix = (mix ^ (mix >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mix ^ (mix >> np.uint64(31))) | np.uint64(1)


@inlined
def _dot_run(
    bits: npt.NDArray[np.unsignedinteger],
    start: int,
    low: int,
    count: int,
    shift: int,
    weights: npt.NDArray[np.uint64],
    word_weights: npt.NDArray[np.uint64],
) -> np.uint64:
    """Of consecutive elements, ``low`` being the first id's place in its block, ``1 << shift`` of them to a word."""
    # No divisions: runs may be short.
    head = min(-low & ((1 << shift) - 1), count) if shift > 0 else count
    inside = (count - head) >> shift
    first = (low + head) >> shift
    dot = np.uint64(0)
    groups = 0
    if inside >= _LONG_WORDS:
        groups = inside // _GROUP_WORDS
        dot = dot_words(bits, start + head, word_weights, first, groups)
    for number in range(groups * _GROUP_WORDS, inside):
        word, weight = word_at(bits, start + head, number), element_at(word_weights, first + number)
        dot += (word & _LOW) * (weight & _LOW) + (word >> _HALF) * (weight >> _HALF)
    for position in range(head):
        dot += element_at(bits, start + position) * element_at(weights, low + position)
    for position in range(head + (inside << shift), count):
        dot += element_at(bits, start + position) * element_at(weights, low + position)
    return dot


@inlined
def _sum_run(
    bits: npt.NDArray[np.unsignedinteger],
    start: int,
    first: int,
    length: int,
    shift: int,
    weights: npt.NDArray[np.uint64],
    word_weights: npt.NDArray[np.uint64],
) -> np.uint64:
    """What consecutive elements add to a sum, ``first`` being the first id."""
    total = np.uint64(0)
    done = 0
    while done < length:
        low = (first + done) & (_BLOCK - 1)
        count = min(length - done, _BLOCK - low)
        dot = _dot_run(bits, start + done, low, count, shift, weights, word_weights)
        total += _block_factor((first + done) >> _SHIFT) * dot
        done += count
    return total


@kernel
def _digest_strips(
    bits: npt.NDArray[np.unsignedinteger],
    rows: IdArray,
    shift: int,
    weights: npt.NDArray[np.uint64],
    word_weights: npt.NDArray[np.uint64],
    scratch: npt.NDArray[np.unsignedinteger],
    out: npt.NDArray[np.uint64],
) -> None:
    number = 0
    while number < rows.shape[0]:
        first, length, index, stride, label = rows[number]
        if stride == 1:
            out[label] += _sum_run(bits, index, first, length, shift, weights, word_weights)
            number += 1
            continue
        # Strips that lie beside each other (a transposed stretch) are read line by line, and turned in the cache.
        stop = number + 1
        while (
            stop < min(number + _ABREAST, rows.shape[0])
            and rows[stop, 1] == length
            and rows[stop, 2] == index + stop - number
            and rows[stop, 3] == stride
            and rows[stop, 4] == label
        ):
            stop += 1
        for begin in range(0, length, _TALL):
            count = min(_TALL, length - begin)
            for position in range(count):
                line = index + (begin + position) * stride
                for beside in range(stop - number):
                    scratch[beside * _PITCH + position] = bits[line + beside]
            for beside in range(stop - number):
                first = rows[number + beside, 0] + begin
                out[label] += _sum_run(scratch, beside * _PITCH, first, count, shift, weights, word_weights)
        number = stop


def digest_strips(bits: npt.NDArray[np.unsignedinteger], rows: IdArray, out: npt.NDArray[np.uint64]) -> None:
    """Add to ``out[label]`` the weighted sum of every strip's elements.

    Parameters
    ----------
    bits
        A parameter's elements as unsigned integers, one-dimensional, contiguous.
    rows
        int64, shape ``(n, 5)``: first id, length, flat index of the first id, index step, label.
    out
        uint64, one sum per label.
    """
    item_bytes = bits.itemsize
    word_weights = _WORD_WEIGHTS[: _BLOCK * min(item_bytes, 4) // 4].view(np.uint64)
    scratch = np.empty(_ABREAST * _PITCH, dtype=bits.dtype)
    shift = 3 - item_bytes.bit_length() + 1
    _digest_strips(bits, rows, shift, _WEIGHTS[item_bytes], word_weights, scratch, out)

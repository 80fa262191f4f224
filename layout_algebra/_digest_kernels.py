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
_GROUP_BYTES = 8 * _GROUP_WORDS
_OFFSETS = range(0, _GROUP_BYTES, 8 * _LANES)
AHEAD_BYTES = 2048
_LONG_WORDS = 128
"""Shorter runs gain nothing from groups."""
_STREAMS = 4
"""Whole blocks read side by side: a processor fetches ahead in each, and memory answers many at once."""
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
    bits: npt.NDArray[np.unsignedinteger],
    start: int,
    weights: npt.NDArray[np.uint64],
    first: int,
    groups: int,
    ahead: int,
) -> np.uint64:
    """Of groups of 128 bytes of elements from one on, with as many bytes of word weights from one on.

    Memory so many bytes further on is asked for meanwhile.
    """
    dot = 0
    for number in range(groups * _GROUP_WORDS):
        word, weight = int(word_at(bits, start, number)), int(element_at(weights, first + number))
        dot += (word & _MASK) * (weight & _MASK) + (word >> 32) * (weight >> 32)
    return np.uint64(dot & ((1 << 64) - 1))


def dot_blocks(
    bits: npt.NDArray[np.unsignedinteger],
    start: int,
    weights: npt.NDArray[np.uint64],
    groups: int,
    step: int,
    factors: tuple[np.uint64, np.uint64, np.uint64, np.uint64],
) -> np.uint64:
    """The sum of four factors times `dot_words` of as many blocks, which begin so many elements one after the other."""
    total = 0
    for number, factor in enumerate(factors):
        total += int(factor) * int(dot_words(bits, start + number * step, weights, 0, groups, 0))
    return np.uint64(total & ((1 << 64) - 1))


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
def _dot_words(typing_context, bits, start, weights, first, groups, ahead):
    """Four vectors a step, so that adding waits for nothing, and memory asked for early: processors stop at a page."""

    def build(context, builder, signature, arguments):
        source, table = (_place_of(context, builder, signature, arguments, k, k + 1) for k in (0, 2))
        sums = [cgutils.alloca_once_value(builder, ir.Constant(_VECTOR, [0] * _LANES)) for _ in range(_VECTORS)]
        with cgutils.for_range(builder, arguments[4]) as loop:
            done = builder.mul(loop.index, _WORD(_GROUP_BYTES))
            place = builder.add(source, done)
            soon = builder.add(place, arguments[5])
            for line in range(0, _GROUP_BYTES, 64):
                prefetch_line(builder, builder.add(soon, _WORD(line)))
            for weight, offset, total in zip(_weights(builder, builder.add(table, done)), _OFFSETS, sums, strict=True):
                _add_products(builder, _vector_at(builder, place, offset), weight, total)
        vector = builder.load(sums[0])
        for total in sums[1:]:
            vector = builder.add(vector, builder.load(total))
        return _across(builder, vector)

    return types.uint64(bits, types.int64, weights, types.int64, types.int64, types.int64), build


@intrinsic
def _dot_blocks(typing_context, bits, start, weights, groups, step, factors):
    def build(context, builder, signature, arguments):
        source = _place_of(context, builder, signature, arguments, 0, 1)
        table = builder.ptrtoint(context.make_array(signature.args[2])(context, builder, arguments[2]).data, _WORD)
        apart = builder.mul(arguments[4], _WORD(bits.dtype.bitwidth // 8))
        sources = [builder.add(source, builder.mul(apart, _WORD(number))) for number in range(_STREAMS)]
        sums = [cgutils.alloca_once_value(builder, ir.Constant(_VECTOR, [0] * _LANES)) for _ in range(_STREAMS)]
        with cgutils.for_range(builder, arguments[3]) as loop:
            done = builder.mul(loop.index, _WORD(_GROUP_BYTES))
            given = _weights(builder, builder.add(table, done))
            for each, total in zip(sources, sums, strict=True):
                place = builder.add(each, done)
                for weight, offset in zip(given, _OFFSETS, strict=True):
                    _add_products(builder, _vector_at(builder, place, offset), weight, total)
        dot = _WORD(0)
        for number, total in enumerate(sums):
            factor = builder.extract_value(arguments[5], number)
            dot = builder.add(dot, builder.mul(factor, _across(builder, builder.load(total))))
        return dot

    return types.uint64(bits, types.int64, weights, types.int64, types.int64, factors), build


def _place_of(context, builder, signature, arguments, array, index):
    """The address of an argument's element."""
    found = context.make_array(signature.args[array])(context, builder, arguments[array])
    return builder.ptrtoint(builder.gep(found.data, [arguments[index]]), _WORD)


def _vector_at(builder, place, offset):
    return builder.load(builder.inttoptr(builder.add(place, _WORD(offset)), _VECTOR.as_pointer()), align=1)


def _halves(builder, vector):
    low, half = (ir.Constant(_VECTOR, [value] * _LANES) for value in (_MASK, 32))
    return builder.and_(vector, low), builder.lshr(vector, half)


def _weights(builder, place):
    """Of a group: each vector's low and high halves."""
    return [_halves(builder, _vector_at(builder, place, offset)) for offset in _OFFSETS]


def _add_products(builder, words, weights, total):
    low, high = (builder.mul(word, weight) for word, weight in zip(_halves(builder, words), weights, strict=True))
    builder.store(builder.add(builder.load(total), builder.add(low, high)), total)


def _across(builder, vector):
    """The sum of a vector's lanes."""
    total = _WORD(0)
    for lane in range(_LANES):
        total = builder.add(total, builder.extract_element(vector, ir.IntType(32)(lane)))
    return total


@overload(element_at)
def _compiled_element_at(array, index):
    return lambda array, index: _element_at(array, index)


@overload(word_at)
def _compiled_word_at(array, start, number):
    return lambda array, start, number: _word_at(array, start, number)


@overload(dot_words)
def _compiled_dot_words(bits, start, weights, first, groups, ahead):
    return lambda bits, start, weights, first, groups, ahead: _dot_words(bits, start, weights, first, groups, ahead)


@overload(dot_blocks)
def _compiled_dot_blocks(bits, start, weights, groups, step, factors):
    return lambda bits, start, weights, groups, step, factors: _dot_blocks(bits, start, weights, groups, step, factors)


@inlined
def random_word(seed: np.uint64, number: int) -> np.uint64:
    """One of 2**64 words of 64 random bits (splitmix64)."""
    mix = seed + np.uint64(number + 1) * np.uint64(0x9E3779B97F4A7C15)
    mix = (mix ^ (mix >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mix = (mix ^ (mix >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mix ^ (mix >> np.uint64(31))


@inlined
def _block_factor(block: int) -> np.uint64:
    """One of `block_factors`."""
    return random_word(np.uint64(0), block) | np.uint64(1)


@inlined
def _dot_run(
    bits: npt.NDArray[np.unsignedinteger],
    start: int,
    low: int,
    count: int,
    shift: int,
    weights: npt.NDArray[np.uint64],
    word_weights: npt.NDArray[np.uint64],
    ahead: int,
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
        dot = dot_words(bits, start + head, word_weights, first, groups, ahead)
    for number in range(groups * _GROUP_WORDS, inside):
        word, weight = word_at(bits, start + head, number), element_at(word_weights, first + number)
        dot += (word & _LOW) * (weight & _LOW) + (word >> _HALF) * (weight >> _HALF)
    for position in range(head):
        dot += element_at(bits, start + position) * element_at(weights, low + position)
    for position in range(head + (inside << shift), count):
        dot += element_at(bits, start + position) * element_at(weights, low + position)
    return dot


@inlined
def sum_run(
    bits: npt.NDArray[np.unsignedinteger],
    start: int,
    first: int,
    length: int,
    shift: int,
    weights: npt.NDArray[np.uint64],
    word_weights: npt.NDArray[np.uint64],
    ahead: int,
) -> np.uint64:
    """What consecutive elements add to a sum, ``first`` being the first id; asks for memory so many bytes ahead."""
    total = np.uint64(0)
    done = 0
    while done < length:
        low = (first + done) & (_BLOCK - 1)
        count = min(length - done, _BLOCK - low)
        dot = _dot_run(bits, start + done, low, count, shift, weights, word_weights, ahead)
        total += _block_factor((first + done) >> _SHIFT) * dot
        done += count
    return total


@inlined
def sum_long_run(
    bits: npt.NDArray[np.unsignedinteger],
    start: int,
    first: int,
    length: int,
    shift: int,
    weights: npt.NDArray[np.uint64],
    word_weights: npt.NDArray[np.uint64],
) -> np.uint64:
    """As `sum_run`, of elements that are in memory: whole blocks side by side, and what is left one after the other."""
    head = min(-first & (_BLOCK - 1), length)
    several = (length - head) // (_STREAMS * _BLOCK) if shift > 0 else 0
    if several == 0:
        return sum_run(bits, start, first, length, shift, weights, word_weights, AHEAD_BYTES)
    total = sum_run(bits, start, first, head, shift, weights, word_weights, AHEAD_BYTES)
    done = head
    for _ in range(several):
        block = (first + done) >> _SHIFT
        factors = (_block_factor(block), _block_factor(block + 1), _block_factor(block + 2), _block_factor(block + 3))
        total += dot_blocks(bits, start + done, word_weights, (_BLOCK >> shift) // _GROUP_WORDS, _BLOCK, factors)
        done += _STREAMS * _BLOCK
    return total + sum_run(bits, start + done, first + done, length - done, shift, weights, word_weights, AHEAD_BYTES)


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
            out[label] += sum_long_run(bits, index, first, length, shift, weights, word_weights)
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
                out[label] += sum_run(scratch, beside * _PITCH, first, count, shift, weights, word_weights, 0)
        number = stop


def tables(item_bytes: int) -> tuple[int, npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """What `sum_run` takes for elements of a width: the shift, their weights and those of words."""
    words = _WORD_WEIGHTS[: _BLOCK * min(item_bytes, 4) // 4].view(np.uint64)
    return 3 - item_bytes.bit_length() + 1, _WEIGHTS[item_bytes], words


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
    shift, weights, word_weights = tables(bits.itemsize)
    scratch = np.empty(_ABREAST * _PITCH, dtype=bits.dtype)
    _digest_strips(bits, rows, shift, weights, word_weights, scratch, out)

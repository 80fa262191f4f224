"""Kernels that read probed memory once: second differences of code numbers, and where no code stands.

The hot loops run in 16-bit lanes: numbers are unsigned and under 2**15, and ``min(a, a + modulus)`` reduces a
difference, since a negative one wraps to a huge number. Arrays are sliced so that loops index from zero, which lets
LLVM vectorize them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from layout_algebra._jit import kernel

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint16]
Bits = npt.NDArray[np.unsignedinteger]

BLOCK = 2048
"""Elements that are tested at once."""

LONG_BLOCK = 1 << 12
"""Elements that are tested at once while nothing is found."""

_SHORT_BLOCK = 1 << 7
"""Elements that are tested at once where something was found."""

LINE_MORE = 4 * LONG_BLOCK
"""Elements that a line has more than its modulus, so that so many can be compared from any place on."""


@kernel
def decode(bits: Bits, base: int, shift: int, out: Words) -> None:
    """Code numbers of wide or narrow floats; everything that is no code becomes 65535.

    Turning the low bits to the top makes one comparison do for both conditions on a code.
    """
    width = bits.itemsize * 8
    for k in range(len(bits)):
        offset = bits[k] - bits.dtype.type(base)
        turned = bits.dtype.type(offset >> bits.dtype.type(shift)) | bits.dtype.type(
            offset << bits.dtype.type(width - shift)
        )
        out[k] = np.uint16(min(turned, bits.dtype.type(65535)))


@kernel
def look_up(patterns: Words, numbers: Words) -> None:
    """Replace every pattern by its entry in a table, what is past the table by 65535."""
    for k in range(len(patterns)):
        patterns[k] = numbers[patterns[k]] if patterns[k] < len(numbers) else np.uint16(65535)


@kernel
def bend_rows(
    here: Words, above: Words, higher: Words, count: int, base: np.uint16, modulus: np.uint16, out: Words
) -> tuple[np.uint16, np.uint16, np.uint16]:
    """``here - 2 * above + higher`` of code numbers, reduced; returns the or of it, least and greatest number here."""
    some, least, most, zero = np.uint16(0), np.uint16(65535), np.uint16(0), np.uint16(0)
    for k in range(count):
        number0 = np.uint16(here[k] - base)
        number1 = np.uint16(above[k] - base)
        number2 = np.uint16(higher[k] - base)
        code0 = number0 if number0 < modulus else zero
        code1 = number1 if number1 < modulus else zero
        code2 = number2 if number2 < modulus else zero
        first = np.uint16(code0 - code1)
        first = min(first, np.uint16(first + modulus))
        second = np.uint16(code1 - code2)
        second = min(second, np.uint16(second + modulus))
        bend = np.uint16(first - second)
        bend = min(bend, np.uint16(bend + modulus))
        out[k] = bend
        some = np.uint16(some | bend)
        least = min(least, number0)
        most = max(most, number0)
    return some, least, most


@kernel
def quiet_rows(here: Words, above: Words, higher: Words, modulus: np.uint16) -> tuple[np.uint16, np.uint16, np.uint16]:
    """Like ``bend_rows`` where all three rows hold codes, without their base; the least and greatest word here.

    The or is 0 exactly when all second differences are: of codes they lie between ``-2 * modulus`` and
    ``2 * modulus``. Half the work of ``bend_rows``.
    """
    some, least, most = np.uint16(0), np.uint16(65535), np.uint16(0)
    for k in range(len(here)):
        bend = np.uint16(np.uint16(here[k] + higher[k]) - np.uint16(above[k] + above[k]))
        bend = np.uint16(bend + modulus)
        bend = min(bend, np.uint16(bend - modulus))
        bend = min(bend, np.uint16(bend - modulus))
        some = np.uint16(some | bend)
        least = min(least, here[k])
        most = max(most, here[k])
    return some, least, most


@kernel
def differ(left: Bits, right: Bits) -> bool:
    """Whether two arrays of one length differ anywhere, told without a branch an element."""
    some = left.dtype.type(0)
    for k in range(len(left)):
        some = left.dtype.type(some | (left[k] ^ right[k]))
    return bool(some != 0)


@kernel
def is_zero(words: Words) -> bool:
    """Whether all elements are, told without a branch an element."""
    some = np.uint16(0)
    for k in range(len(words)):
        some = np.uint16(some | words[k])
    return bool(some == 0)


@kernel
def differ_in_four(left: Bits, right: Bits) -> bool:
    """As ``differ``, of long arrays, whose quarters are read side by side.

    A processor fetches ahead in each of them, and memory answers many at once.
    """
    count = len(left) // 4
    left0, left1, left2, left3 = left[:count], left[count : 2 * count], left[2 * count : 3 * count], left[3 * count :]
    right0, right1 = right[:count], right[count : 2 * count]
    right2, right3 = right[2 * count : 3 * count], right[3 * count :]
    some = left.dtype.type(0)
    for k in range(count):
        one = left.dtype.type((left0[k] ^ right0[k]) | (left1[k] ^ right1[k]))
        other = left.dtype.type((left2[k] ^ right2[k]) | (left3[k] ^ right3[k]))
        some = left.dtype.type(some | one | other)
    for k in range(count, len(left3)):
        some = left.dtype.type(some | (left3[k] ^ right3[k]))
    return bool(some != 0)


@kernel
def line_goes_on(here: Words, line: Words, place: int) -> int:
    """How many elements go on as consecutive ids; ``place`` as in ``line``, in a circle.

    Ends where fewer than a long block are left.
    """
    modulus = len(line) - LINE_MORE
    done = 0
    for size in (LINE_MORE, LONG_BLOCK):
        while done + size <= len(here):
            place %= modulus
            if differ_in_four(here[done : done + size], line[place : place + size]):
                break
            done += size
            place += size
    if done + LONG_BLOCK <= len(here):
        while not differ(here[done : done + _SHORT_BLOCK], line[place : place + _SHORT_BLOCK]):
            done += _SHORT_BLOCK
            place += _SHORT_BLOCK
        while here[done] == line[place]:
            done += 1
            place += 1
    return done


@kernel
def bend_columns(bends: Words, count: int, modulus: np.uint16, out: Words) -> np.uint16:
    """``bends[k + 2] - 2 * bends[k + 1] + bends[k]``, reduced; returns the or of it."""
    here, left, farther = bends[2:], bends[1:], bends
    some = np.uint16(0)
    for k in range(count):
        first = np.uint16(here[k] - left[k])
        first = min(first, np.uint16(first + modulus))
        second = np.uint16(left[k] - farther[k])
        second = min(second, np.uint16(second + modulus))
        bend = np.uint16(first - second)
        bend = min(bend, np.uint16(bend + modulus))
        out[k] = bend
        some = np.uint16(some | bend)
    return some


@kernel
def bend_first_rows(
    here: Words, above: Words, count: int, base: np.uint16, modulus: np.uint16, out: Words
) -> tuple[np.uint16, np.uint16, np.uint16]:
    """``bend_rows`` in row 1, or in row 0 where ``above`` is empty: what lies before the matrix is 0."""
    some, least, most, zero = np.uint16(0), np.uint16(65535), np.uint16(0), np.uint16(0)
    for k in range(count):
        number = np.uint16(here[k] - base)
        bend = number if number < modulus else zero
        least = min(least, number)
        most = max(most, number)
        if len(above) > 0:
            number = np.uint16(above[k] - base)
            code = number if number < modulus else zero
            for _ in range(2):
                bend = np.uint16(bend - code)
                bend = min(bend, np.uint16(bend + modulus))
        out[k] = bend
        some = np.uint16(some | bend)
    return some, least, most


@kernel
def row_bend_at(
    here: Words, here_start: int, above: Words, above_start: int, higher: Words, higher_start: int,
    index: int, width: int, base: np.uint16, modulus: np.uint16, out: Words,
) -> None:  # fmt: skip
    """The second difference along the rows of one element, into ``out[0]``."""
    one = here[index - here_start : index - here_start + 1]
    if index >= 2 * width:
        up = index - width - above_start
        top = index - 2 * width - higher_start
        bend_rows(one, above[up : up + 1], higher[top : top + 1], 1, base, modulus, out)
    elif index >= width:
        up = index - width - above_start
        bend_first_rows(one, above[up : up + 1], 1, base, modulus, out)
    else:
        bend_first_rows(one, above[:0], 1, base, modulus, out)


@kernel
def longer(array: Ints, count: int) -> Ints:
    """The first ``count`` numbers of an array, with twice the room."""
    out = np.empty(2 * len(array), dtype=np.int64)
    for k in range(count):
        out[k] = array[k]
    return out


@kernel
def scan(
    here: Words, here_start: int, above: Words, above_start: int, higher: Words, higher_start: int,
    start: int, stop: int, width: int, base: int, modulus: int, inverse: int, line: Words,
    most_entries: int, most_spans: int, dense: Words,
) -> tuple[Ints, int, Ints, int]:  # fmt: skip
    """Second differences of the flat elements ``start .. stop - 1`` of a matrix, and where they hold no code.

    The element at flat index i is ``here[i - here_start]``, the one above it ``above[i - width - above_start]``, the
    one above that ``higher[i - 2 * width - higher_start]``; the three may be one array. A number is a code if
    ``number - base < modulus``. ``line`` is what consecutive ids from 0 on look like here, ``modulus + LINE_MORE``
    of them: comparing with it is the fastest way past a long run of ids.

    Returns
    -------
    tuple
        Entries as ``(index - start) << 16 | value``, their number, spans without a code as (start, stop) pairs in a
        flat array, their number. A number of -1 says that there are more than ``most_entries`` or ``most_spans``.
        With a ``dense`` array of the stretch's size, values go there and none are listed.
    """
    entries = np.empty(64, dtype=np.int64)
    entry_count = 0
    spans = np.empty(16, dtype=np.int64)
    span_count = 0
    zero_base, top = np.uint16(base), np.uint16(modulus)
    bends = np.empty(BLOCK + 2, dtype=np.uint16)
    found = np.empty(BLOCK, dtype=np.uint16)
    for back in range(1, 3):
        bends[2 - back] = 0
        if start % width >= back:
            row_bend_at(
                here, here_start, above, above_start, higher, higher_start,
                start - back, width, zero_base, top, bends[2 - back : 3 - back],
            )  # fmt: skip
    index = start
    coded_from, reach = start, LONG_BLOCK
    # Elements from line_from on are consecutive ids without a break; breaks make the next tries rarer.
    line_from, skip, skips = start, 0, 0
    while index < stop:
        on_line = False
        if skip > 0:
            skip -= 1
        else:
            end = min(stop, index + LONG_BLOCK)
            anchor = index - 1 if index > line_from else index
            number = np.int64(here[anchor - here_start]) - base
            if 0 <= number < modulus:
                number = number * inverse % modulus + 1
                on_line = not differ(
                    here[anchor + 1 - here_start : end - here_start], line[number : number + end - anchor - 1]
                )
            if on_line:
                skips = 0
                if index - 2 * width >= line_from and bends[0] == 0 and bends[1] == 0:
                    index = end + line_goes_on(
                        here[end - here_start : stop - here_start], line, int(number) + end - anchor - 1
                    )
                    # Where a line ends another may begin; nothing is read twice for that.
                    if stop - index >= LONG_BLOCK:
                        line_from, reach = index, 0
                    continue
            else:
                skips = min(2 * skips + 1, 63)
                skip = skips
        if reach > 0 and index - 2 * width >= coded_from and bends[0] == 0 and bends[1] == 0:
            end = min(stop, index + reach)
            some, least, most = quiet_rows(
                here[index - here_start : end - here_start],
                above[index - width - above_start : end - width - above_start],
                higher[index - 2 * width - higher_start : end - 2 * width - higher_start],
                top,
            )
            if some == 0 and least >= zero_base and most - zero_base < top:
                index = end
                reach = min(2 * reach, LONG_BLOCK)
                if not on_line:
                    line_from = end
                continue
            reach = 0
        else:
            reach = BLOCK
        end = min(stop, index + BLOCK)
        if index < width:
            end = min(end, width)
        elif index < 2 * width:
            end = min(end, 2 * width)
        count = end - index
        row_here = here[index - here_start : end - here_start]
        if index >= 2 * width:
            row_above = above[index - width - above_start : end - width - above_start]
            row_higher = higher[index - 2 * width - higher_start : end - 2 * width - higher_start]
            some, least, most = bend_rows(row_here, row_above, row_higher, count, zero_base, top, bends[2:])
        else:
            row_above = above[:0]
            if index >= width:
                row_above = above[index - width - above_start : end - width - above_start]
            some, least, most = bend_first_rows(row_here, row_above, count, zero_base, top, bends[2:])

        if most >= top:
            coded_from = end
        if most >= top and span_count >= 0:
            k = 0
            while k < count:
                first = k
                if least >= top:
                    k = count
                else:
                    while k < count and np.uint16(row_here[k] - zero_base) >= top:
                        k += 1
                if k > first:
                    if span_count > 0 and spans[2 * span_count - 1] == index + first:
                        spans[2 * span_count - 1] = index + k
                    else:
                        if span_count == most_spans:
                            span_count = -1
                            break
                        if 2 * span_count == len(spans):
                            spans = longer(spans, 2 * span_count)
                        spans[2 * span_count] = index + first
                        spans[2 * span_count + 1] = index + k
                        span_count += 1
                k += 1

        if some != 0 or bends[0] != 0 or bends[1] != 0:
            # Column differences, one stretch of a row at a time: what stands left of column 0 is 0.
            k = 0
            column = index % width
            while k < count:
                size = min(count - k, width - column)
                part = bends[k : k + size + 2]
                if column < 2:
                    part[0] = 0
                if column == 0:
                    part[1] = 0
                some = bend_columns(part, size, top, found)
                if some != 0:
                    if len(dense) > 0:
                        for j in range(size):
                            dense[index - start + k + j] = np.int64(found[j]) * inverse % modulus
                    else:
                        if entry_count + size > most_entries:
                            listed = 0
                            for j in range(size):
                                listed += found[j] != 0
                            if entry_count + listed > most_entries:
                                return entries, -1, spans, span_count
                        while entry_count + size > len(entries):
                            entries = longer(entries, entry_count)
                        for first in range(0, size, _SHORT_BLOCK):
                            last = min(first + _SHORT_BLOCK, size)
                            if is_zero(found[first:last]):
                                continue
                            for j in range(first, last):
                                if found[j] != 0:
                                    number = np.int64(found[j]) * inverse % modulus
                                    entries[entry_count] = (index - start + k + j) << 16 | number
                                    entry_count += 1
                k += size
                column = 0
        bends[0] = bends[count]
        bends[1] = bends[count + 1]
        index = end
        if not on_line:
            line_from = end
    return entries, entry_count, spans, span_count


@kernel
def equal_runs(bits: Bits, spans: Ints, most_runs: int) -> tuple[Ints, int]:
    """Cut spans of elements into maximal runs of equal bits.

    Returns rows (start, stop, bits as a signed number) in a flat array, and their number, or -1 past ``most_runs``.
    """
    runs = np.empty(24, dtype=np.int64)
    count = 0
    for span in range(len(spans) // 2):
        index, end = spans[2 * span], spans[2 * span + 1]
        while index < end:
            first = index
            value = bits[index]
            while index < end:
                block = bits[index : min(end, index + BLOCK)]
                differs = value ^ value
                for k in range(len(block)):
                    differs |= block[k] ^ value
                if differs != 0:
                    while bits[index] == value:
                        index += 1
                    break
                index += len(block)
            if count == most_runs:
                return runs, -1
            if 3 * count == len(runs):
                runs = longer(runs, 3 * count)
            runs[3 * count] = first
            runs[3 * count + 1] = index
            runs[3 * count + 2] = np.int64(value)
            count += 1
    return runs, count

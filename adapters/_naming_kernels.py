"""Finding places in a table of random numbers by what stands in memory: a few numbers in a row are like no others."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from adapters.torch_bits import Bits
from layout_algebra._jit import kernel
from layout_algebra._kernels import join_entries
from layout_algebra.dtypes import IdArray

_KEPT_STEPS = 16


@kernel
def _goes_on(live: Bits, index: int, way: int, table: Bits, place: int, step: int, first: int, window: int) -> bool:
    """Whether ``live[index + way * k]`` is ``table[place + step * k]``, from the ``first`` k on, in a circle."""
    period = len(table)
    at = (place + step * first) % period
    for k in range(first, window):
        if live[index + way * k] != table[at]:
            return False
        at += step
        if at >= period:
            at -= period
    return True


@kernel
def _bounds(ranked: Bits, value: int) -> tuple[int, int]:
    """Where a number stands in a sorted array: first position, and past the last."""
    low, high = 0, len(ranked)
    while low < high:
        middle = (low + high) // 2
        if ranked[middle] < value:
            low = middle + 1
        else:
            high = middle
    first = low
    while low < len(ranked) and ranked[low] == value:
        low += 1
    return first, low


@kernel
def _find(live: Bits, index: int, way: int, table: Bits, candidates: IdArray, step: int, window: int) -> int:
    """Which place of a table an element goes on from in a step, or -1; its number stands at the candidates."""
    for place in candidates:
        if _goes_on(live, index, way, table, place, step, 1, window):
            return int(place)
    return -1


@kernel
def _find_step(
    live: Bits, index: int, way: int, table: Bits, candidates: IdArray, others: IdArray, window: int
) -> tuple[int, int]:
    """As `_find`, in whatever step leads to a place where the next element's number stands; and that step."""
    for place in candidates:
        for other in others:
            step = (other - place) % len(table)
            if _goes_on(live, index, way, table, place, step, 2, window):
                return int(place), int(step)
    return -1, 0


@kernel
def name_elements(
    live: Bits, width: int, elements: IdArray, tables: Bits, orders: IdArray, ranked: Bits, window: int, places: IdArray
) -> bool:
    """Find where in some tables some elements come from, by their neighbours in the row; whether all were found.

    Parameters
    ----------
    live
        Flat bits of a matrix with rows of ``width``.
    elements
        Flat indices, ascending.
    tables
        One period of random numbers each; shape ``(tables, period)``.
    orders, ranked
        Their places sorted by number, and the numbers in that order.
    window
        How many elements must fit: those from an element on to the right, or else to the left, which stand in the
        table at even steps.
    places
        Result, one an element; those that are not negative are left as they are. From the first one on that is not
        found, the others stay negative.
    """
    period = tables.shape[1]
    last_step, last_index, last_place, last_table = 1, 0, 0, 0
    steps = np.ones(_KEPT_STEPS, dtype=np.int64)  # most pieces of a worker go on in one of a few steps
    kept = 1
    for number in range(len(elements)):
        if places[number] >= 0:
            continue
        index = elements[number]
        column = index % width
        fits = (width - column >= window, column + 1 >= window)
        # Mostly an element goes on where the last one was found: no need to search then.
        place = (last_place + last_step * (index - last_index)) % period
        for back in range(2):
            way, step = (-1, period - last_step) if back else (1, last_step)
            if fits[back] and _goes_on(live, index, way, tables[last_table], place, step, 0, window):
                places[number] = place
                break
        if places[number] >= 0:
            continue
        for which in range(len(tables)):
            table, order = tables[which], orders[which]
            first, stop = _bounds(ranked[which], live[index])
            for attempt in range(2 * min(kept, _KEPT_STEPS)):
                back, known = attempt % 2, steps[attempt // 2]
                way, step = (-1, period - known) if back else (1, known)
                if places[number] < 0 and fits[back]:
                    places[number] = _find(live, index, way, table, order[first:stop], step, window)
                    if places[number] >= 0:
                        last_step, last_table = known, which
        for which in range(len(tables)):
            table, order = tables[which], orders[which]
            first, stop = _bounds(ranked[which], live[index])
            for back in range(2):
                if places[number] >= 0 or not fits[back]:
                    continue
                way = -1 if back else 1
                second, end = _bounds(ranked[which], live[index + way])
                places[number], step = _find_step(live, index, way, table, order[first:stop], order[second:end], window)
                if places[number] >= 0:
                    last_step, last_table = (period - step) % period if back else step, which
                    steps[kept % _KEPT_STEPS] = last_step
                    kept += 1
        if places[number] < 0:
            return False
        last_index, last_place = index, places[number]
    return True


@kernel
def outside_holds(live: Bits, runs: IdArray) -> bool:
    """Whether every run (start, stop, bits as a signed number) stands in memory as it is."""
    for row in range(len(runs)):
        for index in range(runs[row, 0], runs[row, 1]):
            if np.int64(live[index]) != runs[row, 2]:
                return False
    return True


@kernel
def distinct(numbers: IdArray) -> IdArray:
    """Ascending, each once."""
    out = np.sort(numbers)
    count = 0
    for number in out:
        if count == 0 or number != out[count - 1]:
            out[count] = number
            count += 1
    return out[:count]


@kernel
def places_around(places: IdArray, width: int, size: int) -> IdArray:
    """Some places of a matrix and those beside them in all eight directions, ascending, each once.

    Parameters
    ----------
    places
        Ascending, each once.
    width, size
        Of the matrix: of a row, and of all.
    """
    out = np.empty(9 * len(places), dtype=np.int64)
    count = 0
    for place in places:
        for row in (-1, 0, 1):
            for column in (-1, 0, 1):
                beside = place + row * width + column
                if 0 <= beside < size and 0 <= place % width + column < width:
                    out[count] = beside
                    count += 1
    return distinct(out[:count])


@kernel
def elements_behind(places: IdArray, width: int, runs: IdArray) -> tuple[IdArray, IdArray]:
    """The elements of a matrix that second differences at some places are sums over, and what they count as so far.

    Parameters
    ----------
    places
        Ascending, each once.
    width
        Of the matrix.
    runs
        Elements that count as 0: intervals (start, stop, ...), ascending.

    Returns
    -------
    tuple
        Elements, ascending, each once; and for each 0 if it lies in a run, else -1.
    """
    out = np.empty(9 * len(places), dtype=np.int64)
    count = 0
    for place in places:
        for row in range(min(place // width, 2) + 1):
            for column in range(min(place % width, 2) + 1):
                out[count] = place - row * width - column
                count += 1
    elements = distinct(out[:count])
    numbers = np.empty(len(elements), dtype=np.int64)
    run = 0
    for k in range(len(elements)):
        while run < len(runs) and runs[run, 1] <= elements[k]:
            run += 1
        numbers[k] = 0 if run < len(runs) and runs[run, 0] <= elements[k] else -1
    return elements, numbers


@kernel
def join_names(
    place: IdArray, value: npt.NDArray[np.integer], starts: IdArray, places: IdArray, width: int,
    elements: IdArray, numbers: IdArray, moduli: IdArray, inverses: IdArray,
) -> tuple[IdArray, IdArray, int]:  # fmt: skip
    """``join_entries`` of some passes and one more: second differences of the numbers that some elements hold.

    Parameters
    ----------
    place, value, starts
        The other passes' lists.
    places
        All places of those lists, ascending, each once.
    width, elements, numbers
        ``elements_behind`` of the places, and their numbers in the last pass.
    moduli, inverses
        Of all passes.

    Returns
    -------
    tuple
        As of ``join_entries``. The second difference at a place is a sum over the 3 x 3 elements that end there; what
        lies before the matrix counts as 0.
    """
    last = len(place)
    all_place = np.empty(last + len(places), dtype=np.int64)
    all_value = np.empty(last + len(places), dtype=np.int64)
    for k in range(last):
        all_place[k], all_value[k] = place[k], np.int64(value[k])
    count = last
    for k in range(len(places)):
        total = np.int64(0)
        for row in range(min(places[k] // width, 2) + 1):
            at = np.searchsorted(elements, places[k] - row * width)
            for column in range(min(places[k] % width, 2) + 1):  # those to the left stand before it in the list
                weight = (-2 if row == 1 else 1) * (-2 if column == 1 else 1)
                total += weight * numbers[at - column]
        if total % moduli[-1]:
            all_place[count], all_value[count] = places[k], total % moduli[-1]
            count += 1
    all_starts = np.empty(len(moduli) + 1, dtype=np.int64)
    for k in range(len(moduli)):
        all_starts[k] = starts[k]
    all_starts[-1] = count
    return join_entries(all_place[:count], all_value[:count], all_starts, moduli, inverses)

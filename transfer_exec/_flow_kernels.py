"""The simulation's loop: messages that share links fairly, workers that pass the stages of several rounds at once.

Arrays only; ``simulate`` owns the meaning. A *slot* holds one round in flight; round k is in slot ``k % depth``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from layout_algebra._jit import kernel

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@kernel
def fair_rates(
    active: Ints, count: int, flows: int, link_starts: Ints, link_numbers: Ints, bytes_per_s: Floats, rates: Floats
) -> None:
    """Max-min fair rates of ``active[:count]``; entry ``slot * flows + flow`` crosses the links of that flow.

    The link that gives its messages least is filled first, then the next among what is left.
    """
    links = len(bytes_per_s)
    users = np.zeros(links + 1, dtype=np.int64)
    for position in range(count):
        flow = active[position] % flows
        for at in range(link_starts[flow], link_starts[flow + 1]):
            users[link_numbers[at] + 1] += 1
    begins = np.cumsum(users)
    waiting = users[1:].copy()
    members = np.empty(begins[links], dtype=np.int64)
    place = begins[:links].copy()
    for position in range(count):
        rates[position] = -1.0
        flow = active[position] % flows
        for at in range(link_starts[flow], link_starts[flow + 1]):
            link = link_numbers[at]
            members[place[link]] = position
            place[link] += 1
    spare = bytes_per_s.copy()
    used = np.flatnonzero(waiting > 0)
    left = len(used)
    while left > 0:
        least = np.inf
        kept = 0
        for position in range(left):
            link = used[position]
            if waiting[link] > 0:
                used[kept] = link
                kept += 1
                share = spare[link] / waiting[link]
                if share < least:
                    least = share
        left = kept
        if left == 0:
            break
        if least == np.inf:
            # Only links without a limit are left; taking from them would make numbers that compare with nothing.
            for position in range(count):
                if rates[position] < 0.0:
                    rates[position] = np.inf
            break
        least = max(least, 0.0)
        for position in range(left):
            link = used[position]
            if waiting[link] > 0 and spare[link] / waiting[link] <= least * (1.0 + 1e-9):
                for entry in range(begins[link], begins[link + 1]):
                    member = members[entry]
                    if rates[member] < 0.0:
                        rates[member] = least
                        flow = active[member] % flows
                        for at in range(link_starts[flow], link_starts[flow + 1]):
                            spare[link_numbers[at]] -= least
                            waiting[link_numbers[at]] -= 1


@kernel
def run_rounds(
    rounds: int,
    depth: int,
    stages: int,
    source: Ints,
    target: Ints,
    size: Floats,
    out_starts: Ints,
    arriving: Ints,
    link_starts: Ints,
    link_numbers: Ints,
    bytes_per_s: Floats,
    overhead_s: float,
    post_s: Floats,
    pack_s: Floats,
    assemble_s: Floats,
    grain_s: float,
) -> Floats:
    """When every worker is done with every round; shape ``(rounds, workers)``.

    Parameters
    ----------
    source, target, size
        Per flow of one round, sorted by (source, stage); bytes.
    out_starts
        Where the flows of ``worker * stages + stage`` begin.
    arriving
        Flows that come to each worker in each stage, shape ``(workers, stages)``.
    post_s
        Seconds from entering a stage until its messages are posted, shape ``(workers, stages)``.
    grain_s
        What happens within this time after an event happens together, at its end.
    """
    workers = len(pack_s)
    flows = len(source)
    done_s = np.zeros((rounds, workers))
    round_of = np.full((depth, workers), -1, dtype=np.int64)
    opened = np.zeros(workers, dtype=np.int64)
    stage_of = np.zeros((depth, workers), dtype=np.int64)
    timer = np.full((depth, workers), np.inf)
    overhead_free = np.zeros(workers)
    pack_free = np.zeros(workers)
    assemble_free = np.zeros(workers)
    to_come = np.zeros((depth, workers, stages), dtype=np.int64)
    to_go = np.zeros((depth, workers, stages), dtype=np.int64)
    to_start = np.zeros((depth, workers, stages), dtype=np.int64)
    started = np.zeros(depth * flows, dtype=np.bool_)
    active = np.empty(depth * flows, dtype=np.int64)
    left = np.empty(depth * flows)
    rates = np.empty(depth * flows)
    count = 0
    finished = 0
    now = 0.0
    # stage_of: 0 opening (overhead, packing); 1 + s in stage s; stages + 1 assembling; stages + 2 done.
    while finished < rounds * workers:
        changed = True
        fresh = False
        while changed:
            changed = False
            for worker in range(workers):
                oldest = max(0, opened[worker] - depth)
                for number in range(oldest, min(rounds, opened[worker] + 1)):
                    slot = number % depth
                    if number == opened[worker]:
                        if round_of[slot, worker] >= 0 and stage_of[slot, worker] != stages + 2:
                            continue
                        round_of[slot, worker] = number
                        opened[worker] = number + 1
                        stage_of[slot, worker] = 0
                        for stage in range(stages):
                            first, last = out_starts[worker * stages + stage], out_starts[worker * stages + stage + 1]
                            to_come[slot, worker, stage] = arriving[worker, stage]
                            to_go[slot, worker, stage] = last - first
                            to_start[slot, worker, stage] = last - first
                            started[slot * flows + first : slot * flows + last] = False
                        overhead_free[worker] = max(now, overhead_free[worker]) + overhead_s
                        ready = max(overhead_free[worker], pack_free[worker]) + pack_s[worker]
                        pack_free[worker] = ready
                        timer[slot, worker] = ready
                        changed = True
                    at = stage_of[slot, worker]
                    if at == 0 and timer[slot, worker] <= now:
                        at = 1
                        stage_of[slot, worker] = 1
                        timer[slot, worker] = now + post_s[worker, 0]
                        changed = True
                    while 1 <= at <= stages and timer[slot, worker] <= now and to_come[slot, worker, at - 1] == 0:
                        at += 1
                        stage_of[slot, worker] = at
                        changed = True
                        if at <= stages:
                            timer[slot, worker] = now + post_s[worker, at - 1]
                        else:
                            assemble_free[worker] = max(now, assemble_free[worker]) + assemble_s[worker]
                            timer[slot, worker] = assemble_free[worker]
                    # Messages of one stage leave in round order, once they are posted and their target is in the round.
                    for stage in range(min(at, stages)):
                        if to_start[slot, worker, stage] == 0 or (stage == at - 1 and timer[slot, worker] > now):
                            continue
                        if number > 0 and depth > 1:
                            before = (number - 1) % depth
                            if round_of[before, worker] == number - 1 and to_go[before, worker, stage] > 0:
                                continue
                        first, last = out_starts[worker * stages + stage], out_starts[worker * stages + stage + 1]
                        for flow in range(first, last):
                            entry = slot * flows + flow
                            other = target[flow]
                            if started[entry] or round_of[slot, other] != number or stage_of[slot, other] < 1:
                                continue
                            started[entry] = True
                            to_start[slot, worker, stage] -= 1
                            active[count] = entry
                            left[count] = size[flow]
                            count += 1
                            fresh = True
                            changed = True
                    if at == stages + 1 and timer[slot, worker] <= now:
                        busy = 0
                        for stage in range(stages):
                            busy += to_go[slot, worker, stage]
                        if busy == 0:
                            stage_of[slot, worker] = stages + 2
                            timer[slot, worker] = np.inf
                            done_s[number, worker] = now
                            finished += 1
                            changed = True
        if finished == rounds * workers:
            break
        if fresh or count > 0:
            fair_rates(active, count, flows, link_starts, link_numbers, bytes_per_s, rates)
        wait = np.inf
        for position in range(count):
            if rates[position] == np.inf or left[position] <= 0.0:
                wait = 0.0
            elif rates[position] > 0.0:
                wait = min(wait, left[position] / rates[position])
        upcoming = np.inf
        for slot in range(depth):
            for worker in range(workers):
                if timer[slot, worker] > now:
                    upcoming = min(upcoming, timer[slot, worker])
        if wait == np.inf and upcoming == np.inf:
            return np.full((rounds, workers), np.nan)
        # Arrivals are told by the step that was chosen for them, since the clock may be too coarse to show it.
        step = min(wait, upcoming - now) + grain_s
        now = upcoming if grain_s == 0.0 and upcoming - now <= wait else now + step
        kept = 0
        for position in range(count):
            entry = active[position]
            slot, flow = entry // flows, entry % flows
            moved = rates[position] * step
            if rates[position] == np.inf or left[position] <= moved * (1.0 + 1e-9):
                stage = 0
                while out_starts[source[flow] * stages + stage + 1] <= flow:
                    stage += 1
                to_go[slot, source[flow], stage] -= 1
                to_come[slot, target[flow], stage] -= 1
            else:
                active[kept] = entry
                left[kept] = left[position] - moved
                kept += 1
        count = kept
    return done_s

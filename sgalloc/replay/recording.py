"""What a replay leaves behind: totals, samples over virtual time, and the time of every verb."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import wraps
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgalloc.stats import GroupStats

# Owners in the map of the pool, by value.
MAP_OWNERS = ("free", "cached", "quarantined", "locked", "pinned", "owned")
MAP_CELLS = 256
MAP_FRAMES = 240

POOL_SAMPLED = ("owned", "locked", "evictable", "quarantined", "pinned", "free")
SAMPLED = ("time", "running", "queued", *POOL_SAMPLED, "committed", "allocated")


@dataclass(slots=True)
class Totals:
    """Counts over a whole replay; tokens unless said otherwise.

    Attributes:
        requests: requests of the workload.
        finished: requests that ran to their end.
        aborted: requests ended early at random.
        refused: requests that could never fit.
        steps: steps of the engine.
        virtual_seconds: length of the run on the virtual clock.
        wall_seconds: time the replay took.
        prompt_tokens: prompts of all admitted requests, once each.
        looked_up: tokens looked up in the prefix cache, again after each retraction.
        hit: tokens found there.
        prefilled: tokens computed by prefill.
        decoded: tokens put out.
        retractions: requests sent back to the queue for want of pages.
        evicted: pages evicted from the prefix cache.
        peak_running: most requests that ran at once.
        waiting_pressure: the lowest share of pages owned, pinned or cached, of the fuller
            group, at the start of a step in which requests waited for pages (1.0 if none ever
            did); on the decode node where there are two.
        pressed_steps: steps in which requests waited for pages.
        accepted: tokens committed by speculative steps.
        speculative_steps: requests times steps that speculated.
        discarded_steps: those of them whose outcome came when the request had ended already.
        reserved_tail: tokens from C to A, summed over the requests of speculative steps, once
            the step is prepared.
        moves: tokens moved to bring accepted paths of trees together.
        window_evicted: pages that went back because they had left the window.
        window_retractions: those of ``retractions`` for want of window pages alone.
        unshared: requests that were opened without their cached prefix, since its window
            pages would have left no room for their own.
        thinned: device pages that came back when prompts became sparse.
        device_retractions: those of ``retractions`` for want of device pages alone.
        side_waits: times that admission found too few pages of the second group alone.
        main_waits: times that it found too few of the main group.
        prefill_steps: steps of the prefill node.
        prefill_retractions: those of ``retractions`` on the prefill node.
        transfers: transfers begun.
        live: transfers that made a request live.
        transfer_aborts: requests aborted while their KV was under way.
        reclaimed: transfers given up at their deadline.
        matched_tokens: tokens that the decode node had in its prefix cache.
        sent_tokens: tokens whose KV was sent.
        sent_pages: pages that hold them.
        extents: runs that are consecutive on both sides, of all transfers.
        live_seconds: from the end of the prefill to live, summed over ``live``.
        live_seconds_most: the longest of these.
    """

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    refused: int = 0
    steps: int = 0
    virtual_seconds: float = 0.0
    wall_seconds: float = 0.0
    prompt_tokens: int = 0
    looked_up: int = 0
    hit: int = 0
    prefilled: int = 0
    decoded: int = 0
    retractions: int = 0
    evicted: int = 0
    peak_running: int = 0
    waiting_pressure: float = 1.0
    pressed_steps: int = 0
    accepted: int = 0
    speculative_steps: int = 0
    discarded_steps: int = 0
    reserved_tail: int = 0
    moves: int = 0
    window_evicted: int = 0
    window_retractions: int = 0
    unshared: int = 0
    thinned: int = 0
    device_retractions: int = 0
    side_waits: int = 0
    main_waits: int = 0
    prefill_steps: int = 0
    prefill_retractions: int = 0
    transfers: int = 0
    live: int = 0
    transfer_aborts: int = 0
    reclaimed: int = 0
    matched_tokens: int = 0
    sent_tokens: int = 0
    sent_pages: int = 0
    extents: int = 0
    live_seconds: float = 0.0
    live_seconds_most: float = 0.0


@dataclass(slots=True)
class PoolRecord:
    """A pool beside the main one: its pages by owner, at the moments of the samples.

    Attributes:
        num_pages: pages of the pool.
        evicted: pages evicted from the prefix cache.
        samples: one array for each of `POOL_SAMPLED`.
    """

    num_pages: int
    evicted: int = 0
    samples: dict[str, array[float]] = field(
        default_factory=lambda: {name: array("d") for name in POOL_SAMPLED}
    )

    def sample(self, group: GroupStats) -> None:
        """Append one value to each of `POOL_SAMPLED`."""
        self.evicted = group.evicted
        for name, value in by_owner(group).items():
            self.samples[name].append(value)


def by_owner(group: GroupStats) -> dict[str, int]:
    """The pages of a group by owner, as `POOL_SAMPLED`."""
    return {
        "owned": group.owned,
        "locked": group.locked,
        "evictable": group.cached - group.locked,
        "quarantined": group.quarantined,
        "pinned": group.pinned,
        "free": group.free,
    }


@dataclass(slots=True)
class Recording:
    """A replay, finished or interrupted.

    Attributes:
        config: the options of the run, as plain values.
        workload: name of the workload.
        num_pages, page_size: of the pool.
        totals: counts.
        samples: one array for each of `SAMPLED`, pages and tokens at the start of a step;
            ``time`` in virtual seconds.
        pools: the pools beside this one, by name.
        reserve: tokens past C that a speculative step holds; 0 without speculation.
        window: tokens of the sliding window; 0 without one.
        map_times: virtual seconds of each frame of the map.
        map_frames: one uint8 array of at most `MAP_CELLS` entries a frame: what most of the
            pages of that stretch of the pool are, an index into `MAP_OWNERS`.
        verbs: nanoseconds of each call, by verb.
        step_ns: nanoseconds spent in the allocator, by step.
        spent_ns: nanoseconds spent in the allocator so far.
        device: name of the device.
        interrupted: whether it was stopped before its end.
        leaked_pages: pages that did not come back at the end.
        leaked_rows: rows that did not come back.
        violation: the law that was broken, or None.
    """

    config: dict[str, Any]
    workload: str
    num_pages: int
    page_size: int
    device: str = "cpu"
    totals: Totals = field(default_factory=Totals)
    samples: dict[str, array[float]] = field(
        default_factory=lambda: {name: array("d") for name in SAMPLED}
    )
    pools: dict[str, PoolRecord] = field(default_factory=dict)
    reserve: int = 0
    window: int = 0
    map_times: list[float] = field(default_factory=list)
    map_frames: list[NDArray[np.uint8]] = field(default_factory=list)
    verbs: dict[str, array[int]] = field(default_factory=dict)
    step_ns: array[int] = field(default_factory=lambda: array("q"))
    spent_ns: int = 0
    interrupted: bool = False
    leaked_pages: int = 0
    leaked_rows: int = 0
    violation: str | None = None

    @property
    def sound(self) -> bool:
        """No law was broken, and every page and row came back."""
        return self.violation is None and not self.leaked_pages and not self.leaked_rows

    def frame(self, now: float, owners: NDArray[np.int64]) -> None:
        """Append a frame of the map; once there are too many, every second one is dropped.

        Args:
            now: virtual seconds.
            owners: as `KVAllocator.owners`, the padding page left out.
        """
        kinds = np.where(owners > 0, MAP_OWNERS.index("owned"), -owners)
        cells = min(MAP_CELLS, kinds.size)
        edges = np.arange(cells) * kinds.size // cells
        shares = [np.add.reduceat(kinds == kind, edges) for kind in range(len(MAP_OWNERS))]
        self.map_frames.append(np.argmax(shares, axis=0).astype(np.uint8))
        self.map_times.append(now)
        if len(self.map_frames) > MAP_FRAMES:
            del self.map_frames[1::2], self.map_times[1::2]

    def sample(self, values: dict[str, float]) -> None:
        """Append one value to each of `SAMPLED`."""
        for name, column in self.samples.items():
            column.append(values[name])


def time_verbs(target: Any, verbs: Iterable[str], recording: Recording, where: str = "") -> None:
    """Record how long each call of the ``verbs`` of ``target`` takes, as ``where`` and verb."""
    for verb in verbs:
        calls = recording.verbs.setdefault(where + verb, array("q"))
        setattr(target, verb, _timed(getattr(target, verb), calls, recording))


def _timed(
    method: Callable[..., Any], calls: array[int], recording: Recording
) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        begin = perf_counter_ns()
        try:
            return method(*args, **kwargs)
        finally:
            taken = perf_counter_ns() - begin
            calls.append(taken)
            recording.spent_ns += taken

    return call

"""What the samples of a replay say of its pools: shares, pages held, pages saved."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from sgalloc.replay.recording import POOL_SAMPLED, PoolRecord, Recording

FloatArray = npt.NDArray[np.float64]


def ratio(part: float, whole: float) -> float | None:
    """``part / whole``; None where there is no whole."""
    return part / whole if whole else None


def samples(recording: Recording) -> dict[str, FloatArray]:
    """The samples as float64 arrays of one length, in case an interrupt cut the last one short."""
    return _cut(recording.samples, _size(recording))


def pool_samples(recording: Recording, name: str) -> dict[str, FloatArray]:
    """The samples of one of ``recording.pools``, of the length of `samples`."""
    return _cut(recording.pools[name].samples, _size(recording))


def held(columns: Mapping[str, FloatArray]) -> FloatArray:
    """Pages that requests hold, which no eviction can free."""
    pages: FloatArray = columns["owned"] + columns["locked"] + columns["pinned"]
    return pages


def used(columns: Mapping[str, FloatArray]) -> FloatArray:
    """Pages that are not free."""
    pages: FloatArray = np.sum([columns[name] for name in POOL_SAMPLED if name != "free"], axis=0)
    return pages


def pool_use(recording: Recording) -> dict[str, dict[str, float | None]]:
    """Occupancy and tail waste of the main pool."""
    columns = samples(recording)
    if not columns["time"].size or not recording.num_pages:
        return {
            "occupancy": dict.fromkeys(
                ("mean_share", "peak_share", "held_mean_share", "held_peak_share")
            ),
            "tail_waste": dict.fromkeys(("mean_tokens", "share")),
        }
    weight = _weight(recording, columns)
    by_requests = held(columns) / recording.num_pages
    by_anyone = used(columns) / recording.num_pages
    mean_waste = _mean(columns["allocated"] - columns["committed"], weight)
    return {
        "occupancy": {
            "mean_share": _mean(by_anyone, weight),
            "peak_share": float(by_anyone.max()),
            "held_mean_share": _mean(by_requests, weight),
            "held_peak_share": float(by_requests.max()),
        },
        "tail_waste": {
            "mean_tokens": mean_waste,
            "share": ratio(mean_waste, _mean(columns["allocated"], weight)),
        },
    }


def pools_use(recording: Recording) -> dict[str, dict[str, float | None]]:
    """Occupancy of the pools beside the main one, by name."""
    weight = _weight(recording, samples(recording))
    return {
        name: _one_pool(pool, pool_samples(recording, name), weight)
        for name, pool in recording.pools.items()
    }


def window_use(recording: Recording) -> dict[str, float | None]:
    """What the sliding window cost and saved; all null without one."""
    names = (
        "tokens",
        "evicted_pages",
        "held_mean_pages",
        "held_peak_pages",
        "saved_mean_pages",
        "saved_share",
        "retractions",
        "unshared_requests",
    )
    if not recording.window:
        return dict.fromkeys(names)
    totals, columns = recording.totals, samples(recording)
    mean = peak = saved = share = None
    if columns["time"].size:
        weight = _weight(recording, columns)
        pages = held(pool_samples(recording, "window"))
        full = _mean(held(columns), weight)
        mean, peak = _mean(pages, weight), float(pages.max())
        saved = full - mean
        share = ratio(saved, full)
    values = (
        recording.window,
        totals.window_evicted,
        mean,
        peak,
        saved,
        share,
        totals.window_retractions,
        totals.unshared,
    )
    return dict(zip(names, values, strict=True))


def sparse_use(recording: Recording) -> dict[str, float | None]:
    """What requests held on the device, and would have held dense; all null unless sparse."""
    totals, columns = recording.totals, samples(recording)
    found: dict[str, float | None] = dict.fromkeys(
        ("held_mean_pages", "held_peak_pages", "dense_mean_pages", "saved_mean_pages")
    )
    counts = {
        "saved_share": None,
        "thinned_pages": totals.thinned,
        "retractions": totals.device_retractions,
        "logical_waits": totals.main_waits,
        "device_waits": totals.side_waits,
    }
    if "device" not in recording.pools:
        return found | dict.fromkeys(counts)
    if not columns["time"].size:
        return found | counts
    weight = _weight(recording, columns)
    pages = held(pool_samples(recording, "device"))
    dense, mean = _mean(held(columns), weight), _mean(pages, weight)
    values = (mean, float(pages.max()), dense, dense - mean)
    found = dict(zip(found, values, strict=True))
    return found | counts | {"saved_share": ratio(dense - mean, dense)}


def transfer_use(recording: Recording) -> dict[str, float | None]:
    """What went from the prefill node to the decode node; all null without two."""
    totals, columns = recording.totals, samples(recording)
    mean = peak = None
    if columns["time"].size:
        mean = _mean(columns["pinned"], _weight(recording, columns))
        peak = float(columns["pinned"].max())
    found = {
        "prefill_steps": totals.prefill_steps,
        "prefill_retractions": totals.prefill_retractions,
        "transfers": totals.transfers,
        "live": totals.live,
        "aborted": totals.transfer_aborts,
        "reclaimed": totals.reclaimed,
        "matched_tokens": totals.matched_tokens,
        "sent_tokens": totals.sent_tokens,
        "sent_pages": totals.sent_pages,
        "extents": totals.extents,
        "mean_run_pages": ratio(totals.sent_pages, totals.extents),
        "pinned_mean_pages": mean,
        "pinned_peak_pages": peak,
        "live_mean_seconds": ratio(totals.live_seconds, totals.live),
        "live_most_seconds": totals.live_seconds_most if totals.live else None,
    }
    return found if "prefill" in recording.pools else dict.fromkeys(found)


def _one_pool(
    pool: PoolRecord, columns: dict[str, FloatArray], weight: FloatArray
) -> dict[str, float | None]:
    found: dict[str, float | None] = {"pages": pool.num_pages}
    if not weight.size:
        names = ("mean_share", "peak_share", "held_mean_pages", "held_peak_pages")
        return found | dict.fromkeys(names) | {"evicted_pages": pool.evicted}
    by_requests, by_anyone = held(columns), used(columns) / pool.num_pages
    return found | {
        "mean_share": _mean(by_anyone, weight),
        "peak_share": float(by_anyone.max()),
        "held_mean_pages": _mean(by_requests, weight),
        "held_peak_pages": float(by_requests.max()),
        "evicted_pages": pool.evicted,
    }


def _size(recording: Recording) -> int:
    parts = (recording.samples, *(pool.samples for pool in recording.pools.values()))
    return min(len(column) for columns in parts for column in columns.values())


def _cut(columns: Mapping[str, array[float]], size: int) -> dict[str, FloatArray]:
    return {name: np.array(column[:size], np.float64) for name, column in columns.items()}


def _weight(recording: Recording, columns: dict[str, FloatArray]) -> FloatArray:
    """How long what each sample says held while requests ran, seconds."""
    time = columns["time"]
    if not time.size:
        return time
    # What a sample says holds until the next one.
    lasted = np.diff(time, append=max(recording.totals.virtual_seconds, time[-1]))
    weight = np.where(columns["running"] > 0, lasted, 0.0)
    return weight if weight.sum() > 0 else np.ones_like(time)


def _mean(values: FloatArray, weight: FloatArray) -> float:
    return float(np.average(values, weights=weight))

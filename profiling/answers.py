"""What the results say, question by question."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from profiling import window_verbs
from profiling.group_verbs import BESIDE, NAMES, PLAIN
from profiling.layout import Found, Table, spread, times, us
from profiling.scaling import NEW, WORN, WORN_COLD
from sgalloc.bench.aim import BLOCKS, FIRST, STEPWISE
from sgalloc.bench.course import GROWS
from sgalloc.bench.harness import LOOP, SUBJECT

LIMITS = {"reserve": 15.0, "reserve again": 5.0, "release": 1.0}
ALL = "all steps"


def aim_table(found: Found) -> Table:
    """The limits that the project set itself."""
    rows = []
    kinds = [
        ("reserve", GROWS, "`reserve`, steps that grow"),
        ("reserve", ALL, "`reserve`, all steps"),
        ("reserve", FIRST, "`reserve`, first step of a block"),
        ("reserve again", "", "`reserve`, without need"),
        ("commit", "", "`commit`"),
        ("release", "", "`release`, a request of 1,000 tokens"),
    ]
    for name, label, title in kinds:
        for page in sorted(found.sizes("page"), reverse=True):
            cells = [
                found.where(name, side, label, page=page, turns=turns)
                for side, turns in ((SUBJECT, BLOCKS), (SUBJECT, STEPWISE), (LOOP, BLOCKS))
            ]
            limited = page == 64 and label in ("", GROWS) and name in LIMITS
            limit = f"{LIMITS[name]:.0f}" if limited else ""
            shown = [spread(cell[0]) if cell else "" for cell in cells]
            rows.append([title, str(page), limit, *shown])
    verdicts = []
    for name, label, title in kinds:
        if name not in LIMITS or label in (ALL, FIRST):
            continue
        warm = found.median(name, SUBJECT, label, page=64, turns=BLOCKS)
        cold = found.median(name, SUBJECT, label, page=64, turns=STEPWISE)
        verdicts.append(
            f"{title} at page 64: {us(warm)} µs in blocks, limit {LIMITS[name]:.0f}, "
            f"{_met(warm, LIMITS[name])}; step by step {us(cold)} µs, {_met(cold, LIMITS[name])}"
        )
    one = found.one("reserve", SUBJECT, GROWS, page=64, turns=BLOCKS)
    share = one["n"] / found.one("reserve", SUBJECT, ALL, page=64, turns=BLOCKS)["n"]
    verdicts.append(f"{share:.0%} of the steps at page 64 grow")
    return Table(
        "The limits, µs a call",
        f"Batch {one['at']['batch']}, reserve 16, 1 to 5 tokens accepted (3 on average), "
        "histories of 937 to 1,000 tokens, a `Batch`, no profiler; release: batches of 64, µs a "
        "request. Median (p10–p90); the loop in blocks, too.",
        ["call", "page", "limit", "sgalloc, in blocks", "sgalloc, step by step", "python loop"],
        rows,
        ". ".join(verdicts) + ".",
    )


def verbs_table(found: Found, page: int) -> Table:
    """All verbs against the loop at one page size."""
    batches = found.sizes("batch")
    rows = []
    ratios: dict[int, list[float]] = {batch: [] for batch in batches}
    for name, label in VERBS:
        row = [f"`{name}`" if not label else f"`{name}`, {label}"]
        for batch in batches:
            mine = found.where(name, SUBJECT, label, batch=batch, page=page)
            theirs = found.where(name, LOOP, label, batch=batch, page=page)
            if not mine or not theirs:
                row.append("")
                continue
            ratios[batch].append(theirs[0]["median_us"] / mine[0]["median_us"])
            row.append(f"{spread(mine[0])} · {us(theirs[0]['median_us'])}")
        rows.append(row)
    parts = []
    for batch, values in ratios.items():
        won = sum(ratio > 1 for ratio in values)
        parts.append(
            f"batch {batch:,}: faster in {won} of {len(values)} rows, "
            f"median {times(median(values))}"
        )
    return Table(
        f"Each verb at page {page}, µs a call of the whole batch",
        "sgalloc's median (p10–p90) · the loop's median; turns of 5 rounds. The loop's `reserve` "
        "holds the scheduler's estimate, as `reserve` proves that it fits; both write the table.",
        ["verb", *(f"batch {batch:,}" for batch in batches)],
        rows,
        "sgalloc against the loop: " + "; ".join(parts) + ".",
    )


VERBS = (
    ("open", ""),
    ("extend, whole prompt", ""),
    ("extend, 64 tokens", ""),
    ("decode", ALL),
    ("decode", GROWS),
    ("reserve", ALL),
    ("reserve", GROWS),
    ("reserve without need", ""),
    ("commit", ""),
    ("trim, 64 tokens", ""),
    ("release", ""),
    ("slots", ""),
    ("pages, of one request", ""),
    ("plan", ""),
    ("fits, the planned step", ""),
    ("fits, new prompts", ""),
)


def cache_table(found: Found) -> Table:
    """The prefix cache, a request."""
    batches, pages = found.sizes("batch"), found.sizes("page")
    rows = []
    for name, _ in found.names():
        for page in pages:
            row = [f"`{name}`", str(page)]
            for batch in batches:
                record = found.one(name, SUBJECT, batch=batch, page=page)
                row.append(us(record["median_us"] / batch))
            rows.append(row)
    small, large, page = batches[0], batches[-1], pages[-1]
    parts = [
        f"{name} {us(found.median(name, batch=small, page=page) / small)} → "
        f"{us(found.median(name, batch=large, page=page) / large)}"
        for name, _ in found.names()
    ]
    return Table(
        "The prefix cache, µs a request",
        "Prompts of 1,024 tokens, 16 of which share their first 512 (192 and 64 from batch 65,536 "
        "on); publish at 768 (128). Medians of the call for the whole batch, divided by it. The "
        "eviction takes each request's own leaf, in one growth.",
        ["verb", "page", *(f"batch {batch:,}" for batch in batches)],
        rows,
        f"a request costs at page {page}, batch {small} → {large:,}: " + ", ".join(parts) + " µs.",
    )


def groups_table(found: Found, page: int) -> Table:
    """Speculation, transfers and second groups, beside the plain way."""
    rows, shares = [], []
    for name in NAMES:
        side = PLAIN if name in BESIDE else LOOP
        for record in found.where(name, SUBJECT, page=page):
            batch = record["at"]["batch"]
            plain = found.median(name, side, batch=batch, page=page)
            share = _share(record["median_us"] / plain)
            if batch == 256:
                shares.append(f"{name} {share}")
            beside = f"`{BESIDE[name]}`" if name in BESIDE else "loop"
            rows.append([f"`{name}`", f"{batch:,}", spread(record), beside, us(plain), share])
    return Table(
        f"Speculation, transfers and second groups at page {page}, µs a call of the whole batch",
        "Median (p10–p90). Reserve 16 and 1 to 5 accepted tokens; a tree of 16 drafts, 4 "
        "accepted; requests of 1,000 tokens are preallocated, acknowledged by one writer each in "
        "a call each, or aborted by force; a buffer and a window of 512 tokens; the extents of "
        "all page lists of the batch. Beside it, in turns: the plain loop, or the nearest verb of "
        "an allocator with one group.",
        ["call", "batch", "sgalloc", "beside", "µs", "ratio"],
        rows,
        "by what is beside it, at batch 256: " + (", ".join(shares) or "not measured") + ".",
    )


def _share(ratio: float) -> str:
    """A ratio that may be far below one."""
    return f"{ratio:.2f}×" if ratio < 10 else times(ratio)


def moved_table(found: Found) -> Table:
    """Growth by pages moved."""
    moved = sorted({r["at"]["pages moved"] for r in found.where("extend", SUBJECT)})
    rows, parts = [], []
    for page in sorted({record["at"]["page"] for record in found.where("extend", SUBJECT)}):
        costs = []
        for pages in moved:
            at = {"page": page, "pages_moved": pages}
            mine = found.one("extend", SUBJECT, **at)
            costs.append(mine["median_us"])
            rows.append(
                [
                    f"{pages:,}",
                    str(page),
                    spread(mine),
                    us(mine["median_us"] * 1000 / pages),
                    us(found.median("extend", LOOP, **at)),
                    spread(found.one("trim", SUBJECT, **at)),
                    us(found.median("trim", LOOP, **at)),
                ]
            )
        slopes = [
            (costs[i + 1] - costs[i]) * 1000 / (moved[i + 1] - moved[i])
            for i in range(len(moved) - 1)
        ]
        parts.append(
            f"page {page}: {us(costs[0])} µs for {moved[0]} pages, then "
            + ", ".join(f"{us(slope)} ns" for slope in slopes)
            + " for each further page, size by size"
        )
    return Table(
        "Growth by pages moved",
        "16 requests grow from nothing in one `extend`, and are cut back by one `trim`. Median "
        "(p10–p90) in µs, the cost of a page in ns (`extend` divided by its pages).",
        ["pages", "page", "extend", "ns a page", "loop's extend", "trim", "loop's trim"],
        rows,
        "; ".join(parts) + ".",
    )


def pool_table(found: Found) -> Table:
    """A fixed growth by size of the pool."""
    pools = found.sizes("pool")
    rows, medians, cold = [], [], []
    for pool in pools:
        row = [f"{pool:,}"]
        for ids in (NEW, WORN):
            reserve = found.one("reserve", SUBJECT, pool=pool, ids=ids)
            medians.append(reserve["median_us"])
            row += [spread(reserve), spread(found.one("trim", SUBJECT, pool=pool, ids=ids))]
        cold.append(found.one("reserve", SUBJECT, pool=pool, ids=WORN_COLD))
        rows.append([*row, spread(cold[-1])])
    return Table(
        "The same growth in pools of all sizes",
        "32 requests reserve 8 tokens each at page 1, 256 pages moved; given back by `trim`. "
        "Worn: all pages went out in turns and came back in random order. Ids given back go out "
        "again first, so they are in the caches; in the last column none is given back until the "
        "rows are full, so each growth takes others. µs, median (p10–p90).",
        [
            "pool, pages",
            "new: reserve",
            "new: trim",
            "worn: reserve",
            "worn: trim",
            "worn, ids not used lately: reserve",
        ],
        rows,
        f"from {pools[0]:,} to {pools[-1]:,} pages `reserve` stays between {us(min(medians))} and "
        f"{us(max(medians))} µs, a factor of {max(medians) / min(medians):.2f}; with ids not used "
        f"lately it goes from {us(cold[0]['median_us'])} to {us(cold[-1]['median_us'])} µs.",
    )


def history_table(found: Found) -> Table:
    """A fixed growth by history."""
    histories = found.sizes("history")
    records = [found.one("reserve", SUBJECT, history=history) for history in histories]
    trims = [found.one("trim", SUBJECT, history=history) for history in histories]
    medians = [record["median_us"] for record in records]
    return Table(
        "The same growth after histories of all lengths",
        "64 requests grow by one page of 64 each; given back by `trim`. µs, median (p10–p90).",
        ["history, tokens", "reserve", "trim"],
        [
            [f"{history:,}", spread(record), spread(trim)]
            for history, record, trim in zip(histories, records, trims, strict=True)
        ],
        f"from {histories[0]:,} to {histories[-1]:,} tokens `reserve` stays between "
        f"{us(min(medians))} and {us(max(medians))} µs, a factor of "
        f"{max(medians) / min(medians):.2f}.",
    )


def breakdown_table(found: Found) -> Table:
    """Where the time of a growing reserve goes."""
    pages = sorted(found.sizes("page"), reverse=True)
    names = [name for name, _ in found.names() if name not in ("whole call", "an empty part")]
    shares: dict[str, dict[int, float]] = {name: {} for name in (*names, "between the parts")}
    for page in pages:
        empty = found.median("an empty part", page=page)
        for name in names:
            shares[name][page] = max(0.0, found.median(name, page=page) - empty)
        whole = found.median("whole call", page=page)
        known = sum(shares[name][page] for name in names)
        shares["between the parts"][page] = whole - known
    rows = [
        [name, *(us(values[page]) for page in pages)]
        for name, values in sorted(shares.items(), key=lambda item: -item[1][pages[0]])
    ]
    rows.append(["**whole call**", *(spread(found.one("whole call", page=p)) for p in pages)])
    first = pages[0]
    whole = found.median("whole call", page=first)
    largest = [f"{name} {shares[name][first] / whole:.0%}" for name, *_ in rows[:3]]
    batch = found.sizes("batch")[0]
    return Table(
        f"Where the time of a growing `reserve` of {batch} goes, µs",
        "Medians over the steps that grow. Parts are timed from within, in other steps than the "
        f"whole call; an empty part reads {us(found.median('an empty part', page=first))} µs, "
        "which is taken off each.",
        ["part", *(f"page {page}" for page in pages)],
        rows,
        f"at page {first} " + ", ".join(largest) + f" of {us(whole)} µs.",
    )


def prices_table(found: Found) -> Table:
    """What NumPy charges for a call."""
    sizes = found.sizes("elements")
    small = sizes[0]

    def price(name: str) -> str:
        return us(found.median(name, elements=small))

    return Table(
        "What one NumPy call costs, µs",
        "int64 throughout, one hundred calls between two readings of the clock; the call of a "
        "Python function is in it. Median (p10–p90).",
        ["call", *(f"{size} elements" for size in sizes)],
        [
            [name, *(spread(found.one(name, elements=size)) for size in sizes)]
            for name, _ in found.names()
        ],
        f"at {small} elements an operand costs {price('array + Python int')} µs as a Python int "
        f"and {price('array + array of no dimensions')} µs as an array of no dimensions; an "
        f"int32 index costs {price('column[int32 index] = values')} µs where int64 costs "
        f"{price('column[int64 index] = values')} µs.",
    )


def parts_table(found: Found) -> Table:
    """What the loop's parts cost."""
    batches = found.sizes("batch")
    rows = [
        [name, *(spread(found.one(name, batch=batch)) for batch in batches)]
        for name, _ in found.names()
    ]
    names = [name for name, _ in found.names()]
    totals = [sum(found.median(name, batch=batch) for name in names) for batch in batches]
    rows.append(["**together**", *(us(total) for total in totals)])
    return Table(
        "The plain loop's speculative step, its loops alone, µs",
        "No table write and no page ids, which an engine with a GPU leaves to kernels.",
        ["part", *(f"batch {batch:,}" for batch in batches)],
        rows,
        "before any page is moved the loop costs "
        + ", ".join(
            f"{us(total * 1000 / batch)} ns a request at {batch:,}"
            for total, batch in zip(totals, batches, strict=True)
        )
        + ".",
    )


def touch_table(found: Found) -> Table:
    """What first touches cost."""
    records = [found.one(name) for name, _ in found.names()]
    cold, warm = records[0]["median_us"], records[1]["median_us"]
    at = records[0]["at"]
    return Table(
        "The first touch of memory, µs",
        f"One `extend` of {at['batch']} requests to {at['tokens']:,} tokens in a new allocator "
        "with a table of 64 MiB, in a process of its own. Median (p10–p90).",
        ["call", "µs"],
        [[record["name"].replace("warm()", "`warm()`"), spread(record)] for record in records],
        f"untouched memory makes the same call {times(cold / warm)} as long, "
        f"{us(cold - warm)} µs more; all other tables exclude this by `warm()`.",
    )


_BUILDERS: dict[str, Callable[[Found], list[Table]]] = {
    "aim": lambda found: [aim_table(found)],
    "verbs": lambda found: [verbs_table(found, page) for page in found.sizes("page")],
    "cache": lambda found: [cache_table(found)],
    "groups": lambda found: [groups_table(found, page) for page in found.sizes("page")],
    "window": lambda found: [window_verbs.table(found)],
    "scaling": lambda found: [moved_table(found), pool_table(found), history_table(found)],
    "breakdown": lambda found: [breakdown_table(found)],
    "prices": lambda found: [prices_table(found)],
    "loop-parts": lambda found: [parts_table(found)],
    "first-touch": lambda found: [touch_table(found)],
}
BENCHES = tuple(_BUILDERS)


def build(data: Mapping[str, Any], bench: str) -> list[Table]:
    """The tables of one benchmark of a document."""
    return _BUILDERS[bench](Found(data["benches"][bench]))


def _met(value: float, limit: float) -> str:
    return "met" if value <= limit else "missed"

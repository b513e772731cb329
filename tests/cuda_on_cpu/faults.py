"""Faults to plant into the kernels, one at a time: what the tests have to find."""

from __future__ import annotations

from cuda_on_cpu.faults_side import SIDE_FAULTS, Fault

FAULTS: dict[str, Fault] = {
    "insertion in front of equals": Fault(
        "assign", "common.cuh", "offsets[middle] <= value", "offsets[middle] < value"
    ),
    "32-bit product, whole rows": Fault(
        "assign",
        "common.cuh",
        "return where * t.page_size;",
        "return static_cast<i64>(static_cast<u32>(where * t.page_size));",
    ),
    "32-bit product, cut rows": Fault(
        "assign",
        "common.cuh",
        "return row * t.row_width",
        "return static_cast<i64>(static_cast<u32>(row * t.row_width))",
    ),
    "16-byte stores of any table": Fault("assign", "common.cuh", "t.quad_shift > -2", "true"),
    "a shift where it is no power": Fault(
        "assign",
        "common.cuh",
        "t.quad_shift >= 0 ? at >> t.quad_shift : at / quads",
        "at >> (31 - __builtin_clz(static_cast<u32>(quads)))",
    ),
    "slots that repeat": Fault("assign", "common.cuh", "slot + 2, slot + 3", "slot + 2, slot + 2"),
    "a tile past the end": Fault("assign", "assign_pages.cu", "min(tile, pages - begin)", "tile"),
    "no barrier behind the bounds": Fault(
        "assign",
        "assign_pages.cu",
        "            __syncthreads();\n            first_run",
        "            first_run",
    ),
    "no barrier before the tile is written": Fault(
        "assign",
        "assign_pages.cu",
        "            __syncthreads();\n            write_tile",
        "            write_tile",
    ),
    "no barrier before the next tile": Fault(
        "assign",
        "assign_pages.cu",
        "        }\n        __syncthreads();\n    }",
        "        }\n    }",
    ),
    "a page table that nobody wants": Fault(
        "assign",
        "assign_pages.cu",
        "                place = places[page];\n            }\n            if (t.pages) t.pages",
        "                place = places[page];\n            }\n            t.pages",
    ),
    "runs searched behind the tile alone": Fault(
        "assign", "assign_pages.cu", "last_run + 1, page", "last_run, page"
    ),
    "runs searched in front of the tile's": Fault(
        "assign", "assign_pages.cu", "offsets, first_run + 1", "offsets, first_run + 2"
    ),
    "the first run of another tile": Fault(
        "assign", "assign_pages.cu", "step->tile_runs_at) + blockIdx.x", "step->tile_runs_at)"
    ),
    "a tile that ends with its first run": Fault(
        "assign", "assign_pages.cu", "last_run = tile_runs[1];", "last_run = tile_runs[0];"
    ),
    "runs of the next tile, not of the next of this block": Fault(
        "assign", "assign_pages.cu", "tile_runs += gridDim.x;", "tile_runs += 1;"
    ),
    "runs of tiles past the last one": Fault(
        "assign",
        "assign_pages.cu",
        "last_run = tile_runs[1];",
        "last_run = tile_runs[1 + gridDim.x];",
    ),
    "runs of tiles that the host did not give": Fault(
        "assign", "assign_pages.cu", "runs && step->tile_runs_at ?", "runs ?"
    ),
    "runs searched from the next tile's": Fault(
        "assign",
        "assign_pages.cu",
        "threadIdx.x == 0 ? begin :",
        "threadIdx.x == 0 ? begin + count :",
    ),
    "the last page's run of the next tile": Fault(
        "assign", "assign_pages.cu", ": begin + count - 1;", ": begin - 1;"
    ),
    "new slots read from the table": Fault("assign", "gather.cuh", "ahead >= 0", "ahead > 0"),
    "gather with a 32-bit product": Fault(
        "assign",
        "gather.cuh",
        "static_cast<i64>(g.row[r]) * t.row_width + position",
        "static_cast<i64>(static_cast<u32>(g.row[r] * t.row_width + position))",
    ),
    "gather from the first position": Fault(
        "assign", "gather.cuh", "g.start[r] + (at - g.offset[r])", "at - g.offset[r]"
    ),
    "gather of equal shares from the first position": Fault(
        "assign", "gather.cuh", "g.start[r] + (at - r * g.uniform)", "at - r * g.uniform"
    ),
    "gather past the end": Fault("assign", "gather.cuh", "next < total", "next <= total"),
    "gather that leaves slots out": Fault(
        "assign", "gather.cuh", "next += stride", "next += stride + 1"
    ),
    "gather that takes int64 for int32": Fault(
        "assign", "gather.cuh", "if (g.wide)", "if (!g.wide)"
    ),
    "a new page of another request": Fault(
        "assign", "gather.cuh", "ids[g.new_at[r] + ahead]", "ids[g.new_at[r]]"
    ),
    "mapped: places behind the last page": Fault(
        "mapped", "assign_pages.cu", "if (place >= 0) {", "if (place >= -1) {"
    ),
    "mapped: pages counted that are not there": Fault(
        "mapped", "assign_pages.cu", "__syncthreads_count(place >= 0)", "__syncthreads_count(1)"
    ),
    "mapped: a place 0 that is no place": Fault(
        "mapped", "assign_pages.cu", "if (place >= 0) {", "if (place > 0) {"
    ),
    "mapped: pages of the next tile": Fault(
        "mapped", "assign_pages.cu", "static_cast<i32>(threadIdx.x) < tile && page", "page"
    ),
    "mapped: places past the fixed ones": Fault(
        "mapped", "assign_pages.cu", " && page < kFixedPages", ""
    ),
    "mapped: ids elsewhere": Fault(
        "mapped",
        "assign_pages.cu",
        "kFixedPlaces + 8 * kFixedPages",
        "kFixedPlaces + 4 * kFixedPages",
    ),
    "mapped: tiles of the block's threads": Fault(
        "mapped",
        "assign_pages.cu",
        "blockIdx.x * tile + threadIdx.x",
        "blockIdx.x * blockDim.x + threadIdx.x",
    ),
    "mapped: a warp counts for itself": Fault(
        "mapped",
        "assign_pages.cu",
        "__syncthreads_count(place >= 0)",
        "__builtin_popcount(__ballot_sync(0xffffffffu, place >= 0))",
    ),
    "mapped: a page table that nobody wants": Fault(
        "mapped",
        "assign_pages.cu",
        "    if (place >= 0) {\n        if (t.pages) t.pages",
        "    if (place >= 0) {\n        t.pages",
    ),
    "words of an earlier launch": Fault(
        "scan", "page_watermarks.cu", "static_cast<u32>(heard >> 34) != epoch || ", ""
    ),
    "tiles by block number": Fault(
        "scan",
        "page_watermarks.cu",
        "static_cast<i32>(atomicAdd(ticket, 1u) - ticket_base)",
        "static_cast<i32>(blockIdx.x + 0 * (atomicAdd(ticket, 1u) - ticket_base))",
    ),
    "an aggregate told as the sum": Fault(
        "scan", "page_watermarks.cu", "tile ? kAggregate : kInclusive", "kInclusive"
    ),
    "a sum without what came before": Fault(
        "scan",
        "page_watermarks.cu",
        "told(epoch, kInclusive, before + total)",
        "told(epoch, kInclusive, total)",
    ),
    "look-back that leaves the sum out": Fault(
        "scan", "page_watermarks.cu", "lane <= stop", "lane < stop"
    ),
    "look-back windows that overlap": Fault(
        "scan", "page_watermarks.cu", "last -= kThreads", "last -= kThreads - 1"
    ),
    "look-back windows with a gap": Fault(
        "scan", "page_watermarks.cu", "last -= kThreads", "last -= kThreads + 1"
    ),
    "look-back of each warp to the same tiles": Fault(
        "scan", "page_watermarks.cu", "last - static_cast<i32>(threadIdx.x)", "last - lane"
    ),
    "look-back past the nearest sum": Fault(
        "scan",
        "page_watermarks.cu",
        "if (whole[turn][w]) return",
        "if (w == kWarps - 1 && whole[turn][w]) return",
    ),
    "look-back that only its nearest warp ends": Fault(
        "scan", "page_watermarks.cu", "if (whole[turn][w]) return", "if (whole[turn][0]) return"
    ),
    "look-back that its nearest window ends": Fault(
        "scan",
        "page_watermarks.cu",
        "        turn ^= 1;",
        "        return before;",
    ),
    "look-back windows of which only the last counts": Fault(
        "scan", "page_watermarks.cu", "        turn ^= 1;", "        turn ^= 1, before = 0;"
    ),
    "no barrier behind what was heard": Fault(
        "scan",
        "page_watermarks.cu",
        "        __syncthreads();\n        for (i32 w",
        "        for (i32 w",
    ),
    "no barrier behind the ticket": Fault(
        "scan",
        "page_watermarks.cu",
        "    __syncthreads();\n    i32 tile = shared_tile;",
        "    i32 tile = shared_tile;",
    ),
    "no barrier behind the sums of warps": Fault(
        "scan",
        "page_watermarks.cu",
        "warp_sums[warp] = sum;\n    __syncthreads();",
        "warp_sums[warp] = sum;",
    ),
    "no barrier behind the offsets": Fault(
        "scan",
        "page_watermarks.cu",
        "    __syncthreads();\n\n    i32 before = 0, begin",
        "\n    i32 before = 0, begin",
    ),
    "no barrier before the tile is written, scan": Fault(
        "scan",
        "page_watermarks.cu",
        "        __syncthreads();\n        write_tile",
        "        write_tile",
    ),
    "no barrier before the next tile, scan": Fault(
        "scan",
        "page_watermarks.cu",
        "write_tile(t, entries, page_ids, pages);\n        __syncthreads();",
        "write_tile(t, entries, page_ids, pages);",
    ),
    "requests that shrink": Fault(
        "scan", "page_watermarks.cu", "max(last - first, 0)", "last - first"
    ),
    "marks in 32 bits": Fault(
        "scan",
        "page_watermarks.cu",
        "i64 mark = static_cast<i64>(committed[r])",
        "i32 mark = committed[r]",
    ),
    "requests of the next tile": Fault(
        "scan",
        "page_watermarks.cu",
        "k < each && local < tile_requests && r < requests",
        "k < each && r < requests",
    ),
    "requests counted twice": Fault(
        "scan",
        "page_watermarks.cu",
        "k < each && local < tile_requests && r < requests",
        "local < tile_requests && r < requests",
    ),
    "requests past the last": Fault(
        "scan",
        "page_watermarks.cu",
        "k < each && local < tile_requests && r < requests",
        "k < each && local < tile_requests",
    ),
    "tiles of the most requests": Fault(
        "scan", "page_watermarks.cu", "tile * tile_requests + local", "tile * kTileRequests + local"
    ),
    "threads without a request": Fault(
        "scan",
        "page_watermarks.cu",
        "(tile_requests + kThreads - 1) / kThreads",
        "tile_requests / kThreads",
    ),
    "offsets written over the neighbours'": Fault(
        "scan",
        "page_watermarks.cu",
        "if (k < each && local < tile_requests) offsets",
        "if (local < tile_requests) offsets",
    ),
    "offsets searched that are not there": Fault(
        "scan",
        "page_watermarks.cu",
        "insertion(offsets, 0, tile_requests, begin + i)",
        "insertion(offsets, 0, kTileRequests, begin + i)",
    ),
    "ids of the first tile": Fault(
        "scan", "page_watermarks.cu", "ids[before + begin + i]", "ids[begin + i]"
    ),
    "ids of the first pages of a tile": Fault(
        "scan", "page_watermarks.cu", "ids[before + begin + i]", "ids[before + i]"
    ),
    "places of the first pages of a tile": Fault(
        "scan", "page_watermarks.cu", "(begin + i - offsets[r])", "(i - offsets[r])"
    ),
    "padding that is not": Fault(
        "export",
        "export_pages.cu",
        "page < indptr[r + 1] - indptr[r]",
        "page <= indptr[r + 1] - indptr[r]",
    ),
    "a last page of a request without tokens": Fault(
        "export",
        "export_pages.cu",
        "pages ? lengths[r] - (pages - 1) * page_size : 0",
        "lengths[r] - (pages - 1) * page_size",
    ),
    "an indptr without its end": Fault(
        "export", "export_pages.cu", "r <= requests", "r < requests"
    ),
    "blocks that are never counted anew": Fault(
        "replay", "assign_pages.cu", "counters[1] = 0;", ""
    ),
    "steps counted that were not there": Fault("replay", "assign_pages.cu", "if (staged) {", "{"),
    "steps past the end of the ring": Fault(
        "replay", "assign_pages.cu", "(serial % ring)", "(serial % (ring + 1))"
    ),
    "steps told before they are due": Fault(
        "replay", "assign_pages.cu", "== gridDim.x - 1", "== 0"
    ),
    "a verdict that the next replay hears": Fault(
        "replay", "assign_pages.cu", "counters[2] = 0;", ""
    ),
    "each block with a verdict of its own": Fault(
        "staging", "assign_pages.cu", "if (!decided) decided = mine;", "decided = mine;"
    ),
    "a step taken for the one before": Fault(
        "replay", "assign_pages.cu", "*serial == next + 1", "*serial == next"
    ),
    "export with a 32-bit product, padded": Fault(
        "export",
        "export_pages.cu",
        "i64 entry = static_cast<i64>(rows[r]) * row_width",
        "i64 entry = static_cast<i64>(static_cast<u32>(rows[r] * row_width))",
    ),
    "export with a 32-bit product, flat": Fault(
        "export",
        "export_pages.cu",
        "slots[static_cast<i64>(rows[r]) * row_width",
        "slots[static_cast<i64>(static_cast<u32>(rows[r] * row_width))",
    ),
    "digest: weights that may be even": Fault("digest", "row_digest.cu", ") | 1;", ");"),
    "digest: weights that are not mixed": Fault(
        "digest", "row_digest.cu", "    stepped *= kMix;\n", ""
    ),
    "digest: entries with a sign": Fault(
        "digest", "row_digest.cu", "static_cast<u32>(entry) *", "static_cast<u64>(entry) *"
    ),
    "digest: 16 bytes from anywhere": Fault("digest", "row_digest.cu", "(4 - off) % 4", "0"),
    "digest: places counted from the first quad": Fault(
        "digest", "row_digest.cu", "static_cast<u64>(head + 4ll", "static_cast<u64>(4ll"
    ),
    "digest: quads past the end": Fault(
        "digest", "row_digest.cu", "left > (kAhead - 1) * threads;", "left > 0;"
    ),
    "digest: loaded ahead, and not counted": Fault(
        "digest", "row_digest.cu", "        sum += weighted_four(three, stepped + 2 * far);\n", ""
    ),
    "digest: the same weights in each turn": Fault(
        "digest", "row_digest.cu", "        stepped += kAhead * far;\n", ""
    ),
    "digest: the rest left out": Fault(
        "digest", "row_digest.cu", "n < rest; n += threads", "n < 0; n += threads"
    ),
    "digest: the rest behind the head": Fault(
        "digest", "row_digest.cu", "n < head ? n : n + 4 * quads", "n"
    ),
    "digest: half of each warp": Fault("digest", "row_digest.cu", "lanes = 16", "lanes = 8"),
    "digest: without a carry": Fault(
        "digest",
        "row_digest.cu",
        "sum += static_cast<u64>(other_high) << 32 | other_low;",
        "sum = static_cast<u64>(high + other_high) << 32 | (low + other_low);",
    ),
    "digest: the first warp alone": Fault(
        "digest", "row_digest.cu", "warp < static_cast<i32>(blockDim.x) / 32;", "warp < 1;"
    ),
    "digest: no barrier behind the range": Fault(
        "digest",
        "row_digest.cu",
        "range = ranges[at];\n        __syncthreads();",
        "range = ranges[at];",
    ),
    "digest: no barrier behind the sums": Fault(
        "digest",
        "row_digest.cu",
        "sums[thread / 32] = sum;\n        __syncthreads();",
        "sums[thread / 32] = sum;",
    ),
    "digest: a range for each block": Fault(
        "digest", "row_digest.cu", "at += static_cast<i32>(gridDim.x)", "at += count"
    ),
    "digest: 32-bit entries": Fault(
        "digest", "row_digest.cu", "array + range.start", "array + static_cast<u32>(range.start)"
    ),
    "digest: the map for the page ids": Fault(
        "digest", "row_digest.cu", "range.array == 2 ? map", "range.array >= 2 ? map"
    ),
    "digest: the table for the second group's": Fault(
        "digest", "row_digest.cu", "range.array == 1 ? side_slots", "range.array == 1 ? slots"
    ),
    **SIDE_FAULTS,
}
# What the results do not show, or not each time.
RACES: dict[str, Fault] = {
    "tiles that several blocks write": Fault(
        "race", "assign_pages.cu", "begin += gridDim.x * tile", "begin += tile"
    ),
    "side: pages that several blocks write": Fault(
        "race",
        "side_pages.cuh",
        "static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; at < total",
        "threadIdx.x; at < total",
    ),
    "words stored as plain memory": Fault(
        "race", "common.cuh", "__atomic_store_n(word, value, __ATOMIC_RELAXED)", "*word = value"
    ),
    "no barrier before the next tile": FAULTS["no barrier before the next tile"],
    "no barrier before the next tile, scan": FAULTS["no barrier before the next tile, scan"],
    "what was heard is written over": Fault("race", "page_watermarks.cu", "        turn ^= 1;", ""),
    "no barrier behind what was heard": FAULTS["no barrier behind what was heard"],
    "no barrier behind the offsets": FAULTS["no barrier behind the offsets"],
    "new slots read from the table": FAULTS["new slots read from the table"],
    "mapped: pages of the next tile": FAULTS["mapped: pages of the next tile"],
    "digest: no barrier behind the range": FAULTS["digest: no barrier behind the range"],
    "digest: no barrier behind the sums": FAULTS["digest: no barrier behind the sums"],
    "digest: ranges that several blocks hash": Fault(
        "race", "row_digest.cu", "at = static_cast<i32>(blockIdx.x)", "at = 0"
    ),
}

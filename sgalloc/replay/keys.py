"""What every key of ``report.json`` means."""

from __future__ import annotations

KEYS: dict[str, str] = {
    "format": "version of this layout",
    "workload": "name of the workload",
    "device": "device that held the table",
    "config.*": "options of the run",
    "pool.pages": "pages of the pool; the logical ones of a sparse allocator",
    "pool.page_tokens": "tokens a page",
    "requests.total": "requests of the workload",
    "requests.finished": "requests that ran to their end",
    "requests.aborted": "requests ended early at random",
    "requests.refused": "requests that could never fit into the pool",
    "requests.unfinished": "requests left over: the run was interrupted, or something broke",
    "requests.peak_running": "most requests that ran at once",
    "requests.retractions": "times a running request went back to the queue for want of pages",
    "tokens.prompt": "tokens of the prompts of all admitted requests, once each",
    "tokens.looked_up": "tokens looked up in the prefix cache, again after each retraction",
    "tokens.hit": "tokens found there",
    "tokens.prefilled": "tokens computed by prefill",
    "tokens.decoded": "tokens put out",
    "prefix_cache.hit_share": "tokens found per token looked up; null without a look-up",
    "prefix_cache.evicted_pages": "pages evicted from the prefix cache",
    "time.steps": "steps of the engine",
    "time.virtual_seconds": "length of the run on the virtual clock",
    "time.wall_seconds": "time the replay took",
    "occupancy.mean_share": "share of the pool that is owned, cached or quarantined: mean over "
    "the virtual time in which requests ran; null without a sample",
    "occupancy.peak_share": "the same, at its highest",
    "occupancy.held_mean_share": "share of the pool that open requests hold (owned, or cached and "
    "locked), which no eviction can free: mean as above",
    "occupancy.held_peak_share": "the same, at its highest",
    "tail_waste.mean_tokens": "tokens allocated and not committed, over all open requests (a "
    "shared page counts for each of them): mean as above",
    "tail_waste.share": "the same per token allocated; null where nothing was allocated",
    "pressure.steps": "steps that began while requests waited for pages",
    "pressure.lowest_filled_share": "lowest share of the pool that was owned, pinned or cached at "
    "the start of such a step, of the fuller group where there is a window, on the decode node "
    "where there are two; null if there was none",
    "speculation.request_steps": "speculative steps, counted once for each request in them",
    "speculation.committed_tokens": "tokens that they committed",
    "speculation.mean_committed_tokens": "tokens a request commits a step; null without any",
    "speculation.reserve_tokens": "tokens past its committed ones that a request reserves for a "
    "step; null without speculation",
    "speculation.mean_tail_tokens": "tokens allocated past the committed ones once a step is "
    "prepared, a request: what the reserve costs; null without any",
    "speculation.moved_tokens": "tokens moved to bring accepted paths of trees together",
    "speculation.discarded_steps": "those of request_steps that ran although the request had "
    "ended, since an overlapped engine hears of that a step late",
    "window.tokens": "tokens of the sliding window; null without one, as all of this group",
    "window.evicted_pages": "window pages that came back because they had left the window",
    "window.held_mean_pages": "window pages that requests hold (owned, pinned, or cached and "
    "locked), on the decode node where there are two: mean as for occupancy",
    "window.held_peak_pages": "the same, at its highest",
    "window.saved_mean_pages": "pages by which that is less than what requests hold in the full "
    "group, which is what they would hold of the window group without eviction: mean as above",
    "window.saved_share": "the same, per page held in the full group",
    "window.retractions": "those of requests.retractions for want of window pages alone",
    "window.unshared_requests": "requests that went without their cached prefix, since its window "
    "pages left no room for their own",
    "sparse.held_mean_pages": "device pages that requests hold: mean as for occupancy; null unless "
    "sparse, as all of this group",
    "sparse.held_peak_pages": "the same, at its highest",
    "sparse.dense_mean_pages": "logical pages that requests hold, each of which a dense request "
    "has on the device, too: mean as above",
    "sparse.saved_mean_pages": "pages by which they hold less on the device: mean as above",
    "sparse.saved_share": "the same, per page of a dense request",
    "sparse.thinned_pages": "device pages that came back when prompts became sparse",
    "sparse.retractions": "those of requests.retractions for want of device pages alone",
    "sparse.logical_waits": "times that admission was refused for want of logical pages",
    "sparse.device_waits": "times that admission was refused for want of device pages alone",
    "disaggregation.prefill_steps": "steps of the prefill node; null without one, as all of this "
    "group",
    "disaggregation.prefill_retractions": "those of requests.retractions on the prefill node",
    "disaggregation.transfers": "transfers begun",
    "disaggregation.live": "transfers that made a request live",
    "disaggregation.aborted": "requests aborted while their KV was under way",
    "disaggregation.reclaimed": "transfers that ended at their deadline, since a writer was lost",
    "disaggregation.matched_tokens": "tokens not sent, since the decode node had them cached",
    "disaggregation.sent_tokens": "tokens whose KV was sent",
    "disaggregation.sent_pages": "pages that hold them",
    "disaggregation.extents": "runs of pages that are consecutive on both nodes: pieces sent",
    "disaggregation.mean_run_pages": "pages a piece",
    "disaggregation.pinned_mean_pages": "pages of the decode node that a remote writer may still "
    "write: mean over the virtual time in which there were requests",
    "disaggregation.pinned_peak_pages": "the same, at its highest",
    "disaggregation.live_mean_seconds": "from the end of a prefill to live: mean",
    "disaggregation.live_most_seconds": "the same, at its longest",
    "pools.*.pages": "pages of a pool beside the main one (which is that of the decode node where "
    "there are two, and the logical one where there is a device group)",
    "pools.*.mean_share": "share of it that is not free: mean as for occupancy",
    "pools.*.peak_share": "the same, at its highest",
    "pools.*.held_mean_pages": "pages of it that requests hold: mean as for occupancy",
    "pools.*.held_peak_pages": "the same, at its highest",
    "pools.*.evicted_pages": "pages of it evicted from the prefix cache",
    "allocator.step_median_us": "time in the allocator a step: median; null without a step",
    "allocator.step_p99_us": "the same, 99th percentile (interpolated between ranks)",
    "allocator.step_mean_us": "the same, mean",
    "allocator.total_ms": "time in the allocator, all steps",
    "allocator.verbs.*.calls": "calls of the verb",
    "allocator.verbs.*.median_us": "time of a call: median; null without a call",
    "allocator.verbs.*.p99_us": "the same, 99th percentile",
    "allocator.verbs.*.total_ms": "time of all calls",
    "allocator.verbs.*.share": "the same, as a share of the time of all verbs",
    "verdict.outcome": '"sound" (no law was broken, and every page and row came back), or "broken"',
    "verdict.text": "the verdict as a sentence",
    "verdict.violation": "the law that was broken; null if none",
    "verdict.interrupted": "whether the run was stopped before its end",
    "verdict.leaked_pages": "pages that did not come back; null where they were not counted",
    "verdict.leaked_rows": "rows that did not come back; null where they were not counted",
}
"""What every key of `summarise` means; ``*`` stands for the name of an option or a verb."""

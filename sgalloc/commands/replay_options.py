"""What ``sgalloc replay`` was given, as the options of the engine."""

from __future__ import annotations

from typing import Any

from sgalloc.groups.sparse import Sparse
from sgalloc.groups.window import SlidingWindow
from sgalloc.replay.acceptance import PRESETS, Acceptance, preset
from sgalloc.replay.clock import StepTime
from sgalloc.replay.options import Disaggregation, Options
from sgalloc.replay.windowed import default_pages
from sgalloc.sizing import SpecConfig, alloc_len_per_decode

_GIB = 1 << 30
# Options that belong to another one.
_BELONG_TO = {
    "spec": ("steps", "topk", "draft_tokens", "accept", "overlap"),
    "window": ("window_pages", "window_every"),
    "sparse": ("device_buffer", "draft_scratch"),
    "disaggregated": ("prefill_pages", "writers"),
}


def refuse_idle(given: dict[str, Any]) -> None:
    """Options that would do nothing beside the others given."""
    used = {name: given[name] not in (None, False, "none") for name in _BELONG_TO}
    for owner, names in _BELONG_TO.items():
        for name in names if not used[owner] else ():
            if given[name] is not None:
                raise ValueError(f"{_option(name)} does nothing alone: add {_option(owner)}")
        if used[owner] and given["cache_only"]:
            raise ValueError(f"--cache-only feeds the prefix cache alone: leave out --{owner}")
    if given["share_partial"] and not given["cache_only"]:
        raise ValueError("--share-partial is for the cache alone: add --cache-only")
    if given["cache_only"] and given["report"] is not None:
        raise ValueError("--cache-only prints one line and has no report: leave out --report")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def pages_of(given: dict[str, Any], page_size: int) -> int:
    """Pages of the pool, given as such or as memory."""
    if given["pages"] is not None:
        return int(given["pages"])
    if not 0 < given["pool_gib"] <= 1 << 20:
        raise ValueError(f"--pool-gib is {given['pool_gib']}: give the GiB that hold the KV")
    pages = int(given["pool_gib"] * _GIB / given["bytes_per_token"] / page_size)
    if not pages:
        raise ValueError(
            f"--pool-gib {given['pool_gib']:g} holds no page of --page-size {page_size} at "
            f"--bytes-per-token {given['bytes_per_token']}: give more memory or smaller pages"
        )
    return pages


def options_of(given: dict[str, Any]) -> Options:
    """What the engine runs with."""
    spec = _spec(given)
    pages = pages_of(given, max(given["page_size"], 1))
    return Options(
        num_pages=pages,
        page_size=given["page_size"],
        running_limit=given["running"],
        chunk=given["chunk"],
        spec=spec,
        acceptance=_acceptance(spec, given["accept"]),
        overlap=bool(given["overlap"]),
        prefix_cache=given["prefix_cache"],
        window=_window(given, pages),
        sparse=_sparse(given, spec),
        disaggregated=_disaggregation(given, pages),
        admit=given["admit"],
        headroom=given["headroom"],
        abort_rate=given["abort_rate"],
        speed=given["speed"],
        check_every=given["check_every"],
        seed=given["seed"],
        device=given["device"],
        step_time=StepTime(),
    )


def _window(given: dict[str, Any], pages: int) -> SlidingWindow | None:
    if given["window"] is None:
        return None
    held = given["window_pages"]
    if held is None:
        size = max(given["page_size"], 1)
        held = default_pages(pages, size, given["window"], given["chunk"])
    every = 1 if given["window_every"] is None else given["window_every"]
    return SlidingWindow(given["window"], held, evict_every=every)


def prefix_cache_of(given: dict[str, Any]) -> bool:
    """Whether there is a prefix cache: not with ``--sparse``, unless asked for."""
    if given["prefix_cache"] is None:
        return given["sparse"] is None
    return bool(given["prefix_cache"])


def _sparse(given: dict[str, Any], spec: SpecConfig) -> Sparse | None:
    if given["sparse"] is None:
        return None
    buffer, scratch = given["device_buffer"], given["draft_scratch"]
    if scratch is None:
        drafts = spec.algorithm != "none"
        scratch = alloc_len_per_decode(spec, max(given["page_size"], 1)) if drafts else 0
    return Sparse(given["sparse"], 4096 if buffer is None else buffer, scratch)


def _disaggregation(given: dict[str, Any], pages: int) -> Disaggregation | None:
    if not given["disaggregated"]:
        return None
    held = pages if given["prefill_pages"] is None else given["prefill_pages"]
    return Disaggregation(held, 2 if given["writers"] is None else given["writers"])


def _spec(given: dict[str, Any]) -> SpecConfig:
    algorithm = given["spec"]
    if algorithm == "none":
        return SpecConfig()
    steps = given["steps"]
    if steps is None:
        steps = 3 if algorithm in ("eagle", "ngram") else 0
    topk = 1 if given["topk"] is None else given["topk"]
    draft = given["draft_tokens"]
    if draft is None:
        # Of a tree each level has topk nodes, so that its path has to be moved.
        nodes = steps * topk if algorithm == "eagle" and topk > 1 else max(steps, 3)
        draft = 16 if algorithm == "dflash" else nodes + 1
    return SpecConfig(algorithm, steps=steps, topk=topk, draft_tokens=draft)


def _acceptance(spec: SpecConfig, accept: str | None) -> Acceptance | None:
    """How many tokens a step keeps: at most one more than are drafted behind the known one."""
    if spec.algorithm == "none":
        return None
    drafted = spec.draft_tokens if spec.algorithm == "uno" else spec.draft_tokens - 1
    if spec.algorithm == "eagle":
        drafted = min(drafted, spec.steps)
    if drafted < 1:
        raise ValueError(
            f"--draft-tokens {spec.draft_tokens} leaves nothing to draft behind the known token: "
            "give at least 2"
        )
    if accept in PRESETS:
        return preset(accept, draft_tokens=drafted)
    if accept is None:
        mean = 4.24 if spec.algorithm == "dflash" else 2.65
        return Acceptance(drafted, mean=min(mean, drafted + 1.0))
    try:
        return Acceptance(drafted, mean=float(accept))
    except ValueError as error:
        raise ValueError(
            f"--accept is {accept!r}: give a mean from 1 to {drafted + 1} tokens, or one of "
            f"{', '.join(PRESETS)}"
        ) from error

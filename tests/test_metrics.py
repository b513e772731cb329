"""Metrics: what Prometheus scrapes is what stats() says, under names that keep its rules."""

from __future__ import annotations

import re
import sys
import threading
from typing import Any

import pytest

import sgalloc
from sgalloc import metrics

prometheus = pytest.importorskip(
    "prometheus_client", reason="metrics need prometheus_client: pip install 'sgalloc[metrics]'"
)


def make(**kwargs: Any) -> sgalloc.KVAllocator:
    return sgalloc.KVAllocator(50, 4, 8, 128, device="cpu", prefix_cache=True, **kwargs)


def scraped(*collectors: metrics.Collector) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample, as the text that is sent says it, by name and labels."""
    from prometheus_client.parser import text_string_to_metric_families

    registry = prometheus.CollectorRegistry()
    for one in collectors:
        registry.register(one)
    text = prometheus.generate_latest(registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_samples_are_what_stats_says() -> None:
    alloc = make(window=sgalloc.SlidingWindow(8, 40))
    h = alloc.open(3)
    alloc.extend(h, [5, 9, 17])
    alloc.release(h[:1], tokens=[range(5)])
    with pytest.raises(sgalloc.RowTooNarrow):
        alloc.extend(h[1:2], 129)
    found = scraped(metrics.Collector(alloc))
    stats = alloc.stats()
    for group, pages in stats.groups.items():
        by_state = {
            dict(labels)["state"]: value
            for (name, labels), value in found.items()
            if name == "sgalloc_pages" and dict(labels)["group"] == group
        }
        assert set(by_state) == {"free", "quarantined", "cached", "pinned", "owned"}
        assert all(by_state[state] == getattr(pages, state) for state in by_state)
        key = (("group", group),)
        assert sum(by_state.values()) == found["sgalloc_pool_pages", key] == pages.total
        assert found["sgalloc_high_water_pages", key] == pages.high_water
        assert found["sgalloc_locked_pages", key] == pages.locked
        assert found["sgalloc_evicted_pages_total", key] == pages.evicted
    assert found["sgalloc_rows", (("state", "open"),)] == 2
    assert found["sgalloc_committed_tokens", ()] == stats.committed == 26
    assert found["sgalloc_allocated_tokens", ()] == stats.allocated == 32
    assert found["sgalloc_refusals_total", (("reason", "RowTooNarrow"),)] == 1
    assert found["sgalloc_refusals_total", (("reason", "OutOfPages"),)] == 0
    assert found["sgalloc_staging_waits_total", ()] == 0
    info = [dict(labels) for name, labels in found if name == "sgalloc_info"]
    assert info == [{"version": sgalloc.__version__, "device": "cpu", "page_size": "4"}]


def test_names_keep_the_rules() -> None:
    for family in metrics.Collector(make()).collect():
        assert re.fullmatch(r"sgalloc_[a-z_]+[a-z]", family.name) and family.documentation
        assert not family.name.endswith(("_total", "_count", "_sum", "_bucket"))
        counts = family.type == "counter"
        assert all(sample.name.endswith("_total") == counts for sample in family.samples)
        assert family.samples, family.name


def test_several_allocators_are_told_apart_by_labels() -> None:
    prefill, decode = make(), make()
    decode.open(2)
    collector = metrics.Collector(prefill, {"node": "prefill"})
    collector.add(decode, {"node": "decode"})
    found = scraped(collector)
    for node, rows in (("prefill", 0), ("decode", 2)):
        assert found["sgalloc_rows", (("node", node), ("state", "open"))] == rows


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda c: metrics.Collector(3), TypeError, "reads a KVAllocator"),
        (lambda c: c.add(make()), ValueError, r"labels must be \['node'\]"),
        (lambda c: c.add(make(), {"node": "a"}), ValueError, "read already"),
        (lambda c: c.add(make(), {"host": "a"}), ValueError, "labels must be"),
    ],
)
def test_bad_input_is_named(call: Any, error: type[Exception], words: str) -> None:
    collector = metrics.Collector(make(), {"node": "a"})
    with pytest.raises(error, match=words):
        call(collector)


def test_a_scrape_from_another_thread_disturbs_nobody() -> None:
    alloc = make()
    collector = metrics.Collector(alloc)
    stop, seen, problems = threading.Event(), [0], []

    def scrape() -> None:
        try:
            while not stop.is_set():
                scraped(collector)
                seen[0] += 1
        except Exception as problem:
            problems.append(problem)

    thread = threading.Thread(target=scrape)
    thread.start()
    for n in range(300):
        h = alloc.open(2)
        alloc.extend(h, 40)
        alloc.release(h, tokens=[range(n, n + 40), range(n, n + 40)])
    while not seen[0] and not problems:
        thread.join(0.01)
    stop.set()
    thread.join()
    assert problems == [] and seen[0] >= 1
    alloc.check()


def test_without_prometheus_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'sgalloc\[metrics\]'"):
        metrics.Collector(make())

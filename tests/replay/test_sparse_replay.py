"""The replay of sparse requests: dense prompts, thinned once complete, and who waits for what."""

from __future__ import annotations

import numpy as np
import pytest
from replay.engine_support import column, engine, plain, proven, req, run

from sgalloc import Sparse
from sgalloc.errors import OutOfPages
from sgalloc.groups.window import SlidingWindow
from sgalloc.replay.acceptance import Acceptance
from sgalloc.replay.clock import StepTime
from sgalloc.replay.engine import Engine
from sgalloc.replay.options import Disaggregation, Options
from sgalloc.replay.recording import Recording
from sgalloc.replay.summary import summarise
from sgalloc.replay.workload import generate
from sgalloc.sizing import SpecConfig

CHAIN = {
    "spec": SpecConfig("eagle", steps=3, topk=1, draft_tokens=4),
    "acceptance": Acceptance(3, mean=2.2),
}


def device(recording: Recording, name: str = "owned") -> list[float]:
    return list(recording.pools["device"].samples[name])


def sparse(*requests, ratio=4, buffer=8, scratch=0, **options) -> Recording:
    settings = Sparse(ratio, buffer, scratch)
    return run(*requests, sparse=settings, prefix_cache=False, **options)


@pytest.mark.parametrize(("scratch", "pages"), [(0, 0), (4, 1), (9, 3)])
def test_a_prompt_is_dense_and_then_a_buffer(scratch, pages):
    recording = sparse(req(40, output=20), chunk=16, scratch=scratch)
    # 4, 8 and 10 pages while it is prefilled; then a buffer of two and the newest one.
    assert column(recording, "owned")[:4] == [0, 4, 8, 10]
    assert device(recording)[:3] == [0, 4, 8]
    assert set(device(recording)[3:-1]) == {2 + 1 + pages}
    assert recording.totals.thinned == 10 - 3 - pages
    assert recording.num_pages == 4 * 50 and recording.pools["device"].num_pages == 50
    # Logical pages go on growing.
    assert max(column(recording, "owned")) == 15
    found = summarise(recording)["sparse"]
    owned, held = np.array(column(recording, "owned")), np.array(device(recording))
    assert found["held_peak_pages"] == 8
    assert found["saved_mean_pages"] == pytest.approx(float((owned - held)[:-1].mean()))
    assert found["dense_mean_pages"] == pytest.approx(float(owned[:-1].mean()))


def test_a_short_request_fills_its_buffer_as_it_grows():
    recording = sparse(req(5, output=40), buffer=16)
    # It has two pages, grows to the four of its buffer and the one of its newest token.
    held = device(recording)[1:-1]
    assert held[0] == 2 and held[-1] == max(held) == 5
    assert held == sorted(held)
    assert recording.totals.thinned == 0


def test_more_run_at_once_than_a_device_could_hold_dense():
    requests = [req(60, output=60) for _ in range(12)]
    common = {"num_pages": 60, "headroom": 0, "chunk": 60}
    dense = run(*requests, prefix_cache=False, **common)
    thin = sparse(*requests, ratio=8, **common)
    assert dense.totals.peak_running <= 4
    assert thin.totals.peak_running > 2 * dense.totals.peak_running
    assert thin.totals.virtual_seconds < dense.totals.virtual_seconds
    assert max(device(thin)) <= 60 < max(column(thin, "owned"))
    assert summarise(thin)["sparse"]["saved_share"] > 0.5


def test_admission_is_refused_by_the_group_that_is_short():
    requests = [req(60, output=60) for _ in range(12)]
    common = {"headroom": 0, "chunk": 60}
    logical = sparse(*requests, ratio=1, num_pages=60, **common).totals
    assert logical.main_waits > 0 == logical.side_waits
    device_ = sparse(*requests, ratio=16, num_pages=32, **common).totals
    assert device_.side_waits > 0 == device_.main_waits
    assert logical.pressed_steps > 0 < device_.pressed_steps
    assert logical.waiting_pressure > 0.5


def test_who_is_sent_back_for_device_pages_is_told_apart():
    requests = [req(6, output=40) for _ in range(8)]
    common = {"headroom": 0, "admit": "chunk", "chunk": 64}
    by_device = sparse(*requests, ratio=16, num_pages=20, buffer=64, **common).totals
    assert 0 < by_device.retractions == by_device.device_retractions
    by_logical = sparse(*requests, ratio=1, num_pages=24, buffer=4, **common).totals
    assert by_logical.retractions > 0 == by_logical.device_retractions
    assert by_device.finished == by_logical.finished == 8


def test_a_prompt_that_finds_no_scratch_goes_back_and_comes_again():
    settings = {"sparse": Sparse(8, 64, 16), "prefix_cache": False}
    watched = engine(
        *(req(9, output=12) for _ in range(9)),
        num_pages=24, headroom=0, admit="chunk", chunk=64, **settings,
    )  # fmt: skip
    refused: list[OutOfPages] = []
    to_sparse = watched.alloc.to_sparse

    def noted(x, after=None):
        try:
            to_sparse(x, after)
        except OutOfPages as error:
            refused.append(error)
            raise

    watched.alloc.to_sparse = noted
    totals = proven(watched.run()).totals
    assert refused and {error.group for error in refused} == {"device"}
    assert totals.finished == 9 and totals.decoded == 9 * 12
    assert totals.device_retractions >= len(refused)


def test_a_request_that_fits_one_group_alone_is_refused():
    requests = [req(30, output=2), req(10, output=2)]
    # 8 pages of the device, or 8 logical ones, hold 31 tokens, and with scratch they do not.
    assert sparse(*requests, num_pages=8).totals.refused == 0
    assert sparse(*requests, num_pages=8, scratch=1).totals.refused == 1
    assert sparse(*requests, num_pages=7).totals.refused == 1
    assert sparse(*requests, num_pages=8, ratio=1, **CHAIN).totals.refused == 1


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("admit", ["prompt", "chunk"])
@pytest.mark.parametrize("spec", ["none", "chain", "block"])
def test_under_pressure_every_request_finishes(spec, admit, page_size):
    block = {"spec": SpecConfig("dflash", draft_tokens=8), "acceptance": Acceptance(7, mean=4)}
    given = {"none": {}, "chain": CHAIN | {"overlap": True}, "block": block}[spec]
    workload = generate("code", 120, seed=6)
    options = Options(
        num_pages=11_000 // page_size,
        page_size=page_size,
        device="cpu",
        speed=60.0,
        check_every=40,
        chunk=4_096,
        step_time=StepTime(base=30e-3, per_prefill_token=2e-6),
        admit=admit,
        headroom=0,
        prefix_cache=False,
        sparse=Sparse(3, 512, 64),
        **given,
    )
    recording = proven(Engine(workload, options).run())
    totals = recording.totals
    assert totals.finished == 120
    assert totals.decoded == sum(request.output_len for request in workload.requests)
    assert totals.pressed_steps > 0
    assert totals.thinned > 1_000 // page_size
    pool = recording.pools["device"].samples
    assert set(sum(np.array(values) for values in pool.values())) == {11_000 // page_size}
    assert summarise(recording)["sparse"]["saved_share"] > 0.2


def test_the_same_run_gives_the_same_recording():
    def once() -> dict[str, object]:
        requests = [req(60, output=60, arrival=float(at)) for at in range(12)]
        common = {"num_pages": 40, "headroom": 0, "chunk": 32, "abort_rate": 0.3, "overlap": True}
        return plain(sparse(*requests, ratio=5, scratch=4, **common, **CHAIN))

    assert once() == once()


@pytest.mark.parametrize("after", [1, 4, 9])
def test_stop_gives_everything_back(after):
    watched = engine(
        *(req(40, output=20) for _ in range(4)),
        sparse=Sparse(4, 8, 4), prefix_cache=False, chunk=30, num_pages=60,
    )  # fmt: skip
    recording = watched.run(lambda totals: watched.stop() if totals.steps == after else None)
    assert recording.interrupted and recording.sound
    assert all(g.free == g.total for g in watched.alloc.stats().groups.values())


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("prefix_cache", {"prefix_cache": True}),
        ("window", {"window": SlidingWindow(8, 9)}),
        ("disaggregated", {"disaggregated": Disaggregation(9)}),
        (
            "topk",
            {"spec": SpecConfig("eagle", 3, 2, 7), "acceptance": Acceptance(3, mean=2.0)},
        ),
    ],
)
def test_what_does_not_go_with_sparse_is_refused_by_name(name, given):
    with pytest.raises(ValueError, match=f"^{name} is ") as caught:
        Options(num_pages=9, sparse=Sparse(2, 8), **({"prefix_cache": False} | given))
    assert "sparse" in str(caught.value) and "\n" not in str(caught.value)

"""Settings of the window group: what is taken and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

import sgalloc


def test_settings_are_shown_and_cannot_be_changed() -> None:
    window = sgalloc.SlidingWindow(4096, 100)
    assert (window.tokens, window.num_pages) == (4096, 100)
    assert (window.slot_map, window.evict_every) == (False, 1)
    with pytest.raises(AttributeError):
        window.tokens = 1  # type: ignore[misc]
    assert window == sgalloc.SlidingWindow(tokens=4096, num_pages=100)


@pytest.mark.parametrize("name", ["tokens", "num_pages", "evict_every"])
@pytest.mark.parametrize("value", [0, -1, 1.5, float("nan"), True, "3", None, 2**31, [4]])
def test_a_bad_number_is_refused_by_its_name(name: str, value: Any) -> None:
    numbers: dict[str, Any] = {"tokens": 4, "num_pages": 4, "evict_every": 1, name: value}
    with pytest.raises((TypeError, ValueError), match=f"window.{name}") as refused:
        sgalloc.SlidingWindow(**numbers)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("value", [0, 1, None, "yes"])
def test_a_map_is_wanted_or_not(value: Any) -> None:
    with pytest.raises(TypeError, match=r"window\.slot_map"):
        sgalloc.SlidingWindow(4, 4, value)


def test_window_slots_past_int32_are_refused_by_the_name_of_the_field() -> None:
    window = sgalloc.SlidingWindow(4, 2**27)
    with pytest.raises(ValueError, match=r"window.num_pages=134217728 .*: use at most"):
        sgalloc.KVAllocator(8, 16, 2, 64, device="cpu", window=window)


@pytest.mark.parametrize("value", [4096, (4, 4), {"tokens": 4}, sgalloc.SlidingWindow])
def test_something_else_than_a_window_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="window must be a SlidingWindow"):
        sgalloc.KVAllocator(8, 16, 2, 64, device="cpu", window=value)


def test_integers_of_numpy_are_taken() -> None:
    import numpy as np

    assert sgalloc.SlidingWindow(np.int64(4), np.int32(5)) == sgalloc.SlidingWindow(4, 5)

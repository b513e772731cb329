"""Page lists as runs: what a transfer engine sends in one piece."""

from __future__ import annotations

from typing import Any

import numpy as np

from sgalloc.inputs import Int64, int64_array


def extents(page_ids: Any) -> tuple[Int64, Int64]:
    """Runs of consecutive ascending page ids, in the order of the list.

    Args:
        page_ids: of `KVAllocator.pages`, flat.

    Returns:
        First id and number of pages of each run, int64 ``(runs,)`` each, so that products with
        the bytes of a page do not overflow.

    Raises:
        TypeError, ValueError: not a flat list of ids from 1 on.
    """
    ids = _page_ids(page_ids, "page_ids")
    first, count = _runs(np.diff(ids) != 1, ids.size)
    return ids[first], count


def pair_extents(src_ids: Any, dst_ids: Any) -> tuple[Int64, Int64, Int64]:
    """Runs that are consecutive and ascending on both sides, page by page in order.

    Args:
        src_ids: pages of the sender, flat.
        dst_ids: pages of the receiver, as many.

    Returns:
        First id at the sender, first id at the receiver, and number of pages of each run,
        int64 ``(runs,)`` each.

    Raises:
        TypeError, ValueError: not flat lists of ids from 1 on, or not of one length.
    """
    src, dst = _page_ids(src_ids, "src_ids"), _page_ids(dst_ids, "dst_ids")
    if src.size != dst.size:
        raise ValueError(
            f"{src.size} pages cannot be sent into {dst.size}: pass the pages of the same tokens "
            "on both sides, from the same page edge on"
        )
    first, count = _runs((np.diff(src) != 1) | (np.diff(dst) != 1), src.size)
    return src[first], dst[first], count


def _page_ids(value: Any, name: str) -> Int64:
    ids = int64_array(value, name)
    if ids.size and ids.min() < 1:
        at = int(ids.argmin())
        raise ValueError(
            f"{name}[{at}]={ids[at]} is no page of a request: pass what pages() returns, ids from "
            "1 on"
        )
    return ids


def _runs(breaks: np.ndarray[Any, np.dtype[np.bool_]], size: int) -> tuple[Int64, Int64]:
    """Where runs begin, and how long they are, if one ends before each of ``breaks``."""
    if not size:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    first = np.concatenate(([0], breaks.nonzero()[0] + 1))
    return first, np.diff(first, append=size)

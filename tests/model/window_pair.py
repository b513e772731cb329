"""What the window group holds on both sides of a pair, compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from model.pair import Pair


def compare_window(pair: Pair, handles: list[int], requests: list[Any], rows: list[int]) -> None:
    """The window's table by row and the map, up to the names of its pages."""
    size = pair.config.page_size
    for side in pair.ref.freed_sides:
        pair.side_of.pop(side, None)
    pair.ref.freed_sides.clear()
    frontiers = [request.frontier * size for request in requests]
    pair.same("frontier", pair.real.frontier(handles).tolist(), frontiers)
    table = pair.real.window_table
    for request, row in zip(requests, rows, strict=True):
        pair.same("below the frontier", table[row, : request.frontier * size].any(), False)
        for number, mine in request.window.items():
            held = table[row, number * size : number * size + size].tolist()
            pair.same_name("window page", pair.side_of, mine, held[0] // size)
            pair.same(f"window page {number}", held, pair.slots([held[0] // size]))
    if table[0].any():
        pair.fail("the padding row of the window table was written")
    for node in pair.ref.nodes():
        if node.side and node.side not in pair.side_of and node.page in pair.page_of:
            pair.fail("a cached window page was never seen in a table")
    out = pair.config.pages_of("window") - len(pair.ref.side_free)
    pair.same("window pages that are out", len(pair.side_of), out)
    if not pair.config.window.slot_map:
        return
    shown = {}
    for start in range(0, (pair.config.num_pages + 1) * size, size):
        held = pair.real.full_to_window[start : start + size].tolist()
        if any(held):
            shown[start // size] = held
    expected = {
        pair.page_of[page]: pair.slots([pair.side_of[side]]) if side in pair.side_of else None
        for page, side in pair.ref.map.items()
    }
    pair.same("full_to_window", shown, expected)

"""Faults to plant into what writes pages of a second group, and what a fault is."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A fault, as one replacement in one file.

    Attributes:
        battery: whose launches are to find it.
        file: where it is planted.
        old: what stands there, once.
        new: what is put in its place.
    """

    battery: str
    file: str
    old: str
    new: str


SIDE_FAULTS: dict[str, Fault] = {
    "mapped beside: cleared pages left out": Fault(
        "beside", "assign_pages.cu", "if (side_id >= 0) {", "if (side_id > 0) {"
    ),
    "mapped beside: pages counted that are not there": Fault(
        "beside",
        "assign_pages.cu",
        "__syncthreads_count(side_id >= 0)",
        "__syncthreads_count(there)",
    ),
    "mapped beside: as many as of the main group": Fault(
        "beside",
        "assign_pages.cu",
        "i32 beside = __syncthreads_count(side_id >= 0);",
        "i32 beside = count;",
    ),
    "mapped beside: a table that nobody keeps": Fault(
        "beside", "assign_pages.cu", "side_slots && side_place >= 0 ?", "side_place >= 0 ?"
    ),
    "mapped beside: a place 0 that is no place": Fault(
        "beside", "assign_pages.cu", "side_place >= 0 ?", "side_place > 0 ?"
    ),
    "mapped beside: a map that nobody keeps": Fault(
        "beside", "assign_pages.cu", "side_map && main > 0 ?", "main > 0 ?"
    ),
    "mapped beside: the padding page mapped": Fault(
        "beside", "assign_pages.cu", "side_map && main > 0 ?", "side_map ?"
    ),
    "mapped beside: the map by the page of the second group": Fault(
        "beside", "assign_pages.cu", "main * page_size : -1", "side_id * page_size : -1"
    ),
    "mapped beside: ids elsewhere": Fault(
        "beside",
        "assign_pages.cu",
        "kFixedSidePlaces + 8 * kFixedPages",
        "kFixedSidePlaces + 4 * kFixedPages",
    ),
    "mapped beside: mains elsewhere": Fault(
        "beside", "assign_pages.cu", "kFixedSideIds + 4 * kFixedPages", "kFixedSideIds"
    ),
    "mapped beside: places elsewhere": Fault(
        "beside",
        "assign_pages.cu",
        "kFixedGather + 16 * kFixedPages",
        "kFixedGather + 12 * kFixedPages",
    ),
    "mapped beside: cleared entries that count on": Fault(
        "beside", "side_pages.cuh", "i32 step = min(id, 1);", "i32 step = 1;"
    ),
    "mapped beside: slots that repeat": Fault(
        "beside", "side_pages.cuh", "second + step, second", "second, second"
    ),
    "mapped beside: a map without quads": Fault(
        "beside",
        "side_pages.cuh",
        "if (sent >= 0) *reinterpret_cast<int4*>(map + sent + offset) = four;",
        "",
    ),
    "mapped beside: a map without single slots": Fault(
        "beside", "side_pages.cuh", "if (sent >= 0) map[sent + offset] = slot;", ""
    ),
    "mapped beside: an entry 0 that is no entry": Fault(
        "beside", "side_pages.cuh", "if (entry >= 0) slots", "if (entry > 0) slots"
    ),
    "mapped beside: 16-byte stores of any table": Fault(
        "beside", "side_pages.cuh", "i32 width = t.quad_shift > -2 ? 4 : 1;", "i32 width = 4;"
    ),
    "mapped beside: a page past the last": Fault(
        "beside", "side_pages.cuh", "i32 total = count * parts;", "i32 total = (count + 1) * parts;"
    ),
    "mapped beside: pages by a power of two": Fault(
        "beside",
        "side_pages.cuh",
        "t.quad_shift >= 0 ? at >> t.quad_shift : at / parts",
        "at >> (t.quad_shift > 0 ? t.quad_shift : 0)",
    ),
    "side: a page 0 that has slots": Fault(
        "side",
        "side_pages.cuh",
        "id ? static_cast<i32>(id * size + offset) : 0",
        "static_cast<i32>(id * size + offset)",
    ),
    "side: cleared entries that count on": Fault(
        "side", "side_pages.cuh", "i32 step = id ? 1 : 0;", "i32 step = 1;"
    ),
    "side: a place that is none": Fault("side", "side_pages.cuh", "place >= 0 ?", "place >= -1 ?"),
    "side: a place 0 that is no place": Fault(
        "side", "side_pages.cuh", "place >= 0 ?", "place > 0 ?"
    ),
    "side: the padding page mapped": Fault(
        "side", "side_pages.cuh", "side.map && main ?", "side.map ?"
    ),
    "side: a map that nobody keeps": Fault(
        "side", "side_pages.cuh", "side.map && main ?", "main ?"
    ),
    "side: a table that nobody keeps": Fault(
        "side", "side_pages.cuh", "side.slots && place >= 0 ?", "place >= 0 ?"
    ),
    "side: mapped where it is shown alone": Fault(
        "side",
        "side_pages.cuh",
        "side.map && main ? side",
        "side.map && main && place >= 0 ? side",
    ),
    "side: 32-bit entries": Fault(
        "side",
        "side_pages.cuh",
        "side.slots + entry_of(t, place) + offset",
        "side.slots + static_cast<u32>(entry_of(t, place)) + offset",
    ),
    "side: the map by the page of the second group": Fault(
        "side", "side_pages.cuh", "side.map + main * size", "side.map + id * size"
    ),
    "side: entries left out": Fault("side", "side_pages.cuh", "at += stride", "at += stride + 1"),
    "side: 16-byte stores of any table": Fault(
        "side", "side_pages.cuh", "bool quads = t.quad_shift > -2", "bool quads = true"
    ),
    "side: a quarter of each page": Fault("side", "side_pages.cuh", "* (quads ? 4 : 1)", "* 1"),
    "side: stores past the page": Fault(
        "side", "side_pages.cuh", "quads ? size / 4 : size;", "size;"
    ),
    "side: slots that repeat": Fault(
        "side", "side_pages.cuh", "slot + 2 * step, slot + 3 * step", "slot + 2 * step, slot + 2"
    ),
    "side: a map without quads": Fault(
        "side", "side_pages.cuh", "if (mapped) *reinterpret_cast<int4*>(mapped) = four;", ""
    ),
    "side: a map without single slots": Fault(
        "side", "side_pages.cuh", "if (mapped) *mapped = slot;", ""
    ),
    "side: a page past the last": Fault(
        "side", "side_pages.cuh", "side.pages * parts", "(side.pages + 1) * parts"
    ),
    "side: left out": Fault(
        "side",
        "assign_pages.cu",
        "    apply_step(t, tile, step);\n    side_step(t, step);",
        "    apply_step(t, tile, step);",
    ),
    "side: ids for pages of the main group": Fault(
        "side", "assign_pages.cu", "step->side_mains_at", "step->side_ids_at"
    ),
    "side: left out of steps without pages": Fault(
        "side", "assign_pages.cu", "if (!step->side_pages) return;", "if (!step->pages) return;"
    ),
    "side: the tables of each other": Fault(
        "side",
        "assign_pages.cu",
        "reinterpret_cast<i32*>(step->side_map)",
        "reinterpret_cast<i32*>(step->side_slots)",
    ),
}

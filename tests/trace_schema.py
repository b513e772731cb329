"""What a timeline has to be, so that viewers open it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any


def check_schema(document: dict[str, Any]) -> None:
    """What the trace event format asks for, and that spans of one track hold each other."""
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    events = document["traceEvents"]
    tracks = defaultdict(list)
    arrows: dict[int, dict[str, Any]] = defaultdict(dict)
    named = set()
    for event in events:
        assert event["ph"] in "MXCsf" and event["name"], event
        assert type(event["pid"]) is int and type(event["tid"]) is int
        assert event["ts"] >= 0 and isinstance(event["ts"], int | float)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name") and event["args"]["name"]
            named.add((event["pid"], event["tid"]))
        elif event["ph"] == "X":
            assert event["dur"] >= 0 and event["cat"] == "sgalloc"
            tracks[event["pid"], event["tid"]].append(event)
        elif event["ph"] == "C":
            assert event["args"] and all(type(n) is int for n in event["args"].values())
        else:
            assert event["ph"] not in arrows[event["id"]], "an arrow has two ends"
            arrows[event["id"]][event["ph"]] = event
    assert set(tracks) <= named, "each track has a name"
    for spans in tracks.values():
        inside: list[float] = []
        for span in spans:
            # Times are cut to ns when they are written as µs.
            while inside and inside[-1] <= span["ts"] + 1e-9:
                inside.pop()
            end = span["ts"] + span["dur"]
            assert not inside or end <= inside[-1] + 1e-6, f"{span['name']} leaves its parent"
            inside.append(end)
    for ends in arrows.values():
        assert set(ends) == {"s", "f"} and ends["f"]["bp"] == "e"
        assert ends["f"]["ts"] >= ends["s"]["ts"] - 1000

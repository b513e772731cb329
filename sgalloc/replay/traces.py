"""Reading request traces: Mooncake JSON lines and the Azure 2023 CSV.

Both are told apart by content: the first bytes say whether the file is compressed (.xz, .gz),
its first line that is not blank which format it is. Lines are streamed, and what cannot be used is
skipped and reported with its line number (counted in the decompressed text).

What counts as unusable: text that does not parse, a missing field, a wrong type, a length below 1
or above 2**31 - 1, hash_ids that do not cover the prompt. That includes a request without output:
every request of a replay yields at least the token that its prefill samples. Neither published
trace has such a row.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import math
import re
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sgalloc.replay.requests import (
    BLOCK_TOKENS,
    MAX_REQUESTS,
    MAX_TOKENS,
    IntArray,
    TraceRequest,
    Workload,
    max_block_id,
    whole_number,
)

MAX_PROBLEMS = 20
MAX_LINE = 1 << 22
TICK_SECONDS = 3.0

_KNOWN = "Mooncake JSON lines or an Azure CSV with TIMESTAMP,ContextTokens,GeneratedTokens"
_AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_OTHER_PACKERS = {
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"PK\x03\x04": "zip",
    b"\x04\x22\x4d\x18": "lz4",
}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_INSTANT = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?", re.ASCII
)
_DIGITS = re.compile(r"[+-]?\d{1,40}", re.ASCII)


class TraceError(ValueError):
    """A trace that cannot be used; the message names the file and what to do."""


class _Row(NamedTuple):
    ticks: float | int
    prompt_len: int
    output_len: int
    blocks: IntArray | None


class _BadLine(Exception):
    """Why one line is left out."""


_Parser = Callable[[str], _Row]
_Numbered = tuple[int, bytes | None]


def read_trace(path: str | PathLike[str], *, limit: int | None = None) -> Workload:
    """Read a trace into a workload, its requests in order of arrival (ties in file order).

    ``limit`` stops the reading after that many usable lines. Arrivals count from the earliest
    line. Mooncake stamps a whole 3 s of traffic with one time: the requests of one stamp are
    spread evenly, in order, over the time to the next stamp, 3 s at most.

    Raises TraceError for a file that is missing, unreadable, of unknown format, truncated, or
    without a single usable line; ValueError for a limit that is not a positive whole number.
    """
    most = None if limit is None else whole_number("limit", limit, 1, MAX_REQUESTS)
    where = Path(path)
    try:
        raw = open(where, "rb")  # noqa: SIM115 - closed below, once its errors can be told apart
    except (OSError, ValueError) as error:
        raise _unreadable(where, error) from error
    with raw:
        try:
            return _read(where, raw, MAX_REQUESTS if most is None else most)
        except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
            raise TraceError(
                f"trace {where}: the compressed data is damaged or cut short ({_short(error)}); "
                "fetch the file again"
            ) from error
        except OSError as error:
            raise _unreadable(where, error) from error


def _unreadable(where: Path, error: OSError | ValueError) -> TraceError:
    reason = (isinstance(error, OSError) and error.strerror) or error
    return TraceError(f"trace {where}: cannot be read ({reason}); give a readable file of {_KNOWN}")


def _read(where: Path, raw: io.BufferedReader, limit: int) -> Workload:
    lines = _lines(_decompressed(where, raw))
    first = next(((number, line) for number, line in lines if line is None or line.strip()), None)
    if first is None:
        raise TraceError(f"trace {where}: is empty; give {_KNOWN}")
    text = _text(first[1])
    header = _azure_header(text)
    if header is not None:
        rows, skipped, problems = _collect(lines, _azure_parser(header), limit)
        requests = _by_arrival(rows)
    elif text is not None and text.startswith("{"):
        rows, skipped, problems = _collect(_chained(first, lines), _mooncake_row, limit)
        requests = _spread(rows)
    else:
        raise TraceError(
            f"trace {where}: line {first[0]} is of no known format ({_short(first[1])}); "
            f"give {_KNOWN}, plain or packed as .xz or .gz"
        )
    if not requests:
        reason = f"; {problems[0]}" if problems else ""
        raise TraceError(
            f"trace {where}: no usable line ({skipped} skipped{reason}); give {_KNOWN}"
        )
    return Workload(where.name, requests, skipped, problems)


def _decompressed(where: Path, raw: io.BufferedReader) -> io.BufferedIOBase:
    """The file's text, by its first bytes (peeked at, so that a pipe will do as well)."""
    magic = raw.peek(8)[:8]
    if magic.startswith(b"\xfd7zXZ\x00"):
        return lzma.LZMAFile(raw)
    if magic.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=raw)
    for start, packer in _OTHER_PACKERS.items():
        if magic.startswith(start):
            raise TraceError(
                f"trace {where}: is packed with {packer}; unpack it, or repack it as .xz or .gz"
            )
    return raw


def _lines(stream: io.BufferedIOBase) -> Iterator[_Numbered]:
    """Numbered lines; None for one longer than MAX_LINE, which is never held whole."""
    number = 0
    while line := stream.readline(MAX_LINE):
        number += 1
        if len(line) < MAX_LINE or line.endswith(b"\n"):
            yield number, line
            continue
        while (rest := stream.readline(MAX_LINE)) and not rest.endswith(b"\n"):
            pass
        yield number, None


def _chained(first: _Numbered, lines: Iterator[_Numbered]) -> Iterator[_Numbered]:
    yield first
    yield from lines


def _text(line: bytes | None) -> str | None:
    """The line as text without its ends (and a byte-order mark); None where it is no text."""
    if line is None or b"\x00" in line:
        return None
    try:
        return line.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        return None


def _collect(
    lines: Iterator[_Numbered], parse: _Parser, limit: int
) -> tuple[list[_Row], int, list[str]]:
    rows: list[_Row] = []
    problems: list[str] = []
    skipped = 0
    for number, line in lines:
        text = _text(line)
        if text == "":
            continue
        try:
            if text is None:
                raise _BadLine(
                    f"longer than {MAX_LINE} bytes" if line is None else "not UTF-8 text"
                )
            rows.append(parse(text))
        except _BadLine as problem:
            skipped += 1
            if len(problems) < MAX_PROBLEMS:
                problems.append(f"line {number}: {problem}")
        if len(rows) >= limit:
            break
    return rows, skipped, problems


def _mooncake_row(text: str) -> _Row:
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise _BadLine(f"not JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise _BadLine(f"not JSON ({_short(error)})") from None
    if not isinstance(fields, dict):
        raise _BadLine(f"not a JSON object ({_short(text)})")
    for name in ("timestamp", "input_length", "output_length", "hash_ids"):
        if name not in fields:
            raise _BadLine(f"{name} is missing")
    stamp = fields["timestamp"]
    if type(stamp) not in (int, float) or not 0 <= stamp < 2**53:
        raise _BadLine(f"timestamp is {_short(stamp)}, not milliseconds from 0 on")
    prompt_len = _length("input_length", fields["input_length"])
    output_len = _length("output_length", fields["output_length"])
    return _Row(stamp, prompt_len, output_len, _blocks(fields["hash_ids"], prompt_len))


def _length(name: str, value: object) -> int:
    if type(value) is not int:
        raise _BadLine(f"{name} is {_short(value)}, not a whole number")
    if not 1 <= value <= MAX_TOKENS:
        raise _BadLine(f"{name} is {_short(value)}, not within 1 to {MAX_TOKENS}")
    return value


def _blocks(ids: object, prompt_len: int) -> IntArray:
    if not isinstance(ids, list) or any(type(block) is not int for block in ids):
        raise _BadLine(f"hash_ids is {_short(ids)}, not a list of whole numbers")
    needed = -(-prompt_len // BLOCK_TOKENS)
    if len(ids) != needed:
        raise _BadLine(
            f"hash_ids has {len(ids)} blocks, but {prompt_len} tokens in blocks of "
            f"{BLOCK_TOKENS} make {needed}"
        )
    if min(ids) < 0 or max(ids) > max_block_id(BLOCK_TOKENS):
        raise _BadLine(f"hash_ids leaves the range 0 to {max_block_id(BLOCK_TOKENS)}")
    return np.array(ids, dtype=np.int64)


def _azure_header(text: str | None) -> list[str] | None:
    """The names of the columns, where the line is the header of an Azure trace."""
    if text is None:
        return None
    try:
        names = [name.strip() for name in next(csv.reader([text]), [])]
    except csv.Error:
        return None
    return names if all(names.count(field) == 1 for field in _AZURE_FIELDS) else None


def _azure_parser(header: list[str]) -> _Parser:
    at_stamp, at_prompt, at_output = (header.index(field) for field in _AZURE_FIELDS)

    def parse(text: str) -> _Row:
        try:
            cells = [cell.strip() for cell in next(csv.reader([text], strict=True))]
        except (csv.Error, StopIteration) as error:
            raise _BadLine(f"not a line of CSV ({_short(error)})") from None
        if len(cells) != len(header):
            raise _BadLine(f"{len(cells)} fields where the header names {len(header)}")
        ticks = _nanoseconds(cells[at_stamp])
        prompt_len = _length("ContextTokens", _integer("ContextTokens", cells[at_prompt]))
        output_len = _length("GeneratedTokens", _integer("GeneratedTokens", cells[at_output]))
        return _Row(ticks, prompt_len, output_len, None)

    return parse


def _integer(name: str, cell: str) -> int:
    if not _DIGITS.fullmatch(cell):
        raise _BadLine(f"{name} is {_short(cell)}, not a whole number")
    return int(cell)


def _nanoseconds(cell: str) -> int:
    """Since 1970, to the last of the 7 digits, which datetime would drop; UTC unless it says."""
    parts = _INSTANT.fullmatch(cell)
    try:
        if parts is None:
            raise ValueError
        instant = datetime.fromisoformat(parts[1] + (parts[3] or "+00:00"))
    except ValueError:
        raise _BadLine(
            f"TIMESTAMP is {_short(cell)}, not like 2023-11-16 18:17:03.9799600"
        ) from None
    since = instant - _EPOCH
    return (since.days * 86_400 + since.seconds) * 10**9 + int((parts[2] or "0").ljust(9, "0"))


def _by_arrival(rows: list[_Row]) -> list[TraceRequest]:
    rows.sort(key=lambda row: row.ticks)
    return [_request((row.ticks - rows[0].ticks) / 1e9, row) for row in rows]


def _spread(rows: list[_Row]) -> list[TraceRequest]:
    """Spread the rows of each stamp over the time until the next one, or TICK_SECONDS."""
    rows.sort(key=lambda row: row.ticks)
    stamps = np.array([row.ticks for row in rows], dtype=np.float64) / 1e3
    distinct, first, group, size = np.unique(
        stamps, return_index=True, return_inverse=True, return_counts=True
    )
    span = np.minimum(np.diff(distinct, append=math.inf), TICK_SECONDS)
    place = np.arange(len(rows)) - first[group]
    arrivals = stamps - stamps[:1] + place * (span / size)[group]
    return [_request(float(arrival), row) for arrival, row in zip(arrivals, rows, strict=True)]


def _request(arrival: float, row: _Row) -> TraceRequest:
    return TraceRequest(arrival, row.prompt_len, row.output_len, row.blocks, BLOCK_TOKENS)


def _short(value: Any) -> str:
    """What to show of a value that may be long or hold anything."""
    if isinstance(value, bytes):
        value = value[:80]
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a number of more than 40 digits"
    text = str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

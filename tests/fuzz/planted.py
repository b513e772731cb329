"""Faults to be planted from outside into the package's code, as real bugs looked.

Each is a change to the source of one function: the text that is there, and what stands in its
place. The function's code is swapped, so that whoever imported it by name runs the fault, too.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple


class Fault(NamedTuple):
    """One fault.

    Attributes:
        kind: "K1" to "K10", as in the list of what goes wrong.
        name: what it is, in words.
        where: module and qualified name of the function.
        old, new: the text that is there, and what stands in its place, further lines as
            indented as the first.
        found_by: "fuzz", or a test of the latch tests, by its path below ``tests``.
    """

    kind: str
    name: str
    where: str
    old: str
    new: str
    found_by: str = "fuzz"


PLAN = "sgalloc.plan:Plan.__init__"
FITS = "sgalloc.holdings:Holdings.fits"
CLOSE = "sgalloc.ledger:Ledger.close"
VICTIMS = "sgalloc.core:Core.victims"
LATCH = "gpu/test_latch.py::"
D9 = LATCH + "test_d9_a_row_is_reused_behind_its_last_reader"
D10 = "gpu/test_staging.py::test_d10_staging_memory_is_not_rewritten_while_it_is_read"

FAULTS = (
    # -- K1: reused before the last reader is done
    Fault("K1", "what is released does not wait for its event",
          "sgalloc.quarantine:Quarantine.pending",
          "return None if self._device.done(after) else after", "return None"),
    Fault("K1", "one event that is done lets everything come back",
          "sgalloc.quarantine:Quarantine.settle",
          "done = [self._device.done(entry.event) for entry in self.entries]",
          "done = [any(self._device.done(e.event) for e in self.entries)] * len(self.entries)"),
    Fault("K1", "new pages of the cache do not wait for the event of their release",
          "sgalloc.returning:release", "nodes += entered",
          "[core.prefix.tree.unlock(n) for n in entered]"),
    Fault("K1", "a staging slot is used again while a kernel reads it",
          "sgalloc.device.staging:Slot.busy",
          "return self.used and not event_done(self.event)", "return False", D10),
    Fault("K1", "a row is rewritten while a forward reads it",
          "sgalloc.device.order:StreamOrder._behind", "if reader != stream:", "if False:", D9),
    # -- K2: planner and allocator disagree
    Fault("K2", "admission adds up tokens and then counts pages", FITS,
          "pages = -(-lengths // self.page_size)",
          "pages = -(-lengths.sum(keepdims=True) // self.page_size)"),
    Fault("K2", "admission forgets rows", FITS,
          "if lengths.size > self._ledger.free_rows + leaving.size:", "if False:"),
    Fault("K2", "admission forgets the second group", "sgalloc.core:Core.has_room",
          "if part is None or side is None:", "if True:"),
    Fault("K2", "what leaves the window does not count as gain", "sgalloc.core:Core.has_room",
          "part.need - part.gain <= side", "part.need <= side"),
    Fault("K2", "locked pages of the cache are counted as room", "sgalloc.prefix:RadixTree.lock",
          "self.evictable -= ", "self.evictable -= 0 * "),
    # -- K3: two owners
    Fault("K3", "one id comes back for another", "sgalloc.pages:PagePool.give",
          "self.free += ids.size",
          "self.free += ids.size\n"
          "self._stack[self.free - 1] = self._stack[max(self.free - 2, 0)]"),
    Fault("K3", "a trim gives shared pages back", "sgalloc.returning:trim",
          "owners, ids = ledger.page_range(rows, np.maximum(keep, shared), held)",
          "owners, ids = ledger.page_range(rows, keep, held)"),
    Fault("K3", "a stale handle names the row's next request", "sgalloc.ledger:Ledger.rows_of",
          "if stale.size:", "if stale.size and (self.handle.take(rows, mode='clip') == 0).any():"),
    # -- K4: nobody's
    Fault("K4", "an aborted transfer loses a page", "sgalloc.transfer:_take_back",
          "pin.pages,\n        np.full(pin.pages.size, pin.row, np.int64),",
          "pin.pages[:-1],\n        np.full(pin.pages[:-1].size, pin.row, np.int64),"),
    Fault("K4", "pages that left the window are not given back", "sgalloc.growing:_apply_both",
          "side.pool.give(returning, owners)", "side.pool.give(returning[1:], owners[1:])"),
    Fault("K4", "a release keeps the tail of a reserve", "sgalloc.returning:release",
          "shared, held = ledger.shared.take(rows), ledger.page_counts(rows)",
          "shared = ledger.shared.take(rows)\n"
          "held = np.maximum(-(-ledger.committed.take(rows) // ledger.page_size), shared)"),
    Fault("K4", "a request that was thinned out loses its scratch",
          "sgalloc.groups.sparse:DevicePages.held", "if not having.size:", "if True:"),
    # -- K5: what the row's last owner left
    Fault("K5", "the frontier of a row's last request stays", "sgalloc.groups.window:Window.close",
          "self.first[rows] = 0", "pass"),
    Fault("K5", "the namespace of a row's last request stays", CLOSE,
          "self.namespace.pop(row, None)", "pass"),
    Fault("K5", "the map still shows pages that went back", "sgalloc.quarantine:Quarantine.unmap",
          "if event is None and pages.size:", "if False:"),
    Fault("K5", "the decode steps of a row's last request stay", CLOSE,
          "self.decode_steps[rows] = 0", "pass"),
    Fault("K5", "a request comes back sparse", "sgalloc.groups.sparse:DevicePages.close",
          "(self.sparse, self.is_long, self.has_scratch)", "(self.is_long, self.has_scratch)"),
    # -- K6: tokens, slots and pages mixed up
    Fault("K6", "a trim rounds down and gives the page of C back", "sgalloc.returning:trim",
          "keep = -(-committed // ledger.page_size)", "keep = committed // ledger.page_size"),
    Fault("K6", "moves of a tree are told in pages", "sgalloc.compacting:_slots",
          "(pages * ledger.per_page + offset)", "(pages + offset)"),
    Fault("K6", "slots are asked for by page", "sgalloc.device.cpu:CpuDevice._gathered",
          "rows * self._row_width + start", "rows * self._row_width + start // self._page_size"),
    Fault("K6", "the frontier is a page too far", "sgalloc.groups.window:Window.leaving",
          "(committed - self._keep) // self._ledger.per_page",
          "(committed - self._keep) // self._ledger.per_page + (committed > self._keep)"),
    # -- K7: past the end of a row or a count
    Fault("K7", "a growth is not held against the width of a row", PLAN,
          "if last[widest] > ledger.row_pages:", "if False:"),
    Fault("K7", "a commit may pass the extent", "sgalloc.ledger:Ledger.commit",
          "if over.size:", "if False:"),
    Fault("K7", "a negative position of a compaction wraps around", "sgalloc.compacting:moves",
          "if below.size:", "if False:"),
    # -- K8: what comes from elsewhere
    Fault("K8", "an event whose `done` is a method counts as done", "sgalloc.events:is_done",
          "return bool(done() if callable(done) else done)", "return bool(done)"),
    Fault("K8", "numbers in an int32 array are read as int64", "sgalloc.inputs:token_counts",
          "numbers = array.astype(np.int64, copy=False)",
          "numbers = array.astype(np.int64, copy=False) if array.nbytes % 8 "
          "else array.view(np.int64)"),
    Fault("K8", "an empty batch is an error", "sgalloc.inputs:int64_array",
          "return array.astype(np.int64, copy=False)",
          "return array[array.argmax() * 0 :].astype(np.int64, copy=False)"),
    Fault("K8", "the event of another stream is not waited for",
          "sgalloc.device.order:StreamOrder.enter",
          "runtime.streamWaitEvent(stream, event_pointer(after))", "event_pointer(after)", D9),
    # -- K9: out of memory
    Fault("K9", "pages are evicted before a growth is refused", VICTIMS,
          "short = need - self.pool.free",
          "short = need - self.pool.free\n"
          "if self.tree is not None and short > self.evictable:\n"
          "    gone = self.tree.victims(self.evictable)\n"
          "    self.evict(gone, pages_of(gone)[0])"),
    Fault("K9", "an exact fit is refused", VICTIMS,
          "if short > self.evictable:", "if short >= max(self.evictable, 1):"),
    Fault("K9", "rows are taken before pages are counted", "sgalloc.transfer:preallocate",
          "ledger.next_rows(lengths.size)",
          "ledger.next_rows(lengths.size)\nledger.free_rows -= 1"),
    # -- K10: hidden cost
    Fault("K10", "every batch is remembered", "sgalloc.holdings:Holdings.batch",
          "return Batch(self._ledger, x)",
          "vars(self).setdefault('_made', []).append(Batch(self._ledger, x))\n"
          "return self._made[-1]"),
    Fault("K10", "every handle that was ever opened is remembered", "sgalloc.ledger:Ledger.open",
          "if namespace is not None:",
          "self.namespace.update((-h, count) for h in handles.tolist())\n"
          "if namespace is not None:"),
    Fault("K10", "a step waits for the device", "sgalloc.device.cuda:CudaDevice.write",
          "stream, capturing, quiet = self._order.enter(after, asked_here)",
          "stream, capturing, quiet = self._order.enter(after, asked_here)\n"
          "runtime.deviceSynchronize()",
          LATCH + "test_a_verb_returns_while_the_stream_is_held"),
)  # fmt: skip


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Let the package have a fault."""
    function = function_at(fault.where)
    honest = function.__code__
    function.__code__ = mutated(function, fault.old, fault.new)
    try:
        yield
    finally:
        function.__code__ = honest


def function_at(where: str) -> Any:
    """The function of this name, without what is wrapped around it."""
    module, _, path = where.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return inspect.unwrap(found)


def mutated(function: Any, old: str, new: str) -> Any:
    """The code of a function with ``new`` in place of ``old``, which has to stand there once."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{function.__qualname__} has not exactly one {old!r}"
    at = source.index(old)
    indent = source[source.rindex("\n", 0, at) + 1 : at]
    indent = indent[: len(indent) - len(indent.lstrip())]
    tree = ast.parse(source.replace(old, new.replace("\n", f"\n{indent}")))
    [definition] = tree.body
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    names = dict(function.__globals__)
    flags = annotations.compiler_flag
    exec(compile(tree, function.__code__.co_filename, "exec", flags), names)
    return names[definition.name].__code__


def table() -> Iterator[str]:
    """The table of docs/fuzzing.md, a line at a time: `python tests/fuzz/planted.py`."""
    from time import perf_counter

    from sgalloc.fuzz.walk import run_world

    yield "| kind | fault | found by | after calls | seconds |"
    yield "|---|---|---|---|---|"
    for fault in FAULTS:
        if fault.found_by != "fuzz":
            yield f"| {fault.kind} | {fault.name} | `tests/{fault.found_by}` | | |"
            continue
        calls, begun, failure = 0, perf_counter(), None
        with planted(fault):
            for number in count():
                tally, failure = run_world(0, number)
                calls += tally.calls
                if failure is not None:
                    break
        seconds = perf_counter() - begun
        yield f"| {fault.kind} | {fault.name} | `sgalloc fuzz` | {calls:,} | {seconds:.1f} |"


if __name__ == "__main__":
    for line in table():
        print(line)

"""The plain decode step as CUDA graphs: a fixed number of rows, which read the table in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from examples.engine.engine import Array, Engine


class DecodeGraphs:
    """One graph for each of a few lengths. What a step lacks of its rows is padding: row 0.

    The graphs read the table at its one address, the rows and slots of a step from buffers, and
    the last tokens and lengths where the step before left them: in a step whose batch is that of
    the step before, the host uploads nothing.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        size, width = engine.settings.running, engine.alloc.row_width
        self.rows, self.slots = torch.zeros(
            (2, size), dtype=torch.int64, device=engine.model.device
        )
        self.lengths = sorted({min(width, 512 * number) for number in range(1, width // 512 + 2)})
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self._filled: Array | None = None
        pool = None
        with torch.cuda.stream(engine.stream), torch.no_grad():
            for keys in reversed(self.lengths):
                engine.decode_forward(self.rows, self.slots, keys)  # all padding
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool, engine.stream):
                    found, logits = engine.decode_forward(self.rows, self.slots, keys)
                pool = graph.pool()
                self.graphs[keys] = graph, found, logits

    # guide: step 6
    def out(self, rows: Array) -> Tensor:
        """Where the allocator is to put the slots of these rows' next tokens."""
        if self._filled is not rows:
            self.rows.zero_()
            self.slots.zero_()
            self.rows[: rows.size] = self.engine.upload(rows)
            self._filled = rows
        return self.slots[: rows.size]

    # guide: step 6
    def replay(self, rows: Array, longest: int) -> tuple[Tensor, Tensor]:
        """The next tokens of these rows, and their logits, until the next replay."""
        keys = next(length for length in self.lengths if length >= longest)
        graph, found, logits = self.graphs[keys]
        graph.replay()
        return found[: rows.size], logits[: rows.size]

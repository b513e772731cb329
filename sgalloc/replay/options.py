"""How the engine in miniature runs: its options, refused where they make no sense together."""

from __future__ import annotations

from dataclasses import dataclass, field

from sgalloc import sizing
from sgalloc.groups.sparse import Sparse
from sgalloc.groups.window import SlidingWindow
from sgalloc.replay.acceptance import Acceptance
from sgalloc.replay.clock import StepTime, TransferTime
from sgalloc.replay.requests import real_number, whole_number

_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """A prefill node of its own; the engine's pool is then that of the decode node.

    Attributes:
        prefill_pages: pages of the prefill node.
        writers: most writers of a request's KV; each request draws its number from 1 on.
        transfer_time: how long the KV is under way.
    """

    prefill_pages: int
    writers: int = 2
    transfer_time: TransferTime = field(default_factory=TransferTime)

    def __post_init__(self) -> None:
        """Refuse what cannot be run; the allocator looks at the pool itself."""
        whole_number("prefill_pages", self.prefill_pages, 1, _MOST)
        whole_number("writers", self.writers, 1, 1024)


@dataclass(frozen=True, slots=True)
class Options:
    """How the engine runs.

    Attributes:
        num_pages, page_size: of the pool; with ``sparse`` the pages of the device.
        running_limit: most requests at once.
        chunk: most tokens prefilled in a step.
        spec: speculative decoding, or none.
        acceptance: how many drafted tokens a step keeps; needed with speculation.
        overlap: whether the engine hears of a step's accepted tokens a step late.
        prefix_cache: whether finished requests leave their pages for others.
        namespace: of all requests of the run, in the prefix cache.
        window: a second group of pages, for sliding window attention.
        sparse: the KV in host memory under logical pages, and a buffer on the device.
        disaggregated: a prefill node with a pool of its own.
        admit: ``"prompt"`` opens a request when its whole prompt fits, ``"chunk"`` when its
            first chunk does, which fills the pool closer and retracts more.
        headroom: tokens a running request that admission leaves free for its growth.
        abort_rate: share of requests that are aborted at a random point.
        speed: how many times faster than in the workload requests arrive.
        check_every: steps between two checks of the laws; 0 checks at the end alone.
        seed: of acceptance and aborts.
        device: of the allocator.
        step_time: the clock.
    """

    num_pages: int
    page_size: int = 64
    running_limit: int = 256
    chunk: int = 8192
    spec: sizing.SpecConfig = field(default_factory=sizing.SpecConfig)
    acceptance: Acceptance | None = None
    overlap: bool = False
    prefix_cache: bool = True
    namespace: int | str | bytes | None = None
    window: SlidingWindow | None = None
    sparse: Sparse | None = None
    disaggregated: Disaggregation | None = None
    admit: str = "prompt"
    headroom: int = 32
    abort_rate: float = 0.0
    speed: float = 1.0
    check_every: int = 0
    seed: int = 0
    device: str = "auto"
    step_time: StepTime = field(default_factory=StepTime)

    def __post_init__(self) -> None:
        """Refuse what cannot be run; the allocator looks at the pool itself."""
        whole_number("running_limit", self.running_limit, 1, 2**20)
        whole_number("chunk", self.chunk, 1, _MOST)
        whole_number("headroom", self.headroom, 0, _MOST)
        whole_number("check_every", self.check_every, 0, 2**62)
        whole_number("seed", self.seed, 0, 2**62)
        real_number("abort_rate", self.abort_rate, 0.0, 1.0)
        real_number("speed", self.speed, 1e-6, 1e6)
        if self.admit not in ("prompt", "chunk"):
            raise ValueError(f"admit is {self.admit!r}: give 'prompt' or 'chunk'")
        self._check_speculation()
        if self.sparse is not None:
            self._check_sparse()
        if self.disaggregated is not None and self.admit == "chunk":
            raise ValueError(
                "admit is 'chunk', but a prefill node sends whole prompts: give 'prompt' with "
                "disaggregation"
            )

    @property
    def group(self) -> str:
        """Name of the main group of pages."""
        return "full" if self.sparse is None else "logical"

    @property
    def side(self) -> str | None:
        """Name of the second group of pages, where there is one."""
        if self.window is not None:
            return "window"
        return None if self.sparse is None else "device"

    @property
    def main_pages(self) -> int:
        """Pages of the main group."""
        return self.num_pages if self.sparse is None else self.sparse.logical_pages(self.num_pages)

    @property
    def speculates(self) -> bool:
        """Whether there is speculative decoding."""
        return self.spec.algorithm != "none"

    @property
    def tree(self) -> bool:
        """Whether each step verifies a tree, whose accepted path is brought together."""
        return self.spec.algorithm == "eagle" and self.spec.topk > 1

    @property
    def reserve(self) -> int:
        """Tokens past C that a speculative step holds; 0 without speculation."""
        if not self.speculates:
            return 0
        return sizing.alloc_reserve_per_decode(self.spec, self.page_size)

    @property
    def ahead(self) -> int:
        """Tokens a request that admission leaves free for those that decode.

        What a tree reserves is not held between two steps, so it is left free, too.
        """
        return max(self.headroom, self.reserve if self.tree else 0)

    def _check_sparse(self) -> None:
        for name, value, why in (
            ("prefix_cache", self.prefix_cache, "shared pages are read on the device"),
            ("window", self.window, "a sparse request keeps no window on the device"),
            ("disaggregated", self.disaggregated, "the decode node's budget is in dense pages"),
            ("topk", self.tree and self.spec.topk, "drafts stand in scratch, not in branches"),
        ):
            if value:
                raise ValueError(f"{name} is {value!r}, but {why}: leave it out with sparse")

    def _check_speculation(self) -> None:
        spec = self.spec
        if not self.speculates:
            if self.overlap:
                raise ValueError("overlap is True, but a plain step lags nothing: add speculation")
            return
        if self.acceptance is None:
            raise ValueError(f"speculation by {spec.algorithm} needs an acceptance model")
        kept = self.acceptance.draft_tokens + 1
        step = sizing.alloc_len_per_decode(spec, self.page_size)
        if self.tree:
            if self.overlap:
                raise ValueError(
                    f"overlap is True, but the path of a tree with topk={spec.topk} has to be "
                    "known before the next step: give topk=1, or no overlap"
                )
            step = min(step, spec.steps + 1, spec.draft_tokens)
        if kept > step:
            raise ValueError(
                f"acceptance may keep {kept} tokens a step, but a step of {spec} has "
                f"{step}: draft more tokens, or accept fewer"
            )

"""One walk: a real allocator (now and then two) and the reference, given the same calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

from sgalloc import errors
from sgalloc.fuzz.calls import KINDS_OF_EVENT
from sgalloc.fuzz.config import Config
from sgalloc.fuzz.reference import Match, Plan, Refused
from sgalloc.fuzz.subject import Disagreement, Subject

REFUSALS: dict[str, type[Exception]] = {
    "pages": errors.OutOfPages,
    "rows": errors.OutOfRows,
    "narrow": errors.RowTooNarrow,
    "stale": errors.StaleHandle,
    "extent": errors.CommitPastExtent,
    "plan": errors.StalePlan,
    "edge": errors.InsideSharedPage,
    "state": errors.WrongState,
    "value": ValueError,
}
REFUSING = (errors.AllocError, ValueError, TypeError)
CUDA_EVENT = len(KINDS_OF_EVENT)


class World:
    """What a walk has to do with.

    Args:
        config: what the allocators are made with.
        device: where their tables live.
        laws_every: calls from one look at everything to the next.
        journal: a file that the first allocator writes its calls to.

    Attributes:
        ref: the reference.
        subjects: the allocators.
        known: labels of requests that were ever opened.
        matches, plans, batches, events: what else calls name by label.
        calls: public calls that were compared.
        seen: calls by verb.
        refused: refusals by verb and reason.
    """

    def __init__(
        self,
        config: Config,
        device: str = "cpu",
        laws_every: int = 16,
        journal: str | PathLike[str] | None = None,
    ) -> None:
        self.config, self.device, self.laws_every = config, device, laws_every
        self.ref = config.reference()
        self.subjects = [Subject(config.allocator(device, journal=journal), config)]
        self.known: set[int] = set()
        self.matches: dict[int, Match] = {}
        self.plans: dict[int, Plan] = {}
        self.batches: dict[int, list[int]] = {}
        self.events: dict[int, Any] = {}
        self.calls = 0
        self.seen: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self._tables = device == "cpu"

    # -- comparing -------------------------------------------------------------------------

    def compare(self, touched: Sequence[int] = ()) -> None:
        """What these requests hold and what is free; now and then everything."""
        every = self.calls % self.laws_every == 0
        if every:
            self.ref.check()
        for subject in self.subjects:
            subject.compare_rooms(self.ref)
            subject.compare_requests(self.ref, touched, self._tables)
            if every:
                subject.compare_all(self.ref)

    def compare_all(self) -> None:
        """Everything."""
        self.ref.check()
        for subject in self.subjects:
            subject.compare_rooms(self.ref)
            subject.compare_all(self.ref)

    def both(
        self, verb: str, mine: Callable[[], Any], theirs: Callable[[Subject], Any]
    ) -> tuple[Any, list[Any]] | None:
        """The same call on both sides; None when both refused it for the same reason."""
        self.calls += 1
        ripe = self.ref.ripe()
        try:
            expected = mine()
        except Refused as refusal:
            if ripe:
                # Bad arguments may be refused before or after what is done was taken in.
                self.settle_all()
            for subject in self.subjects:
                self.refusal(subject, verb, refusal, theirs)
            self.refused[f"{verb}: {refusal.kind}"] += 1
            return None
        answers = []
        for subject in self.subjects:
            try:
                answers.append(theirs(subject))
            except REFUSING as error:
                raise Disagreement(
                    f"{verb} was refused ({type(error).__name__}: {error}), the reference did it"
                ) from error
        if ripe:
            self.settle_all()
        self.seen[verb] += 1
        return expected, answers

    def settle_all(self) -> None:
        """Take in what is done, on both sides."""
        self.ref.settle()
        for subject in self.subjects:
            subject.alloc.settle()

    def refusal(
        self, subject: Subject, verb: str, refusal: Refused, call: Callable[[Subject], Any]
    ) -> None:
        """The call is refused as the reference refuses it, and leaves everything as it was."""
        before = subject.fingerprint()
        try:
            call(subject)
        except REFUSING as error:
            subject.count(error)
            self.same_refusal(subject, verb, error, refusal)
        else:
            subject.fail(f"{verb} went through, the reference refuses it: {refusal}")
        if subject.fingerprint() != before:
            subject.fail(f"{verb} was refused and changed something")

    def same_refusal(self, subject: Subject, verb: str, error: Exception, refusal: Refused) -> None:
        """Class, numbers and group are those that the reference has."""
        if not isinstance(error, REFUSALS[refusal.kind]):
            subject.fail(f"{verb}: {error!r} where the reference says {refusal}")
        text, numbers = str(error), dict(refusal.numbers)
        if not text or "\n" in text:
            subject.fail(f"{verb}: {error!r} is not one line")
        if isinstance(error, errors.OutOfPages):
            subject.same("OutOfPages.group", error.group, refusal.group)
            if refusal.group not in text:
                subject.fail(f"{error!r} does not name the group {refusal.group}")
        if isinstance(error, errors.RowTooNarrow):
            # Any row that is too narrow may be the one that is named.
            del numbers["need"]
            if error.need <= error.width:
                subject.fail(f"{verb}: {error!r} names no row that is too narrow")
        for name, number in numbers.items():
            if name != "edge":
                subject.same(f"{type(error).__name__}.{name}", getattr(error, name), number)
            if str(number) not in text:
                subject.fail(f"{error!r} does not carry {name}={number}")

    # -- what calls name -------------------------------------------------------------------

    def event(self, name: tuple[int, int] | None) -> Any:
        """The event of this label and kind; made when it is named first."""
        if name is None:
            return None
        label, kind = name
        if label not in self.events:
            if kind == CUDA_EVENT:
                self.events[label] = done_cuda_event() if self.device != "cpu" else None
            else:
                self.events[label] = KINDS_OF_EVENT[kind]()
        return self.events[label]

    def labels(self, who: Sequence[tuple[Any, ...]]) -> list[int]:
        """The labels alone."""
        return [one[0] for one in who]


class CudaEvent:
    """An event of CuPy's, recorded on a stream of its own, that is over."""

    over = True

    def __init__(self) -> None:
        import cupy

        stream = cupy.cuda.Stream(non_blocking=True)
        self._event = cupy.cuda.Event(disable_timing=True)
        self._event.record(stream)
        self._event.synchronize()

    @property
    def ptr(self) -> int:
        """Its handle."""
        return int(self._event.ptr)

    @property
    def done(self) -> bool:
        """Whether it is over."""
        return bool(self._event.done)


def done_cuda_event() -> CudaEvent:
    """An event of the device's kind that nobody has to wait for."""
    return CudaEvent()

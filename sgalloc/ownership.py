"""Which thread, and which process, may use an allocator."""

from __future__ import annotations

import os
from threading import Lock, Thread, current_thread, get_ident
from typing import NoReturn
from weakref import WeakSet

from sgalloc.errors import WrongState

_NOBODY = 0  # no thread is called so
_NO_COPY = (
    "a {} belongs to an allocator of this process, and can be neither copied nor pickled: "
    "send the bytes of snapshot(), and let the other side restore them"
)

_FORKED = (
    "this allocator was made before its process was forked, and a forked child cannot use the "
    "CUDA context of its parent: start the child with spawn, or fork before the first use of CUDA, "
    "and make an allocator there"
)


class Owner:
    """The one thread that uses an allocator: the first that does, until it ends or another adopts.

    Verbs compare `thread` with their own before they look at anything, and `claim` where they
    differ. So no two threads are ever inside the same allocator.

    Args:
        on_gpu: whether the allocator is lost to a forked child, as its CUDA context is.

    Attributes:
        thread: the owner's identifier; 0 for nobody.
    """

    __slots__ = ("__weakref__", "_holder", "_lost", "_on_gpu", "thread")

    def __init__(self, on_gpu: bool) -> None:
        self.thread = _NOBODY
        self._holder: Thread | None = None
        self._on_gpu = on_gpu
        self._lost = ""
        _owners.add(self)

    def check(self) -> None:
        """Refuse any thread but the owner. Raises as `claim`."""
        if get_ident() != self.thread:
            self.claim()

    def mine(self) -> bool:
        """Whether the calling thread is the owner, or could claim it just now."""
        try:
            self.check()
        except WrongState:
            return False
        return True

    def claim(self) -> None:
        """Let the calling thread be the owner, if there is none, or none that lives.

        Raises:
            WrongState: another thread owns the allocator, or another process.
        """
        with _lock:
            if self._lost:
                raise WrongState(self._lost)
            holder = self._holder
            if holder is not None and holder.is_alive():
                self._refuse(holder)
            self._take()

    def adopt(self) -> None:
        """Let the calling thread be the owner, whoever was.

        Raises:
            WrongState: the allocator is on a GPU, and was made before this process was forked.
        """
        with _lock:
            if self._lost and self._on_gpu:
                raise WrongState(self._lost)
            self._lost = ""
            self._take()

    def forked(self) -> None:
        """In a forked child: what was on a GPU is lost, and what another thread was at may be."""
        if self._on_gpu:
            self._lost = _FORKED
        elif self._holder is not None and self.thread != get_ident():
            self._lost = (
                f"this process was forked while thread {self._holder.name!r} owned the allocator, "
                "perhaps in the middle of a call: fork from that thread, or, if it was at rest, "
                "adopt() the allocator here"
            )
        if self._lost:
            self.thread = _NOBODY

    def _take(self) -> None:
        self._holder = current_thread()
        self.thread = get_ident()

    def _refuse(self, holder: Thread) -> NoReturn:
        raise WrongState(
            f"thread {current_thread().name!r} called an allocator that thread {holder.name!r} "
            "uses: let that thread make the call, or adopt() the allocator here while it makes none"
        )


class Unpicklable:
    """Refuses to be copied or pickled."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(_NO_COPY.format(type(self).__name__))


def was_forked() -> bool:
    """Whether this process was forked after the package was imported."""
    return _was_forked


def check_process(made_in: int) -> None:
    """Refuse to go on with what another process put on a GPU.

    Args:
        made_in: the process that did, by its number.

    Raises:
        WrongState: it was not this one.
    """
    if os.getpid() != made_in:
        raise WrongState(_FORKED)


_lock = Lock()
_owners: WeakSet[Owner] = WeakSet()
_was_forked = False


def _in_child() -> None:
    global _lock, _was_forked
    _lock, _was_forked = Lock(), True  # whoever held it is not here
    for owner in list(_owners):
        owner.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)

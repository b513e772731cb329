"""Empty modules for what a peer imports and does not call on the way that is measured."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Collection
from typing import Any


class Nothing:
    """Stands for whatever a module that is absent here would have: callable, and never called."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> Nothing:
        return Nothing()

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __or__(self, other: Any) -> Nothing:
        """Part of an annotation such as ``absent.Type | None``."""
        return Nothing()

    __ror__ = __or__


class _EmptyModule(types.ModuleType):
    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds empty modules."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if not any(name == one or name.startswith(f"{one}.") for one in self._names):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _EmptyModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is in it."""


def stand_in(names: Collection[str]) -> None:
    """Let ``names`` be imported, with all below them, empty, where they cannot be found."""
    sys.meta_path.append(_Finder(names))

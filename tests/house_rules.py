"""Checks over the syntax tree: who writes C and A, who imports whom, who prints, what is bare."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import sgalloc

PACKAGE = Path(sgalloc.__file__).parent
NO_DEVICE = ("cupy", "torch", "sgalloc.device")
COLUMNS = ("committed", "allocated")
IN_PLACE = ("fill", "sort", "put", "partition", "itemset", "setfield", "resize", "__setitem__")
WRITES_FIRST = ("put", "place", "putmask", "copyto", "put_along_axis", "fill_diagonal", "at")
VIEWS = ("reshape", "view", "ravel", "transpose", "swapaxes", "squeeze")


class Module(NamedTuple):
    """One file of the package, or a snippet that stands for one."""

    name: str
    tree: ast.Module
    package: str

    @classmethod
    def of(cls, name: str, source: str, is_package: bool = False) -> Module:
        return cls(name, ast.parse(source), name if is_package else name.rpartition(".")[0])


def modules() -> list[Module]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found.append(Module.of(name, path.read_text("utf-8"), is_package))
    return found


# -- the checks ----------------------------------------------------------------------------------


def column_of(node: ast.AST, aliases: set[str]) -> bool:
    """Whether the expression is a column of C or A, or a view of one."""
    while True:
        if isinstance(node, ast.Attribute):
            if node.attr in COLUMNS:
                return True
            if node.attr not in ("T", "flat", "base"):
                return False
            node = node.value
        elif isinstance(node, ast.Subscript | ast.Starred):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr not in VIEWS:
                return False
            node = node.func.value
        else:
            return isinstance(node, ast.Name) and node.id in aliases


def targets_of(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement stores into or deletes, tuples taken apart."""
    found: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        found = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.comprehension):
        found = [node.target]
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        found = [node.optional_vars]
    while found:
        target = found.pop()
        if isinstance(target, ast.Tuple | ast.List):
            found.extend(target.elts)
        else:
            yield target


def writes_of_c_and_a(module: Module) -> list[str]:
    """Every place that writes a column of C or A."""
    aliases: set[str] = set()
    for node in ast.walk(module.tree):
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and value is not None:
            names = [node.target] if isinstance(node, ast.NamedExpr) else targets_of(node)
            if column_of(value, aliases):
                aliases |= {name.id for name in names if isinstance(name, ast.Name)}
    found = []
    for node in ast.walk(module.tree):
        for target in targets_of(node):
            into = isinstance(target, ast.Subscript) and column_of(target, aliases)
            rebound = isinstance(target, ast.Attribute) and target.attr in COLUMNS
            own = rebound and isinstance(target.value, ast.Name) and target.value.id == "self"
            in_place = isinstance(node, ast.AugAssign) and column_of(target, aliases)
            if into or in_place or (rebound and not own):
                found.append(f"{module.name}:{node.lineno}")
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        by_name = isinstance(node.func, ast.Name) and node.func.id == "setattr"
        if (
            any(k.arg == "out" and _holds_column(k.value, aliases) for k in node.keywords)
            or (name in WRITES_FIRST and node.args and column_of(node.args[0], aliases))
            or (name in IN_PLACE and column_of(node.func.value, aliases))  # type: ignore[attr-defined]
            or (
                (by_name or name == "__setattr__")
                and any(isinstance(a, ast.Constant) and a.value in COLUMNS for a in node.args)
            )
        ):
            found.append(f"{module.name}:{node.lineno}")
    return found


def _holds_column(value: ast.expr, aliases: set[str]) -> bool:
    parts = value.elts if isinstance(value, ast.Tuple) else [value]
    return any(column_of(part, aliases) for part in parts)


def imports_of(module: Module) -> Iterator[tuple[str, int]]:
    """Every module that is imported, wherever the import stands, and its line."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.package.split(".")
                kept = ".".join(parts[: len(parts) - node.level + 1])
                base = f"{kept}.{base}" if base else kept
            if base == "sgalloc":
                yield from ((f"sgalloc.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield base, node.lineno
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node.func, ast.Name) else name
            if name in ("import_module", "__import__"):
                yield str(node.args[0].value), node.lineno


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def device_imports(module: Module) -> list[str]:
    """Imports that a host room must not have."""
    return [
        f"{module.name}:{line} imports {name}"
        for name, line in imports_of(module)
        if any(within(name, banned) for banned in NO_DEVICE)
    ]


def floor_of(name: str, floors: Mapping[str, int]) -> int | None:
    while name:
        if name in floors:
            return floors[name]
        name = name.rpartition(".")[0]
    return None


def climbing_imports(module: Module, floors: Mapping[str, int]) -> list[str]:
    """Imports of a room above, and rooms that stand on no floor."""
    here = floor_of(module.name, floors)
    if here is None:
        return [f"{module.name} stands on no floor: give it one in this test"]
    found = []
    for name, line in imports_of(module):
        there = floor_of(name, floors)
        if there is not None and there > here:
            found.append(f"{module.name}:{line} (floor {here}) imports {name} (floor {there})")
    return found


def clocks_and_prints(module: Module) -> list[str]:
    """Uses of the clock and of the standard output."""
    found = [f"{module.name}:{n}" for name, n in imports_of(module) if within(name, "time")]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "print":
                found.append(f"{module.name}:{node.lineno}")
        elif isinstance(node, ast.Attribute) and node.attr in ("stdout", "stderr"):
            found.append(f"{module.name}:{node.lineno}")
    return found


def undocumented(module: Module) -> list[str]:
    """Public modules, classes, functions and methods without a docstring."""
    found = [] if ast.get_docstring(module.tree) else [module.name]

    def visit(body: list[ast.stmt], path: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                if node.name.startswith("_") or _is_overload(node):
                    continue
                if not ast.get_docstring(node):
                    found.append(f"{path}.{node.name}")
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{path}.{node.name}")

    visit(module.tree.body, module.name)
    return found


def _is_overload(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "overload" for d in node.decorator_list)

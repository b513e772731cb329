"""Finds the CUDA sources, which travel with the package as data.

A wheel holds them as `sgalloc/cuda/`. In an editable install or a bare checkout they lie in the
folder `cuda/` at the repository root, beside the package.
"""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path


def cuda_dir() -> Traversable:
    """Return the folder that holds the `.cu` and `.cuh` files.

    Raises:
        FileNotFoundError: neither the installed package nor a checkout around it has the folder.
    """
    package = files("sgalloc")
    installed = package / "cuda"
    if installed.is_dir():
        return installed
    root = Path(str(package)).parent
    beside = root / "cuda"
    # In site-packages the sibling folder `cuda` belongs to NVIDIA's namespace package, so a
    # sibling counts only inside a checkout of this project.
    if (root / "setup.py").is_file() and (beside / "README.md").is_file():
        return beside
    raise FileNotFoundError(
        f"sgalloc's CUDA sources are missing: neither {installed} nor a checkout's {beside} "
        "exists; reinstall sgalloc, or restore the folder cuda/ of the checkout"
    )


def read_text(name: str) -> str:
    """Return the text of one file of the CUDA folder.

    Args:
        name: a plain file name such as `"assign_pages.cu"`, without folders.

    Raises:
        ValueError: `name` is not a plain file name.
        FileNotFoundError: there is no such file, or no CUDA folder at all.
    """
    if not name or name in {".", ".."} or "/" in name or "\\" in name:
        raise ValueError(f"{name!r} is not a plain file name; give one such as 'assign_pages.cu'")
    folder = cuda_dir()
    source = folder / name
    if not source.is_file():
        known = ", ".join(sorted(entry.name for entry in folder.iterdir())) or "nothing"
        raise FileNotFoundError(f"no CUDA source {name!r} in {folder}; it holds: {known}")
    return source.read_text(encoding="utf-8")

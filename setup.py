"""Metadata of the package; the settings of the tools are in pyproject.toml."""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent

CLI = ["click>=8.1", "rich>=13"]
REPORT = ["matplotlib>=3.9", "jinja2>=3.1"]
METRICS = ["prometheus-client>=0.20"]
TEST = [
    "pytest>=8",
    "hypothesis>=6.100",
    # tests/test_package.py builds wheels without a network, hence without build isolation.
    "setuptools>=77",
    "wheel",
    # A small pure-Python part of NVIDIA's `cuda` namespace, which our folder cuda/ must not hide.
    "cuda-pathfinder>=1.3.4",
]

setup(
    name="sgalloc",
    version=runpy.run_path(str(ROOT / "sgalloc" / "_version.py"))["__version__"],
    description="A host-authoritative KV-slot allocator for LLM serving",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The sgalloc authors",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: GPU :: NVIDIA CUDA :: 12",
        "Environment :: GPU :: NVIDIA CUDA :: 13",
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    # The folder cuda/ holds no Python: it is mapped in, so that its sources travel as data.
    packages=[*find_packages(include=["sgalloc", "sgalloc.*"]), "sgalloc.cuda"],
    package_dir={"sgalloc.cuda": "cuda"},
    package_data={
        "sgalloc": ["py.typed"],
        "sgalloc.bench": ["shipped.json"],
        "sgalloc.replay": ["templates/*.html"],
        "sgalloc.cuda": ["*.cu", "*.cuh", "README.md"],
    },
    zip_safe=False,
    install_requires=[
        # CuPy 14 needs NumPy 2.0 too, and from 2.0 on a Python int never widens an array (NEP 50).
        "numpy>=2.0",
        # The first release with counters; it has wheels for Python 3.11 to 3.14.
        "nvtx>=0.2.16",
    ],
    extras_require={
        # CuPy 14 is the first release whose extra `ctk` brings the toolkit's wheels.
        "cuda12": ["cupy-cuda12x[ctk]>=14"],
        "cuda13": ["cupy-cuda13x[ctk]>=14"],
        # Loose on purpose: an engine brings its own build of torch.
        "torch": ["torch"],
        # For tests alone: NVRTC compiles the kernels for every architecture, without a GPU.
        "kernels": ["cuda-core>=1.0", "cuda-bindings>=13.2,<14", "nvidia-cuda-nvrtc>=13,<14"],
        "cli": CLI,
        "report": REPORT,
        "metrics": METRICS,
        "test": [*TEST, *CLI, *REPORT, *METRICS],
        "dev": ["ruff", "mypy", "pre-commit"],
    },
    entry_points={"console_scripts": ["sgalloc = sgalloc.cli:main"]},
)

"""The package as users get it: from a wheel, an sdist, an editable install, a bare checkout."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import sgalloc
from sgalloc import cuda_source

ROOT = Path(__file__).resolve().parent.parent
BUILD_INPUTS = ["setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"]
PROBE = '__global__ void probe() {} // "\u00b5s"\n'

WHERE_AND_WHAT = """
    import sgalloc
    from sgalloc import cuda_source
    print(sgalloc.__file__)
    print(cuda_source.cuda_dir())
    print(sgalloc.__version__)
    assert cuda_source.read_text("README.md").startswith("# CUDA C")
"""


def run_python(
    code: str, cwd: Path, pythonpath: Path | None = None, python: str = sys.executable
) -> list[str]:
    """Run code in a fresh interpreter with nothing on its path but what is named here."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    if pythonpath is not None:
        env["PYTHONPATH"] = str(pythonpath)
    command = [python, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def build_wheel(source: Path, out: Path) -> Path:
    pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", out, source)
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, with two kernels in cuda/ beside things that must stay out."""
    copy = tmp_path_factory.mktemp("source")
    for name in BUILD_INPUTS:
        shutil.copy(ROOT / name, copy)
    for name in ["sgalloc", "cuda"]:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ["probe.cu", "probe.cuh", "probe.ptx", "probe.o"]:
        (copy / "cuda" / name).write_text(PROBE, encoding="utf-8")
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    pip("install", "--no-deps", "--no-index", "--target", target, wheel)
    return target


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode("utf-8"))


def package_files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {n for n in archive.namelist() if ".dist-info/" not in n}


def test_wheel_holds_the_package_and_the_cuda_sources_and_nothing_else(wheel: Path) -> None:
    package = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "sgalloc").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    sources = {
        f"sgalloc/cuda/{path.name}"
        for path in (ROOT / "cuda").iterdir()
        if path.suffix in {".cu", ".cuh", ".md"}
    }
    probes = {"sgalloc/cuda/probe.cu", "sgalloc/cuda/probe.cuh"}
    assert package_files(wheel) == package | sources | probes
    assert "sgalloc/py.typed" in package


def test_sdist_builds_the_same_wheel(source: Path, wheel: Path, tmp_path: Path) -> None:
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    run_python(code, cwd=source)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = sdist.with_name(sdist.name.removesuffix(".tar.gz"))
    assert package_files(build_wheel(unpacked, tmp_path / "again")) == package_files(wheel)


def test_wheel_finds_its_cuda_sources(installed: Path, tmp_path: Path) -> None:
    file, folder, version = run_python(WHERE_AND_WHAT, cwd=tmp_path, pythonpath=installed)
    assert file == str(installed / "sgalloc" / "__init__.py")
    assert folder == str(installed / "sgalloc" / "cuda")
    assert version == sgalloc.__version__
    code = "from sgalloc import cuda_source; print(ascii(cuda_source.read_text('probe.cu')))"
    assert run_python(code, cwd=tmp_path, pythonpath=installed) == [ascii(PROBE)]


def test_editable_install_finds_the_sibling_folder(source: Path, tmp_path: Path) -> None:
    # An environment of its own: this one may hold an editable install of the checkout already.
    venv.create(tmp_path / "venv", with_pip=False)
    scheme = {"base": str(tmp_path / "venv"), "platbase": str(tmp_path / "venv")}
    site_packages = Path(sysconfig.get_path("purelib", "venv", scheme))
    ours = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site_packages / "dependencies.pth").write_text("\n".join(sorted(ours)) + "\n")
    pip(
        *("install", "--no-deps", "--no-index", "--no-build-isolation"),
        *("--target", site_packages, "--editable", source),
    )
    python = tmp_path / "venv" / "bin" / "python"
    file, folder, version = run_python(WHERE_AND_WHAT, cwd=tmp_path, python=str(python))
    assert file == str(source / "sgalloc" / "__init__.py")
    assert folder == str(source / "cuda")
    assert version == sgalloc.__version__


def test_bare_checkout_finds_the_sibling_folder(tmp_path: Path) -> None:
    file, folder, _ = run_python(WHERE_AND_WHAT, cwd=tmp_path, pythonpath=ROOT)
    assert file == str(ROOT / "sgalloc" / "__init__.py")
    assert folder == str(ROOT / "cuda")


def test_missing_cuda_folder_is_one_clear_error(installed: Path, tmp_path: Path) -> None:
    """NVIDIA's folder `cuda` next to the package in site-packages is not taken for ours."""
    site_packages = tmp_path / "site-packages"
    shutil.copytree(installed, site_packages)
    shutil.rmtree(site_packages / "sgalloc" / "cuda")
    (site_packages / "cuda" / "pathfinder").mkdir(parents=True)
    code = """
        from sgalloc import cuda_source
        try:
            print("found", cuda_source.cuda_dir())
        except FileNotFoundError as error:
            print(error)
    """
    (message,) = run_python(code, cwd=tmp_path, pythonpath=site_packages)
    assert str(site_packages / "sgalloc" / "cuda") in message
    assert "reinstall sgalloc" in message


@pytest.mark.parametrize("name", ["", ".", "..", "../setup.py", "sub/kernel.cu", "sub\\kernel.cu"])
def test_read_text_takes_plain_file_names_only(name: str) -> None:
    with pytest.raises(ValueError, match="not a plain file name"):
        cuda_source.read_text(name)


def test_read_text_of_an_unknown_source_lists_what_there_is() -> None:
    with pytest.raises(FileNotFoundError, match=r"'no_such\.cu'.*README\.md"):
        cuda_source.read_text("no_such.cu")


def test_cuda_folder_holds_cuda_c_and_nothing_else() -> None:
    strangers = {
        entry.name
        for entry in (ROOT / "cuda").iterdir()
        if entry.name not in {"README.md", "__pycache__"} and entry.suffix not in {".cu", ".cuh"}
    }
    assert strangers == set()


def test_cuda_folder_hides_no_namespace_package(tmp_path: Path) -> None:
    """A `cuda` namespace package later on the path stays importable from the repository root."""
    package = tmp_path / "cuda" / "sgalloc_probe"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("answer = 42\n")
    code = """
        import os, sys
        assert sys.path[0] == "" and os.path.isdir("cuda")
        from cuda import sgalloc_probe
        print(sgalloc_probe.answer)
    """
    assert run_python(code, cwd=ROOT, pythonpath=tmp_path) == ["42"]


def test_cuda_pathfinder_imports_from_the_repository_root() -> None:
    try:
        version = importlib.metadata.version("cuda-pathfinder")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("cuda-pathfinder is not installed")
    code = "import cuda.pathfinder; print(cuda.pathfinder.__version__)"
    assert run_python(code, cwd=ROOT) == [version]


def test_import_brings_numpy_and_nvtx_only(tmp_path: Path) -> None:
    code = """
        import sys
        before = set(sys.modules)
        import sgalloc
        new = {name.partition(".")[0] for name in set(sys.modules) - before}
        print(*sorted(new - set(sys.stdlib_module_names)))
    """
    (line,) = run_python(code, cwd=tmp_path, pythonpath=ROOT)
    # Cython's runtime modules are part of nvtx's own extension.
    found = {name for name in line.split() if not name.lstrip("_").startswith("cython_")}
    assert found <= {"sgalloc", "numpy", "nvtx"}
    assert {"sgalloc", "numpy"} <= found


def test_no_module_asks_for_a_device_library_when_imported(tmp_path: Path) -> None:
    """Not even in a `try`: a finder in front of all others notes every request for one."""
    code = """
        import importlib, pkgutil, sys
        asked = []

        class Watch:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {"cupy", "cupyx", "torch", "cuda"}:
                    asked.append(name)
                return None

        # The rooms of a GPU, which are entered once an allocator is made on one.
        gpu = {"batched", "cuda", "cuda_lengths", "cuda_poisoning", "captured", "order", "staging"}
        gpu |= {"streams", "cuda_digest", "cuda_tables", "failing", "layout", "scan", "spans"}
        sys.meta_path.insert(0, Watch())
        import sgalloc
        for module in pkgutil.walk_packages(sgalloc.__path__, "sgalloc."):
            if module.name.removeprefix("sgalloc.device.") not in gpu:
                importlib.import_module(module.name)
                print(module.name)
        assert not asked, asked
    """
    imported = run_python(code, cwd=tmp_path, pythonpath=ROOT)
    assert {"sgalloc.cuda_source", "sgalloc._version"} <= set(imported)


def test_hard_dependencies_are_numpy_and_nvtx(metadata: Message) -> None:
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    assert {r.name for r in requirements if r.marker is None} == {"numpy", "nvtx"}
    assert all("extra ==" in str(r.marker) for r in requirements if r.marker is not None)


def test_extras_bring_what_they_are_named_for(metadata: Message) -> None:
    extras: dict[str, set[str]] = {name: set() for name in metadata.get_all("Provides-Extra", [])}
    for text in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(text)
        for name, members in extras.items():
            if requirement.marker is not None and requirement.marker.evaluate({"extra": name}):
                requirement.marker = None
                members.add(str(requirement))
                break
    names = {extra: {Requirement(m).name for m in members} for extra, members in extras.items()}
    assert extras["cuda12"] == {"cupy-cuda12x[ctk]>=14"}
    assert extras["cuda13"] == {"cupy-cuda13x[ctk]>=14"}
    assert extras["torch"] == {"torch"}
    assert names["cli"] == {"click", "rich"}
    assert names["report"] == {"matplotlib", "jinja2"}
    assert names["test"] >= names["cli"] | names["report"] | {"pytest", "hypothesis", "setuptools"}
    assert names["dev"] == {"ruff", "mypy", "pre-commit"}


def test_version_licence_and_python_versions(metadata: Message, wheel: Path) -> None:
    assert metadata["Name"] == "sgalloc"
    assert metadata["Version"] == sgalloc.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    supported = SpecifierSet(metadata["Requires-Python"])
    assert "3.11" in supported
    assert "3.10" not in supported
    prefix = "Programming Language :: Python :: 3."
    named = [c for c in metadata.get_all("Classifier", []) if c.startswith(prefix)]
    assert [c.removeprefix(prefix) for c in named] == ["11", "12", "13", "14"]
    with zipfile.ZipFile(wheel) as archive:
        (licence,) = [n for n in archive.namelist() if n.endswith("licenses/LICENSE")]
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()


def test_console_script_leads_to_a_command(installed: Path, tmp_path: Path) -> None:
    code = f"""
        import importlib.metadata
        (found,) = importlib.metadata.distributions(name="sgalloc", path=[{str(installed)!r}])
        (script,) = found.entry_points.select(group="console_scripts")
        print(script.name, script.value, callable(script.load()))
    """
    lines = run_python(code, cwd=tmp_path, pythonpath=installed)
    assert lines == ["sgalloc sgalloc.cli:main True"]

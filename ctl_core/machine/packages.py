"""Reads which TensorFlow is installed, and which CUDA libraries it will load.

TensorFlow is not imported: the build is described by a file of its package, and the libraries that
it wants by the extra ``and-cuda`` of its metadata.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any, NamedTuple

# Packages that contain the module tensorflow. Two of them overwrite each other's files.
BUILDS = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-gpu",
    "tensorflow-rocm",
    "intel-tensorflow",
    "tf-nightly",
    "tf-nightly-cpu",
    "tf-nightly-gpu",
)
_BUILD_INFO = "tensorflow/python/platform/build_info.py"
# The library in each of NVIDIA's packages, by the name of the package without its version of CUDA.
_LIBRARIES = {
    "nvidia-cublas": "libcublas",
    "nvidia-cuda-cupti": "libcupti",
    "nvidia-cuda-nvrtc": "libnvrtc",
    "nvidia-cuda-runtime": "libcudart",
    "nvidia-cudnn": "libcudnn",
    "nvidia-cufft": "libcufft",
    "nvidia-curand": "libcurand",
    "nvidia-cusolver": "libcusolver",
    "nvidia-cusparse": "libcusparse",
    "nvidia-nccl": "libnccl",
    "nvidia-nvjitlink": "libnvJitLink",
}


class Build(NamedTuple):
    """What TensorFlow was built for.

    Attributes:
        is_cuda: whether the build supports NVIDIA GPUs
        cuda: the version of CUDA, such as ``(12, 5)``; None if the build does not name it
        binaries: the compute capabilities for which the build contains machine code
    """

    is_cuda: bool
    cuda: tuple[int, int] | None = None
    binaries: tuple[tuple[int, int], ...] = ()


class Library(NamedTuple):
    """A CUDA library that TensorFlow wants.

    Attributes:
        package: the package that contains the library
        wanted: the versions that TensorFlow's metadata allows, such as ``<10.0,>=9.3``
        installed: the version of the package; None if it is not installed
        fits: whether the installed version is allowed
        other: a file that is loaded instead of the package's, or in place of a missing package
        other_version: the version in the name of that file; None if the name does not contain it
        is_other_too_old: whether that version is older than TensorFlow wants
    """

    package: str
    wanted: str
    installed: str | None = None
    fits: bool = False
    other: str | None = None
    other_version: str | None = None
    is_other_too_old: bool = False


class TensorFlow(NamedTuple):
    """The installed TensorFlow.

    Attributes:
        builds: the version of each installed package of ``BUILDS``
        build: what TensorFlow was built for; None if it is unknown
        libraries: the CUDA libraries that it wants
        has_compiler: whether XLA finds ``ptxas`` and ``libdevice``
    """

    builds: dict[str, str]
    build: Build | None = None
    libraries: tuple[Library, ...] = ()
    has_compiler: bool = False


class Search(NamedTuple):
    """Where libraries are searched for.

    Attributes:
        packages: the folder of the environment's packages
        before: the folders in ``LD_LIBRARY_PATH``, which take precedence over packages
        after: the folders of the system, where a library is found if its package is missing
        toolkits: the folders of CUDA's toolkit, which contains ``ptxas`` and ``libdevice``
        programs: the folders in ``PATH``
    """

    packages: Path
    before: Sequence[Path] = ()
    after: Sequence[Path] = ()
    toolkits: Sequence[Path] = ()
    programs: Sequence[Path] = ()


def read_tensorflow(search: Search) -> TensorFlow:
    """Returns what is known of the TensorFlow in a folder of packages."""
    installed = {
        _normalize(name): distribution
        for distribution in distributions(path=[str(search.packages)])
        if (name := distribution.metadata["Name"]) is not None
    }
    builds = {name: installed[name].version for name in BUILDS if name in installed}
    libraries: tuple[Library, ...] = ()
    if builds:
        requirements = installed[next(iter(builds))].requires or []
        libraries = tuple(_list_libraries(requirements, installed, search))
    return TensorFlow(
        builds,
        _read_build(search.packages / _BUILD_INFO),
        libraries,
        _has_compiler(search),
    )


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _read_build(file: Path) -> Build | None:
    """Reads TensorFlow's description of its build, which is a Python file with one dict."""
    try:
        tree = ast.parse(file.read_text("utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "collections.OrderedDict":
            info = dict(ast.literal_eval(node.args[0]))
            return Build(
                is_cuda=bool(info.get("is_cuda_build")),
                cuda=read_version(str(info.get("cuda_version", ""))),
                binaries=tuple(_list_binaries(info)),
            )
    return None


def _list_binaries(info: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Yields the compute capability of each entry such as ``sm_89``."""
    for entry in info.get("cuda_compute_capabilities", ()):
        digits = re.fullmatch(r"(?:sm|compute)_(\d+)(\d)", str(entry))
        if digits is not None:
            yield int(digits[1]), int(digits[2])


def read_version(text: str) -> tuple[int, int] | None:
    """Returns the first two numbers of a version; None if the text contains no version."""
    match = re.search(r"(\d+)\.(\d+)", text)
    if match is None:
        return None
    return int(match[1]), int(match[2])


def _list_libraries(
    requirements: Iterable[str], installed: dict[str, Distribution], search: Search
) -> Iterator[Library]:
    """Yields each of NVIDIA's packages that TensorFlow's extra ``and-cuda`` requires."""
    # TensorFlow requires this package, so that it is installed in each environment that has one.
    from packaging.requirements import Requirement

    for requirement in map(Requirement, requirements):
        package = _normalize(requirement.name)
        if not package.startswith("nvidia-"):
            continue
        library = Library(package, str(requirement.specifier))
        if package in installed:
            version = installed[package].version
            fits = requirement.specifier.contains(version)
            library = library._replace(installed=version, fits=fits)
        yield _add_other(library, search)


def _add_other(library: Library, search: Search) -> Library:
    """Adds the file that is loaded instead of the one in the package, if there is such a file."""
    name = _LIBRARIES.get(re.sub(r"-cu\d+$", "", library.package))
    oldest = re.search(r">=([\d.]+)", library.wanted)
    if name is None or oldest is None:
        return library
    file_name = f"{name}.so.{oldest[1].split('.')[0]}"
    folders = [*search.before]
    if library.installed is None:
        folders += search.after
    for folder in folders:
        file = folder / file_name
        if search.packages in file.parents or not file.exists():
            continue
        version = file.resolve().name.partition(".so.")[2]
        if "." not in version:
            return library._replace(other=str(file))
        is_too_old = _split(version) < _split(oldest[1])[: len(_split(version))]
        return library._replace(other=str(file), other_version=version, is_other_too_old=is_too_old)
    return library


def _split(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _has_compiler(search: Search) -> bool:
    """Returns True if ``ptxas`` and ``libdevice`` are where XLA searches for them."""
    toolkits = [search.packages / "nvidia" / "cuda_nvcc", *search.toolkits]
    programs = [*(toolkit / "bin" for toolkit in toolkits), *search.programs]
    has_libdevice = any(
        (toolkit / "nvvm" / "libdevice" / "libdevice.10.bc").exists() for toolkit in toolkits
    )
    return has_libdevice and any((folder / "ptxas").exists() for folder in programs)

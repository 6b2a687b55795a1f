"""Collects the facts about a machine that decide whether TensorFlow can use its NVIDIA GPUs.

``collect_facts`` only reads. ``checks.py`` draws the conclusions.
"""

import importlib.util
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ctl_core.machine.driver import DriverAnswer, ask_driver
from ctl_core.machine.packages import Search, TensorFlow, read_tensorflow

HIDING_VARIABLE = "CUDA_VISIBLE_DEVICES"
# Written by train.sh if it has chosen the TensorFlow of this environment.
_CHOICE_FILE = ".accelerator"
_NVIDIA = "0x10de"  # the vendor's number on the PCI bus
_WSL_LIBRARIES = "usr/lib/wsl/lib"


class Hardware(NamedTuple):
    """Signs of NVIDIA GPUs that the operating system shows.

    Attributes:
        pci_gpus: the number of NVIDIA GPUs on the PCI bus
        module_version: the version of the driver's kernel module; None if no module is loaded
        device_files: the files of GPUs in /dev
        refused_files: those device files that this user or this container may not open
        is_wsl: whether this is the Windows Subsystem for Linux
        has_wsl_gpu: whether Windows offers a GPU to WSL, of any vendor
        has_wsl_driver: whether Windows has an NVIDIA driver
    """

    pci_gpus: int = 0
    module_version: str | None = None
    device_files: tuple[str, ...] = ()
    refused_files: tuple[str, ...] = ()
    is_wsl: bool = False
    has_wsl_gpu: bool = False
    has_wsl_driver: bool = False

    @property
    def has_nvidia_gpu(self) -> bool:
        """True if the machine has an NVIDIA GPU, as far as the operating system shows."""
        signs = (self.pci_gpus, self.module_version, self.device_files, self.has_wsl_driver)
        return any(signs)


class Facts(NamedTuple):
    """All facts about a machine.

    Attributes:
        processor: the kind of processor, such as ``x86_64``
        has_avx: whether an x86-64 processor has AVX instructions; True for other processors
        is_container: whether this process runs in a container
        hardware: what the operating system shows
        driver: the answers of the driver, without the variable ``CUDA_VISIBLE_DEVICES``
        visible_gpus: the number of GPUs that a process with the current variables may use
        tensorflow: the installed TensorFlow
        variables: the environment variables
        python: the command that starts this Python
        has_choice: whether train.sh chooses the TensorFlow of this environment
    """

    processor: str
    has_avx: bool
    is_container: bool
    hardware: Hardware
    driver: DriverAnswer
    visible_gpus: int
    tensorflow: TensorFlow
    variables: Mapping[str, str]
    python: str
    has_choice: bool


def hides_gpus_on_purpose(variables: Mapping[str, str]) -> bool:
    """Returns True if ``CUDA_VISIBLE_DEVICES`` is empty or -1."""
    return variables.get(HIDING_VARIABLE, "0").strip() in ("", "-1")


def collect_facts(
    root: Path = Path("/"),
    packages: Path | None = None,
    variables: Mapping[str, str] = os.environ,
) -> Facts:
    """Collects the facts about this machine; takes about a second if there is a driver.

    Args:
        root: the folder that contains /proc, /dev, /sys and so on
        packages: the folder of the environment's packages; default: that of this Python
        variables: the environment variables
    """
    hardware = read_hardware(root)
    packages = packages or _find_packages()
    driver = DriverAnswer(problem="not asked, because there is no sign of a GPU")
    visible_gpus = 0
    if hardware.has_nvidia_gpu:
        others = {name: value for name, value in variables.items() if name != HIDING_VARIABLE}
        driver = ask_driver(others)
        visible_gpus = len(driver.gpus)
        if HIDING_VARIABLE in variables:
            visible_gpus = len(ask_driver(variables).gpus)
    search = Search(
        packages,
        before=_list_folders(variables.get("LD_LIBRARY_PATH", "")),
        after=[
            Path(sys.prefix, "lib"),  # of conda
            *(root / folder for folder in ("usr/local/cuda/lib64", "usr/lib64", "usr/lib")),
            *sorted((root / "usr/lib").glob("*-linux-gnu")),
        ],
        toolkits=[*_list_named_toolkits(variables), root / "usr/local/cuda", Path(sys.prefix)],
        programs=_list_folders(variables.get("PATH", "")),
    )
    return Facts(
        processor=platform.machine(),
        has_avx=has_avx(root),
        is_container=_is_container(root, variables),
        hardware=hardware,
        driver=driver,
        visible_gpus=visible_gpus,
        tensorflow=read_tensorflow(search),
        variables=variables,
        python=_name_python(),
        has_choice=Path(sys.prefix, _CHOICE_FILE).exists(),
    )


def _find_packages() -> Path:
    """Returns the folder that contains the package tensorflow, which is not imported."""
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or spec.origin is None:
        return Path(sysconfig.get_path("purelib"))
    return Path(spec.origin).parents[1]


def _name_python() -> str:
    """Returns the path of this Python, relative to the current folder if it is inside."""
    relative = os.path.relpath(sys.executable)
    if relative.split(os.sep)[0] == os.pardir:
        return sys.executable
    return relative


def _list_folders(path: str) -> list[Path]:
    """Returns the folders of a variable such as ``PATH``."""
    return [Path(folder) for folder in path.split(os.pathsep) if folder]


def _list_named_toolkits(variables: Mapping[str, str]) -> Iterator[Path]:
    """Yields the folder of CUDA's toolkit that ``XLA_FLAGS`` names."""
    for flag in variables.get("XLA_FLAGS", "").split():
        name, _, folder = flag.partition("=")
        if name == "--xla_gpu_cuda_data_dir":
            yield Path(folder)


def read_hardware(root: Path = Path("/")) -> Hardware:
    """Returns the signs of NVIDIA GPUs that the operating system shows; takes milliseconds.

    Args:
        root: the folder that contains /proc, /dev and /sys
    """
    files = [file for file in sorted(root.glob("dev/nvidia*")) if not file.is_dir()]
    files = [file for file in files if re.fullmatch(r"nvidia(\d+|ctl|-uvm)", file.name)]
    is_gpu = any(re.fullmatch(r"nvidia\d+", file.name) for file in files)
    return Hardware(
        pci_gpus=_count_pci_gpus(root),
        module_version=_read_module_version(root),
        device_files=tuple(str(file) for file in files if is_gpu),
        refused_files=tuple(str(file) for file in files if is_gpu and not _can_open(file)),
        is_wsl="microsoft" in _read(root / "proc/version").lower(),
        has_wsl_gpu=(root / "dev/dxg").exists(),
        has_wsl_driver=(root / _WSL_LIBRARIES / "libcuda.so.1").exists(),
    )


def _read(file: Path) -> str:
    """Returns the text of a file; "" if it cannot be read."""
    try:
        return file.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def _count_pci_gpus(root: Path) -> int:
    """Counts the NVIDIA devices on the PCI bus that are display or 3D controllers."""
    devices = root.glob("sys/bus/pci/devices/*")
    return sum(
        _read(device / "vendor").strip() == _NVIDIA and _read(device / "class").startswith("0x03")
        for device in devices
    )


def _read_module_version(root: Path) -> str | None:
    """Returns the version of the driver's kernel module, such as ``550.54.14``."""
    match = re.search(
        r"Kernel Module.*?\s(\d+(\.\d+)+)\s", _read(root / "proc/driver/nvidia/version")
    )
    if match is None:
        return None
    return match[1]


def _can_open(file: Path) -> bool:
    """Returns True if this process may open a device file.

    The permissions of the file do not show everything: a container, or a job of Slurm that has
    requested no GPU, may not open files that its user may open elsewhere.
    """
    try:
        os.close(os.open(file, os.O_RDWR))
    except PermissionError:
        return False
    except OSError:  # the driver does not answer, which is another problem
        return True
    return True


def has_avx(root: Path = Path("/")) -> bool:
    """Returns False if this is an x86-64 processor without AVX, which TensorFlow's builds need."""
    flags = re.search(r"^flags\s*:(.*)$", _read(root / "proc/cpuinfo"), re.MULTILINE)
    return flags is None or "avx" in flags[1].split()


def _is_container(root: Path, variables: Mapping[str, str]) -> bool:
    """Returns True if this process runs in a container of Docker, Podman, Kubernetes and so on."""
    files = (".dockerenv", "run/.containerenv", ".singularity.d")
    names = ("container", "KUBERNETES_SERVICE_HOST", "APPTAINER_CONTAINER")
    return any((root / file).exists() for file in files) or any(name in variables for name in names)

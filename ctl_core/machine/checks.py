"""Explains why TensorFlow cannot use the GPUs of a machine: each check is one cause with its cure.

A check is a function that gets the facts, and returns a line or None. To explain another set-up,
write a check and add it to ``_CPU_CHECKS``, ``_DRIVER_CHECKS`` or ``_TENSORFLOW_CHECKS``.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ctl_core.machine.driver import Gpu
from ctl_core.machine.facts import HIDING_VARIABLE, Facts, hides_gpus_on_purpose
from ctl_core.machine.packages import read_version

# The oldest driver for Linux that runs programs built for a major version of CUDA. Within a major
# version, older drivers run programs of newer minor versions.
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
_OLDEST_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580"}
# cuDNN 9.11 and newer do not support GPUs of a lower compute capability than this one (Turing).
_CUDNN_WITHOUT_OLD_GPUS = (9, 11)
_OLDEST_GPU_OF_CUDNN = (7, 5)
# Results of cuInit, from cuda.h.
_STUB_LIBRARY = 34
_NO_DEVICE = 100
_SYSTEM_NOT_READY = 802
_DRIVER_MISMATCH = 803
_COMPAT_NOT_SUPPORTED = 804


class Finding(NamedTuple):
    """A cause and its cure, in one line.

    Attributes:
        text: the line
        is_blocking: whether it prevents TensorFlow from using a GPU
    """

    text: str
    is_blocking: bool = True


Check = Callable[[Facts], Finding | None]


def diagnose(facts: Facts) -> list[Finding]:
    """Returns what is wrong with a machine, in the order in which it is best repaired.

    Of the checks of the driver, only the first finding is returned, because each cause of a failing
    driver has several symptoms.
    """
    findings = _run(_CPU_CHECKS, facts)
    if facts.hardware.has_nvidia_gpu or facts.hardware.is_wsl:
        findings += _run(_DRIVER_CHECKS, facts)[:1]
    if facts.hardware.has_nvidia_gpu:
        findings += _run(_TENSORFLOW_CHECKS, facts)
    return findings


def _run(checks: Sequence[Check], facts: Facts) -> list[Finding]:
    findings = (check(facts) for check in checks)
    return [finding for finding in findings if finding is not None]


# ---- Phrases -------------------------------------------------------------------------------------


def describe_gpus(gpus: Sequence[Gpu]) -> str:
    """Returns a phrase such as ``2 GPUs (NVIDIA A100-SXM4-40GB)``."""
    names = ", ".join(dict.fromkeys(gpu.name for gpu in gpus))
    number = f"{len(gpus)} {'GPU' if len(gpus) == 1 else 'GPUs'}"
    if not names:
        return number
    return f"{number} ({names})"


def describe_tensorflow(facts: Facts) -> str:
    """Returns a phrase such as ``tensorflow 2.21.0``."""
    builds = [f"{name} {version}" for name, version in facts.tensorflow.builds.items()]
    return " and ".join(builds) or "TensorFlow"


def _format_version(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _format_installation(facts: Facts, requirement: str) -> str:
    return f'{facts.python} -m pip install "{requirement}"'


def _format_gpu_build(facts: Facts) -> str:
    """Returns the command that installs TensorFlow with the CUDA libraries."""
    if facts.has_choice:
        return "ACCELERATOR=gpu ./train.sh"
    version = next(iter(facts.tensorflow.builds.values()), None)
    bound = "" if version is None else f"=={version}"
    install = _format_installation(facts, f"tensorflow[and-cuda]{bound}")
    others = " ".join(name for name in facts.tensorflow.builds if name != "tensorflow")
    if not others:
        return install
    return f"{facts.python} -m pip uninstall --yes {others} && {install}"


def _has_gpu_build(facts: Facts) -> bool:
    return facts.tensorflow.build is not None and facts.tensorflow.build.is_cuda


# ---- With and without a GPU ----------------------------------------------------------------------


def check_processor(facts: Facts) -> Finding | None:
    """TensorFlow's builds need AVX; without it, the process is killed by SIGILL."""
    if facts.has_avx:
        return None
    return Finding(
        "this processor has no AVX instructions, without which TensorFlow ends with 'Illegal "
        "instruction': train on another machine, in a virtual machine choose the processor type "
        "'host', or build TensorFlow from source"
    )


def check_tensorflow_is_installed(facts: Facts) -> Finding | None:
    """The environment has no TensorFlow."""
    if facts.tensorflow.builds or facts.tensorflow.build is not None:
        return None
    return Finding(
        f"TensorFlow is not installed for {facts.python}: use the Python of the project's "
        "environment (.venv/bin/python), which ./train.sh creates"
    )


def check_two_builds(facts: Facts) -> Finding | None:
    """Two packages have overwritten each other's files."""
    builds = facts.tensorflow.builds
    if len(builds) < 2:
        return None
    if facts.has_choice:
        cure = "rm -r .venv && ./train.sh"
    else:
        remove = f"{facts.python} -m pip uninstall --yes {' '.join(builds)}"
        cure = f"{remove} && " + _format_installation(facts, "tensorflow[and-cuda]")
    return Finding(
        f"{describe_tensorflow(facts)} are both installed, and have overwritten each other's "
        f"files: {cure}"
    )


# ---- The driver ----------------------------------------------------------------------------------


def check_wsl(facts: Facts) -> Finding | None:
    """In WSL, the driver is that of Windows; a driver for Linux hides it."""
    hardware, driver = facts.hardware, facts.driver
    if not hardware.is_wsl:
        return None
    if not hardware.has_wsl_gpu:
        return Finding(
            "WSL: there is no /dev/dxg, so Windows shares no GPU; if it has one, run in "
            "PowerShell: wsl --update, and wsl --set-version DISTRIBUTION 2",
            is_blocking=False,
        )
    if not hardware.has_wsl_driver:
        return Finding(
            "WSL: Windows has no NVIDIA driver; if it has an NVIDIA GPU, install NVIDIA's driver "
            "in Windows (none in WSL), then run in PowerShell: wsl --shutdown",
            is_blocking=False,
        )
    if driver.problem.startswith("libcuda"):
        return Finding(
            "WSL: the driver's library is not found: export LD_LIBRARY_PATH=/usr/lib/wsl/lib"
        )
    if driver.error and "/wsl/" not in driver.library:
        return Finding(
            f"WSL: {driver.library} is a driver for Linux, which hides that of Windows: remove it "
            "(sudo apt remove 'libnvidia-compute-*'), then run in PowerShell: wsl --shutdown"
        )
    return None


def check_driver_is_loaded(facts: Facts) -> Finding | None:
    """There is a GPU, but the kernel has no driver for it."""
    hardware = facts.hardware
    if hardware.is_wsl or hardware.module_version or hardware.device_files:
        return None
    return Finding(
        "this machine has an NVIDIA GPU, but no NVIDIA driver is loaded: install one (on Ubuntu: "
        "sudo ubuntu-drivers install) and restart; with Secure Boot, its key must be enrolled"
    )


def check_container(facts: Facts) -> Finding | None:
    """The container was started without GPUs."""
    hardware = facts.hardware
    if not facts.is_container or hardware.is_wsl or hardware.device_files:
        return None
    return Finding(
        "this container was started without the GPUs of its machine: docker run --gpus all "
        "(needs the NVIDIA Container Toolkit), podman run --device nvidia.com/gpu=all, "
        "apptainer exec --nv, or in Kubernetes the limit nvidia.com/gpu: 1"
    )


def check_permission(facts: Facts) -> Finding | None:
    """This user, or this job, may not open the device files."""
    files = facts.hardware.refused_files
    if not files:
        return None
    if "SLURM_JOB_ID" in facts.variables:
        cure = "request GPUs for the job, for example with --gpus-per-node=1"
    elif facts.is_container:
        cure = "start the container with --gpus all, and as a user who may use the GPUs"
    else:
        cure = (
            f"ls -l {files[0]} shows the group that may; add yourself to it (sudo usermod -aG "
            "GROUP $USER), and log in again"
        )
    return Finding(f"this process has no permission to open {files[0]}: {cure}")


def check_driver_library(facts: Facts) -> Finding | None:
    """The library libcuda.so.1, which belongs to the driver, is missing or broken."""
    problem = facts.driver.problem
    if not problem:
        return None
    if not problem.startswith("libcuda"):
        return Finding(
            f"the NVIDIA driver was asked for its GPUs: {problem}; restart the machine, and if "
            "that does not help, install the driver again"
        )
    if facts.is_container:
        cure = "start the container with --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    else:
        cure = (
            "install the whole driver, in the version that is loaded (on Ubuntu: the package "
            "libnvidia-compute-VERSION)"
        )
    return Finding(f"the driver's library libcuda.so.1 is not found: {cure}")


def check_versions_of_driver(facts: Facts) -> Finding | None:
    """The driver was updated, but the kernel still runs the module of the previous one."""
    loaded = facts.hardware.module_version
    library = facts.driver.library.rpartition(".so.")[2]
    is_compat = "/compat/" in facts.driver.library
    differs = loaded is not None and "." in library and library != loaded and not is_compat
    if facts.driver.error != _DRIVER_MISMATCH and not (facts.driver.error and differs):
        return None
    if facts.is_container:
        cure = "start the container again; if that does not help, restart the machine"
    else:
        cure = "restart the machine"
    return Finding(
        f"the driver's library ({library or 'of unknown version'}) and kernel module "
        f"({loaded or 'of unknown version'}) have different versions, as after an update: {cure}"
    )


def check_driver_answers(facts: Facts) -> Finding | None:
    """The driver is there, but cuInit fails for a reason that the other checks do not explain."""
    error = facts.driver.error
    if error == 0:
        return None
    if error == _STUB_LIBRARY:
        return Finding(
            f"{facts.driver.library} is a stub for compilers, which hides the driver: remove its "
            "folder from LD_LIBRARY_PATH"
        )
    if error == _COMPAT_NOT_SUPPORTED:
        return Finding(
            f"{facts.driver.library} is CUDA's compatibility package, which this GPU does not "
            "support: remove its folder from LD_LIBRARY_PATH, and update the driver"
        )
    if error == _SYSTEM_NOT_READY:
        return Finding(
            "the GPUs are not ready (error 802): sudo systemctl start nvidia-fabricmanager, in the "
            "version of the driver"
        )
    if error == _NO_DEVICE:
        return Finding(
            "the driver finds no GPU (error 100): nvidia-smi and sudo dmesg | grep NVRM show why; "
            "a GPU may need a newer driver, or have failed"
        )
    return Finding(
        f"the driver does not start (cuInit: error {error}): restart the machine; after standby, "
        "sudo modprobe -r nvidia_uvm && sudo modprobe nvidia_uvm may be enough"
    )


# ---- TensorFlow on a machine with a GPU ----------------------------------------------------------


def check_age_of_driver(facts: Facts) -> Finding | None:
    """The driver is too old for the CUDA that TensorFlow was built for."""
    build, supported = facts.tensorflow.build, facts.driver.cuda
    if build is None or build.cuda is None or supported is None:
        return None
    if supported[0] >= build.cuda[0]:
        return None
    oldest = _OLDEST_DRIVERS.get(build.cuda[0])
    version = facts.hardware.module_version or ""
    driver = f"the NVIDIA driver {version}".rstrip()
    wanted = "a newer one" if oldest is None else f"version {oldest} or newer"
    return Finding(
        f"{driver} supports CUDA up to {_format_version(supported)}, and "
        f"{describe_tensorflow(facts)} needs CUDA {build.cuda[0]}: install {wanted}"
    )


def check_build_for_cpus(facts: Facts) -> Finding | None:
    """TensorFlow was installed without GPU support."""
    build = facts.tensorflow.build
    if build is None or build.is_cuda or len(facts.tensorflow.builds) > 1:
        return None
    gpus = describe_gpus(facts.driver.gpus) if facts.driver.gpus else "an NVIDIA GPU"
    tensorflow = describe_tensorflow(facts)
    if facts.processor not in ("x86_64", "AMD64"):
        return Finding(
            f"{tensorflow} was built without GPU support, as all of TensorFlow's packages for "
            f"{facts.processor} are: use NVIDIA's container nvcr.io/nvidia/tensorflow"
        )
    return Finding(
        f"{tensorflow} was built without GPU support, and this machine has {gpus}: "
        f"{_format_gpu_build(facts)}"
    )


def check_visible_devices(facts: Facts) -> Finding | None:
    """CUDA_VISIBLE_DEVICES hides GPUs."""
    value = facts.variables.get(HIDING_VARIABLE)
    gpus = facts.driver.gpus
    if value is None or not gpus:
        return None
    shown = f"{HIDING_VARIABLE}={value or chr(39) * 2}"
    if hides_gpus_on_purpose(facts.variables):
        return Finding(
            f"{shown} hides {describe_gpus(gpus)}: to train on GPUs, unset {HIDING_VARIABLE}"
        )
    numbers = "0" if len(gpus) == 1 else f"0 to {len(gpus) - 1}"
    if facts.visible_gpus == 0:
        return Finding(
            f"{shown} names no GPU of this machine, which has {numbers}: correct the variable, or "
            f"unset {HIDING_VARIABLE}"
        )
    if facts.visible_gpus < len(value.strip(",").split(",")):
        return Finding(
            f"{shown} names a GPU that does not exist, and hides those after it: this machine has "
            f"{numbers}",
            is_blocking=False,
        )
    return None


def check_new_gpu(facts: Facts) -> Finding | None:
    """A GPU is newer than the newest one for which TensorFlow contains machine code."""
    build = facts.tensorflow.build
    if build is None or not build.binaries:
        return None
    newest = max(build.binaries)
    for gpu in facts.driver.gpus:
        if gpu.capability[0] > newest[0]:
            return Finding(
                f"{_describe_capability(gpu)} is newer than {describe_tensorflow(facts)}, built "
                f"for up to {_format_version(newest)}: steps may fail with CUDA_ERROR_INVALID_PTX, "
                "INVALID_HANDLE or 'PTX version does not support target'; use a newer TensorFlow, "
                "or NVIDIA's container nvcr.io/nvidia/tensorflow (doctor --deep tries it)"
            )
    return None


def check_old_gpu(facts: Facts) -> Finding | None:
    """A GPU is older than the oldest one that TensorFlow supports."""
    build = facts.tensorflow.build
    if build is None or not build.binaries:
        return None
    oldest = min(build.binaries)
    for gpu in facts.driver.gpus:
        if gpu.capability < oldest:
            return Finding(
                f"{_describe_capability(gpu)} is older than {describe_tensorflow(facts)} supports, "
                f"which is {_format_version(oldest)} and newer: train on the CPU or on another GPU"
            )
    return None


def _describe_capability(gpu: Gpu) -> str:
    return f"{gpu.name} (compute capability {_format_version(gpu.capability)})"


def check_cudnn_for_old_gpu(facts: Facts) -> Finding | None:
    """Newer versions of cuDNN have no machine code for Pascal and Volta, so convolutions fail."""
    for library in facts.tensorflow.libraries:
        version = read_version(library.installed or "")
        if not library.package.startswith("nvidia-cudnn") or version is None:
            continue
        if version < _CUDNN_WITHOUT_OLD_GPUS:
            continue
        for gpu in facts.driver.gpus:
            if gpu.capability < _OLDEST_GPU_OF_CUDNN and check_old_gpu(facts) is None:
                requirement = f"{library.package}<{_format_version(_CUDNN_WITHOUT_OLD_GPUS)}"
                return Finding(
                    f"{library.package} {library.installed} does not support "
                    f"{_describe_capability(gpu)}: {_format_installation(facts, requirement)}"
                )
    return None


def check_libraries(facts: Facts) -> Finding | None:
    """Packages with CUDA libraries are missing, or have other versions than TensorFlow wants."""
    if not _has_gpu_build(facts):
        return None
    libraries = facts.tensorflow.libraries
    wrong = [
        f"{library.package} {library.installed} (wanted: {library.wanted})"
        for library in libraries
        if library.installed is not None and not library.fits
    ]
    # XLA's compiler has a check of its own.
    missing = [
        library.package
        for library in libraries
        if library.installed is None and library.other is None and "nvcc" not in library.package
    ]
    if not wrong and not missing:
        return None
    parts = []
    if missing:
        shown = ", ".join(missing[:2]) + (" and others" if len(missing) > 2 else "")
        parts.append(f"not installed: {shown}")
    if wrong:
        parts.append(f"of the wrong version: {', '.join(wrong)}")
    return Finding(
        f"the CUDA libraries of {describe_tensorflow(facts)} are {'; '.join(parts)}: "
        f"{_format_gpu_libraries(facts)}"
    )


def _format_gpu_libraries(facts: Facts) -> str:
    """Returns the command that installs the CUDA libraries of the installed TensorFlow."""
    name, version = next(iter(facts.tensorflow.builds.items()))
    return _format_installation(facts, f"{name}[and-cuda]=={version}")


def check_hidden_libraries(facts: Facts) -> Finding | None:
    """LD_LIBRARY_PATH has older libraries, which take precedence over TensorFlow's packages."""
    if not _has_gpu_build(facts):
        return None
    old = [library for library in facts.tensorflow.libraries if library.is_other_too_old]
    if not old:
        return None
    # TensorFlow refuses an older cuDNN, and often works with an older version of the others.
    old.sort(key=lambda library: "cudnn" not in library.package)
    library = old[0]
    where = "LD_LIBRARY_PATH" if library.installed is not None else "the system"
    cure = "unset LD_LIBRARY_PATH, or remove this folder from it"
    if library.installed is None:
        cure = _format_gpu_libraries(facts)
    return Finding(
        f"{library.other} in {where} is version {library.other_version}, and "
        f"{describe_tensorflow(facts)} wants {library.package} {library.wanted}: {cure}",
        is_blocking="cudnn" in library.package,
    )


def check_compiler(facts: Facts) -> Finding | None:
    """XLA compiles for GPUs with ``ptxas`` and ``libdevice``, which belong to CUDA's toolkit."""
    if not _has_gpu_build(facts) or facts.tensorflow.has_compiler:
        return None
    package = next(
        (library.package for library in facts.tensorflow.libraries if "nvcc" in library.package),
        "nvidia-cuda-nvcc-cu12",
    )
    return Finding(
        "XLA cannot compile, because ptxas or libdevice.10.bc is missing: "
        f"{_format_installation(facts, package)}; until then, pass --no-jit-compile",
        is_blocking=False,
    )


_CPU_CHECKS: tuple[Check, ...] = (
    check_processor,
    check_tensorflow_is_installed,
    check_two_builds,
)
_DRIVER_CHECKS: tuple[Check, ...] = (
    check_wsl,
    check_driver_is_loaded,
    check_container,
    check_permission,
    check_driver_library,
    check_versions_of_driver,
    check_driver_answers,
)
_TENSORFLOW_CHECKS: tuple[Check, ...] = (
    check_age_of_driver,
    check_build_for_cpus,
    check_visible_devices,
    check_new_gpu,
    check_old_gpu,
    check_cudnn_for_old_gpu,
    check_libraries,
    check_hidden_libraries,
    check_compiler,
)


def describe_health(facts: Facts) -> str:
    """Returns the line for a machine without findings."""
    tensorflow = describe_tensorflow(facts)
    gpus = facts.driver.gpus[: facts.visible_gpus]
    if not gpus:
        return f"no NVIDIA GPU was found: {tensorflow} trains on the CPU."
    version = facts.hardware.module_version
    driver = "" if version is None else f"driver {version}, "
    build = facts.tensorflow.build
    if build is not None and build.cuda is not None:
        tensorflow += f" for CUDA {_format_version(build.cuda)}"
    return f"nothing to report: {describe_gpus(gpus)}, {driver}{tensorflow}."

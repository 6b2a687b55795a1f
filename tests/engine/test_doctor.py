"""``python -m ctl_core doctor`` names the cause and the cure of each set-up without a usable GPU.

All set-ups are simulated: a driver is a small C library that answers as the case needs, and /proc,
/dev, /sys and the folder of packages are folders of the test. The descriptions of TensorFlow's
builds are those of its packages.
"""

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

import ctl_core
from ctl_core.__main__ import main
from ctl_core.cluster import missing_gpus
from ctl_core.commands import doctor
from ctl_core.commands.gpu_trial import train_convolution
from ctl_core.machine import checks
from ctl_core.machine.checks import describe_health, diagnose
from ctl_core.machine.driver import DriverAnswer, Gpu
from ctl_core.machine.facts import Facts, Hardware, collect_facts, read_hardware
from ctl_core.machine.packages import Build, Library, TensorFlow
from tests.helpers.cases import make_hooks
from tests.helpers.project import Train

# Of the package tensorflow 2.21.0 for Linux: build_info.py, and requirements of its metadata.
GPU_BUILD = """\
import collections

build_info = collections.OrderedDict([('cpu_compiler', 'clang'), ('cuda_compute_capabilities', \
['sm_60', 'sm_70', 'sm_80', 'sm_89', 'compute_90']), ('cuda_version', '12.5.1'), ('cudnn_version', \
'9'), ('is_cuda_build', True), ('is_rocm_build', False), ('is_tensorrt_build', False)])
"""
CPU_BUILD = """\
import collections

build_info = collections.OrderedDict([('is_cuda_build', False), ('is_rocm_build', False), \
('is_tensorrt_build', False)])
"""
REQUIREMENTS = """\
Requires-Dist: packaging
Requires-Dist: keras>=3.12.0
Provides-Extra: and-cuda
Requires-Dist: nvidia-cublas-cu12<13.0,>=12.5.3.2; extra == "and-cuda"
Requires-Dist: nvidia-cuda-nvcc-cu12<13.0,>=12.5.82; extra == "and-cuda"
Requires-Dist: nvidia-cuda-runtime-cu12<13.0,>=12.5.82; extra == "and-cuda"
Requires-Dist: nvidia-cudnn-cu12<10.0,>=9.3.0.75; extra == "and-cuda"
"""
NVIDIA_PACKAGES = {
    "nvidia_cublas_cu12": "12.9.1.4",
    "nvidia_cuda_nvcc_cu12": "12.9.86",
    "nvidia_cuda_runtime_cu12": "12.9.79",
    "nvidia_cudnn_cu12": "9.10.2.21",
}
MODULE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\n"
OPEN_MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
# A driver: its answers are macros that the compiler gets.
LIBCUDA = """\
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static int visible(void) {
  const char *value = getenv("CUDA_VISIBLE_DEVICES");
  if (!value) return COUNT;
  int index = atoi(value);
  return *value >= '0' && *value <= '9' && index < COUNT;
}
int cuInit(unsigned flags) { START; return ERROR; }
int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
int cuDeviceGetCount(int *count) { *count = visible(); return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "NVIDIA T", size); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? CAPABILITY / 10 : CAPABILITY % 10;
  return 0;
}
"""
ANSWERS = {"COUNT": 2, "ERROR": 0, "VERSION": 12040, "CAPABILITY": 80, "START": ""}


class Machine:
    """A simulated machine with a driver, a GPU, and TensorFlow for GPUs."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.packages = folder / "site-packages"
        self.variables = {"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": str(folder / "driver")}
        self.driver = folder / "driver"
        self.write("proc/driver/nvidia/version", MODULE)
        self.write("proc/cpuinfo", "flags\t\t: fpu sse4_2 avx avx2\n")
        for name in ("nvidia0", "nvidiactl", "nvidia-uvm"):
            self.write(f"dev/{name}")
        self.install("tensorflow", "2.21.0", REQUIREMENTS)
        self.describe_build(GPU_BUILD)
        for name, version in NVIDIA_PACKAGES.items():
            self.install(name, version)
        self.write_compiler()

    def write(self, name: str, text: str = "") -> Path:
        """Writes a file of the system, such as ``proc/version``."""
        return write(self.root / name, text)

    def install(self, name: str, version: str, requirements: str = "") -> None:
        """Writes the metadata of a package."""
        text = f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{requirements}"
        write(self.packages / f"{name}-{version}.dist-info" / "METADATA", text)

    def uninstall(self, name: str) -> None:
        """Removes the metadata of a package."""
        (file,) = self.packages.glob(f"{name}-*.dist-info/METADATA")
        file.unlink()
        file.parent.rmdir()

    def describe_build(self, text: str) -> None:
        write(self.packages / "tensorflow" / "python" / "platform" / "build_info.py", text)

    def write_compiler(self) -> None:
        folder = self.packages / "nvidia" / "cuda_nvcc"
        write(folder / "bin" / "ptxas")
        write(folder / "nvvm" / "libdevice" / "libdevice.10.bc")

    def compile_driver(self, version: str = "550.54.14", **answers: Any) -> None:
        """Compiles a driver's library with the answers in ``ANSWERS`` and these."""
        source = write(self.driver / "cuda.c", LIBCUDA)
        library = self.driver / f"libcuda.so.{version}"
        macros = [f"-D{name}={value}" for name, value in (ANSWERS | answers).items()]
        command = ["cc", "-shared", "-fPIC", *macros, "-o", str(library), str(source)]
        subprocess.run(command, check=True, capture_output=True)
        link = self.driver / "libcuda.so.1"
        link.unlink(missing_ok=True)
        link.symlink_to(library)

    def collect(self, **variables: str) -> Facts:
        facts = collect_facts(self.root, self.packages, self.variables | variables)
        # Tests may run in a container, on any processor.
        return facts._replace(processor="x86_64", python="python")


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def check_lines(facts: Facts, *fragments: str, is_blocking: bool = True) -> None:
    """Asserts that there is one finding, a single line that contains the fragments."""
    findings = diagnose(facts)
    assert len(findings) == 1, findings
    (finding,) = findings
    assert "\n" not in finding.text
    for fragment in fragments:
        assert fragment in finding.text
    assert finding.is_blocking == is_blocking


# ---- What is read from a machine -----------------------------------------------------------------


def test_a_healthy_machine_has_no_finding(machine: Machine) -> None:
    machine.compile_driver()
    facts = machine.collect()
    assert diagnose(facts) == []
    assert facts.driver.gpus == (Gpu("NVIDIA T", (8, 0)),) * 2
    assert facts.tensorflow.build == Build(True, (12, 5), ((6, 0), (7, 0), (8, 0), (8, 9), (9, 0)))
    assert describe_health(facts) == (
        "nothing to report: 2 GPUs (NVIDIA T), driver 550.54.14, tensorflow 2.21.0 for CUDA 12.5."
    )


def test_a_driver_of_a_newer_cuda_is_healthy(machine: Machine) -> None:
    machine.write("proc/driver/nvidia/version", OPEN_MODULE.replace("570.86.15", "580.65.06"))
    machine.compile_driver("580.65.06", VERSION=13000)
    facts = machine.collect()
    assert facts.hardware.module_version == "580.65.06"
    assert diagnose(facts) == []


def test_a_machine_without_a_gpu_is_healthy(machine: Machine, tmp_path: Path) -> None:
    """The driver is not asked, and TensorFlow for CPUs needs no CUDA libraries."""
    facts = collect_facts(tmp_path / "empty", machine.packages, {})
    assert diagnose(facts) == []
    assert not facts.driver.library
    assert describe_health(facts).startswith("no NVIDIA GPU was found: tensorflow 2.21.0 trains")


def test_gpus_on_the_pci_bus_are_counted(machine: Machine) -> None:
    """The sound device of a GPU and GPUs of other vendors do not count."""
    devices = {"01:00.0": ("0x10de", "0x030000"), "01:00.1": ("0x10de", "0x040300")}
    devices |= {"00:02.0": ("0x8086", "0x030000"), "02:00.0": ("0x10de", "0x030200")}
    for address, (vendor, kind) in devices.items():
        machine.write(f"sys/bus/pci/devices/0000:{address}/vendor", f"{vendor}\n")
        machine.write(f"sys/bus/pci/devices/0000:{address}/class", f"{kind}\n")
    assert read_hardware(machine.root).pci_gpus == 2


def test_wsl_and_files_that_may_not_be_opened_are_found(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.write("proc/version", "Linux version 5.15.153.1-microsoft-standard-WSL2")
    machine.write("dev/dxg")
    machine.write("usr/lib/wsl/lib/libcuda.so.1")
    (machine.root / "dev" / "nvidia-caps").mkdir()

    def refuse(file: Path, flags: int) -> int:
        assert flags == os.O_RDWR
        if file.name == "nvidia0":
            raise PermissionError(1, "Operation not permitted")
        return os.open(file, os.O_RDONLY)

    monkeypatch.setattr(
        "ctl_core.machine.facts.os", SimpleNamespace(open=refuse, close=os.close, O_RDWR=os.O_RDWR)
    )
    hardware = read_hardware(machine.root)
    assert hardware.is_wsl
    assert hardware.has_wsl_gpu
    assert hardware.has_wsl_driver
    assert [Path(file).name for file in hardware.device_files] == [
        "nvidia-uvm",
        "nvidia0",
        "nvidiactl",
    ]
    assert [Path(file).name for file in hardware.refused_files] == ["nvidia0"]


# ---- Set-ups of packages, with a driver that answers ---------------------------------------------


def install_cpu_build(machine: Machine) -> None:
    machine.uninstall("tensorflow")
    machine.install("tensorflow_cpu", "2.21.0", REQUIREMENTS)
    machine.describe_build(CPU_BUILD)


def install_both_builds(machine: Machine) -> None:
    machine.install("tensorflow_cpu", "2.21.0", REQUIREMENTS)


def remove_libraries(machine: Machine) -> None:
    machine.uninstall("nvidia_cublas_cu12")
    machine.uninstall("nvidia_cudnn_cu12")


def install_old_cudnn(machine: Machine) -> None:
    machine.uninstall("nvidia_cudnn_cu12")
    machine.install("nvidia_cudnn_cu12", "9.1.0.70")


def hide_cudnn(machine: Machine) -> None:
    library = write(machine.driver / "libcudnn.so.9.1.0")
    (machine.driver / "libcudnn.so.9").symlink_to(library)


def hide_cublas(machine: Machine) -> None:
    library = write(machine.driver / "libcublas.so.12.2.1.16")
    (machine.driver / "libcublas.so.12").symlink_to(library)


def remove_compiler(machine: Machine) -> None:
    (machine.packages / "nvidia" / "cuda_nvcc" / "bin" / "ptxas").unlink()


def remove_tensorflow(machine: Machine) -> None:
    machine.uninstall("tensorflow")
    (machine.packages / "tensorflow" / "python" / "platform" / "build_info.py").unlink()


def remove_avx(machine: Machine) -> None:
    machine.write("proc/cpuinfo", "flags\t\t: fpu sse4_2\n")


SETUPS: list[tuple[Callable[[Machine], None], bool, tuple[str, ...]]] = [
    (
        install_cpu_build,
        True,
        (
            "tensorflow-cpu 2.21.0 was built without GPU support",
            "2 GPUs (NVIDIA T)",
            "python -m pip uninstall --yes tensorflow-cpu && python -m pip install "
            '"tensorflow[and-cuda]==2.21.0"',
        ),
    ),
    (
        install_both_builds,
        True,
        (
            "tensorflow 2.21.0 and tensorflow-cpu 2.21.0 are both installed",
            "pip uninstall --yes tensorflow tensorflow-cpu && ",
        ),
    ),
    (
        remove_libraries,
        True,
        (
            "not installed: nvidia-cublas-cu12, nvidia-cudnn-cu12:",
            'pip install "tensorflow[and-cuda]==2.21.0"',
        ),
    ),
    (
        install_old_cudnn,
        True,
        ("of the wrong version: nvidia-cudnn-cu12 9.1.0.70 (wanted: <10.0,>=9.3.0.75)",),
    ),
    (
        hide_cudnn,
        True,
        ("libcudnn.so.9 in LD_LIBRARY_PATH is version 9.1.0", "unset LD_LIBRARY_PATH"),
    ),
    (hide_cublas, False, ("libcublas.so.12 in LD_LIBRARY_PATH is version 12.2.1.16",)),
    (
        remove_compiler,
        False,
        ("ptxas", 'pip install "nvidia-cuda-nvcc-cu12"', "--no-jit-compile"),
    ),
    (remove_tensorflow, True, ("TensorFlow is not installed", "./train.sh")),
    (remove_avx, True, ("no AVX instructions", "Illegal instruction")),
]


@pytest.mark.parametrize(
    ("change", "is_blocking", "fragments"), SETUPS, ids=lambda value: getattr(value, "__name__", "")
)
def test_setups_of_packages_are_explained(
    machine: Machine,
    change: Callable[[Machine], None],
    is_blocking: bool,
    fragments: tuple[str, ...],
) -> None:
    machine.compile_driver()
    change(machine)
    check_lines(machine.collect(), *fragments, is_blocking=is_blocking)


def test_libraries_of_the_system_take_the_place_of_packages(machine: Machine) -> None:
    """As in NVIDIA's containers, which have no packages with CUDA libraries."""
    machine.compile_driver()
    for name in NVIDIA_PACKAGES:
        machine.uninstall(name)
    for name in ("libcublas.so.12", "libcudart.so.12", "libcudnn.so.9"):
        machine.write(f"usr/local/cuda/lib64/{name}")
    assert diagnose(machine.collect()) == []


def test_the_cure_is_train_sh_if_it_has_chosen_tensorflow(machine: Machine) -> None:
    machine.compile_driver()
    install_cpu_build(machine)
    check_lines(machine.collect()._replace(has_choice=True), ": ACCELERATOR=gpu ./train.sh")
    check_lines(machine.collect()._replace(processor="aarch64"), "packages for aarch64", "nvcr.io")


# ---- Set-ups of drivers --------------------------------------------------------------------------

DRIVERS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    (
        {"VERSION": 11040, "version": "470.223.02"},
        ("supports CUDA up to 11.4, and tensorflow 2.21.0 needs CUDA 12: install", "525.60.13"),
    ),
    (
        {"ERROR": 803, "version": "550.90.07"},
        ("library (550.90.07) and kernel module (550.54.14)", "restart the machine"),
    ),
    ({"ERROR": 34}, ("is a stub", "LD_LIBRARY_PATH")),
    ({"ERROR": 100}, ("error 100", "nvidia-smi")),
    ({"ERROR": 802}, ("nvidia-fabricmanager",)),
    ({"ERROR": 804}, ("compatibility package",)),
    ({"ERROR": 999}, ("cuInit: error 999", "nvidia_uvm")),
    ({"START": "abort()"}, ("ended with exit code -6",)),
    (
        {"CAPABILITY": 120},
        ("NVIDIA T (compute capability 12.0) is newer", "CUDA_ERROR_INVALID_PTX"),
    ),
    ({"CAPABILITY": 52}, ("NVIDIA T (compute capability 5.2) is older", "6.0 and newer")),
]


@pytest.mark.parametrize(("answers", "fragments"), DRIVERS, ids=lambda value: str(value)[:30])
def test_setups_of_drivers_are_explained(
    machine: Machine, answers: dict[str, Any], fragments: tuple[str, ...]
) -> None:
    if answers.get("version") == "470.223.02":
        machine.write("proc/driver/nvidia/version", MODULE.replace("550.54.14", "470.223.02"))
    machine.compile_driver(**answers)
    check_lines(machine.collect(), *fragments)


def test_a_driver_that_hangs_is_not_waited_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctl_core.machine.driver._PATIENCE", 0.3)
    machine.compile_driver(START="sleep(60)")
    check_lines(machine.collect(), "no answer within 0 s", "restart the machine")


def test_a_missing_library_of_the_driver_is_named(machine: Machine) -> None:
    facts = machine.collect()
    if not facts.driver.problem.startswith("libcuda"):
        pytest.skip("this machine has a driver")
    check_lines(
        facts._replace(is_container=False), "libcuda.so.1 is not found", "libnvidia-compute"
    )
    check_lines(facts._replace(is_container=True), "NVIDIA_DRIVER_CAPABILITIES=compute,utility")


@pytest.mark.parametrize(
    ("value", "is_blocking", "fragment"),
    [
        ("", True, "CUDA_VISIBLE_DEVICES='' hides 2 GPUs"),
        ("-1", True, "CUDA_VISIBLE_DEVICES=-1 hides 2 GPUs"),
        ("7", True, "CUDA_VISIBLE_DEVICES=7 names no GPU of this machine, which has 0 to 1"),
        ("NoDevFiles", True, "CUDA_VISIBLE_DEVICES=NoDevFiles names no GPU"),
        ("0,5", False, "CUDA_VISIBLE_DEVICES=0,5 names a GPU that does not exist"),
    ],
)
def test_gpus_that_a_variable_hides(
    machine: Machine, value: str, is_blocking: bool, fragment: str
) -> None:
    machine.compile_driver()
    facts = machine.collect(CUDA_VISIBLE_DEVICES=value)
    check_lines(facts, fragment, is_blocking=is_blocking)


def test_a_variable_that_chooses_a_gpu_is_no_finding(machine: Machine) -> None:
    machine.compile_driver()
    facts = machine.collect(CUDA_VISIBLE_DEVICES="1")
    assert diagnose(facts) == []
    assert ": 1 GPU (NVIDIA T)," in describe_health(facts)


# ---- Facts that only other machines have ---------------------------------------------------------

HEALTHY = Facts(
    processor="x86_64",
    has_avx=True,
    is_container=False,
    hardware=Hardware(module_version="550.54.14", device_files=("/dev/nvidia0",)),
    driver=DriverAnswer("libcuda.so.550.54.14", cuda=(12, 4), gpus=(Gpu("NVIDIA T", (8, 0)),)),
    visible_gpus=1,
    tensorflow=TensorFlow(
        {"tensorflow": "2.21.0"}, Build(True, (12, 5), ((6, 0), (9, 0))), has_compiler=True
    ),
    variables={},
    python="python",
    has_choice=False,
)
SILENT = DriverAnswer(problem="libcuda.so.1: cannot open shared object file")
REFUSED = Hardware(
    module_version="550.54.14",
    device_files=("/dev/nvidia0", "/dev/nvidiactl"),
    refused_files=("/dev/nvidia0",),
)
WSL = Hardware(is_wsl=True, has_wsl_gpu=True, has_wsl_driver=True)
CHANGES: dict[str, tuple[dict[str, Any], bool, tuple[str, ...]]] = {
    "no driver": (
        {"hardware": Hardware(pci_gpus=1), "driver": SILENT},
        True,
        ("no NVIDIA driver is loaded", "Secure Boot"),
    ),
    "a container without GPUs": (
        {
            "hardware": Hardware(module_version="550.54.14"),
            "driver": SILENT,
            "is_container": True,
        },
        True,
        ("started without the GPUs", "--gpus all", "nvidia.com/gpu: 1"),
    ),
    "no permission": (
        {"hardware": REFUSED, "driver": DriverAnswer("libcuda.so.550.54.14", error=100)},
        True,
        ("no permission to open /dev/nvidia0", "usermod -aG"),
    ),
    "a job without a GPU": (
        {"hardware": REFUSED, "driver": SILENT, "variables": {"SLURM_JOB_ID": "7"}},
        True,
        ("no permission to open /dev/nvidia0", "--gpus-per-node=1"),
    ),
    "a WSL without a GPU": (
        {"hardware": Hardware(is_wsl=True), "driver": SILENT},
        False,
        ("/dev/dxg", "wsl --update"),
    ),
    "a WSL without a driver": (
        {"hardware": WSL._replace(has_wsl_driver=False), "driver": SILENT},
        False,
        ("install NVIDIA's driver in Windows",),
    ),
    "a WSL that does not find its driver": (
        {"hardware": WSL, "driver": SILENT},
        True,
        ("export LD_LIBRARY_PATH=/usr/lib/wsl/lib",),
    ),
    "a WSL with a driver for Linux": (
        {"hardware": WSL, "driver": DriverAnswer("/usr/lib/libcuda.so.535.1", error=100)},
        True,
        ("hides that of Windows", "libnvidia-compute"),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_machines_are_explained(name: str) -> None:
    changes, is_blocking, fragments = CHANGES[name]
    check_lines(HEALTHY._replace(**changes), *fragments, is_blocking=is_blocking)


@pytest.mark.parametrize(
    ("capability", "is_named"), [((7, 0), True), ((6, 1), True), ((7, 5), False)]
)
def test_a_cudnn_without_kernels_for_an_old_gpu(
    capability: tuple[int, int], is_named: bool
) -> None:
    cudnn = Library("nvidia-cudnn-cu12", ">=9.3", installed="9.28.0.42", fits=True)
    tensorflow = HEALTHY.tensorflow._replace(libraries=(cudnn,))
    driver = HEALTHY.driver._replace(gpus=(Gpu("NVIDIA V", capability),))
    facts = HEALTHY._replace(tensorflow=tensorflow, driver=driver)
    if is_named:
        check_lines(facts, "does not support NVIDIA V", '"nvidia-cudnn-cu12<9.11"')
    else:
        assert diagnose(facts) == []


# ---- The command, and the line of a run ----------------------------------------------------------


@pytest.fixture
def here(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes the command and runs examine the simulated machine."""
    machine.compile_driver()
    monkeypatch.setattr(doctor, "collect_facts", machine.collect)
    monkeypatch.setattr(missing_gpus, "collect_facts", machine.collect)
    monkeypatch.setattr(
        missing_gpus, "read_hardware", functools.partial(read_hardware, machine.root)
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return machine


def test_the_command_prints_a_line_and_an_exit_code(
    here: Machine, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == 0
    assert capfd.readouterr().out.startswith("nothing to report: 2 GPUs")
    remove_compiler(here)
    assert main(["doctor"]) == 0
    assert capfd.readouterr().out.startswith("warning: XLA cannot compile")
    install_cpu_build(here)
    assert main(["doctor"]) == 1
    out, err = capfd.readouterr()
    assert (out.count("\n"), err) == (1, "")
    assert out.startswith("error: tensorflow-cpu 2.21.0 was built without GPU support")


def test_the_command_needs_no_tensorflow(tmp_path: Path) -> None:
    """It runs in any folder, and imports only what the command line imports."""
    code = (
        "import sys; from ctl_core.__main__ import main; code = main(['doctor']); "
        "sys.exit(code or 'tensorflow' in sys.modules)"
    )
    variables = {"PYTHONPATH": str(Path(ctl_core.__file__).parents[1]), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=variables, capture_output=True, text=True
    )
    if not read_hardware().has_nvidia_gpu:
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("no NVIDIA GPU was found: tensorflow")
    assert done.stderr == ""


def test_deep_reports_a_gpu_that_cannot_train(
    here: Machine, capfd: pytest.CaptureFixture[str]
) -> None:
    """TensorFlow does not find the simulated GPU, so the trial fails."""
    here.variables["CUDA_VISIBLE_DEVICES"] = "1"
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("this machine has a GPU")
    assert main(["doctor", "--deep"]) == 1
    (trial,) = capfd.readouterr().out.splitlines()
    assert trial.startswith("error: GPU 1: exit code 1: ")
    assert trial.endswith("TensorFlow finds no GPU")


@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_trial_trains(is_compiled: bool) -> None:
    assert train_convolution("CPU:0", is_compiled) > 0


def test_the_reason_of_a_failed_trial_has_the_warnings_before_it() -> None:
    output = (
        "2026-01-01 10:00:00.0: I tensorflow/a.cc:1] not this\n"
        "2026-01-01 10:00:00.1: W tensorflow/b.cc:2] Cannot dlopen some GPU libraries.\n"
        "W0000 00:00:1753232013.685876   24341 gpu_device.cc:2431] not built with kernels\n"
        "LLVM ERROR: PTX version 8.5 does not support target 'sm_120'\n"
    )
    assert doctor._find_reason(output) == (
        "Cannot dlopen some GPU libraries.; not built with kernels; LLVM ERROR: PTX version 8.5 "
        "does not support target 'sm_120'"
    )


LINE = "warning: no GPU is used: "


def test_a_run_says_why_it_finds_no_gpu(
    here: Machine,
    train: Train,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once, at its start; not if the GPUs are hidden on purpose."""
    install_cpu_build(here)
    train(make_hooks(), steps=2, run_name="a")
    out = capfd.readouterr().out
    assert out.count(LINE) == 1
    assert f"{LINE}tensorflow-cpu 2.21.0 was built without GPU support" in out.splitlines()[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    train(make_hooks(), steps=2, run_name="b")
    assert LINE not in capfd.readouterr().out


@pytest.mark.usefixtures("here")
def test_a_run_on_a_machine_that_looks_healthy_names_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda _: [])
    explanation = missing_gpus.explain_missing_gpus(ctl_core.Config(steps=1))
    assert explanation is not None
    assert "the driver reports 2 GPUs (NVIDIA T), but TensorFlow finds none" in explanation
    assert "doctor --deep" in explanation
    several = ctl_core.Config(steps=1, virtual_devices=2)
    assert missing_gpus.explain_missing_gpus(several) is None
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda _: ["GPU:0"])
    assert missing_gpus.explain_missing_gpus(ctl_core.Config(steps=1)) is None


# ---- The page ------------------------------------------------------------------------------------


def list_messages() -> list[str]:
    """Returns the text of each finding in the source of the checks, with … for each value."""
    messages = []
    for node in ast.walk(ast.parse(Path(checks.__file__).read_text("utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Finding":
            text = node.args[0]
            parts = text.values if isinstance(text, ast.JoinedStr) else [text]
            messages.append(
                "".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in parts)
            )
    return messages


def test_the_page_explains_each_line() -> None:
    """Each row of the page quotes a line of the doctor, and each line has a row."""
    page = Path(ctl_core.__file__).parents[1] / "docs" / "gpu-not-found.md"
    _, _, table = page.read_text("utf-8").partition("\n## What the lines mean\n")
    rows = re.findall(r"^`([^`]+)` \| .+", table.partition("\n## ")[0], re.MULTILINE)
    messages = list_messages()
    assert len(messages) > 25
    assert [row for row in rows if not any(row in message for message in messages)] == []
    assert [m for m in messages if not any(row in m for row in rows)] == []

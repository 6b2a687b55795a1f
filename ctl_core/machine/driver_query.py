"""Asks the NVIDIA driver about its GPUs, and prints the answers as JSON.

``driver.py`` runs this file in a child process, because a broken driver may crash the process or
never return. The file imports only the standard library, so that the child process starts quickly.
"""

import ctypes
import json
from typing import Any

# Names of the attributes of a device in CUDA's driver API.
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76


def query() -> dict[str, Any]:
    """Returns the fields of ``DriverAnswer`` whose values are known."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"problem": str(error)}
    answer: dict[str, Any] = {"library": find_loaded_library()}
    version = ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(version)) == 0:
        answer["cuda"] = [version.value // 1000, version.value % 1000 // 10]
    answer["error"] = cuda.cuInit(0)
    if answer["error"] == 0:
        answer["gpus"] = list_gpus(cuda)
    return answer


def find_loaded_library() -> str:
    """Returns the path of the ``libcuda.so.1`` that this process has loaded, without links."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if "libcuda.so" in path:
                return f"/{path}"
    return ""


def list_gpus(cuda: ctypes.CDLL) -> list[Any]:
    """Returns the name and the compute capability of each GPU."""
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    gpus = []
    for index in range(count.value):
        device = ctypes.c_int()
        cuda.cuDeviceGet(ctypes.byref(device), index)
        name = ctypes.create_string_buffer(100)
        cuda.cuDeviceGetName(name, len(name), device)
        capability = []
        for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
            number = ctypes.c_int()
            cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
            capability.append(number.value)
        gpus.append([name.value.decode(errors="replace"), capability])
    return gpus


if __name__ == "__main__":
    print(json.dumps(query()))

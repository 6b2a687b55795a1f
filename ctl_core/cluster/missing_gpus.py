"""Explains in one line why a run trains on the CPU of a machine that has NVIDIA GPUs."""

import os

import tensorflow as tf

from ctl_core.machine.checks import describe_gpus, diagnose
from ctl_core.machine.facts import collect_facts, hides_gpus_on_purpose, read_hardware
from ctl_core.run.settings import Config


def explain_missing_gpus(config: Config) -> str | None:
    """Returns why TensorFlow finds no GPU; None if it finds one, or if the run wants none.

    A machine that shows no sign of an NVIDIA GPU is asked nothing further, which takes
    milliseconds.
    """
    wants_none = config.virtual_devices > 1 or hides_gpus_on_purpose(os.environ)
    if wants_none or tf.config.list_physical_devices("GPU"):
        return None
    if not read_hardware().has_nvidia_gpu:
        return None
    facts = collect_facts()
    for finding in diagnose(facts):
        if finding.is_blocking:
            return f"no GPU is used: {finding.text}"
    return (
        f"no GPU is used: the driver reports {describe_gpus(facts.driver.gpus)}, but TensorFlow "
        "finds none; for its messages: python -m ctl_core doctor --deep"
    )

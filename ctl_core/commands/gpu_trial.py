"""Trains a convolution on one device: a child process of ``doctor --deep``.

The child process sees only one GPU. If TensorFlow, XLA or the driver end the process, ``doctor``
reports it and tries the next GPU.
"""

import math
import sys
import time

import keras
import tensorflow as tf

_STEPS = 3


def train_convolution(device: str, is_compiled: bool) -> float:
    """Trains a small convolution for some steps.

    Args:
        device: the device, such as ``GPU:0``
        is_compiled: whether XLA compiles the steps

    Returns:
        How long the steps have taken, the first one with its compilation (seconds).

    Raises:
        ValueError: the loss is not finite.
    """
    started = time.monotonic()
    with tf.device(device):
        images = tf.random.stateless_uniform([4, 16, 16, 3], seed=[0, 1])
        convolution = keras.layers.Conv2D(8, 3, activation="relu")
        convolution.build(images.shape)
        variables = convolution.trainable_variables
        optimizer = keras.optimizers.Nadam()
        optimizer.build(variables)

        @tf.function(jit_compile=is_compiled)
        def take_step() -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(convolution(images))
            optimizer.apply(tape.gradient(loss, variables), variables)
            return loss

        losses = [float(take_step()) for _ in range(_STEPS)]
    if not all(map(math.isfinite, losses)):
        raise ValueError(f"the losses of {_STEPS} steps are {losses}")
    return time.monotonic() - started


def main() -> int:
    """Trains on the GPU that this process sees, and prints how long that took."""
    if not tf.config.list_physical_devices("GPU"):
        print("TensorFlow finds no GPU", file=sys.stderr)
        return 1
    seconds = train_convolution("GPU:0", is_compiled=False)
    compiled_seconds = train_convolution("GPU:0", is_compiled=True)
    print(f"trains ({seconds:.1f} s), and trains compiled by XLA ({compiled_seconds:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())

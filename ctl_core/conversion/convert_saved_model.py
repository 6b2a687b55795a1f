"""Converts a SavedModel to LiteRT; also a program, because the converter may crash.

For int8, the converter runs the model on examples in a runtime of its own, which ends the process
for some models, for example with an LSTM. ``litert.py`` therefore starts this file as ``python
convert_saved_model.py FOLDER int8``: with the examples in ``FOLDER/examples.npz``, and the result
in ``FOLDER/model.tflite``. The program does not import the engine.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tensorflow as tf

SIGNATURE = "serving_default"
EXAMPLES = "examples.npz"
RESULT = "model.tflite"


def convert(folder: Path, quantize: str | None) -> bytes:
    """Returns the content of a LiteRT file that needs no Flex ops.

    Args:
        folder: the folder of the SavedModel
        quantize: ``float16`` for weights of float16; ``int8`` for weights and, where LiteRT has
            such ops, values of int8; None for float32

    Raises:
        Exception: LiteRT lacks an op; the class of most errors is private.
    """
    converter = tf.lite.TFLiteConverter.from_saved_model(str(folder), signature_keys=[SIGNATURE])
    # With this option, files contain variables without values in place of the weights.
    converter.experimental_enable_resource_variables = False
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS]
    if quantize is not None:
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if quantize == "float16":
        converter.target_spec.supported_types = [tf.float16]
    if quantize == "int8":
        converter.representative_dataset = lambda: _read_examples(folder / EXAMPLES)
    return converter.convert()


def _read_examples(path: Path) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yields the inputs for each example alone, as the converter expects them."""
    arrays = {name[1:]: array for name, array in np.load(path).items()}
    for row in range(min(map(len, arrays.values()))):
        yield SIGNATURE, {name: array[row : row + 1] for name, array in arrays.items()}


def main(folder: Path, quantize: str) -> str | None:
    """Writes the result; returns the message of the error if the conversion fails."""
    try:
        content = convert(folder, quantize)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    (folder / RESULT).write_bytes(content)
    return None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))

"""Exports that are one file: Keras' own format, TensorFlow Lite and ONNX."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from ctl_core.checks.returned import kind_of
from ctl_core.errors import SetupError, brief
from ctl_core.nested import any_number, input_names, structured
from ctl_core.serving import Serving
from ctl_core.tools.export import dense_outputs, save_model

# The version of ONNX' operators that is asked for; runtimes know older ones too.
OPSET = 18
_OTHER = "take savedmodel, which holds any model"


def check_format(serving: Serving, kind: str, before: str) -> None:
    """Refuses a format that cannot hold a model, as far as that shows before it is tried.

    Args:
        serving: the model
        kind: keras, tflite or onnx
        before: the hook that makes the model's input

    Raises:
        SetupError: it cannot.
    """
    if kind == "onnx":
        _tf2onnx()
    if kind != "keras":
        return
    if not isinstance(serving.model, keras.Model):
        raise SetupError(
            f"format: keras holds Keras models, and {serving.hook} returned "
            f"{kind_of(serving.model)}; {_OTHER}."
        )
    if not serving.plain:
        raise SetupError(
            f"format: keras holds the model alone, without {before}, which changes what a client "
            "sends; put that into layers of the model, or take savedmodel."
        )
    if foreign := _foreign(serving.model):
        raise SetupError(
            f"format: keras cannot hold {foreign}, whose code is not Keras' own, in the model of "
            f"{serving.hook}; {_OTHER}."
        )


def _foreign(model: keras.Model) -> str | None:
    """Returns the name of a class or function in a model that Keras alone cannot make again."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of functions without a name, which are found below
            todo: list[Any] = [keras.saving.serialize_keras_object(model)]
    except Exception as error:
        return f"a layer ({brief(error, 120)})"
    while todo:
        part = todo.pop()
        if isinstance(part, list | tuple):
            todo += part
        elif isinstance(part, dict):
            todo += part.values()
            kind, module = part.get("class_name"), part.get("module")
            if kind == "__lambda__" or (kind == "function" and module == "builtins"):
                return "a function, such as that of a Lambda layer"
            if kind is not None and isinstance(module, str) and not _of_libraries(module):
                return f"{kind} of {module}"
    return None


def _of_libraries(module: str) -> bool:
    return module.split(".")[0] in ("keras", "builtins", "numpy", "tensorflow")


def save_keras(serving: Serving, path: Path) -> None:
    """Writes a .keras file, and reads it back as one who has only Keras would.

    Raises:
        SetupError: Keras cannot.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        file = Path(folder, "model.keras")
        try:
            with warnings.catch_warnings(), keras.saving.CustomObjectScope({}):
                warnings.simplefilter("ignore")
                serving.model.save(file)
                keras.saving.load_model(file, compile=False)
        except OSError:
            raise
        except Exception as error:
            raise _cannot("keras", serving, brief(error, 200)) from error
        file.replace(path)


def save_tflite(serving: Serving, path: Path) -> None:
    """Writes a TensorFlow Lite file with the signature ``serving_default``.

    Raises:
        SetupError: an op of the model is none of TensorFlow Lite's.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        save_model(serving, Path(folder))
        converter = tf.lite.TFLiteConverter.from_saved_model(
            folder, signature_keys=["serving_default"]
        )
        try:
            with _without_stderr():  # the exception says the same
                content = converter.convert()
        except Exception as error:  # its class is not public
            ops = re.findall(r"(?:TF Select|Custom) ops: ([\w, ]+)", str(error))
            why = f"it has no {', '.join(sorted(set(ops)))}" if ops else brief(error, 200)
            raise _cannot("tflite", serving, why) from error
    path.write_bytes(content)


def save_onnx(serving: Serving, path: Path) -> None:
    """Writes an ONNX file, of which inputs and outputs are called as in ``serving_default``.

    Raises:
        SetupError: an op of the model has none in ONNX that it could become.
    """
    convert, onnx = _tf2onnx()
    names = input_names(serving.input_spec)

    # One argument for each input: those of a dict would be called otherwise.
    def by_place(*parts: Any) -> dict[str, tf.Tensor]:
        inputs = structured(serving.input_spec, dict(zip(names, parts, strict=True)))
        return dense_outputs(serving.traced(inputs))

    specs = [any_number(part, name) for name, part in names.items()]
    function = tf.function(by_place, autograph=False, input_signature=specs)
    try:
        with _quiet("tf2onnx"):
            model, _ = convert.from_function(
                function,
                input_signature=specs,
                opset=OPSET,
                custom_op_handlers={"Erfc": (_erfc, [])},
            )
        onnx.checker.check_model(model)
    except Exception as error:
        raise _cannot("onnx", serving, brief(error, 200)) from error
    path.write_bytes(model.SerializeToString())


def _erfc(context: Any, node: Any, name: str, _: Any) -> None:
    """Writes 1 - erf(x), for an op of ``gelu`` that tf2onnx does not know."""
    kind, shape = context.get_dtype(node.output[0]), context.get_shape(node.output[0])
    values, outputs = list(node.input), list(node.output)
    context.remove_node(node.name)
    one = context.make_const(f"{name}_one", tf.as_dtype("float32").as_numpy_dtype(1))
    erf = context.make_node("Erf", values, shapes=[shape], dtypes=[kind])
    context.make_node(
        "Sub",
        [one.output[0], erf.output[0]],
        name=name,
        outputs=outputs,
        shapes=[shape],
        dtypes=[kind],
    )


def _tf2onnx() -> tuple[Any, Any]:
    try:
        return importlib.import_module("tf2onnx.convert"), importlib.import_module("onnx")
    except ImportError as error:
        raise SetupError(
            f"format: onnx needs tf2onnx, which cannot be imported: {brief(error, 100)}; "
            f"{sys.executable} -m pip install tf2onnx"
        ) from error


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Within, a library's logger says nothing, nor does it print."""
    logger = logging.getLogger(name)
    before = logger.disabled
    others = [
        other
        for key in logging.root.manager.loggerDict
        if key.startswith(f"{name}.")
        for other in [logging.getLogger(key)]
        if not other.disabled
    ]
    try:
        for one in (logger, *others):
            one.disabled = True
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.disabled = before
        for one in others:
            one.disabled = False


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Within, nothing is printed to standard error, by C++ neither."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


def _cannot(kind: str, serving: Serving, why: str) -> SetupError:
    return SetupError(f"format: {kind} cannot hold the model of {serving.hook}: {why}; {_OTHER}.")


WRITE: dict[str, Callable[[Serving, Path], None]] = {
    "keras": save_keras,
    "tflite": save_tflite,
    "onnx": save_onnx,
}

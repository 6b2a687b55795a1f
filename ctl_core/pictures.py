"""``ctl_core.image``: pictures of hooks, for TensorBoard and the trackers of the run."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf


def image(step: int, name: str, picture: Any) -> None:
    """For host hooks: writes a picture, or several, to TensorBoard and the trackers.

    It is ``tf.summary.image``, whose pictures trackers get wherever a hook writes them, without
    its batches: a picture may come alone, and grey.

    Args:
        step: the step it belongs to
        name: of the picture, such as ``samples``
        picture: of shape [height, width], [height, width, channels] or [pictures, height, width,
            channels], with 1, 3 or 4 channels; uint8, or floats from 0 to 1

    Raises:
        ValueError: it has another shape or type.
    """
    pixels = np.asarray(picture)
    if pixels.ndim == 2:
        pixels = pixels[:, :, np.newaxis]
    if pixels.ndim == 3:
        pixels = pixels[np.newaxis]
    floats = np.issubdtype(pixels.dtype, np.floating)
    if pixels.ndim != 4 or pixels.shape[-1] not in (1, 3, 4) or 0 in pixels.shape:
        raise ValueError(
            f"image {name!r}: expected [height, width], [height, width, channels] or [pictures, "
            f"height, width, channels] with 1, 3 or 4 channels, got shape "
            f"{list(np.shape(picture))}"
        )
    if not floats and pixels.dtype != np.uint8:
        raise ValueError(
            f"image {name!r}: expected uint8, or floats from 0 to 1, got {pixels.dtype.name}"
        )
    pixels = pixels.astype(np.float32) if floats else pixels  # NaN is black
    tf.summary.image(name, np.nan_to_num(pixels), step=step, max_outputs=len(pixels))

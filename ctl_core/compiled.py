"""Compilation with XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ctl_core.compat import GraphWriter


def compiled(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Compiles with XLA what one replica does with a batch.

    A function of its own for each replica and each graph: a cached trace of another replica would
    hold that replica's variables.
    """

    def no_summaries() -> None:
        raise ValueError(
            "tf.summary in a step that jit_compile compiles; write it in update_pre or a host "
            "hook, or leave out jit_compile"
        )

    def on_replica(batch: Any) -> Any:
        @tf.function(jit_compile=True, autograph=False)
        def on_device(batch: Any) -> Any:
            with GraphWriter(no_summaries).as_default():
                return function(batch)

        return on_device(batch)

    return on_replica

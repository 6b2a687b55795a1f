"""What the small workloads take on JAX: Keras' ``fit`` on that backend, and a scan as the limit.

``python -m benchmarks.jax_peers ROUNDS FILE QUICK WORKLOAD...`` writes what it measures as JSON, a
line for each result; Keras has one backend in a process, so that this is one of its own. The scan
is the step in ``jax.lax.scan`` under ``jit``, with all batches in memory already.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

from benchmarks.pace import CHECKED, Pace, timed
from benchmarks.report import JAX_FIT, JAX_SCAN, Timing
from benchmarks.workloads import LEARNING_RATE, WORKLOADS, Workload, losses

# Of two loops with the same operations, which are fused otherwise.
TOLERANCE = 1e-3


def fit(work: Workload, pace: Pace) -> None:
    """Keras ``fit`` without its progress bar, compiled a step at a time, as is its default."""
    optimizer = work.create_opt(LEARNING_RATE)
    optimizer.global_clipnorm = work.clip
    model = work.create_model()
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    pace.weights = model.get_weights

    class Stops(keras.callbacks.Callback):
        """Times epochs, each of which is a segment."""

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            pace.stop()

    quiet = {"callbacks": [Stops()], "verbose": 0, "shuffle": False}
    model.fit(work.endless(), steps_per_epoch=CHECKED, **quiet)
    model.fit(work.endless(), steps_per_epoch=pace.segment, epochs=2**40, **quiet)


def scan(work: Workload, pace: Pace) -> None:
    """Many steps in one call of a function that JAX has compiled."""
    import jax
    import jax.numpy as jnp

    model, optimizer = work.create_model(), work.create_opt(LEARNING_RATE)
    optimizer.build(model.trainable_variables)
    batches = list(work.dataset(work.batch_size).as_numpy_iterator())
    inputs, labels = (jnp.stack(parts) for parts in zip(*batches, strict=True))

    def step(carry: Any, index: Any) -> Any:
        weights, others, optimizers = carry

        def mean_loss(weights: Any) -> Any:
            logits, after = model.stateless_call(weights, others, inputs[index], training=True)
            return jnp.mean(losses(labels[index], logits)), after

        (_, after), gradients = jax.value_and_grad(mean_loss, has_aux=True)(weights)
        if work.clip is not None:
            norm = jnp.sqrt(sum(jnp.sum(gradient**2) for gradient in gradients))
            gradients = [g * work.clip / jnp.maximum(norm, work.clip) for g in gradients]
        weights, optimizers = optimizer.stateless_apply(optimizers, gradients, weights)
        return (weights, after, optimizers), None

    run = jax.jit(lambda carry, indices: jax.lax.scan(step, carry, indices)[0])
    variables = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    carry: Any = tuple([variable.value for variable in several] for several in variables)
    pace.weights = lambda: [np.asarray(weight) for weight in carry[0]]
    taken = 0
    while True:
        last = CHECKED if taken == 0 else taken - taken % pace.segment + pace.segment
        carry = run(carry, jnp.arange(taken, last) % len(batches))
        jax.block_until_ready(carry)
        taken = last
        pace.stop()


def main(rounds: int, file: Path, quick: bool, names: list[str]) -> None:
    """Times both on each workload, after a check that their weights are the same."""
    with file.open("a", encoding="utf-8") as out:
        for name in names:
            work = WORKLOADS[name]()
            if quick:
                work = dataclasses.replace(work, segment=CHECKED, compiled_segment=0)
            loops = {JAX_FIT: fit, JAX_SCAN: scan}
            paces = {
                peer: Pace(functools.partial(loop, work), work.segment_of(peer == JAX_SCAN))
                for peer, loop in loops.items()
            }
            for pace in paces.values():
                pace.advance()
            found = [pace.weights() for pace in paces.values() if pace.weights is not None]
            for one, other in zip(*found, strict=True):
                np.testing.assert_allclose(one, other, TOLERANCE, 1e-5, err_msg=name)
            # The first takes each to the end of a segment; whole ones are compiled anew.
            timed(paces, 2)
            for peer, seconds in timed(paces, rounds).items():
                timing = Timing(name, 1, 50, peer, seconds)
                print(json.dumps(dataclasses.asdict(timing)), file=out, flush=True)
            for pace in paces.values():
                pace.end()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "quick", sys.argv[4:])
    os._exit(0)

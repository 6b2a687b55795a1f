"""Graph functions that are traced once, and called on each device with the device's variables.

A function that was traced on one device has captured the variables of that device. Another device
calls the same function with its own variables in their place. It is not inlined, so that the graph
of a step contains one call for each device instead of a copy of the model.

Everything that differs between devices has to be an argument: the rows, the index of the replica,
the states of random generators. A function that cannot be shared is traced for each device:

- Replicas exchange values in it, which is impossible inside a function.
- An op in it draws random numbers from a seed of its own: all devices would draw the same numbers.
- It uses an object that exists once and that is not only read as a variable, such as a lookup
  table. The devices would wait for each other.
- It calls a ``tf.py_function``, whose calls TensorFlow does not tell apart in the backward pass.
- It reads a variable of float8, which TensorFlow cannot pass to a condition inside a function.
- It writes a summary, or uses a tensor of another graph, for example one that a hook has stored.

A single device traces its functions only once, too, although TensorFlow inlines them: a loop of
steps and a single step, whose values hooks take, are two graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeAlias

import tensorflow as tf

from ctl_core import compat
from ctl_core.cluster.collectives import count_local_replicas
from ctl_core.cluster.replica_contexts import enter_shared_replica, find_local_device
from ctl_core.input.batches import Share
from ctl_core.model.executable import forbid_uncompilable
from ctl_core.numerics.randomness import find_seeded_op
from ctl_core.numerics.reduction import is_float8
from ctl_core.run.errors import NotShareable
from ctl_core.types import Structure

# A function to share. It gets the number of the step and structures of tensors, which may also
# contain Python values, and returns a structure of tensors, and an object that contains no tensors.
Shareable: TypeAlias = Callable[..., tuple[Structure, Any]]

# A function that raises an error if a traced graph is not valid.
Check: TypeAlias = Callable[[tf.Graph], None]


class Trace(NamedTuple):
    """A traced function.

    Attributes:
        function: the graph function
        facts: the object that the function returned besides tensors
        captures: the objects that the function captured: a variable that has a component on each
            device, or a tensor that is the same for all devices
    """

    function: tf.types.experimental.ConcreteFunction
    facts: Any
    captures: list[tf.Variable | tf.Tensor]


class SharedFunction:
    """A function that is traced once for all devices, and for all graphs of a run.

    Attributes:
        obstacle: why the function cannot be shared; "" as long as nothing prevents it
        has_several_devices: whether several devices of this process call the function
    """

    def __init__(
        self,
        function: Shareable,
        strategy: tf.distribute.Strategy,
        compiled: bool = False,
        check: Check | None = None,
        inlined: bool = True,
        waits: bool = False,
    ) -> None:
        """Prepares the function; it is traced when it is first called.

        Args:
            function: the function to share
            strategy: the strategy whose devices call the function
            compiled: whether XLA compiles the function
            check: raises an error if a traced graph is not valid; None if every graph is
            inlined: whether a function that is not shared becomes a part of the graph that calls
                it; otherwise it is always a function of its own
            waits: whether ops wait for the result of the function. A single device then does not
                inline it, because ops would wait only for what an inlined function writes
        """
        self.obstacle = ""
        self._function = function
        self._strategy = strategy
        self._compiled = compiled
        self._check = check
        self._inlined = inlined
        self._waits = waits
        self.has_several_devices = count_local_replicas(strategy) > 1
        self._seed_generator = compat.get_seed_generator()
        self._traces: dict[Any, Trace] = {}

    @property
    def is_shared(self) -> bool:
        """Whether the function is traced once for all devices and graphs."""
        return not self.obstacle

    @property
    def is_inlined(self) -> bool:
        """Whether the function becomes a part of each graph that calls it."""
        return self._inlined and not self.is_shared and not self._compiled

    def __call__(self, step: tf.Tensor, *arguments: Structure) -> tuple[Structure, Any]:
        """Calls the function on a replica; traces it if necessary.

        Args:
            step: the number of the step
            arguments: the other arguments of the function, of the same form as on other replicas

        Raises:
            NotShareable: the function cannot be shared; the message says why.
        """
        if not self.is_shared and self._inlined:
            return self._call_inlined(step, *arguments)
        device = find_local_device(self._strategy)
        replica = hide(tf.distribute.get_replica_context().replica_id_in_sync_group)
        values = (replica, step, *arguments)
        flat = tf.nest.flatten(values)
        described = tuple(map(_describe, flat))
        key: tuple[Any, ...] = (described, repr(tf.nest.map_structure(lambda _: 0, values)))
        if not self.is_shared:  # each device of each graph has its own function
            key = (*key, device, tf.compat.v1.get_default_graph())
        if key not in self._traces:
            self._traces[key] = self._trace(values, described)
        trace = self._traces[key]
        captures = [self._find_capture(capture, device) for capture in trace.captures]
        tensors = [value for value in flat if tf.is_tensor(value)]
        flat_tensors = tf.nest.flatten(tensors, expand_composites=True)
        result = compat.call_with_captures(trace.function, flat_tensors, captures)
        return result, trace.facts

    def _call_inlined(self, *arguments: Structure) -> tuple[Structure, Any]:
        """Calls the function within the graph of a replica, or as an executable of its own."""
        if self._compiled:
            return call_compiled(self._function, self._check, *arguments)
        return self._function(*arguments)

    def _find_capture(self, capture: tf.Variable | tf.Tensor, device: int) -> tf.Tensor:
        """Returns the tensor that a device passes for a captured object."""
        if not isinstance(capture, tf.Variable):
            return capture
        handle: tf.Tensor = self._strategy.experimental_local_results(capture)[device].handle
        return handle

    def _trace(self, values: Structure, described: Sequence[Any]) -> Trace:
        """Traces the function.

        Args:
            values: the index of the replica, the number of the step, and the other arguments
            described: for each of them, its type if it is a tensor, otherwise the value itself
        """
        facts: list[Any] = []

        def traced(*tensors: tf.Tensor) -> Structure:
            remaining = iter(tensors)
            filled = [
                next(remaining) if isinstance(entry, tf.TypeSpec) else entry for entry in described
            ]
            replica, step, *arguments = tf.nest.pack_sequence_as(values, filled)
            with self._enter_trace(replica, step):
                result, returned = self._function(step, *arguments)
            facts.append(returned)
            return result

        specs = [entry for entry in described if isinstance(entry, tf.TypeSpec)]
        options: dict[str, Any] = {"experimental_attributes": {"_noinline": True}}
        if self._inlined and not self._waits and not self.has_several_devices:
            options = {}  # TensorFlow inlines the function
        if self._compiled:
            options = {"jit_compile": True}
        traceable = tf.function(traced, autograph=False, **options)
        xla = compat.enter_xla() if self._compiled else contextlib.nullcontext()
        # Ops run on the device of the call.
        with self._explain_refusal(), tf.device(None), xla:
            function = traceable.get_concrete_function(*specs)
        if self._check is not None:
            self._check(function.graph)
        captures: list[tf.Variable | tf.Tensor] = [*compat.list_captured_inputs(function)]
        if self.is_shared:
            captures = list_captures(function, self.has_several_devices)
        return Trace(function, facts[-1], captures)

    @contextlib.contextmanager
    def _explain_refusal(self) -> Iterator[None]:
        """Raises ``NotShareable`` if ``_refuse`` was called inside the context.

        Code in between may have caught the error of ``_refuse``, or raised another one.
        """
        obstacle_before = self.obstacle
        try:
            yield
        except Exception as error:
            if self.obstacle != obstacle_before:
                raise NotShareable(self.obstacle) from error
            raise
        if self.obstacle != obstacle_before:
            raise NotShareable(self.obstacle)

    def _refuse(self, obstacle: str) -> NoReturn:
        """Raises an error while the function is traced, because it cannot be shared."""
        self.obstacle = obstacle
        raise NotShareable(obstacle)

    @contextlib.contextmanager
    def _enter_trace(self, replica: tf.Tensor, step: tf.Tensor) -> Iterator[None]:
        """Enters the contexts in which the function is traced.

        Args:
            replica: the index of the replica that calls the function
            step: the number of the step
        """
        with contextlib.ExitStack() as contexts:
            contexts.enter_context(compat.run_replica(self._seed_generator))
            if self.is_shared:
                if self._strategy.num_replicas_in_sync > 1:
                    refuse_exchange = partial(self._refuse, "replicas exchange values in it")
                    contexts.enter_context(enter_shared_replica(replica, refuse_exchange))
                contexts.enter_context(compat.mute_other_summaries(step))
                refuse_summary = partial(self._refuse, "it writes a summary")
                contexts.enter_context(compat.GraphWriter(refuse_summary).as_default(step))
            if self._compiled:
                contexts.enter_context(forbid_uncompilable())
            yield

    def run_again_if_not_shareable(self, run: Callable[[], Any]) -> Any:
        """Calls a function that calls this one on all devices, and returns its result.

        Calls it again if this function turns out not to be shareable.
        """
        try:
            return run()
        except NotShareable as error:
            self.obstacle = str(error)
        return run()


def call_compiled(
    function: Shareable, check: Check | None, *arguments: Structure
) -> tuple[Structure, Any]:
    """Calls a function as an XLA executable of the graph that calls it.

    Args:
        function: the function
        check: raises an error if the traced graph is not valid; None if every graph is
        arguments: the arguments of the function
    """
    facts: list[Any] = []

    # A function that is defined anew has no trace that uses the variables of another replica.
    @tf.function(jit_compile=True, autograph=False)
    def compiled(*arguments: Structure) -> Structure:
        result, returned = function(*arguments)
        facts.append(returned)
        return result

    with forbid_uncompilable():
        if check is not None:
            check(compiled.get_concrete_function(*arguments).graph)
        return compiled(*arguments), facts[-1]


def _describe(value: Any) -> Any:
    """Returns the type of a tensor, without its name, or any other value unchanged."""
    if isinstance(value, tf.Tensor):
        return tf.TensorSpec(value.shape, value.dtype)
    if tf.is_tensor(value):
        return tf.type_spec_from_value(value)
    return value


def list_captures(
    function: tf.types.experimental.ConcreteFunction, has_several_devices: bool
) -> list[tf.Variable | tf.Tensor]:
    """Returns the objects that a function has captured, see ``Trace``.

    Args:
        function: the function
        has_several_devices: whether several devices call the function

    Raises:
        NotShareable: the function cannot be shared.
    """
    graph = function.graph
    operations = list(compat.add_called_ops(graph.get_operations()))
    obstacle = find_obstacle(operations, has_several_devices)
    if obstacle:
        raise NotShareable(obstacle)
    written = set(map(id, compat.find_written_resources(graph)))
    captures: list[tf.Variable | tf.Tensor] = []
    for tensor in compat.list_captured_inputs(function):
        variable = compat.find_distributed_variable(tensor)
        if variable is None and not hasattr(tensor, "numpy"):
            raise NotShareable(f"it uses {tensor.name}, a tensor of another graph")
        if variable is None and id(tensor) in written and has_several_devices:
            raise NotShareable("it uses an object that exists once for all devices")
        if variable is not None and is_float8(variable.dtype):
            raise NotShareable("it reads a variable of float8")
        captures.append(tensor if variable is None else variable)
    return captures


def find_obstacle(operations: Sequence[tf.Operation], has_several_devices: bool) -> str:
    """Returns why no shared function can contain some ops; "" if one can.

    Args:
        operations: the ops
        has_several_devices: whether several devices call the function
    """
    op = find_seeded_op(operations)
    if op is not None:
        return f"{op.type} draws random numbers from a seed of its own"
    # TensorFlow records the calls of a py_function by its token, for the backward pass.
    if has_several_devices and any(op.type == "EagerPyFunc" for op in operations):
        return "it calls a tf.py_function"
    return ""


def hide(value: int | tf.Tensor) -> tf.Tensor:
    """Returns a tensor whose value TensorFlow does not know before the graph runs.

    TensorFlow would otherwise create another version of a function for each constant argument. The
    versions could then round differently.
    """
    tensor = tf.convert_to_tensor(value)
    return tf.compat.v1.placeholder_with_default(tensor, tensor.shape)


def hide_numbers(function: SharedFunction, share: Share) -> Share:
    """Returns the share that a replica passes to a function that may be shared.

    If several devices call the function, the numbers in the share are no constants; see ``hide``.
    """
    if not (function.is_shared and function.has_several_devices):
        return share

    def hide_if_given(value: tf.Tensor | None) -> tf.Tensor | None:
        return None if value is None else hide(value)

    return share._replace(
        rows=hide_if_given(share.rows),
        present=hide_if_given(share.present),
        together=hide_if_given(share.together),
        leaf=hide(share.leaf),
    )

"""Divides the state of optimizers among the devices of a process (``--shard-optimizer``).

Every variable that is trained has one device as its owner. Only the owner has the slots that
optimizers keep for the variable, such as Adam's moments, and only the owner updates the variable.
Then the other devices copy the new value. So each device keeps only its part of the state, and the
weights are the same as without shards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ctl_core import compat
from ctl_core.cluster.collectives import count_local_replicas
from ctl_core.hooks.hooks import Hook
from ctl_core.hooks.optimizer_groups import OptimizerGroups
from ctl_core.hooks.recording import Recording
from ctl_core.numerics.packing import BUCKET_BYTES, Packing
from ctl_core.numerics.variables import count_elements, name_variable, unwrap
from ctl_core.types import Optimizer, Variable


def choose_owners(sizes: list[int], devices: int) -> list[int]:
    """Returns the index of the device that owns each variable.

    The largest variable is dealt first, and each variable goes to the device that has the fewest
    bytes so far.

    Args:
        sizes: the size of each variable in bytes
        devices: the number of devices
    """
    bytes_of_devices = [0] * devices
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        device = bytes_of_devices.index(min(bytes_of_devices))
        owners[index] = device
        bytes_of_devices[device] += sizes[index]
    return owners


def count_bytes(variable: Variable) -> int:
    """Returns the number of bytes that the elements of a variable take on one device."""
    return count_elements(variable) * tf.as_dtype(variable.dtype).size


def _explain(which: str) -> str:
    """Returns the message for an optimizer whose state cannot be divided.

    Args:
        which: names the optimizer, and says why
    """
    return (
        f"shard_optimizer cannot divide the state {which}; leave out --shard-optimizer, or use "
        "another optimizer."
    )


class Slot(NamedTuple):
    """A variable that an optimizer keeps for a weight, or the average of a weight.

    Attributes:
        variable: the variable
        owner: the index of the only device that has it, among those of this process; None if all
            devices have it
    """

    variable: tf.Variable
    owner: int | None


class Shards:
    """The owners of the variables of a run, and what they own."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        recording: Recording,
        variables: Iterable[Variable],
    ) -> None:
        """Chooses the owners.

        Args:
            strategy: the strategy whose replicas train
            recording: records the variables that are created for an owner
            variables: the variables to train; a variable may occur several times
        """
        self._strategy = strategy
        self._recording = recording
        self._variables = {id(unwrap(variable)): unwrap(variable) for variable in variables}
        sizes = [count_bytes(variable) for variable in self._variables.values()]
        owners = choose_owners(sizes, count_local_replicas(strategy))
        self._owners = dict(zip(self._variables, owners, strict=True))
        self._slots: dict[int, Slot] = {}

    def find_owner(self, variable: Variable) -> int | None:
        """Returns the index of the device that owns a variable; None if all devices have it."""
        return self._owners.get(id(unwrap(variable)))

    def owns(self, variable: Variable, device: int) -> bool:
        """Returns whether a device updates a variable.

        Args:
            variable: the variable
            device: the index of the device among those of this process
        """
        return self.find_owner(variable) in (None, device)

    def find_component(self, variable: Variable) -> tf.Variable:
        """Returns the component of a variable on the device that owns it."""
        components = self._strategy.experimental_local_results(unwrap(variable))
        owner = self.find_owner(variable)
        assert owner is not None
        component: tf.Variable = components[owner]
        return component

    @contextlib.contextmanager
    def place(self, variable: Variable) -> Iterator[None]:
        """Creates slots inside the context on the device that owns ``variable``.

        The names by which they are recorded, and saved, do not depend on the owner. If no device
        owns ``variable``, every device gets the slots.
        """
        owner = self.find_owner(variable)

        def create(make: Callable[..., tf.Variable], **values: Any) -> tf.Variable:
            created = make(**values) if owner is None else self._create_on(owner, values)
            self._slots[id(created)] = Slot(created, owner)
            return created

        with tf.variable_creator_scope(create):
            yield

    def _create_on(self, owner: int, values: dict[str, Any]) -> tf.Variable:
        """Creates a variable on one device only.

        Args:
            owner: the index of the device
            values: the arguments of ``tf.Variable``; those that concern replicas have no effect
        """
        chosen = ("initial_value", "trainable", "name", "dtype", "shape")
        options: dict[str, Any] = {name: values.get(name) for name in chosen}
        device = self._strategy.extended.worker_devices[owner]
        with compat.leave_creator_scopes(), tf.device(device):
            created = tf.Variable(**options)
        self._recording.add(created)
        return created

    def place_slots(self) -> contextlib.AbstractContextManager[None]:
        """Makes the optimizers that are built inside the context create slots on the owners."""
        return compat.place_slots(self.place)

    def check_optimizer(self, create_opt: Hook, optimizer: Optimizer) -> None:
        """Rejects an optimizer whose state cannot be divided.

        Args:
            create_opt: the hook that created the optimizer
            optimizer: an optimizer that has created its variables; it may consist of others

        Raises:
            SetupError: it updates variables in a way that does not depend on their owners.
        """
        for inner in getattr(optimizer, "optimizers", ()):
            self.check_optimizer(create_opt, inner)
        reason = self._find_obstacle(optimizer)
        if reason is not None:
            name = getattr(optimizer, "name", None) or type(optimizer).__name__
            raise create_opt.reject(_explain(f"of {name}, {reason}"))

    def _find_obstacle(self, optimizer: Optimizer) -> str | None:
        """Returns why the state of an optimizer cannot be divided, a relative clause; or None."""
        if isinstance(optimizer, OptimizerGroups):
            return None
        if not isinstance(optimizer, keras.Optimizer):
            return "which is not an optimizer of Keras"
        if optimizer.use_ema:
            return "whose use_ema averages all weights on each device (instead, pass --ema)"
        if optimizer.gradient_accumulation_steps:
            return (
                "whose gradient_accumulation_steps keeps all gradients on each device (instead, "
                "pass --accumulate-steps)"
            )
        for variable in map(unwrap, optimizer.variables):
            if variable.shape.rank > 0 and id(variable) not in self._slots:
                return (
                    f"because it does not say to which weight {name_variable(variable)} belongs "
                    "(add_variable_from_reference does)"
                )
        return None

    def check_graph(self, create_opt: Hook, device: int, graph: compat.FunctionGraph) -> None:
        """Rejects an update that changes slots which another device owns.

        Args:
            create_opt: the hook that created the optimizers
            device: the index of the device whose update was traced
            graph: the graph of the update
        """
        of_others = {
            id(slot.variable.handle): slot.variable
            for slot in self._slots.values()
            if slot.owner not in (None, device)
        }
        for handle in compat.find_written_resources(graph):
            if id(handle) in of_others:
                name = name_variable(of_others[id(handle)])
                raise create_opt.reject(
                    _explain(f"of an optimizer that changes {name} outside of update_step")
                )

    def copy_from_owners(self, variables: Iterable[Variable]) -> None:
        """Copies the values of variables from their owners to all other devices of this process.

        Small variables of the same owner are packed, so that one transfer copies many of them.
        """
        owned: dict[int, dict[int, tf.Variable]] = {}
        for variable in map(unwrap, variables):
            owner = self.find_owner(variable)
            if owner is not None:
                owned.setdefault(owner, {})[id(variable)] = variable
        for owner, of_owner in owned.items():
            self._copy(owner, list(of_owner.values()))

    def _copy(self, owner: int, variables: list[tf.Variable]) -> None:
        """Copies the values of variables that have the same owner to all other devices.

        Args:
            owner: the index of the device that owns them
            variables: the variables, each once
        """
        local_results = self._strategy.experimental_local_results
        by_device = list(zip(*map(local_results, variables), strict=True))
        specs = [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables]
        packing = Packing(specs, BUCKET_BYTES)
        devices = self._strategy.extended.worker_devices
        with tf.device(devices[owner]):
            packed = packing.pack([component.read_value() for component in by_device[owner]])
        for index, components in enumerate(by_device):
            if index == owner:
                continue
            with tf.device(devices[index]):
                for component, value in zip(components, packing.unpack(packed), strict=True):
                    component.assign(value)

"""Computes the weights of all shares of a batch before the forward pass.

This is necessary if the backward pass is not linear: the loss is then divided by the weight of the
whole batch before the backward pass. The functions handle all replicas at once.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from functools import partial

import tensorflow as tf

from ctl_core.cluster.collectives import replica_id
from ctl_core.input.batches import Share, ShareWeight, pack_elements, unpack_element
from ctl_core.model.components import StepContext
from ctl_core.model.forward import weigh_share
from ctl_core.model.generator_states import GeneratorStates
from ctl_core.model.replicas import Replicas
from ctl_core.numerics.reduction import sum_over_replicas
from ctl_core.types import Batch, Count, PerReplica

# A function that returns the share of each replica, given the index of a micro-batch.
Deal = Callable[[Count], Share]


class WeighedShares:
    """The shares of a batch with their weights, and with the sum of the weights.

    The weights are added up in the order in which gradients are: first those of the micro-batches
    of a replica, then those of all replicas.
    """

    def __init__(
        self,
        context: StepContext,
        replicas: Replicas,
        generators: GeneratorStates,
        states: tf.Tensor | None,
        deal: Deal,
    ) -> None:
        """Computes the weights.

        Args:
            context: the context of the step, or of a turn within it
            replicas: the replicas that compute the shares
            generators: assigns the states of random generators
            states: the states in this update
            deal: returns the shares of a micro-batch. If each element of the dataset is a share,
                each call draws other elements.
        """
        self._replicas = replicas
        self._deal_again = deal
        self._shape = context.components.shape
        shares = [deal(index) for index in range(self._shape.accumulate_steps)]
        self._single_share = shares[0]
        self._packed: PerReplica | None = None
        if len(shares) > 1 and not self._shape.by_rows:
            self._packed = replicas.run(pack_elements, [share.batch for share in shares])
        weigh = partial(self._weigh, context, generators, states)
        own_weights = [replicas.run(weigh, share) for share in shares]
        self._own_weights: PerReplica = replicas.run(tf.stack, own_weights)
        self._total: PerReplica = replicas.run(self._add_up, own_weights)

    def deal(self, micro_batch: Count) -> Share:
        """Returns the share of each replica, given the index of a micro-batch."""
        if self._shape.accumulate_steps == 1:
            share = self._single_share
        elif self._packed is None:
            share = self._deal_again(micro_batch)
        else:
            batch, leaf = self._replicas.run(partial(self._unpack, micro_batch), self._packed)
            share = Share(batch, leaf=leaf)
        choose = partial(self._choose_weight, micro_batch)
        weight: ShareWeight = self._replicas.run(choose, self._own_weights, self._total)
        return share._replace(weight=weight)

    def _weigh(
        self,
        context: StepContext,
        generators: GeneratorStates,
        states: tf.Tensor | None,
        share: Share,
    ) -> tf.Tensor:
        """Returns the weight of a share. Runs on each replica."""
        generators.assign(states, share.leaf)
        return weigh_share(context, share)

    def _add_up(self, own_weights: list[tf.Tensor]) -> tf.Tensor:
        """Returns the sum of the weights of all shares. Runs on each replica."""
        total = functools.reduce(operator.add, own_weights)
        sum_of_all: tf.Tensor = sum_over_replicas(total, self._shape.replicas)
        return sum_of_all

    def _unpack(self, micro_batch: Count, packed: tf.Tensor) -> tuple[Batch, Count]:
        """Returns the element of a micro-batch, and the index of its leaf. Runs on each replica."""
        element = unpack_element(packed[micro_batch], self._shape.element_spec)
        return element, self._shape.find_leaf(replica_id(), micro_batch)

    def _choose_weight(
        self, micro_batch: Count, own_weights: tf.Tensor, total: tf.Tensor
    ) -> ShareWeight:
        """Returns the weight of the share of a micro-batch. Runs on each replica."""
        return ShareWeight(own_weights[micro_batch], total)

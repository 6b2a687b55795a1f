"""Messages that pages of the documentation show as samples are those that users get."""

import re

import pytest

from tests.golden import ROOT, small
from tests.helpers.project import Cli
from tests.helpers.samples import find_stale_lines, read_samples

DEBUGGING = ROOT / "docs" / "debugging.md"
CHECKING = ROOT / "docs" / "checking.md"

LINEAR = """
def create_model():
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
"""
SUBTRACTS_A_MEAN = """
def input_pre(batch):
    return batch[0] - tf.reduce_mean(batch[0], axis=0)
"""
DIVIDES_BY_ZERO = """
def input_pre(batch):
    zeros = tf.zeros_like(batch[0])
    return zeros / zeros
"""
BECOMES_NAN = """
def loss_pre(output, batch):
    return output * np.nan, batch[1]


def update_pre(gradients):
    return gradients, gradients
"""
KEEPS_A_VALUE = re.findall(r"^```python\n(.*?)^```$", CHECKING.read_text("utf-8"), re.M | re.S)[0]

# The page, the number of its sample, the hooks in addition to those of a small program, the flags.
SAMPLES = {
    "a mean over the share of a replica": (CHECKING, 1, LINEAR + SUBTRACTS_A_MEAN, ["--check"]),
    "a Python value": (CHECKING, 2, KEEPS_A_VALUE, ["--check"]),
    "a loss that is not finite": (DEBUGGING, 0, BECOMES_NAN, []),
    "the op that is NaN": (DEBUGGING, 1, DIVIDES_BY_ZERO, ["--detect-anomaly"]),
    "weights that are not finite": (DEBUGGING, 2, LINEAR + BECOMES_NAN, []),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_are_the_messages_that_users_get(name: str, cli: Cli) -> None:
    page, number, hooks, flags = SAMPLES[name]
    outcome = cli(f"{small.CALLBACKS}\n{hooks}", *flags)
    printed = outcome.out + outcome.err
    assert find_stale_lines(read_samples(page)[number], printed) == [], printed

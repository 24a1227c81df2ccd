"""Which gradients travel together under TensorFlow: a grouping changes no value, so only this can tell it."""

from __future__ import annotations

import tensorflow as tf

from hvd_twobit.tensorflow.plan import groups_of

VARIABLES = [tf.Variable(0.0, name="same") for _ in range(5)]


def together(groups: object) -> list[list[int]]:
    """Positions of the variables of each group, in order of first appearance."""
    found: dict[int, list[int]] = {}
    for position, number in enumerate(groups_of(groups, VARIABLES)):
        found.setdefault(number, []).append(position)
    return list(found.values())


def test_without_groups_every_gradient_travels_alone() -> None:
    assert together(None) == [[0], [1], [2], [3], [4]]


def test_a_number_of_groups_splits_the_gradients_in_order() -> None:
    assert together(2) == [[0, 1, 2], [3, 4]] and together(9) == [[0], [1], [2], [3], [4]]


def test_listed_variables_travel_together_and_the_others_alone() -> None:
    assert together([[VARIABLES[3], VARIABLES[0]], [VARIABLES[4]]]) == [[0, 3], [1], [2], [4]]

"""What a leaf is: a constant of the program, or a value that is still being traced."""

import jax
import numpy as np

from multitower.towers.leaves import Constant, are_traced


class Equal:
    """A function that equals others, and so has no hash."""

    def __eq__(self, other):
        return isinstance(other, Equal)

    __hash__ = None

    def __call__(self, x):
        return x


def test_a_constant_without_a_hash_is_equal_to_itself_alone():
    # The lies: a program that is used for another function; no key for it at all.
    one, other = Equal(), Equal()
    assert Constant.of(one) == Constant.of(one) != Constant.of(other)
    assert hash(Constant.of(one)) == hash(Constant.of(one))


def test_inside_jit_all_is_traced():
    # The lie: arrays with values, beside a function that closes over one without.
    seen = []
    jax.jit(lambda: seen.append(are_traced([np.ones(2)])))()
    assert seen == [True]
    assert not are_traced([np.ones(2)])

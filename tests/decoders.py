"""A tiny decoder's training, for tests that exchange its attention."""

import jax
import jax.numpy as jnp
import numpy as np

TOKENS, WIDTH, HEADS, LENGTH = 11, 16, 2, 12


def batches(steps, seed=0):
    """Periodic sequences, which a decoder learns within a hundred steps."""
    rng = np.random.default_rng(seed)
    period = rng.integers(2, 5, (steps, 4, 1))
    start = rng.integers(0, TOKENS, (steps, 4, 1))
    return jnp.asarray((start + np.arange(LENGTH + 1) % period) % TOKENS)


def losses(parameters, logits_of, steps, rate=0.1):
    """The losses of gradient descent with momentum; ``logits_of(parameters, tokens)``."""

    def loss_of(parameters, tokens):
        logits = logits_of(parameters, tokens[:, :-1])
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)
        return -picked.mean()

    def step(carry, tokens):
        parameters, speed = carry
        loss, grads = jax.value_and_grad(loss_of)(parameters, tokens)
        speed = jax.tree.map(lambda v, g: 0.9 * v - rate * g, speed, grads)
        return (jax.tree.map(jnp.add, parameters, speed), speed), loss

    carry = parameters, jax.tree.map(jnp.zeros_like, parameters)
    return jax.jit(lambda carry, tokens: jax.lax.scan(step, carry, tokens)[1])(carry, batches(steps))


def assert_same_training(one, other):
    """The same losses, of a training that learns."""
    np.testing.assert_allclose(one, other, atol=1e-4)
    assert one[-1] < one[0] / 2

"""A tiny decoder's training, for tests that exchange its attention."""

import jax
import jax.numpy as jnp
import numpy as np

TOKENS, WIDTH, HEADS, LENGTH = 11, 16, 2, 12


def sequences():
    """Eight periodic ones."""
    rng = np.random.default_rng(0)
    period, start = rng.integers(2, 5, (8, 1)), rng.integers(0, TOKENS, (8, 1))
    return jnp.asarray((start + np.arange(LENGTH + 1) % period) % TOKENS)


def losses(parameters, logits_of, steps=100):
    """The losses of gradient descent on all sequences at once, which amplifies no rounding; ``logits_of(parameters, tokens)``."""
    tokens = sequences()

    def loss_of(parameters):
        logits = logits_of(parameters, tokens[:, :-1])
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)
        return -picked.mean()

    def step(parameters, _):
        loss, grads = jax.value_and_grad(loss_of)(parameters)
        return jax.tree.map(lambda x, grad: x - 0.1 * grad, parameters, grads), loss

    return jax.jit(lambda parameters: jax.lax.scan(step, parameters, length=steps)[1])(parameters)


def assert_same_training(one, other):
    """The same losses, of a training that learns."""
    np.testing.assert_allclose(one, other, atol=1e-4)
    assert one[-1] < one[0] / 2

"""Every operation states what a call must do at least."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel import explain, kernel_registry
from ejkernel.lab import workloads

PLAIN = {name: workloads.checks(name)[0] for name in workloads.OPERATIONS}
CALLS = {name: {**jax.eval_shape(lambda w=w: w.cast("float32")), **w.options} for name, w in PLAIN.items()}


def cost(name, arguments):
    return kernel_registry.operation(name).cost(explain(name, **arguments).call)


@pytest.mark.parametrize("name", CALLS)
def test_a_plain_call(name):
    told = cost(name, CALLS[name])
    assert 0 < told.flops <= told.backward_flops or name == "mean_pooling"
    assert 0 < told.bytes <= told.backward_bytes
    arrays = [x for x in jax.tree.leaves(CALLS[name]) if hasattr(x, "shape")]
    read = sum(x.size * x.dtype.itemsize for x in arrays if jnp.issubdtype(x.dtype, jnp.floating))
    assert told.bytes >= read


@pytest.mark.parametrize("name", [name for name in CALLS if name != "grouped_matmul"])
def test_an_empty_batch_costs_no_products(name):
    arguments = dict(CALLS[name])
    for argument in ("query", "key", "value", "inputs", "mask", "context_lens", "block_tables"):
        if argument in arguments:
            shape, dtype = arguments[argument].shape, arguments[argument].dtype
            arguments[argument] = jax.ShapeDtypeStruct((0, *shape[1:]), dtype)
    assert cost(name, arguments).flops == 0

"""The backward: flash attention's kernel, with the mask's blocks as its lists."""

from __future__ import annotations

from typing import Any

from jax import Array

from ejkernel.contracts.params import BwdParams
from ejkernel.kernels._pallas.tpu.blocksparse_attention.backward_parameters import effective
from ejkernel.kernels._pallas.tpu.blocksparse_attention.forward import planned
from ejkernel.kernels._pallas.tpu.flash_attention.gradients import Call
from ejkernel.kernels.common.softmax import sink_gradient, softmax_residuals


def backward(
    arrays: dict[str, Any],
    spec: Any,
    params: BwdParams,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array,
    wanted: frozenset[str],
    *,
    device: Any = None,
    interpret: Any = False,
) -> dict[str, Array]:
    """The wanted gradients, from the residuals ``(out, lse)``."""
    params = effective(arrays, spec, params, device)
    blocks = params.q_blocksize, params.kv_blocksize
    dout, finite_lse, slope, arrays = softmax_residuals(arrays, out, lse, dout, dlse, rows_may_see_nothing=True)
    grads = {}
    if wanted - {"softmax_aux"}:
        masked, kinds, patterns = planned(arrays, spec, *blocks, ("key", "value"))
        call = Call(*blocks, masked, spec, dout, finite_lse, slope, device, interpret)
        grads = call.tensor_gradients(wanted, kinds, patterns)
    if "softmax_aux" in wanted:
        grads["softmax_aux"] = sink_gradient(arrays["softmax_aux"], finite_lse, slope)
    return {name: grads[name] for name in wanted}

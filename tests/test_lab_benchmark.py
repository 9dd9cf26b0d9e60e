"""The lab's benchmark helpers: calls, waiting, time, memory and the categories of kernels."""

import collections
import gzip
import inspect
import json
import os
import subprocess
import sys
import types
import unittest.mock
from enum import Enum, IntEnum

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.errors import InvalidInputError, UnsupportedError
from ejkernel.lab import benchmark, benchmark_latency, benchmark_memory, count_cuda_kernels, memory, profiles, warmup
from ejkernel.lab.profiles import _category
from ejkernel.utils import bursts
from ejkernel.utils.bursts import Places, places

KEYS = ["gemm", "elementwise", "softmax", "layernorm", "memory", "other", "total"]
MIB = 1024**2


class Counter:
    def __init__(self, result=None):
        self.calls, self.result = [], result

    def __call__(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return self.result


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when a test moves it."""
    now = types.SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(bursts, "time", types.SimpleNamespace(perf_counter=lambda: now.seconds, sleep=lambda _: None))
    return now


# --- signatures and arguments ---------------------------------------------------------------------------------------


def test_signatures_are_as_documented():
    for function, defaults in (
        (warmup, {"n_warmup": 10}),
        (benchmark_latency, {"n_warmup": 10, "n_repeat": 100}),
        (benchmark_memory, {"n_warmup": 10, "n_repeat": 100}),
    ):
        parameters = inspect.signature(function).parameters
        assert [*parameters] == ["fn", "args", *defaults, "kwargs"]
        assert {name: parameters[name].default for name in defaults} == defaults
    assert [*inspect.signature(count_cuda_kernels).parameters] == ["prof"]


def test_importing_the_helpers_loads_no_torch():
    code = (
        "import sys; from ejkernel.lab import benchmark_latency, count_cuda_kernels, default_schedule, measure, warmup, "
        "measure_ceilings; benchmark_latency(len, [1], n_repeat=2); "
        "sys.exit(bool({'torch', 'matplotlib', 'pandas', 'psutil', 'pynvml'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_call_is_made_with_the_arguments():
    fn = Counter()
    assert warmup(fn, 1, 2, key=3) is None
    assert fn.calls == [((1, 2), {"key": 3})] * 10
    fn.calls.clear()
    benchmark_latency(fn, 1, key=3, n_warmup=2, n_repeat=5)
    assert fn.calls == [((1,), {"key": 3})] * 7
    fn.calls.clear()
    benchmark_memory(fn, n_warmup=0, n_repeat=np.int64(1))
    assert fn.calls == [((), {})]
    fn.calls.clear()
    warmup(fn, n_warmup=0)
    assert not fn.calls
    benchmark_latency(fn)
    assert len(fn.calls) == 110


@pytest.mark.parametrize("function", [warmup, benchmark_latency, benchmark_memory])
@pytest.mark.parametrize("n_warmup", [-1, 1.5, "3", None, True])
def test_a_bad_warmup_is_refused(function, n_warmup):
    fn = Counter()
    with pytest.raises(InvalidInputError, match=r"n_warmup is .*expected an integer of at least 0"):
        function(fn, n_warmup=n_warmup)
    assert not fn.calls


@pytest.mark.parametrize("function", [benchmark_latency, benchmark_memory])
@pytest.mark.parametrize("n_repeat", [0, -1, 2.0, None, True])
def test_a_bad_repeat_is_refused_before_anything_runs(function, n_repeat):
    fn = Counter()
    with pytest.raises(InvalidInputError, match=r"n_repeat is .*expected an integer of at least 1"):
        function(fn, n_repeat=n_repeat)
    assert not fn.calls


@pytest.mark.parametrize("function", [warmup, benchmark_latency, benchmark_memory])
def test_what_cannot_be_called_is_refused(function):
    with pytest.raises(InvalidInputError, match=r"fn is 3 \(int\); expected a function"):
        function(3)


@pytest.mark.parametrize("function", [warmup, benchmark_latency, benchmark_memory])
@pytest.mark.parametrize(
    ("fails_at", "note"), [(1, "warm-up run 1 of 2"), (2, "warm-up run 2 of 2"), (4, "run 2 of 3")]
)
def test_exceptions_come_through_with_a_note(function, fails_at, note):
    error = KeyError("mine")
    fn = Counter()

    def failing():
        fn()
        if len(fn.calls) == fails_at:
            raise error

    counts = {"n_warmup": 2} | ({} if function is warmup else {"n_repeat": 3})
    if function is warmup and fails_at == 4:
        return function(failing, **counts)
    with pytest.raises(KeyError) as caught:
        function(failing, **counts)
    assert caught.value is error
    assert [note in line for line in error.__notes__] == [True]
    assert len(fn.calls) == fails_at


# --- time -----------------------------------------------------------------------------------------------------------


def test_latency_is_the_mean_of_the_timed_runs(clock):
    durations = iter([100.0, 100.0, 0.001, 0.002, 0.006])  # the first two are warm-up

    def fn():
        clock.seconds += next(durations)

    latency = benchmark_latency(fn, n_warmup=2, n_repeat=3)
    assert isinstance(latency, float)
    assert latency == pytest.approx(3.0)


@pytest.fixture
def waits(monkeypatch):
    log = []
    real = jax.block_until_ready
    monkeypatch.setattr(bursts.jax, "block_until_ready", lambda out: (log.append(out), real(out))[1])
    return log


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"a": [x]}, lambda x: types.MappingProxyType({"a": x})])
def test_each_jax_result_on_a_cpu_is_waited_for(waits, wrap):
    x = jnp.ones(3)
    benchmark_latency(lambda: wrap(x), n_warmup=2, n_repeat=3)
    assert len(waits) == 5
    assert all(any(leaf is x for leaf in jax.tree.leaves(out)) for out in waits)


def test_results_are_waited_for_without_warmup(waits):
    x = jnp.ones(3)
    benchmark_latency(lambda: x, n_warmup=0, n_repeat=3)
    assert len(waits) == 3


def test_arrays_that_are_not_jaxs_own_are_waited_for():
    class Array:
        waited = 0

        def block_until_ready(self):
            self.waited += 1

    array = Array()
    benchmark_latency(lambda: (3, [array]), n_warmup=2, n_repeat=3)
    assert array.waited == 5


def test_a_mix_of_torch_and_jax_waits_for_both(cuda, waits):
    x = jnp.ones(3)
    benchmark_latency(lambda: [x, cuda.Tensor()], n_warmup=1, n_repeat=2)
    assert len(waits) == 3
    assert cuda.log == ["wait cuda:0"] * 3


def test_plain_functions_are_not_waited_for(waits):
    benchmark_latency(lambda: [1, "a", None, np.ones(3)], n_warmup=1, n_repeat=3)
    assert not waits


def test_an_accelerator_is_sent_all_calls_and_waited_for_once(monkeypatch):
    log = []
    place = Places((), (types.SimpleNamespace(platform="gpu", id=0),))
    assert place.queued
    monkeypatch.setattr(benchmark, "places", lambda *trees: place)
    monkeypatch.setattr(benchmark, "time", types.SimpleNamespace(sleep=lambda _: log.append("pause")))
    monkeypatch.setattr(bursts, "wait", lambda out, where: log.append("wait"))
    benchmark_latency(lambda: log.append("call"), n_warmup=1, n_repeat=3)
    assert log == ["pause", "call", "wait", "call", "call", "call", "wait"]


class FakeDevice:
    def __init__(self, type, index=0):
        self.type, self.index = type, index

    def __eq__(self, other):
        return (self.type, self.index) == (other.type, other.index)

    def __hash__(self):
        return hash((self.type, self.index))


@pytest.fixture
def cuda(monkeypatch):
    """A torch whose GPU has an allocator."""
    log = []
    gpu = types.SimpleNamespace(in_use=5 * 1024**3, peak=9 * 1024**3, log=log, started=False)

    class Tensor:
        def __init__(self, device="cuda"):
            self.device = FakeDevice(device)

    def reset(device):
        gpu.peak = gpu.in_use

    torch = types.ModuleType("torch")
    torch.Tensor, torch.device = Tensor, FakeDevice
    torch.nn = types.SimpleNamespace(Module=type("Module", (), {}))
    torch.cuda = types.SimpleNamespace(
        synchronize=lambda device: log.append(f"wait {device.type}:{device.index}"),
        is_initialized=lambda: gpu.started,
        current_device=lambda: 3,
        reset_peak_memory_stats=reset,
        memory_allocated=lambda device: gpu.in_use,
        max_memory_allocated=lambda device: gpu.peak,
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    gpu.Tensor = Tensor
    return gpu


def test_torch_on_a_gpu_is_waited_for_once(cuda, clock):
    def fn():
        cuda.log.append("call")
        clock.seconds += 0.002
        return {"out": cuda.Tensor()}

    assert benchmark_latency(fn, n_warmup=1, n_repeat=3) == pytest.approx(2.0)
    assert cuda.log == ["call", "wait cuda:0", "call", "call", "call", "wait cuda:0"]


def test_torch_on_two_gpus_and_a_hidden_one_are_synchronized(cuda):
    other = cuda.Tensor()
    other.device = FakeDevice("cuda", 1)
    benchmark_latency(lambda x: other, cuda.Tensor(), n_warmup=1, n_repeat=1)
    assert cuda.log[-2:] == ["wait cuda:0", "wait cuda:1"]
    cuda.log.clear()
    cuda.started = True  # nothing to be seen, but CUDA runs
    warmup(lambda: None, n_warmup=1)
    assert cuda.log == ["wait cuda:3"]
    assert places(cuda.Tensor("cpu"), cuda.Tensor("meta"), jnp.ones(1)).torch == ()


# --- memory ---------------------------------------------------------------------------------------------------------


def grown(fn, *args):
    """By how many MiB a run's peak exceeds what is allocated after it."""
    peak, allocated = benchmark_memory(fn, *args, n_warmup=1, n_repeat=2)
    assert isinstance(peak, float)
    assert isinstance(allocated, float)
    assert peak >= allocated > 0
    return (peak - allocated) * 1024


def test_memory_of_a_plain_function():
    assert grown(lambda: 1) < 40
    assert 150 < grown(lambda: bytearray(b"\1") * (200 * MIB)) < 300


def test_memory_of_jax_on_a_cpu():
    result = jax.jit(lambda x: jnp.full(50 * MIB, x))
    assert 150 < grown(result, 2.0) < 300
    temporary = jax.jit(lambda x: (jnp.arange(50 * MIB, dtype=jnp.float32) * x).reshape(-1, 1024) @ jnp.ones(1024))
    assert 150 < grown(temporary, 2.0) < 300
    assert grown(jax.jit(lambda x: x + 1), jnp.ones(8)) < 40


@pytest.mark.torch
def test_memory_of_torch_on_a_cpu():
    torch = pytest.importorskip("torch")
    assert 150 < grown(lambda: torch.ones(50 * MIB) + 1) < 600
    assert grown(lambda: torch.ones(5)) < 40


def test_memory_without_a_highest_mark_is_sampled(monkeypatch):
    monkeypatch.setattr(memory, "_reset_highest_mark", lambda: False)
    settled = iter([100, 300, 100, 900])
    monkeypatch.setattr(memory, "_settled_bytes", lambda: next(settled))
    looked = memory.threading.Event()

    def resident():
        looked.set()
        return 700

    monkeypatch.setattr(memory, "_resident_bytes", resident)
    nowhere = Places((), ())
    assert memory.memory_of(lambda: looked.wait(10), 1, "run", nowhere) == memory.Memory(
        before=100, peak=700, after=300
    )
    assert memory.memory_of(lambda: None, 1, "run", nowhere).peak >= 900  # what is left has been there


def test_memory_of_torch_on_a_gpu(cuda):
    def fn():
        cuda.peak = max(cuda.peak, cuda.in_use + 2 * 1024**3)
        return cuda.Tensor()

    assert benchmark_memory(fn, n_warmup=1, n_repeat=2) == (7.0, 5.0)


class JaxGpu:
    """A device whose highest mark cannot be reset."""

    platform, id = "gpu", 0

    def __init__(self, limit):
        self.in_use, self.peak, self.limit = 100, 100, limit

    def allocate(self, size):
        self.in_use += size
        self.peak = max(self.peak, self.in_use)

    def memory_stats(self):
        return {"bytes_in_use": self.in_use, "peak_bytes_in_use": self.peak, "bytes_limit": self.limit}


@pytest.fixture
def jax_gpu(monkeypatch):
    device = JaxGpu(limit=10_000)

    def zeros(size, dtype, device):
        device.allocate(size)
        return np.zeros(1)

    monkeypatch.setattr(memory.jnp, "zeros", zeros)
    device.allocate(900)  # the mark is 1000 now
    device.in_use -= 900
    return device


def test_memory_of_jax_on_a_gpu_is_that_of_the_work(jax_gpu):
    def work():
        jax_gpu.allocate(300)
        jax_gpu.in_use -= 250

    assert memory.memory_of(work, 1, "run", Places((), (jax_gpu,))) == memory.Memory(before=100, peak=400, after=150)


def test_memory_of_jax_on_a_full_gpu_is_an_upper_bound(jax_gpu):
    jax_gpu.limit = 1500
    assert memory.memory_of(lambda: None, 1, "run", Places((), (jax_gpu,))) == memory.Memory(100, 1000, 100)


def test_a_device_without_statistics_is_named():
    device = types.SimpleNamespace(platform="gpu", id=0, memory_stats=lambda: None)
    with pytest.raises(UnsupportedError, match="keeps no statistics of the peak memory"):
        memory.memory_of(lambda: None, 1, "run", Places((), (device,)))


# --- the schedule ---------------------------------------------------------------------------------------------------


@pytest.mark.torch
def test_default_schedule_is_torchs():
    profiler = pytest.importorskip("torch.profiler")
    from ejkernel.lab import default_schedule

    assert [default_schedule(step).name for step in (0, 1, 4, 9)] == ["NONE", "WARMUP", "RECORD", "RECORD_AND_SAVE"]
    expected = profiler.schedule(wait=1, warmup=3, active=6)
    assert [default_schedule(step) for step in range(25)] == [expected(step) for step in range(25)]
    windows = []
    with profiler.profile(
        activities=[profiler.ProfilerActivity.CPU],
        schedule=default_schedule,
        on_trace_ready=lambda prof: windows.append(prof.step_num),
    ) as prof:
        for _ in range(10):
            prof.step()
    assert windows == [10]


def test_default_schedule_without_torch_names_the_extra(monkeypatch):
    from ejkernel.lab import default_schedule

    profiles._schedule.cache_clear()
    for module in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        ImportError, match=r"default_schedule needs torch: pip install '\.\[torch\]' in a clone of ejkernel"
    ):
        default_schedule(0)


# --- kernels --------------------------------------------------------------------------------------------------------

NAMES = {
    "gemm": [
        "ampere_sgemm_128x64_tn",
        "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_nn",
        "volta_h884gemm_64x128_ldg8_nn",
        "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize96x64x64_stage3_warpsize2x2x1_tensor16x8x16_kernel",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_32x3_nn_align4>(cutlass_80_tensorop_s1688gemm::Params)",
        "void cutlass::Kernel<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(Params)",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_f16_s161616_16x16_128x2>(Params)",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>, Mainloop>>(Params)",
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT",
        "nvjet_hsh_256x128_64x4_2x1_v_bz_coopB_TNN",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, float, 128, 16, 4, 4, false>(Params)",
        "void gemvNSP_kernel<float, float, float, float, 1, 32, 4, 1024, cublasGemvParamsEx<int>>(Params)",
        "void gemmk1_kernel<int, float, 256, 5, true, false, false, false, cublasGemvTensorStridedBatched<float>>(Params)",
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float, float, 7, false>(Params)",
        "void splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, true, false>(cublasSplitKParams<float>, float)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float, true, false, false>(Params)",
        "triton_gemm_dot_12",
        "gemm_fusion_dot_5_0",
        "triton_tem_fused_mm_0",
        "triton_tem_fused_addmm_relu_2",
        "triton_mm",
        "matmul_kernel",
        "sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x32_kernel",
        "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(Params)",
        "void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1, true, false, true>(int, int)",
        "ampere_scudnn_128x64_relu_medium_nn_v1",
        "gemm_tiled_kernel",
        "cudnn::cnn::conv2d_grouped_direct_kernel",
        "void cudnn::cnn::conv2d_grouped_direct_kernel<false, true, false, false, 0, 0, int, float, float>(Params)",
        "loop_dot_fusion",
    ],
    "elementwise": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>>(int)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul>>(int)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::rsqrt_kernel_cuda(at::T&)>(int)",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::BinaryFunctor<float>>>(int)",
        "void (anonymous namespace)::elementwise_kernel_with_index<int, at::native::arange_cuda_out(c10::Scalar const&)>(int)",
        "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<Lambda>>(long)",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor<float>>",
        "void at::native::vectorized_elementwise_kernel<4, my::softmax_epilogue, std::array<char*, 1ul>>(int)",
        "triton_poi_fused_add_gelu_mul_3",
        "triton_poi_fused_native_layer_norm_4",
        "triton_poi_fused__scaled_dot_product_flash_attention_1",
        "loop_add_fusion",
        "loop_multiply_select_fusion_3",
        "loop_broadcast_fusion.2",
        "loop_transpose_add_fusion",
        "wrapped_add",
        "wrapped_convert_1",
        "loop_reduce_precision_fusion",
        "fusion",
        "fusion_12",
        "fusion.3",
        "add_fusion",
        "add_fusion.3",
        "reduce_precision_fusion",
        "add_kernel",
        "relu_kernel",
        "gelu_kernel",
        "silu_and_mul_kernel",
        "fused_dropout_kernel_vec",
        "void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float, float, unsigned int, 1, 4, bool>(Info)",
        "void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel<c10::BFloat16>, true>(c10::BFloat16*)",
        "_swiglu_forward_kernel",
    ],
    "softmax": [
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 9, false, false>(float*, float const*, int)",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, c10::Half, float, c10::Half, Epilogue>(c10::Half*)",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForwardSmem<4, float, float, float, Epilogue>(float*)",
        "void (anonymous namespace)::softmax_warp_backward<float, float, float, 5, false, false>(float*)",
        "triton_per_fused__softmax_add_2",
        "triton_poi_fused__softmax_3",
        "triton_poi_fused__softmax_layer_norm_4",
        "triton_red_fused__log_softmax_7",
        "triton_softmax_computation_3",
        "triton_softmax_1_0",
    ],
    "layernorm": [
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>(int, float)",
        "void at::native::(anonymous namespace)::layer_norm_grad_input_kernel_vectorized<float, float>(float const*)",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float, 32u, 1u>(long)",
        "void at::native::(anonymous namespace)::GammaBetaBackwardSimpleCUDAKernel<float>(long)",
        "void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float>(long, float)",
        "void vllm::rms_norm_kernel<c10::BFloat16>(c10::BFloat16*)",
        "fused_add_rms_norm_kernel",
        "void cuApplyRMSNorm<float, float>(float*)",
        "void transformer_engine::normalization::ln_fwd_tuned_kernel<Traits>(Params)",
        "triton_per_fused_native_layer_norm_0",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0",
    ],
    "memory": [
        "Memcpy DtoD (Device -> Device)",
        "Memcpy HtoD (Pageable -> Device)",
        "Memcpy DtoH (Device -> Pinned)",
        "Memset (Device)",
        "MemcpyD2D",
        "MemcpyH2D",
        "Memset",
        "[CUDA memcpy HtoD]",
        "[CUDA memset]",
        "CUDA memcpy DtoD",
        "[CUDA Unified Memory memcpy HtoD]",
        "copy_fusion",
        "copy_fusion.2",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_aligned16_contig<OpaqueType<2u>, unsigned int, 4>(Type*)",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::(anonymous namespace)::OpaqueType<4u>>(T*)",
        "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true, 0>(Params)",
        "copy_kernel",
        "wrapped_copy",
        "wrapped_transpose",
        "input_transpose_fusion",
        "loop_concatenate_fusion_2",
        "loop_dynamic_update_slice_fusion.1",
    ],
    "other": [
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4, cutlass::half_t>>(P)",
        "void flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128>>(Params)",
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwd>>>(Params)",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
        "mha_forward_kernel",
        "triton_tem_fused_flex_attention_0",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t<float>>>(Op)",
        "input_reduce_fusion",
        "input_add_reduce_fusion_1",
        "loop_reduce_fusion",
        "wrapped_reduce",
        "wrapped_sort",
        "void cub::DeviceRadixSortOnesweepKernel<Policy, false, float>(int)",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, true>(Info)",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "void at::native::split_kernel<float>(float*)",
        "loop_gather_fusion",
        "gather_fusion",
        "add_reduce_fusion_1",
        "index_add_kernel",
        "void cudnn::ops::convertTensor_kernel<float, float, float, (cudnnKernelDataType_t)2>(float)",
        "triton_red_fused_convolution_native_batch_norm_3",
        "",
    ],
}


@pytest.mark.parametrize(("category", "name"), [(c, name) for c, names in NAMES.items() for name in names])
def test_categories_of_real_names(category, name):
    assert _category(name) == category


def test_names_are_counted():
    every = [name for names in NAMES.values() for name in names]
    counts = count_cuda_kernels(every)
    assert [*counts] == KEYS
    assert counts == {category: len(names) for category, names in NAMES.items()} | {"total": len(every)}
    assert count_cuda_kernels([]) == dict.fromkeys(KEYS, 0)
    assert count_cuda_kernels(
        iter(["ProfilerStep#4", "Optimizer.step#AdamW.step", "Stream Sync", "[memory]", "Memset (Device)"])
    ) == {
        **dict.fromkeys(KEYS, 0),
        "memory": 1,
        "total": 1,
    }


ON_HOST = [
    *("aten::mm", "aten::_softmax", "cudaLaunchKernel", "cudaMemcpyAsync", "cudaDeviceSynchronize", "cuLaunchKernelEx"),
    *(
        "cuLaunchKernel",
        "Lazy Function Loading",
        "AddmmBackward0",
        "torch::autograd::AccumulateGrad",
        "hipLaunchKernel",
    ),
    *("autograd::engine::evaluate_function: MmBackward0", "cudaStreamIsCapturing", "nn.Module: Linear_0"),
]


@pytest.mark.parametrize("name", ON_HOST)
def test_what_runs_on_the_host_is_no_kernel(name):
    nothing = dict.fromkeys(KEYS, 0)
    assert count_cuda_kernels([name]) == nothing
    assert count_cuda_kernels({name: 3}) == nothing
    assert count_cuda_kernels([types.SimpleNamespace(key=name, count=3)]) == nothing
    assert count_cuda_kernels([types.SimpleNamespace(key=name, device_type=None)]) == nothing
    # A device says more than a name.
    assert count_cuda_kernels([event(name)])["total"] == 1


def test_kernels_that_sound_like_the_host_are_counted():
    kernels = ["cuApplyLayerNorm", "cunn_SoftMaxForward", "cutlass_80_tensorop", "cudnn::cnn::conv2d_kernel", "hip_add"]
    assert count_cuda_kernels(kernels)["total"] == len(kernels)


def test_names_may_come_with_counts():
    expected = dict.fromkeys(KEYS, 0) | {"gemm": 3, "memory": 2, "total": 5}
    assert count_cuda_kernels({"ampere_sgemm": 3, "Memset (Device)": np.int64(2), "relu_kernel": 0}) == expected
    names = ["ampere_sgemm"] * 3 + ["[CUDA memset]"] * 2
    assert count_cuda_kernels(collections.Counter(names)) == expected
    assert count_cuda_kernels({}) == dict.fromkeys(KEYS, 0)


@pytest.mark.parametrize(
    "prof",
    [
        *({"ampere_sgemm": 1.5}, {"ampere_sgemm": -1}, {"ampere_sgemm": "3"}, {"ampere_sgemm": True}),
        *({"ampere_sgemm": [1, 2]}, {3: 4}, {"traceEvents": None}, {"traceEvents": {}}, {"traceEvents": ["a"]}),
    ],
)
def test_other_mappings_are_refused(prof):
    with pytest.raises(InvalidInputError, match=r"^prof"):
        count_cuda_kernels(prof)


class DeviceType(Enum):
    CPU = 0
    CUDA = 1


def event(name, device=DeviceType.CUDA, **more):
    return types.SimpleNamespace(name=name, device_type=device, **more)


EVENTS = [
    event("aten::mm", DeviceType.CPU),
    event("cudaLaunchKernel", DeviceType.CPU),
    event("nvjet_tst_128x256_64x4"),
    event("nvjet_tst_128x256_64x4"),
    event("Memset (Device)"),
    event("ProfilerStep#2"),
    event("my region", is_user_annotation=True),
    event("my_kernel", is_user_annotation=False),
]


def test_a_torch_profilers_events_are_counted():
    expected = dict(gemm=2, elementwise=0, softmax=0, layernorm=0, memory=1, other=1, total=4)
    assert count_cuda_kernels(types.SimpleNamespace(events=lambda: EVENTS)) == expected
    assert count_cuda_kernels(EVENTS) == expected
    averages = [
        types.SimpleNamespace(key="nvjet_tst", count=2, device_type=DeviceType.CUDA),
        types.SimpleNamespace(key="Memset (Device)", count=1, device_type=DeviceType.CUDA),
        types.SimpleNamespace(key="my_kernel", count=1, device_type=DeviceType.CUDA),
        types.SimpleNamespace(key="aten::mm", count=9, device_type=DeviceType.CPU),
    ]
    assert count_cuda_kernels(types.SimpleNamespace(key_averages=lambda: averages)) == expected
    both = types.SimpleNamespace(events=lambda: [], key_averages=lambda: averages)
    assert count_cuda_kernels(both) == expected
    mock = unittest.mock.MagicMock()
    mock.key_averages.return_value = averages
    assert count_cuda_kernels(mock) == expected
    mock.events.return_value = [unittest.mock.MagicMock(key="nvjet", device_type=DeviceType.CUDA, count=3)]
    assert count_cuda_kernels(mock)["gemm"] == 3


@pytest.mark.parametrize(
    ("device", "counted"),
    [
        *(("cuda", True), ("cuda:0", True), ("CUDA", True), ("DeviceType.CUDA", True), (1, True)),
        *((types.SimpleNamespace(type="cuda", index=0), True), (IntEnum("Device", {"CUDA": 1}).CUDA, True)),
        *(("cpu", False), ("cpu:0", False), ("DeviceType.CPU", False), (0, False), (2, False), ("mps", False)),
        *((types.SimpleNamespace(type="cpu"), False), (DeviceType.CPU, False), (unittest.mock.Mock(), True)),
    ],
)
def test_devices_are_known_in_every_form(device, counted):
    assert count_cuda_kernels([event("nvjet_tst", device)])["gemm"] == counted


@pytest.mark.torch
def test_torchs_own_devices_are_known():
    torch = pytest.importorskip("torch")
    assert count_cuda_kernels([event("nvjet_tst", torch.device("cuda", 0))])["gemm"] == 1
    assert count_cuda_kernels([event("nvjet_tst", torch.device("cpu"))])["total"] == 0


def test_counts_and_events_of_other_kinds():
    mock = unittest.mock.Mock
    assert count_cuda_kernels([mock(key="nvjet_tst", device_type=DeviceType.CUDA)])["gemm"] == 1
    assert count_cuda_kernels([mock(key="nvjet_tst", count=3)])["gemm"] == 3
    assert count_cuda_kernels([types.SimpleNamespace(key="nvjet_tst", count=np.int64(3))])["gemm"] == 3
    averages = [types.SimpleNamespace(key="nvjet_tst", count=2, device_type=DeviceType.CUDA)]
    assert count_cuda_kernels(mock(key_averages=lambda: averages))["gemm"] == 2
    assert count_cuda_kernels(types.SimpleNamespace(events=EVENTS))["total"] == 4
    assert count_cuda_kernels(types.SimpleNamespace(events=[], key_averages=averages))["gemm"] == 2
    assert count_cuda_kernels(types.SimpleNamespace(events=lambda: []))["total"] == 0
    with pytest.raises(InvalidInputError, match="prof is <Mock"):
        count_cuda_kernels(mock())


@pytest.mark.torch
def test_a_real_torch_profile_of_the_cpu_has_no_kernels():
    torch = pytest.importorskip("torch")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        torch.softmax(torch.ones(4, 4) @ torch.ones(4, 4), -1)
    assert len(prof.events()) > 0
    assert count_cuda_kernels(prof) == dict.fromkeys(KEYS, 0)
    assert count_cuda_kernels(prof.key_averages()) == dict.fromkeys(KEYS, 0)
    assert str(torch.autograd.DeviceType.CUDA).endswith("CUDA")
    assert count_cuda_kernels([event("gemm", torch.autograd.DeviceType.CUDA)])["gemm"] == 1


@pytest.mark.torch
def test_a_torch_profiler_that_has_not_run_is_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(InvalidInputError, match="prof has not run"):
        count_cuda_kernels(torch.profiler.profile())
    with pytest.raises(InvalidInputError, match="prof has not run"):
        count_cuda_kernels(torch.autograd.profiler.profile())


@pytest.mark.torch
def test_a_torch_profiler_that_still_runs_is_refused():
    torch = pytest.importorskip("torch")
    cpu = [torch.profiler.ProfilerActivity.CPU]
    for profiler in (torch.profiler.profile(activities=cpu), torch.autograd.profiler.profile()):
        with profiler as prof:
            torch.ones(2) + 1
            with pytest.raises(InvalidInputError, match="still running: count after its with block"):
                count_cuda_kernels(prof)
        assert count_cuda_kernels(prof) == dict.fromkeys(KEYS, 0)
    counted = []
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    with torch.profiler.profile(
        activities=cpu, schedule=schedule, on_trace_ready=lambda prof: counted.append(count_cuda_kernels(prof))
    ) as prof:
        for _ in range(2):
            prof.step()
    assert counted == [dict.fromkeys(KEYS, 0)]  # a window that has ended can be counted


@pytest.mark.parametrize("prof", [None, 3, object(), [3]])
def test_what_is_no_profile_is_refused(prof):
    with pytest.raises(InvalidInputError, match=r"prof (is|holds)"):
        count_cuda_kernels(prof)


# --- JAX's traces ---------------------------------------------------------------------------------------------------


def meta(pid, tid, kind, name):
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}


def ran(pid, tid, name):
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": 1, "dur": 2}


TRACE = [
    meta(1, None, "process_name", "/device:GPU:0"),
    meta(1, 10, "thread_name", "Stream #10(Compute)"),
    meta(1, 11, "thread_name", "Stream #11(MemcpyD2H)"),
    meta(1, 12, "thread_name", "XLA Ops"),
    meta(1, 13, "thread_name", "XLA Modules"),
    meta(2, None, "process_name", "/host:CPU"),
    ran(1, 10, "gemm_fusion_dot_1"),
    ran(1, 10, "loop_add_fusion"),
    ran(1, 10, "triton_softmax_2"),
    ran(1, 10, "input_reduce_fusion"),
    ran(1, 11, "MemcpyD2H"),
    ran(1, 12, "gemm_fusion_dot.1"),
    ran(1, 13, "jit_f"),
    ran(2, 10, "PjitFunction(f)"),
    ran(3, 10, "nobody's"),
]
TRACE_COUNTS = dict(gemm=1, elementwise=1, softmax=1, layernorm=0, memory=1, other=1, total=5)


def write_trace(folder, run="2026_01_01", events=TRACE, host="host"):
    path = folder / "plugins" / "profile" / run / f"{host}.trace.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    return path


def test_a_jax_traces_folder_and_files_are_counted(tmp_path):
    path = write_trace(tmp_path)
    assert count_cuda_kernels(tmp_path) == TRACE_COUNTS
    assert count_cuda_kernels(str(tmp_path)) == TRACE_COUNTS
    assert count_cuda_kernels(path) == TRACE_COUNTS
    plain = tmp_path / "x.json"
    plain.write_text(json.dumps(TRACE))
    assert count_cuda_kernels(plain) == TRACE_COUNTS


TORCH_TRACE = {
    "schemaVersion": 1,
    "traceEvents": [
        meta(0, 0, "process_name", "python"),
        {"ph": "M", "pid": 0, "tid": 0, "name": "process_labels", "args": {"labels": "GPU 0"}},
        *(
            {**ran(0, 7, name), "cat": cat}
            for cat, name in (
                ("kernel", "ampere_sgemm_128x64_tn"),
                ("kernel", "void at::native::vectorized_elementwise_kernel<4, Relu>(int)"),
                ("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)"),
                ("gpu_memset", "Memset (Device)"),
                ("cpu_op", "aten::mm"),
                ("cuda_runtime", "cudaLaunchKernel"),
                ("gpu_user_annotation", "my region"),
                ("cuda_sync", "Stream Sync"),
            )
        ),
        {"ph": "f", "pid": 0, "tid": 7, "cat": "ac2g", "name": "ac2g"},
    ],
}
TORCH_COUNTS = dict(gemm=1, elementwise=1, softmax=0, layernorm=0, memory=2, other=0, total=4)


def test_a_trace_that_torch_exported_is_counted(tmp_path):
    plain, packed = tmp_path / "trace.json", tmp_path / "x.json.gz"
    plain.write_text(json.dumps(TORCH_TRACE))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    for prof in (plain, str(plain), packed, TORCH_TRACE):
        assert count_cuda_kernels(prof) == TORCH_COUNTS


@pytest.mark.torch
def test_a_real_trace_that_torch_exported_has_no_kernels_of_a_cpu(tmp_path):
    torch = pytest.importorskip("torch")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        torch.ones(4, 4) @ torch.ones(4, 4)
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    assert "aten::mm" in (tmp_path / "trace.json").read_text()
    assert count_cuda_kernels(tmp_path / "trace.json") == dict.fromkeys(KEYS, 0)


def test_a_loaded_trace_is_counted():
    assert count_cuda_kernels({"traceEvents": TRACE}) == TRACE_COUNTS


def test_the_latest_run_of_every_host_is_counted(tmp_path):
    old = write_trace(tmp_path, "2026_01_01", TRACE * 3)
    os.utime(old, (1, 1))
    write_trace(tmp_path, "2026_01_02", host="a")
    write_trace(tmp_path, "2026_01_02", host="b")
    assert count_cuda_kernels(tmp_path)["total"] == 10


def test_streams_without_names_are_counted(tmp_path):
    path = write_trace(tmp_path, events=[e for e in TRACE if "Stream" not in str(e)])
    assert count_cuda_kernels(path) == TRACE_COUNTS


def test_loaded_profile_data_is_counted():
    def line(name, *names):
        return types.SimpleNamespace(name=name, events=[types.SimpleNamespace(name=n) for n in names])

    planes = [
        types.SimpleNamespace(name="/host:CPU", lines=[line("python", "f")]),
        types.SimpleNamespace(
            name="/device:GPU:1", lines=[line("Stream #7(Compute)", "nvjet_x", "wrapped_add"), line("XLA Ops", "dot.1")]
        ),
        types.SimpleNamespace(name="/device:TPU:0", lines=[line("XLA Ops", "fusion")]),
    ]
    counts = count_cuda_kernels(types.SimpleNamespace(planes=planes))
    assert (counts["gemm"], counts["elementwise"], counts["total"]) == (1, 1, 2)


def test_a_real_jax_trace_of_the_cpu_has_no_kernels(tmp_path):
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(jnp.ones((8, 8)) @ jnp.ones((8, 8)))
    files = [*tmp_path.rglob("*.xplane.pb")]
    assert files
    assert count_cuda_kernels(tmp_path) == dict.fromkeys(KEYS, 0)
    assert count_cuda_kernels(jax.profiler.ProfileData.from_file(str(files[0]))) == dict.fromkeys(KEYS, 0)


@pytest.mark.parametrize(
    "make", ["nothing", "empty", "text", "damaged json", "damaged gzip", "damaged pb", "no events"]
)
def test_what_is_no_trace_is_refused(tmp_path, make):
    path = tmp_path / {
        "nothing": "missing",
        "empty": "",
        "text": "x.txt",
        "damaged json": "x.trace.json",
        "damaged gzip": "x.trace.json.gz",
        "damaged pb": "x.xplane.pb",
        "no events": "y.json",
    }.get(make)
    if make not in ("nothing", "empty"):
        path.write_text('{"a": 1}' if make == "no events" else "\xff{[")
    with pytest.raises(InvalidInputError, match="prof is "):
        count_cuda_kernels(path)

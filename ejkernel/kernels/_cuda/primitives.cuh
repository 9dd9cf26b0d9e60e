// What kernels need of the hardware, without a header of any toolkit: NVRTC alone has none.
#pragma once

#define DEVICE __device__ __forceinline__

namespace ejkernel {

// --- numbers: FLOAT32, BFLOAT16 or FLOAT16, as ELEMENT says -----------------------------------------------------------

#define FLOAT32 0
#define BFLOAT16 1
#define FLOAT16 2

#if ELEMENT == FLOAT32
using element = float;
DEVICE float widened(element x) { return x; }
// A NaN is that of the host: `upper` would carry the hardware's own, all of whose bits are set, over into the sign.
DEVICE element narrowed(float x) { return x == x ? x : __uint_as_float(0x7fc00000u); }
#else
using element = unsigned short;
DEVICE float widened(element x) {
#if ELEMENT == BFLOAT16
  return __uint_as_float(static_cast<unsigned>(x) << 16);
#else
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
#endif
}
DEVICE element narrowed(float x) {
  element y;
#if ELEMENT == BFLOAT16
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
#endif
  return y;
}
#endif

// In half precision the error of the fast functions, 1e-7, is far below that of a result.
DEVICE float sigmoid(float x) {
#if ELEMENT == FLOAT32
  return 1.0f / (1.0f + expf(-x));
#else
  return __fdividef(1.0f, 1.0f + __expf(-x));
#endif
}

DEVICE float hyperbolic_tangent(float x) {
#if ELEMENT == FLOAT32
  return tanhf(x);
#else
  return 2.0f * sigmoid(2.0f * x) - 1.0f;
#endif
}

// --- products ---------------------------------------------------------------------------------------------------------

// Of float32 the tensor cores read the upper 19 bits; half of the last one of them is added to round instead of cutting off.
DEVICE unsigned upper(unsigned x) { return (x + 0x1000u) & 0xffffe000u; }
DEVICE unsigned lower(unsigned x) {
  return __float_as_uint(__uint_as_float(x) - __uint_as_float(upper(x))) + 0x1000u;
}

DEVICE void multiply_add(float (&c)[4], const uint4& a, unsigned b0, unsigned b1) {
#if ELEMENT == FLOAT32
#define INSTRUCTION "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
#elif ELEMENT == BFLOAT16
#define INSTRUCTION "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#else
#define INSTRUCTION "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#endif
  asm(INSTRUCTION " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
#undef INSTRUCTION
}

// --- memory that other CTAs write ---------------------------------------------------------------------------------------

// Past the first-level cache, which knows nothing of other multiprocessors' writes.
DEVICE uint4 load_shared_state(const void* address) {
  uint4 x;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(address)
               : "memory");
  return x;
}

// Says that all that this CTA has written may be read. The counter only grows. The release counts for what every thread wrote
// before the CTA's barrier; a fence beside it would only be waited for twice.
DEVICE void arrive(unsigned* counter) {
  __syncthreads();
  if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

// Waits until so many CTAs have arrived. A CTA that never does ends the kernel with an error instead of a hang.
DEVICE void wait(const unsigned* counter, unsigned arrivals) {
  if (threadIdx.x == 0) {
    unsigned found, polls = 0;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
      if (++polls == WATCHDOG) asm volatile("trap;");
    } while (static_cast<int>(found - arrivals) < 0);
  }
  __syncthreads();
}

}  // namespace ejkernel

// The loop over time of a recurrent layer's backward: the gradients of all gates in one launch.
#include "recurrent.cuh"

#define LSTM 0
#define GRU 1
#define RNN_TANH 2
#define RNN_RELU 3

namespace ejkernel {

// The planes' gradients of a unit, given that of its hidden state after the step. `before` is the cell (LSTM) or hidden state (GRU) that the step
// started from; `cell` the gradient of the LSTM's cell. Returns what goes to the hidden state before but by the weights.
DEVICE float slopes(const float (&planes)[PLANES], float before, float dh, float& cell, float (&gradients)[PLANES]) {
#if CELL == LSTM
  const float i = sigmoid(planes[0]), f = sigmoid(planes[1]), o = sigmoid(planes[3]);
  const float g = hyperbolic_tangent(planes[2]);
  const float shown = hyperbolic_tangent(f * before + i * g);
  cell += dh * o * (1.0f - shown * shown);
  gradients[0] = cell * g * i * (1.0f - i);
  gradients[1] = cell * before * f * (1.0f - f);
  gradients[2] = cell * i * (1.0f - g * g);
  gradients[3] = dh * shown * o * (1.0f - o);
  cell *= f;
  return 0.0f;
#elif CELL == GRU
  const float r = sigmoid(planes[0]), z = sigmoid(planes[1]);
  const float n = hyperbolic_tangent(planes[3] + r * planes[2]);
  gradients[3] = dh * (1.0f - z) * (1.0f - n * n);
  gradients[2] = gradients[3] * r;
  gradients[1] = dh * (before - n) * z * (1.0f - z);
  gradients[0] = gradients[3] * planes[2] * r * (1.0f - r);
  return dh * z;
#elif CELL == RNN_TANH
  const float h = hyperbolic_tangent(planes[0]);
  gradients[0] = dh * (1.0f - h * h);
  return 0.0f;
#else
  gradients[0] = planes[0] > 0.0f ? dh : 0.0f;
  return 0.0f;
#endif
}

#if CELL == LSTM
using before_element = float;
DEVICE float known(before_element x) { return x; }
#else
using before_element = element;
DEVICE float known(before_element x) { return widened(x); }
#endif

}  // namespace ejkernel

// planes [batch, steps, planes·hidden], before [batch, steps, hidden] (LSTM: cells, GRU: hidden states), doutputs [batch, steps, hidden],
// dfinal and dfinal_cell [batch, hidden], lengths [batch] → dplanes like planes, dfirst and dfirst_cell [batch, hidden].
extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
    recurrent_backward(const float* planes, const ejkernel::before_element* before, const uint4* weights,
                       const ejkernel::element* doutputs, const float* dfinal, const float* dfinal_cell, const int* lengths,
                       ejkernel::element* dplanes, float* dfirst, float* dfirst_cell, unsigned* counters, int batch,
                       int steps, int from_end, int groups, int passes, int arrivals) {
  using namespace ejkernel;
  extern __shared__ uint4 memory[];
  const int group = blockIdx.x % groups, tile = blockIdx.x / groups;
  const Partial partial{reinterpret_cast<float2*>(memory + WARPS * SHARED * ROW_BLOCKS * 64)};
  // Gradients of hidden states, but for what comes by the weights, and of cells: of this thread's items, by pass.
  float2* states = partial.memory + WARPS * ROW_BLOCKS * BATCH_BLOCKS * 64 + threadIdx.x;
  constexpr int STATE = ITEMS_PER_THREAD * THREADS;
  constexpr int ROW = PLANES * HIDDEN;
  Weights own;
  own.load(weights, memory, group);

  for (int pass = 0; pass < passes; ++pass) {
#pragma unroll
    for (int e = 0; e < ITEMS_PER_THREAD; ++e) {
      const Item item(e, group, (tile * passes + pass) * BATCH);
      float dh[2] = {}, dc[2] = {};
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        if (!item.exists(which, batch)) continue;
        const long long at = static_cast<long long>(item.entry + which) * HIDDEN + item.unit;
        dh[which] = dfinal[at];
        if (CELL == LSTM) dc[which] = dfinal_cell[at];
      }
      states[pass * 2 * STATE + e * THREADS] = float2{dh[0], dh[1]};
      states[(pass * 2 + 1) * STATE + e * THREADS] = float2{dc[0], dc[1]};
    }
  }

  // One more than there are steps: the last one gives the gradients of the start states.
  for (int i = 0; i <= steps; ++i) {
    const int t = from_end ? i : steps - 1 - i;
    const int treated = from_end ? t - 1 : t + 1;
    for (int pass = 0; pass < passes; ++pass) {
      const int begin = (tile * passes + pass) * BATCH;
      float gates[ITEMS_PER_THREAD][2][PLANES] = {};
      float earlier[ITEMS_PER_THREAD][2] = {}, dout[ITEMS_PER_THREAD][2] = {};
      bool alive[ITEMS_PER_THREAD][2] = {};
      if (i < steps) {
#pragma unroll
        for (int e = 0; e < ITEMS_PER_THREAD; ++e) {
          const Item item(e, group, begin);
#pragma unroll
          for (int which = 0; which < 2; ++which) {
            if (!item.exists(which, batch)) continue;
            const long long row = static_cast<long long>(item.entry + which) * steps + t;
            alive[e][which] = t < lengths[item.entry + which];
            if (CELL == LSTM || CELL == GRU) earlier[e][which] = known(__ldg(before + row * HIDDEN + item.unit));
            dout[e][which] = widened(__ldg(doutputs + row * HIDDEN + item.unit));
#pragma unroll
            for (int plane = 0; plane < PLANES; ++plane) {
              gates[e][which][plane] = __ldg(planes + row * ROW + plane * HIDDEN + item.unit);
            }
          }
        }
      }
      if (i > 0) {
        if (pass == 0) wait(counters + tile, static_cast<unsigned>(i) * arrivals);
        const element* source = dplanes + static_cast<long long>(treated) * ROW;
        multiply(own, Rows(source, static_cast<long long>(steps) * ROW, begin, batch), partial);
      }
#pragma unroll
      for (int e = 0; e < ITEMS_PER_THREAD; ++e) {
        const Item item(e, group, begin);
        float2* h_state = states + pass * 2 * STATE + e * THREADS;
        float2* c_state = h_state + STATE;
        const float2 through = i > 0 ? item.sum(partial, 0) : float2{0, 0};
        float dh[2] = {h_state->x + through.x, h_state->y + through.y}, dc[2] = {c_state->x, c_state->y};
#pragma unroll
        for (int which = 0; which < 2; ++which) {
          if (!item.exists(which, batch)) continue;
          if (i == steps) {
            const long long at = static_cast<long long>(item.entry + which) * HIDDEN + item.unit;
            dfirst[at] = dh[which];
            if (CELL == LSTM) dfirst_cell[at] = dc[which];
            continue;
          }
          float gradients[PLANES] = {};
          if (alive[e][which]) {
            dh[which] = slopes(gates[e][which], earlier[e][which], dh[which] + dout[e][which], dc[which], gradients);
          }
          const long long row = static_cast<long long>(item.entry + which) * steps + t;
#pragma unroll
          for (int plane = 0; plane < PLANES; ++plane) {
            dplanes[row * ROW + plane * HIDDEN + item.unit] = narrowed(gradients[plane]);
          }
        }
        *h_state = float2{dh[0], dh[1]};
        *c_state = float2{dc[0], dc[1]};
      }
      if (pass + 1 < passes) {
        __syncthreads();
      } else if (i < steps) {
        arrive(counters + tile);
      }
    }
  }
}

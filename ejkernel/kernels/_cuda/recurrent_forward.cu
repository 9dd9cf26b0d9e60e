// The loop over time of a recurrent layer: all steps in one launch.
#define LENGTH HIDDEN
#include "recurrent.cuh"

#define LSTM 0
#define GRU 1
#define RNN_TANH 2
#define RNN_RELU 3

namespace ejkernel {

// The new hidden state of a unit, from what the inputs and the state give to its gates; `cell` is an LSTM's.
DEVICE float step(const float (&inputs)[GATES], const float (&from_state)[GATES], float h, float& cell) {
#if CELL == LSTM
  const float i = sigmoid(inputs[0] + from_state[0]), f = sigmoid(inputs[1] + from_state[1]);
  const float g = hyperbolic_tangent(inputs[2] + from_state[2]), o = sigmoid(inputs[3] + from_state[3]);
  cell = f * cell + i * g;
  return o * hyperbolic_tangent(cell);
#elif CELL == GRU
  const float r = sigmoid(inputs[0] + from_state[0]), z = sigmoid(inputs[1] + from_state[1]);
  const float n = hyperbolic_tangent(inputs[2] + r * from_state[2]);
  return n + z * (h - n);
#elif CELL == RNN_TANH
  return hyperbolic_tangent(inputs[0] + from_state[0]);
#else
  return fmaxf(inputs[0] + from_state[0], 0.0f);
#endif
}

}  // namespace ejkernel

// projected [batch, steps, gates·hidden], state_bias [hidden] (GRU), first [batch, hidden], first_cell [batch, hidden] (LSTM),
// lengths [batch] → outputs [batch, steps, hidden], cells (LSTM), exchange [2, batch, hidden]: the last two hidden states.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
    recurrent_forward(const float* projected, const float* state_bias, const uint4* weights,
                      const ejkernel::element* first, const float* first_cell, const int* lengths,
                      ejkernel::element* outputs, float* cells, ejkernel::element* exchange, unsigned* counters, int batch,
                      int steps, int from_end, int groups, int passes, int arrivals) {
  using namespace ejkernel;
  extern __shared__ uint4 memory[];
  const int group = blockIdx.x % groups, tile = blockIdx.x / groups;
  const Partial partial{reinterpret_cast<float2*>(memory + WARPS * SHARED * ROW_BLOCKS * 64)};
  // Hidden states and cells of this thread's items, by pass.
  float2* states = partial.memory + WARPS * ROW_BLOCKS * BATCH_BLOCKS * 64 + threadIdx.x;
  constexpr int STATE = ITEMS_PER_THREAD * THREADS;
  Weights own;
  own.load(weights, memory, group);

  for (int pass = 0; pass < passes; ++pass) {
#pragma unroll
    for (int e = 0; e < ITEMS_PER_THREAD; ++e) {
      const Item item(e, group, (tile * passes + pass) * BATCH);
      float h[2] = {}, c[2] = {};
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        if (!item.exists(which, batch)) continue;
        const long long at = static_cast<long long>(item.entry + which) * HIDDEN + item.unit;
        h[which] = widened(first[at]);
        if (CELL == LSTM) c[which] = first_cell[at];
      }
      states[pass * 2 * STATE + e * THREADS] = float2{h[0], h[1]};
      states[(pass * 2 + 1) * STATE + e * THREADS] = float2{c[0], c[1]};
    }
  }

  for (int i = 0; i < steps; ++i) {
    const int t = from_end ? steps - 1 - i : i;
    const element* source = i == 0 ? first : exchange + static_cast<long long>((i - 1) % 2) * batch * HIDDEN;
    element* target = exchange + static_cast<long long>(i % 2) * batch * HIDDEN;
    for (int pass = 0; pass < passes; ++pass) {
      const int begin = (tile * passes + pass) * BATCH;
      float inputs[ITEMS_PER_THREAD][2][GATES] = {};
      bool alive[ITEMS_PER_THREAD][2] = {};
#pragma unroll
      for (int e = 0; e < ITEMS_PER_THREAD; ++e) {
        const Item item(e, group, begin);
#pragma unroll
        for (int which = 0; which < 2; ++which) {
          if (!item.exists(which, batch)) continue;
          alive[e][which] = t < lengths[item.entry + which];
          const long long row = static_cast<long long>(item.entry + which) * steps + t;
#pragma unroll
          for (int gate = 0; gate < GATES; ++gate) {
            inputs[e][which][gate] = __ldg(projected + (row * GATES + gate) * HIDDEN + item.unit);
          }
        }
      }
      if (i > 0 && pass == 0) wait(counters + tile, static_cast<unsigned>(i) * arrivals);
      multiply(own, Rows(source, HIDDEN, begin, batch), partial);
      float h[ITEMS_PER_THREAD][2], c[ITEMS_PER_THREAD][2];
#pragma unroll
      for (int e = 0; e < ITEMS_PER_THREAD; ++e) {
        const Item item(e, group, begin);
        float from_state[2][GATES];
#pragma unroll
        for (int gate = 0; gate < GATES; ++gate) {
          const float2 sum = item.sum(partial, gate);
          from_state[0][gate] = sum.x;
          from_state[1][gate] = sum.y;
        }
        float2* h_state = states + pass * 2 * STATE + e * THREADS;
        float2* c_state = h_state + STATE;
        h[e][0] = h_state->x, h[e][1] = h_state->y, c[e][0] = c_state->x, c[e][1] = c_state->y;
#pragma unroll
        for (int which = 0; which < 2; ++which) {
          if (!item.exists(which, batch)) continue;
          if (CELL == GRU) from_state[which][GATES - 1] += __ldg(state_bias + item.unit);
          if (alive[e][which]) h[e][which] = step(inputs[e][which], from_state[which], h[e][which], c[e][which]);
          target[static_cast<long long>(item.entry + which) * HIDDEN + item.unit] = narrowed(h[e][which]);
        }
        *h_state = float2{h[e][0], h[e][1]};
        *c_state = float2{c[e][0], c[e][1]};
      }
      // The others wait for the states alone: what is the result is written after the last of them.
      if (pass + 1 == passes) {
        arrive(counters + tile);
      } else {
        __syncthreads();
      }
#pragma unroll
      for (int e = 0; e < ITEMS_PER_THREAD; ++e) {
        const Item item(e, group, begin);
#pragma unroll
        for (int which = 0; which < 2; ++which) {
          if (!item.exists(which, batch)) continue;
          const long long at = (static_cast<long long>(item.entry + which) * steps + t) * HIDDEN + item.unit;
          outputs[at] = narrowed(alive[e][which] ? h[e][which] : 0.0f);
          if (CELL == LSTM) cells[at] = c[e][which];
        }
      }
    }
  }
}

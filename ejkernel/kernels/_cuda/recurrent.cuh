// The recurrent product of a CTA: the units that it owns, for a tile of the batch.
//
// A CTA owns UNIT_BLOCKS blocks of 16 units, each with GATES rows of the recurrent weights, and multiplies them with rows of
// LENGTH numbers, one for each entry of the batch. Warps divide the length of these rows. What the CTA's weights occupy is
// the same in every step: the first KEPT pieces of each warp stay in registers, the next SHARED in shared memory, the rest comes
// from the second-level cache.
//
// A piece is 16 bytes of a row in each of 4 lanes. It is two products of the tensor cores, whose order of the
// contracted axis is that of the lanes' bytes; the weights are packed in the same order (recurrent_plan.py: packed).
#pragma once

#include "primitives.cuh"

namespace ejkernel {

constexpr int THREADS = 32 * WARPS;
constexpr int UNITS = 16 * UNIT_BLOCKS;
constexpr int BATCH = 8 * BATCH_BLOCKS;
constexpr int ROW_BLOCKS = UNIT_BLOCKS * GATES;
// Numbers of a lane's 16 bytes, of a piece, and pieces of a warp.
constexpr int CHUNK = 16 / sizeof(element);
constexpr int PIECE = 4 * CHUNK;
constexpr int PIECES = (LENGTH + WARPS * PIECE - 1) / (WARPS * PIECE);
constexpr int STREAMED = PIECES - KEPT - SHARED;
static_assert(STREAMED >= 0, "more pieces are kept than there are");
static_assert(AHEAD >= 1 && AHEAD <= PIECES, "as many pieces of rows are on their way at once");
// An item is two entries of the batch for one unit; threads take some each.
constexpr int ITEMS = UNIT_BLOCKS * BATCH_BLOCKS * 64;
constexpr int ITEMS_PER_THREAD = (ITEMS + THREADS - 1) / THREADS;

struct Weights {
  uint4 kept[KEPT > 0 ? KEPT : 1][ROW_BLOCKS][2];
  const uint4* shared;
  const uint4* streamed;

  DEVICE void load(const uint4* packed, uint4* memory, int group) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint4* own = packed + (static_cast<long long>(group) * WARPS + warp) * PIECES * ROW_BLOCKS * 64 + lane;
    uint4* place = memory + warp * SHARED * ROW_BLOCKS * 64 + lane;
#pragma unroll
    for (int piece = 0; piece < KEPT; ++piece) {
#pragma unroll
      for (int row = 0; row < ROW_BLOCKS; ++row) {
        kept[piece][row][0] = own[(piece * ROW_BLOCKS + row) * 64];
        kept[piece][row][1] = own[(piece * ROW_BLOCKS + row) * 64 + 32];
      }
    }
    own += KEPT * ROW_BLOCKS * 64;
    // A thread reads only what it wrote itself.
    for (int i = 0; i < SHARED * ROW_BLOCKS * 2; ++i) place[i * 32] = own[i * 32];
    shared = place;
    streamed = own + SHARED * ROW_BLOCKS * 64;
  }

  DEVICE uint4 fragment(int piece, int row, int which) const {
    if (piece < KEPT) return kept[piece][row][which];
    if (piece < KEPT + SHARED) return shared[(((piece - KEPT) * ROW_BLOCKS + row) * 2 + which) * 32];
    return __ldg(streamed + (((piece - KEPT - SHARED) * ROW_BLOCKS + row) * 2 + which) * 32);
  }
};

// Rows of a tile: entry b of the batch is at first + b * stride; entries past the end are copies of the last.
struct Rows {
  const element* of[BATCH_BLOCKS];

  DEVICE Rows(const element* first, long long stride, int begin, int batch) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int block = 0; block < BATCH_BLOCKS; ++block) {
      const int entry = min(begin + block * 8 + lane / 4, batch - 1);
      of[block] = first + entry * stride;
    }
  }

  DEVICE uint4 load(int block, int piece) const {
    const int at = (piece * WARPS + threadIdx.x / 32) * PIECE + threadIdx.x % 4 * CHUNK;
    if (LENGTH % (WARPS * PIECE) != 0 && at >= LENGTH) return uint4{0, 0, 0, 0};
    return load_shared_state(of[block] + at);
  }
};

// What the warps found for a row block and a batch block, in the order of the tensor cores' results.
struct Partial {
  float2* memory;

  DEVICE float2* at(int warp, int row, int block, int half, int lane) const {
    return memory + (((warp * ROW_BLOCKS + row) * BATCH_BLOCKS + block) * 2 + half) * 32 + lane;
  }
};

// Leaves the products of all warps in shared memory, and waits for all of them.
DEVICE void multiply(const Weights& weights, const Rows& rows, const Partial& partial) {
  float sum[ROW_BLOCKS][BATCH_BLOCKS][4] = {};
  uint4 ahead[AHEAD][BATCH_BLOCKS];
#pragma unroll
  for (int piece = 0; piece < AHEAD; ++piece) {
#pragma unroll
    for (int block = 0; block < BATCH_BLOCKS; ++block) ahead[piece][block] = rows.load(block, piece);
  }
#pragma unroll
  for (int piece = 0; piece < PIECES; ++piece) {
    uint4 row[BATCH_BLOCKS];
#pragma unroll
    for (int block = 0; block < BATCH_BLOCKS; ++block) {
      row[block] = ahead[piece % AHEAD][block];
      if (piece + AHEAD < PIECES) ahead[piece % AHEAD][block] = rows.load(block, piece + AHEAD);
    }
#pragma unroll
    for (int i = 0; i < ROW_BLOCKS; ++i) {
      const uint4 a = weights.fragment(piece, i, 0), b = weights.fragment(piece, i, 1);
#if ELEMENT == FLOAT32
      // Three products; each piece is added up outside of the tensor cores, which round sums towards zero.
      const uint4 a_upper = {upper(a.x), upper(a.y), upper(a.z), upper(a.w)};
      const uint4 a_lower = {lower(a.x), lower(a.y), lower(a.z), lower(a.w)};
      const uint4 b_upper = {upper(b.x), upper(b.y), upper(b.z), upper(b.w)};
      const uint4 b_lower = {lower(b.x), lower(b.y), lower(b.z), lower(b.w)};
#pragma unroll
      for (int block = 0; block < BATCH_BLOCKS; ++block) {
        const uint4 r = row[block];
        float c[4] = {};
        multiply_add(c, a_lower, upper(r.x), upper(r.y));
        multiply_add(c, b_lower, upper(r.z), upper(r.w));
        multiply_add(c, a_upper, lower(r.x), lower(r.y));
        multiply_add(c, b_upper, lower(r.z), lower(r.w));
        multiply_add(c, a_upper, upper(r.x), upper(r.y));
        multiply_add(c, b_upper, upper(r.z), upper(r.w));
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][block][j] += c[j];
      }
#else
#pragma unroll
      for (int block = 0; block < BATCH_BLOCKS; ++block) {
        multiply_add(sum[i][block], a, row[block].x, row[block].y);
        multiply_add(sum[i][block], b, row[block].z, row[block].w);
      }
#endif
    }
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < ROW_BLOCKS; ++i) {
#pragma unroll
    for (int block = 0; block < BATCH_BLOCKS; ++block) {
      *partial.at(warp, i, block, 0, lane) = float2{sum[i][block][0], sum[i][block][1]};
      *partial.at(warp, i, block, 1, lane) = float2{sum[i][block][2], sum[i][block][3]};
    }
  }
  __syncthreads();
}

// One of this thread's items: where it lies, and its sums.
struct Item {
  int number, unit_block, block, half, lane, unit, entry;

  DEVICE Item(int e, int group, int begin) {
    number = threadIdx.x + e * THREADS;
    lane = number % 32;
    half = number / 32 % 2;
    block = number / 64 % BATCH_BLOCKS;
    unit_block = number / 64 / BATCH_BLOCKS;
    unit = group * UNITS + unit_block * 16 + half * 8 + lane / 4;
    entry = begin + block * 8 + lane % 4 * 2;
  }

  // Whether the entry is one of the batch, and the unit one of the layer.
  DEVICE bool exists(int which, int batch) const {
    return (ITEMS % THREADS == 0 || number < ITEMS) && (HIDDEN % UNITS == 0 || unit < HIDDEN) && entry + which < batch;
  }

  DEVICE float2 sum(const Partial& partial, int gate) const {
    float2 total = {0, 0};
    if (ITEMS % THREADS != 0 && number >= ITEMS) return total;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
      const float2 own = *partial.at(warp, unit_block * GATES + gate, block, half, lane);
      total.x += own.x;
      total.y += own.y;
    }
    return total;
  }
};

}  // namespace ejkernel

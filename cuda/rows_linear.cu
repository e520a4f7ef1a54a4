// rows_linear.cu - products of a dense weight with the few rows of a decoding pass, and what follows them at once.
// linear_rows  y[r, n] = bf16(sum over k of x[r, k] * w[n, k] + bias[n])
// add_rows     y[r, n] = residual[r, n] + linear
// join_rows    y[r, n] = residual[r, n] + (routed[r, n] + sigmoid(gate[r * gate_stride]) * linear); gate null: * 1
// swiglu_rows  y[r, i] = silu(sum x[r, k] * w[i, k]) * (sum x[r, k] * w[n + i, k]), gate rows before up rows
// swiglu_beside_rows  the same beside the kernel ahead of it, which it overtakes: x was complete before that one was launched
//              w bf16 [n, k] or [2n, k], row-major; x bf16 rows of x_stride elements; y, residual, routed bf16 [rows, n];
//              bias bf16 [n] or null; gate bf16
// Rounding     as the library's modules do it: each product, sum and activation above becomes BF16 before the next
// Launch       block 32 * WARPS, grid ceil(n / 16); programmatic: weights are read before the previous kernel has ended.
//              Dynamic shared memory is asked for only to keep blocks apart: see RowKernels in runtime/kernels/rows.py
// Needs        rows 1 to 8, k a multiple of 32, w, x and x_stride at multiples of 16 bytes, sm_80
// Moves        2 * n * k B (twice that for swiglu_rows)
// Numerics     FP32 sums: the warps take columns in turn, their sums are added in order; a row's sums do not
//              depend on the other rows
// Reference    tests/kernels/test_rows.py
#include <cuda_bf16.h>

#include "activation.cuh"
#include "common.cuh"

#ifndef WARPS
#define WARPS 4
#endif
#define TILE 16   // weight rows of a block
#define COLUMNS 8 // rows of x
#define CHUNK 32  // columns of a step

typedef __nv_bfloat16 bf16;

// Sums of tiles of 16 weight rows with all rows of x, in sums[tile][16 * column + row] of the block's shared memory.
// The 32 columns of a chunk are dealt to the MMA's places in another order, the same for both operands: a lane holds 8
// neighbours, which are one load. A warp has DEPTH steps under way, each TOGETHER of them side by side. BESIDE does not wait for the
// kernel ahead.
template <int TILES, int DEPTH, int TOGETHER, bool BESIDE = false>
__device__ __forceinline__ void tile_sums(float (*sums)[TILE * COLUMNS], const bf16* __restrict__ w, long long tile_stride, int n, int k, const bf16* x, int x_stride, int rows) {
  __shared__ float parts[WARPS][TILES][TILE * COLUMNS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, first = blockIdx.x * TILE;
  const int row = lane >> 2, column = (lane & 3) * 8, chunks = k / CHUNK;
  const bf16 *upper[TILES], *lower[TILES];
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    upper[t] = w + t * tile_stride + (long long)min(first + row, n - 1) * k + column;
    lower[t] = w + t * tile_stride + (long long)min(first + row + 8, n - 1) * k + column;
  }
  const bf16* from = x + (long long)row * x_stride + column;
  uint4 a[DEPTH][TILES], b[DEPTH][TILES], v[DEPTH];
  float c[TILES][4] = {};
  const uint4 zero = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int d = 0; d < DEPTH; ++d) {
    const int at = ((d / TOGETHER * WARPS + warp) * TOGETHER + d % TOGETHER) * CHUNK;
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      a[d][t] = at < k ? load_lines(upper[t] + at) : zero;
      b[d][t] = at < k ? load_lines(lower[t] + at) : zero;
    }
  }
  if (!BESIDE) wait_for_previous_kernel();
  let_next_kernel_start();
#pragma unroll
  for (int d = 0; d < DEPTH; ++d) {
    const int at = ((d / TOGETHER * WARPS + warp) * TOGETHER + d % TOGETHER) * CHUNK;
    v[d] = at < k && row < rows ? (BESIDE ? load_past_l1(from + at) : *reinterpret_cast<const uint4*>(from + at)) : zero;
  }
  for (int base = 0; base < chunks; base += WARPS * DEPTH) {
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      const int next = (base + ((d + DEPTH) / TOGETHER * WARPS + warp) * TOGETHER + d % TOGETHER) * CHUNK;
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        mma(c[t], a[d][t].x, b[d][t].x, a[d][t].y, b[d][t].y, v[d].x, v[d].y);
        mma(c[t], a[d][t].z, b[d][t].z, a[d][t].w, b[d][t].w, v[d].z, v[d].w);
        a[d][t] = next < k ? load_lines(upper[t] + next) : zero;
        b[d][t] = next < k ? load_lines(lower[t] + next) : zero;
      }
      v[d] = next < k && row < rows ? (BESIDE ? load_past_l1(from + next) : *reinterpret_cast<const uint4*>(from + next)) : zero;
    }
  }
#pragma unroll
  for (int t = 0; t < TILES; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i) parts[warp][t][TILE * (2 * (lane & 3) + (i & 1)) + row + 8 * (i >> 1)] = c[t][i];
  __syncthreads();
  for (int i = threadIdx.x; i < TILES * TILE * COLUMNS; i += 32 * WARPS) {
    float sum = 0;
#pragma unroll
    for (int other = 0; other < WARPS; ++other) sum += parts[other][i / (TILE * COLUMNS)][i % (TILE * COLUMNS)];
    sums[i / (TILE * COLUMNS)][i % (TILE * COLUMNS)] = sum;
  }
  __syncthreads();
}

__device__ __forceinline__ float rounded(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

// Calls `finish(place in y, row of x, BF16 product)` for each element of the block
template <typename Finish>
__device__ __forceinline__ void each_product(const bf16* w, const bf16* bias, const bf16* x, int n, int k, int x_stride, int rows, Finish finish) {
  __shared__ float sums[1][TILE * COLUMNS];
  tile_sums<1, 4, 4>(sums, w, 0, n, k, x, x_stride, rows);
  for (int i = threadIdx.x; i < TILE * COLUMNS; i += 32 * WARPS) {
    const int at = blockIdx.x * TILE + i % TILE, r = i / TILE;
    if (at < n && r < rows) finish((long long)r * n + at, r, rounded(sums[0][i] + (bias ? __bfloat162float(bias[at]) : 0.0f)));
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) linear_rows(const bf16* w, const bf16* bias, const bf16* x, bf16* y, int n, int k, int x_stride, int rows) {
  each_product(w, bias, x, n, k, x_stride, rows, [=](long long at, int, float product) { y[at] = __float2bfloat16_rn(product); });
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) add_rows(const bf16* w, const bf16* bias, const bf16* x, bf16* y, int n, int k, int x_stride, int rows, const bf16* residual) {
  each_product(w, bias, x, n, k, x_stride, rows, [=](long long at, int, float product) {
    y[at] = __float2bfloat16_rn(__bfloat162float(residual[at]) + product);
  });
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) join_rows(const bf16* w, const bf16* x, bf16* y, int n, int k, int x_stride, int rows, const bf16* residual, const bf16* routed, const bf16* gate, int gate_stride) {
  each_product(w, nullptr, x, n, k, x_stride, rows, [=](long long at, int r, float product) {
    if (gate) product = rounded(rounded(sigmoid(__bfloat162float(gate[r * gate_stride]))) * product);
    product = rounded(__bfloat162float(routed[at]) + product);
    y[at] = __float2bfloat16_rn(__bfloat162float(residual[at]) + product);
  });
}

template <bool BESIDE> __device__ __forceinline__ void swiglu(const bf16* w, const bf16* x, bf16* y, int n, int k, int x_stride, int rows) {
  __shared__ float sums[2][TILE * COLUMNS];
  tile_sums<2, 2, 2, BESIDE>(sums, w, (long long)n * k, n, k, x, x_stride, rows);
  for (int i = threadIdx.x; i < TILE * COLUMNS; i += 32 * WARPS) {
    const int at = blockIdx.x * TILE + i % TILE, r = i / TILE;
    if (at >= n || r >= rows) continue;
    const float gate = rounded(sums[0][i]), up = rounded(sums[1][i]);
    y[(long long)r * n + at] = __float2bfloat16_rn(rounded(gate * sigmoid(gate)) * up);
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) swiglu_rows(const bf16* w, const bf16* x, bf16* y, int n, int k, int x_stride, int rows) {
  swiglu<false>(w, x, y, n, k, x_stride, rows);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) swiglu_beside_rows(const bf16* w, const bf16* x, bf16* y, int n, int k, int x_stride, int rows) {
  swiglu<true>(w, x, y, n, k, x_stride, rows);
  if (blockIdx.x == 0) wait_for_previous_kernel();   // who waits for this kernel waits for that one, too
}

// rows_attention.cu - attention of a decoding pass's few rows, each at a position of its own, over one sequence's keys.
// Computes     y[r, h] = sum over keys s <= positions[r], s > positions[r] - window, of softmax(scale * q[r, h] . k[s]) * v[s]
//              q, y bf16 [rows, heads, SIZE]; keys, values bf16 [key heads, capacity, SIZE]; positions int64 [rows] below
//              capacity; query heads GROUPS * g to GROUPS * (g + 1) - 1 share key head g; window 0: all keys
// Launch       block 256, grid (splits, key heads): block s takes the keys 128 s to 128 s + 127, so 128 * splits must be
//              beyond all positions; programmatic, after a kernel that has waited for whatever wrote `positions`
// Memory       partial fp32 [key heads, splits, GROUPS, 8, SIZE + 2], tickets u32 [key heads], zero before the first
//              launch and again after each
// Needs        rows 1 to 8, SIZE a multiple of 32 up to 256, GROUPS 1 to 16, tensors at multiples of 16 bytes, sm_80
// Moves        4 * SIZE B a key of each key head, each once
// Numerics     scores and sums in FP32, probabilities rounded to BF16 as the factors of v and summed before that. Blocks keep
//              largest score, sum and sums of values; the last block of a key head joins them in the order of the keys. A
//              hidden key adds zero, so a row has the same bits whatever the other rows and `splits` are
// Reference    tests/kernels/test_rows.py
#include <cuda_bf16.h>

#include "common.cuh"

#define KEYS 128
#define ROWS 8
#define WARPS 8
#define STEPS (SIZE / 32)
#define VALUE_STRIDE (SIZE + 8)
#define SCORE_STRIDE (KEYS + 4)
#define SHARE_STRIDE (KEYS + 8)
#define VALUES_BYTES (KEYS * VALUE_STRIDE * 2)
#define SCORES_BYTES (GROUPS * ROWS * SCORE_STRIDE * 4)
#define SHARES_BYTES (GROUPS * ROWS * SHARE_STRIDE * 2)
#define PARTIAL (SIZE + 2)
#define FACTORS KEYS  // splits whose factors fit where the scores were

typedef __nv_bfloat16 bf16;

extern "C" __global__ void __launch_bounds__(32 * WARPS) attend_rows(const bf16* q, const bf16* keys, const bf16* values, const long long* positions, bf16* y, float* partial, u32* tickets, float scale, int window, int rows, int heads, int capacity) {
  DYNAMIC_SHARED(smem);
  __shared__ long long place[ROWS];
  __shared__ float most[GROUPS * ROWS], total[GROUPS * ROWS];
  __shared__ u32 arrived;
  bf16* const tile = reinterpret_cast<bf16*>(smem);
  float* const scores = reinterpret_cast<float*>(smem + VALUES_BYTES);
  bf16* const shares = reinterpret_cast<bf16*>(smem + VALUES_BYTES + SCORES_BYTES);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, split = blockIdx.x, head = blockIdx.y;
  const long long first = (long long)split * KEYS;
  if (threadIdx.x < ROWS) place[threadIdx.x] = threadIdx.x < rows ? positions[threadIdx.x] : -1;
  __syncthreads();
  long long last = 0;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) last = place[r] > last ? place[r] : last;
  if (first > last) return;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const bf16* const key_base = keys + (long long)head * capacity * SIZE;
  const bf16* const value_base = values + (long long)head * capacity * SIZE;

  for (int i = threadIdx.x; i < KEYS * SIZE / 8; i += 32 * WARPS) {
    const int s = i / (SIZE / 8), d = i % (SIZE / 8) * 8;
    const bool there = first + s <= last;
    copy_async_or_zero(shared_address(tile + s * VALUE_STRIDE + d), value_base + (there ? first + s : 0) * SIZE + d, there);
  }
  copy_commit();

  // Scores: a warp's 16 keys with all rows. The places of a head are dealt to the MMA in another order, the same for both.
  {
    const int s = warp * 16 + (lane >> 2), d = (lane & 3) * 8;
    uint4 upper[STEPS], lower[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      upper[i] = *reinterpret_cast<const uint4*>(key_base + min(first + s, last) * SIZE + 32 * i + d);
      lower[i] = *reinterpret_cast<const uint4*>(key_base + min(first + s + 8, last) * SIZE + 32 * i + d);
    }
    const int r = lane >> 2;
#pragma unroll 2
    for (int g = 0; g < GROUPS; ++g) {
      float c[4] = {};
#pragma unroll
      for (int i = 0; i < STEPS; ++i) {
        uint4 b = make_uint4(0, 0, 0, 0);
        if (r < rows) b = *reinterpret_cast<const uint4*>(q + ((long long)r * heads + head * GROUPS + g) * SIZE + 32 * i + d);
        mma(c, upper[i].x, lower[i].x, upper[i].y, lower[i].y, b.x, b.y);
        mma(c, upper[i].z, lower[i].z, upper[i].w, lower[i].w, b.z, b.w);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 2 * (lane & 3) + (i & 1), key = s + 8 * (i >> 1);
        const bool seen = first + key <= place[row] && (!window || first + key > place[row] - window);
        scores[(g * ROWS + row) * SCORE_STRIDE + key] = seen ? c[i] * scale * 1.4426950408889634f : MINUS_INFINITY;
      }
    }
  }
  __syncthreads();

  for (int line = warp; line < GROUPS * ROWS; line += WARPS) {
    const float4 mine = reinterpret_cast<const float4*>(scores + line * SCORE_STRIDE)[lane];
    float largest = fmaxf(fmaxf(mine.x, mine.y), fmaxf(mine.z, mine.w));
#pragma unroll
    for (int step = 16; step; step >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    const float base = largest == MINUS_INFINITY ? 0.0f : largest;
    const float p0 = exp2f(mine.x - base), p1 = exp2f(mine.y - base), p2 = exp2f(mine.z - base), p3 = exp2f(mine.w - base);
    float sum = p0 + p1 + p2 + p3;
#pragma unroll
    for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
    reinterpret_cast<uint2*>(shares + line * SHARE_STRIDE)[lane] = make_uint2(f32_to_bf16x2(p1, p0), f32_to_bf16x2(p3, p2));
    if (!lane) most[line] = largest, total[line] = sum;
  }
  copy_wait<0>();
  __syncthreads();

  // Sums of values: a warp's 16 places of the head with all rows
  float* const mine = partial + ((long long)head * gridDim.x + split) * GROUPS * ROWS * PARTIAL;
  for (int d = warp * 16; d < SIZE; d += WARPS * 16) {
    float c[GROUPS][4] = {};
#pragma unroll
    for (int s = 0; s < KEYS; s += 16) {
      u32 a[4];
      load_transposed(shared_address(tile + (s + (lane & 7) + (lane >> 4) * 8) * VALUE_STRIDE + d + (lane >> 3 & 1) * 8), a);
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        const bf16* from = shares + (g * ROWS + (lane >> 2)) * SHARE_STRIDE + s + 2 * (lane & 3);
        mma(c[g], a[0], a[1], a[2], a[3], *reinterpret_cast<const u32*>(from), *reinterpret_cast<const u32*>(from + 8));
      }
    }
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
#pragma unroll
      for (int i = 0; i < 4; ++i) mine[(g * ROWS + 2 * (lane & 3) + (i & 1)) * PARTIAL + d + (lane >> 2) + 8 * (i >> 1)] = c[g][i];
  }
  for (int line = threadIdx.x; line < GROUPS * ROWS; line += 32 * WARPS) {
    mine[line * PARTIAL + SIZE] = most[line];
    mine[line * PARTIAL + SIZE + 1] = total[line];
  }

  const int splits = (int)(last / KEYS) + 1;
  __threadfence();
  __syncthreads();
  if (!threadIdx.x) arrived = atomic_add(tickets + head, 1);
  __syncthreads();
  if (arrived != splits - 1) return;
  __threadfence();
  if (!threadIdx.x) tickets[head] = 0;
  const float* const all = partial + (long long)head * gridDim.x * GROUPS * ROWS * PARTIAL;
  const long long next = GROUPS * ROWS * PARTIAL;
  float* const factors = scores;  // of a split's sums in those of the row
  for (int line = threadIdx.x; line < GROUPS * ROWS; line += 32 * WARPS) {
    float largest = MINUS_INFINITY;
#pragma unroll 8
    for (int s = 0; s < splits; ++s) largest = fmaxf(largest, __ldcg(all + s * next + line * PARTIAL + SIZE));
    most[line] = largest;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < min(splits, FACTORS) * GROUPS * ROWS; i += 32 * WARPS) {
    const int line = i % (GROUPS * ROWS);
    factors[i] = exp2f(__ldcg(all + i / (GROUPS * ROWS) * next + line * PARTIAL + SIZE) - most[line]);
  }
  __syncthreads();
  // The sum over the splits of factor * what they left at a place
  auto joined = [&](int line, int at) {
    const float* const from = all + line * PARTIAL;
    float sum = 0;
#pragma unroll 8
    for (int s = 0; s < min(splits, FACTORS); ++s) sum = fmaf(factors[s * GROUPS * ROWS + line], __ldcg(from + s * next + at), sum);
    for (int s = FACTORS; s < splits; ++s) sum = fmaf(exp2f(__ldcg(from + s * next + SIZE) - most[line]), __ldcg(from + s * next + at), sum);
    return sum;
  };
  for (int line = threadIdx.x; line < GROUPS * ROWS; line += 32 * WARPS) total[line] = joined(line, SIZE + 1);
  __syncthreads();
  for (int i = threadIdx.x; i < GROUPS * ROWS * SIZE; i += 32 * WARPS) {
    const int line = i / SIZE, d = i % SIZE, r = line % ROWS, g = line / ROWS;
    if (r < rows) y[((long long)r * heads + head * GROUPS + g) * SIZE + d] = __float2bfloat16_rn(joined(line, d) / total[line]);
  }
}

// rows_norm.cu - what stands between the products of a decoding pass: norms, rotary positions with the KV's new entries, routers.
// norm_rows    y[r, g] = weight * bf16(x[r, g] * rsqrt(mean(x[r, g]^2) + eps)); with bias the library's LayerNorm instead:
//              (x - mean) * rsqrt(variance + eps) * weight + bias, rounded once
//              x bf16, group g of row r at r * x_stride + g * width; y the same with y_stride (may be x itself);
//              weight, bias bf16 [width]
// rotate_rows  q_out[r, h] = rotary(q[r, h]); keys[h, positions[r]] = rotary(k[r, h]); values[h, positions[r]] = v[r, h]
//              qkv bf16 rows of qkv_stride: query heads, key heads, value heads of `size`; cosine, sine bf16
//              [rows, rotated], rotated <= size; keys, values bf16 [key heads, capacity, size]; positions int64 [rows];
//              rotary(x) = x * cosine + rotate_half(x) * sine on the first `rotated` places, each product rounded
// route_rows   the `top_k` most likely experts of softmax(logits[r]), the lower number first among equals; weights their
//              probabilities, divided by their sum if `renormalise`, rounded to BF16 if `round_weights`
//              logits bf16 rows of logits_stride; index int32 and weights fp32 [rows, top_k]; seen int32 [rows, top_k] in the
//              host's memory, or null, takes the index too
// Launch       norm_rows: block 256, grid (groups, rows); rotate_rows: block 64, grid (query + 2 * key heads, rows);
//              route_rows: block 32, grid rows; all programmatic
// Needs        width a multiple of 8 up to WIDTH, rows at multiples of 16 bytes; rotated even; EXPERTS up to 1024, top_k up to 32 and EXPERTS; sm_80
// Moves        what it reads and writes, once: at 8 rows a few us of latency, no bandwidth
// Numerics     FP32
// Reference    tests/kernels/test_rows.py
#include <cuda_bf16.h>

#include "common.cuh"

#define NORM_THREADS 256
#ifndef WIDTH
#define WIDTH 16384  // at most
#endif
#define VECTORS ((WIDTH + 8 * NORM_THREADS - 1) / (8 * NORM_THREADS))  // of 8 values a thread
#ifndef EXPERTS
#define EXPERTS 1024
#endif
#define SCORES ((EXPERTS + 31) / 32)  // a lane

typedef __nv_bfloat16 bf16;

__device__ __forceinline__ float rounded(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }
__device__ __forceinline__ float element(const uint4& v, int i) {
  const u32 word = (&v.x)[i >> 1];
  return i & 1 ? __uint_as_float(word & 0xffff0000u) : __uint_as_float(word << 16);
}

__device__ __forceinline__ float block_sum(float value, float* room) {
#pragma unroll
  for (int step = 16; step; step >>= 1) value += __shfl_xor_sync(~0u, value, step);
  __syncthreads();
  if (!(threadIdx.x & 31)) room[threadIdx.x >> 5] = value;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int i = 0; i < NORM_THREADS / 32; ++i) sum += room[i];
  return sum;
}

extern "C" __global__ void __launch_bounds__(NORM_THREADS) norm_rows(const bf16* x, const bf16* weight, const bf16* bias, bf16* y, int width, int x_stride, int y_stride, float eps) {
  __shared__ float room[NORM_THREADS / 32];
  const long long group = (long long)blockIdx.x * width;
  const bf16* from = x + (long long)blockIdx.y * x_stride + group;
  bf16* to = y + (long long)blockIdx.y * y_stride + group;
  uint4 values[VECTORS], factors[VECTORS], offsets[VECTORS];
#pragma unroll
  for (int n = 0; n < VECTORS; ++n) {
    const int at = (n * NORM_THREADS + threadIdx.x) * 8;
    if (at < width) factors[n] = load_read_only(weight + at);
    if (at < width && bias) offsets[n] = load_read_only(bias + at);
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  float sum = 0;
#pragma unroll
  for (int n = 0; n < VECTORS; ++n) {
    const int at = (n * NORM_THREADS + threadIdx.x) * 8;
    values[n] = at < width ? *reinterpret_cast<const uint4*>(from + at) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float v = element(values[n], i);
      sum += bias ? v : v * v;
    }
  }
  float mean = 0, square = block_sum(sum, room) / width;
  if (bias) {
    mean = square, sum = 0;
#pragma unroll
    for (int n = 0; n < VECTORS; ++n)
      if ((n * NORM_THREADS + threadIdx.x) * 8 < width)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float v = element(values[n], i) - mean;
          sum += v * v;
        }
    square = block_sum(sum, room) / width;
  }
  const float scale = rsqrtf(square + eps);
#pragma unroll
  for (int n = 0; n < VECTORS; ++n) {
    const int at = (n * NORM_THREADS + threadIdx.x) * 8;
    if (at >= width) continue;
    const uint4 w = factors[n], b = bias ? offsets[n] : make_uint4(0, 0, 0, 0);
    u32 out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float pair[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int e = 2 * i + j;
        const float v = (element(values[n], e) - mean) * scale;
        pair[j] = bias ? v * element(w, e) + element(b, e) : element(w, e) * rounded(v);
      }
      out[i] = f32_to_bf16x2(pair[1], pair[0]);
    }
    *reinterpret_cast<uint4*>(to + at) = make_uint4(out[0], out[1], out[2], out[3]);
  }
}

extern "C" __global__ void __launch_bounds__(64) rotate_rows(const bf16* qkv, const bf16* cosine, const bf16* sine, const long long* positions, bf16* q_out, bf16* keys, bf16* values, int query_heads, int key_heads, int size, int rotated, int qkv_stride, int capacity) {
  const int head = blockIdx.x, row = blockIdx.y, half = rotated / 2;
  const bf16* from = qkv + (long long)row * qkv_stride + head * size;
  wait_for_previous_kernel();
  let_next_kernel_start();
  bf16* to;
  int turned = rotated;
  if (head < query_heads) {
    to = q_out + ((long long)row * query_heads + head) * size;
  } else {
    const int other = (head - query_heads) % key_heads;
    bf16* cache = head < query_heads + key_heads ? keys : values;
    to = cache + ((long long)other * capacity + positions[row]) * size;
    if (cache == values) turned = 0;
  }
  for (int d = threadIdx.x; d < size; d += 64) {
    const float x = __bfloat162float(from[d]);
    if (d >= turned) {
      to[d] = from[d];
      continue;
    }
    const float other = d < half ? -__bfloat162float(from[d + half]) : __bfloat162float(from[d - half]);
    const long long at = (long long)row * rotated + d;
    to[d] = __float2bfloat16_rn(rounded(x * __bfloat162float(cosine[at])) + rounded(other * __bfloat162float(sine[at])));
  }
}

extern "C" __global__ void __launch_bounds__(32) route_rows(const bf16* logits, int* index, float* weights, volatile int* seen, int logits_stride, int top_k, int renormalise, int round_weights) {
  const int lane = threadIdx.x, row = blockIdx.x;
  let_next_kernel_start();   // it takes one warp, so the next one's blocks find room
  wait_for_previous_kernel();
  float scores[SCORES], most = MINUS_INFINITY, sum = 0;
#pragma unroll
  for (int n = 0; n < SCORES; ++n) {
    const int e = n * 32 + lane;
    scores[n] = e < EXPERTS ? __bfloat162float(logits[(long long)row * logits_stride + e]) : MINUS_INFINITY;
    most = fmaxf(most, scores[n]);
  }
#pragma unroll
  for (int step = 16; step; step >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
#pragma unroll
  for (int n = 0; n < SCORES; ++n) {
    const float score = expf(scores[n] - most);
    scores[n] = n * 32 + lane >= EXPERTS ? -1.0f : score >= 0 ? score : 0.0f;  // NaN: some expert must be named
    sum += fmaxf(scores[n], 0.0f);
  }
#pragma unroll
  for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
  float mine = 0, total = 0;
  int chosen = 0;
  for (int j = 0; j < top_k; ++j) {
    float best = -1.0f;
    int at = 0x7fffffff;
#pragma unroll
    for (int n = 0; n < SCORES; ++n)
      if (scores[n] > best) best = scores[n], at = n * 32 + lane;
#pragma unroll
    for (int step = 16; step; step >>= 1) {
      const float other = __shfl_xor_sync(~0u, best, step);
      const int there = __shfl_xor_sync(~0u, at, step);
      if (other > best || (other == best && there < at)) best = other, at = there;
    }
#pragma unroll
    for (int n = 0; n < SCORES; ++n)
      if (n * 32 + lane == at) scores[n] = -1.0f;
    best /= sum;
    total += best;
    if (lane == j) mine = best, chosen = at;
  }
  if (lane >= top_k) return;
  if (renormalise) mine /= total;
  index[row * top_k + lane] = chosen;
  weights[row * top_k + lane] = round_weights ? rounded(mine) : mine;
  if (seen) seen[row * top_k + lane] = chosen;
}

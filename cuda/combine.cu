// combine.cu - what stands between the grouped matrix products: rows gathered, activated, and summed over the top k.
// gather_rows  xs[i] = x[pairs[i] / top_k] for i < num_sorted
//              x bf16 [num_tokens, hidden_size], pairs int32 [capacity], xs bf16 [capacity, hidden_size]
// activate_*   h[i] = activate(gate_up[i, :I] + gate bias, gate_up[i, I:] + up bias) for i < num_sorted, ACTIVATION compiled in
//              gate_up bf16 or fp32 [capacity, 2I], h bf16 [capacity, I]; the bias is bf16 [2I] at bias_offset_bytes of slot
//              slot_of[top_k_index[pairs[i]]] of pool; pool null: no bias
// combine_*    y[t] = sum over j = 0..top_k-1, in this order, of top_k_weights[t, j] * (p[position[t, j]] + down bias)
//              p bf16 or fp32 [capacity, hidden_size]; a pair of position -1 adds nothing; y bf16 [num_tokens, hidden_size],
//              every element written; the bias is bf16 [hidden_size] at bias_offset_bytes of the pair's slot
// Inputs       num_sorted int32 [1], num_tokens int32 [1] or null for max_tokens, slot_of int32 [num_experts],
//              top_k_index int32 and top_k_weights fp32 [num_tokens, top_k]
// Launch       gather_rows, activate_*: block 256, a warp owns a row, grid ceil(capacity / 8)
//              combine_*: block 128, a thread owns 8 columns of a token, grid (max_tokens, ceil(hidden_size / 1024))
// Needs        hidden_size and I multiples of 8, rows at multiples of 16 bytes, sm_80
// Moves        gather num_sorted * 4 * hidden_size B (x again from L2), activate_bf16 num_sorted * 6 * I B, combine_bf16
//              num_sorted * 2 * hidden_size + num_tokens * 2 * hidden_size B; for 4096 tokens, top 4, hidden_size 2048,
//              I 1408: 134, 138 and 84 MB, so 31, 32 and 19 us at 4.37 TB/s
// Numerics     fp32; h and y rounded once; products and sums of combine are fused
// Reference    gather, activate and combine in tests/kernels/test_grouped.py

#include <cuda_bf16.h>

#include "activation.cuh"
#include "common.cuh"

#define WARPS 8           // rows of a block in gather_rows and activate_*
#define COMBINE_THREADS 128

// Eight values in fp32, from 16 bytes of BF16 or 32 of fp32.
__device__ __forceinline__ void load8(float (&out)[8], const __nv_bfloat16* from) {
  const uint4 raw = *reinterpret_cast<const uint4*>(from);
  const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = bf16_to_f32(words[i]);
    out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ void load8(float (&out)[8], const float* from) {
  const float4 low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1];
  out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
  out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
}

__device__ __forceinline__ void store8(__nv_bfloat16* to, const float (&values)[8]) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = f32_to_bf16x2(values[2 * i + 1], values[2 * i]);
  *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ void add8(float (&values)[8], const __nv_bfloat16* bias) {
  float more[8];
  load8(more, bias);
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] += more[i];
}

// The bias of a pair's expert.
__device__ __forceinline__ const __nv_bfloat16* bias_of(const u8* pool, long long slot_bytes,
                                                        long long bias_offset_bytes, int slot) {
  return reinterpret_cast<const __nv_bfloat16*>(pool + slot * slot_bytes + bias_offset_bytes);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) gather_rows(
    const uint4* __restrict__ x, const int* __restrict__ pairs, const int* __restrict__ num_sorted, int capacity,
    int top_k, int hidden_size, uint4* __restrict__ xs) {
  const int row = blockIdx.x * WARPS + threadIdx.x / 32;
  if (row >= capacity) return;
  const int pair = pairs[row];  // in parallel with num_sorted
  if (row >= *num_sorted) return;
  const int vectors = hidden_size / 8;
  const uint4* const from = x + static_cast<long long>(pair / top_k) * vectors;
  uint4* const to = xs + static_cast<long long>(row) * vectors;
#pragma unroll 8
  for (int i = threadIdx.x % 32; i < vectors; i += 32) to[i] = from[i];
}

template <typename T>
__device__ __forceinline__ void activate_rows(const T* __restrict__ gate_up, const int* __restrict__ pairs,
                                              const int* __restrict__ num_sorted, int capacity, int inner,
                                              const int* __restrict__ top_k_index, const int* __restrict__ slot_of,
                                              const u8* __restrict__ pool, long long slot_bytes,
                                              long long bias_offset_bytes, __nv_bfloat16* __restrict__ h) {
  const int row = blockIdx.x * WARPS + threadIdx.x / 32;
  if (row >= capacity || row >= *num_sorted) return;
  const T* const gates = gate_up + 2ll * row * inner;
  const __nv_bfloat16* bias = nullptr;
  if (pool) bias = bias_of(pool, slot_bytes, bias_offset_bytes, slot_of[top_k_index[pairs[row]]]);
#pragma unroll 4
  for (int column = threadIdx.x % 32 * 8; column < inner; column += 256) {
    float gate[8], up[8];
    load8(gate, gates + column);
    load8(up, gates + inner + column);
    if (bias) {
      add8(gate, bias + column);
      add8(up, bias + inner + column);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) gate[i] = activate(gate[i], up[i]);
    store8(h + static_cast<long long>(row) * inner + column, gate);
  }
}

template <typename T>
__device__ __forceinline__ void combine(const T* __restrict__ p, const int* __restrict__ position,
                                        const float* __restrict__ top_k_weights, const int* __restrict__ num_tokens,
                                        int top_k, int hidden_size, const int* __restrict__ top_k_index,
                                        const int* __restrict__ slot_of, const u8* __restrict__ pool,
                                        long long slot_bytes, long long bias_offset_bytes,
                                        __nv_bfloat16* __restrict__ y) {
  const int token = blockIdx.x;
  const int column = (blockIdx.y * COMBINE_THREADS + threadIdx.x) * 8;
  if ((num_tokens && token >= *num_tokens) || column >= hidden_size) return;
  const long long first = static_cast<long long>(token) * top_k;
  float sum[8] = {};
  constexpr int BATCH = 4;  // rows in flight
  for (int begin = 0; begin < top_k; begin += BATCH) {
    float rows[BATCH][8], weight[BATCH];
    int where[BATCH];
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const bool inside = begin + j < top_k;
      where[j] = inside ? position[first + begin + j] : -1;
      weight[j] = inside ? top_k_weights[first + begin + j] : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      if (where[j] >= 0) load8(rows[j], p + static_cast<long long>(where[j]) * hidden_size + column);
    }
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      if (where[j] < 0) continue;
      if (pool) {
        const int slot = slot_of[top_k_index[first + begin + j]];
        add8(rows[j], bias_of(pool, slot_bytes, bias_offset_bytes, slot) + column);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] = fmaf(weight[j], rows[j][i], sum[i]);
    }
  }
  store8(y + static_cast<long long>(token) * hidden_size + column, sum);
}

#define FOR_TYPE(T, SUFFIX)                                                                                            \
  extern "C" __global__ void __launch_bounds__(32 * WARPS) activate_##SUFFIX(                                          \
      const T* __restrict__ gate_up, const int* __restrict__ pairs, const int* __restrict__ num_sorted, int capacity,  \
      int inner, const int* __restrict__ top_k_index, const int* __restrict__ slot_of,                                 \
      const u8* __restrict__ pool, long long slot_bytes, long long bias_offset_bytes,                       \
      __nv_bfloat16* __restrict__ h) {                                                                                 \
    activate_rows<T>(gate_up, pairs, num_sorted, capacity, inner, top_k_index, slot_of, pool, slot_bytes,                   \
                bias_offset_bytes, h);                                                                                 \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(COMBINE_THREADS) combine_##SUFFIX(                                      \
      const T* __restrict__ p, const int* __restrict__ position, const float* __restrict__ top_k_weights,              \
      const int* __restrict__ num_tokens, int top_k, int hidden_size, const int* __restrict__ top_k_index,             \
      const int* __restrict__ slot_of, const u8* __restrict__ pool, long long slot_bytes,                   \
      long long bias_offset_bytes, __nv_bfloat16* __restrict__ y) {                                                    \
    combine<T>(p, position, top_k_weights, num_tokens, top_k, hidden_size, top_k_index, slot_of, pool, slot_bytes,     \
               bias_offset_bytes, y);                                                                                  \
  }

FOR_TYPE(__nv_bfloat16, bf16)
FOR_TYPE(float, fp32)

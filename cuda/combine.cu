// combine.cu - what stands between the grouped matrix products: rows gathered, activated, and summed over the top k.
// gather_rows  xs[position[t, j]] = x[t], so that xs[i] is the token of sorted pair i; position -1 is left out
//              x bf16 [num_tokens, hidden_size], xs bf16 [capacity, hidden_size]; reads every row of x once
// activate_*   h[i] = activate(gate_up[i, :I] + gate bias, gate_up[i, I:] + up bias) for i < num_sorted
//              gate_up bf16 or fp32 [capacity, 2I], h bf16 [capacity, I]; the bias is bf16 [2I] at bias_offset_bytes of
//              slot slot_of[top_k_index[pairs[i]]] of pool; pool null: no bias
// combine_*    y[t] = sum over j = 0..top_k-1, in this order, of top_k_weights[t, j] * (p[position[t, j]] + down bias)
//              p bf16 or fp32 [capacity, hidden_size]; position -1 adds nothing; y bf16 [num_tokens, hidden_size], each
//              element written; the bias is bf16 [hidden_size] at bias_offset_bytes of the pair's slot.
//              kept fp32 [num_tokens, top_k, hidden_size] or null takes p + bias of each pair; with resume, pairs of
//              position -1 count with what it holds, so that calls over parts of the experts end with the bits of one
// Inputs       position, pairs int32 [capacity], num_sorted int32 [1], num_tokens int32 [1] or null for max_tokens,
//              slot_of int32 [num_experts], top_k_index int32 and top_k_weights fp32 [num_tokens, top_k]
// Launch       gather_rows, combine_*: block 128, a thread owns 8 columns of a token, grid (max_tokens,
//              ceil(hidden_size / 1024)); activate_*: block 256, a warp owns 512 columns of a row, grid
//              (ceil(capacity / 8), ceil(I / 512))
// Needs        hidden_size and I multiples of 8, rows at multiples of 16 bytes, sm_80
// Moves        gather_rows and combine_bf16 (num_sorted + num_tokens) * 2 * hidden_size B, activate_bf16
//              num_sorted * 6 * I B; for 4096 tokens, top 4, hidden_size 2048, I 1408: 84, 84 and 138 MB, so 19, 19 and
//              32 us at 4.37 TB/s
// Numerics     fp32; h and y rounded once; products and sums of combine are fused
// Reference    test_gathers_activates_and_combines in tests/kernels/test_grouped.py

#include <cuda_bf16.h>

#include "activation.cuh"
#include "common.cuh"

#define WARPS 8         // rows of a block in activate_*
#define SEGMENT 512     // columns of a warp in activate_*
#define TOKEN_THREADS 128  // of a block in gather_rows and combine_*
#define IN_FLIGHT 4     // rows of a token at a time

// Eight values as they are stored: 16 bytes of BF16 or 32 of fp32.
struct Bf16x8 {
  uint4 raw;
};
struct Fp32x8 {
  float4 low, high;
};

__device__ __forceinline__ Bf16x8 load8(const __nv_bfloat16* from) { return {*reinterpret_cast<const uint4*>(from)}; }

__device__ __forceinline__ Fp32x8 load8(const float* from) {
  return {reinterpret_cast<const float4*>(from)[0], reinterpret_cast<const float4*>(from)[1]};
}

__device__ __forceinline__ void widen(float (&out)[8], const Bf16x8& values) {
  const u32 words[4] = {values.raw.x, values.raw.y, values.raw.z, values.raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = bf16_to_f32(words[i]);
    out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ void widen(float (&out)[8], const Fp32x8& values) {
  out[0] = values.low.x, out[1] = values.low.y, out[2] = values.low.z, out[3] = values.low.w;
  out[4] = values.high.x, out[5] = values.high.y, out[6] = values.high.z, out[7] = values.high.w;
}

__device__ __forceinline__ void store8(__nv_bfloat16* to, const float (&values)[8]) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = f32_to_bf16x2(values[2 * i + 1], values[2 * i]);
  *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ void store8(float* to, const float (&values)[8]) {
  reinterpret_cast<float4*>(to)[0] = make_float4(values[0], values[1], values[2], values[3]);
  reinterpret_cast<float4*>(to)[1] = make_float4(values[4], values[5], values[6], values[7]);
}

__device__ __forceinline__ void add8(float (&values)[8], const __nv_bfloat16* bias) {
  float more[8];
  widen(more, load8(bias));
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] += more[i];
}

// The bias of a pair's expert.
__device__ __forceinline__ const __nv_bfloat16* bias_of(const u8* pool, long long slot_bytes,
                                                        long long bias_offset_bytes, int slot) {
  return reinterpret_cast<const __nv_bfloat16*>(pool + slot * slot_bytes + bias_offset_bytes);
}

extern "C" __global__ void __launch_bounds__(TOKEN_THREADS) gather_rows(
    const uint4* __restrict__ x, const int* __restrict__ position, const int* __restrict__ num_tokens, int top_k,
    int hidden_size, uint4* __restrict__ xs) {
  const int token = blockIdx.x, vectors = hidden_size / 8;
  const int column = blockIdx.y * TOKEN_THREADS + threadIdx.x;
  if (column >= vectors) return;
  const uint4 value = x[static_cast<long long>(token) * vectors + column];
  if (num_tokens && token >= *num_tokens) return;
  const int* const where = position + static_cast<long long>(token) * top_k;
#pragma unroll 4
  for (int j = 0; j < top_k; ++j) {
    if (where[j] >= 0) xs[static_cast<long long>(where[j]) * vectors + column] = value;
  }
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
#pragma unroll
  for (int part = 0; part < SEGMENT / 256; ++part) {
    const int column = blockIdx.y * SEGMENT + part * 256 + threadIdx.x % 32 * 8;
    if (column >= inner) return;
    const auto gate_values = load8(gates + column), up_values = load8(gates + inner + column);
    float gate[8], up[8];
    widen(gate, gate_values);
    widen(up, up_values);
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
                                        long long slot_bytes, long long bias_offset_bytes, float* __restrict__ kept,
                                        int resume, __nv_bfloat16* __restrict__ y) {
  const int token = blockIdx.x;
  const int column = (blockIdx.y * TOKEN_THREADS + threadIdx.x) * 8;
  if (column >= hidden_size || (num_tokens && token >= *num_tokens)) return;
  const long long first = static_cast<long long>(token) * top_k;
  float sum[8] = {};
  for (int begin = 0; begin < top_k; begin += IN_FLIGHT) {
    decltype(load8(p)) rows[IN_FLIGHT];
    float weight[IN_FLIGHT];
    int where[IN_FLIGHT];
#pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) {
      const bool inside = begin + j < top_k;
      where[j] = inside ? position[first + begin + j] : -1;
      weight[j] = inside ? top_k_weights[first + begin + j] : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) {
      if (where[j] >= 0) rows[j] = load8(p + static_cast<long long>(where[j]) * hidden_size + column);
    }
#pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) {
      float row[8];
      float* const place = kept ? kept + (first + begin + j) * hidden_size + column : nullptr;
      if (where[j] >= 0) {
        widen(row, rows[j]);
        if (pool) {
          const int slot = slot_of[top_k_index[first + begin + j]];
          add8(row, bias_of(pool, slot_bytes, bias_offset_bytes, slot) + column);
        }
        if (place) store8(place, row);
      } else if (resume && begin + j < top_k) {
        widen(row, load8(place));
      } else {
        continue;
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] = fmaf(weight[j], row[i], sum[i]);
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
    activate_rows<T>(gate_up, pairs, num_sorted, capacity, inner, top_k_index, slot_of, pool, slot_bytes,              \
                bias_offset_bytes, h);                                                                                 \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(TOKEN_THREADS) combine_##SUFFIX(                                        \
      const T* __restrict__ p, const int* __restrict__ position, const float* __restrict__ top_k_weights,              \
      const int* __restrict__ num_tokens, int top_k, int hidden_size, const int* __restrict__ top_k_index,             \
      const int* __restrict__ slot_of, const u8* __restrict__ pool, long long slot_bytes, long long bias_offset_bytes, \
      float* __restrict__ kept, int resume, __nv_bfloat16* __restrict__ y) {                                           \
    combine<T>(p, position, top_k_weights, num_tokens, top_k, hidden_size, top_k_index, slot_of, pool, slot_bytes,     \
               bias_offset_bytes, kept, resume, y);                                                                    \
  }

FOR_TYPE(__nv_bfloat16, bf16)
FOR_TYPE(float, fp32)

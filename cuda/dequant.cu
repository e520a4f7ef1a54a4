// dequant.cu - the active experts' INT4 or INT8 units as row-major BF16, for matrix products that want plain weights.
// Computes   weight = BF16((code - ZERO) * scale), rounded once: the product is exact in fp32
// Inputs     pool        slots of slot_bytes: gate_up units (runtime/kernels/units.py) at 0, down at down_offset_bytes
//            active      int32 [num_active]   experts to expand; others are left alone
//            num_active  int32 [1]
//            slot_of     int32 [num_experts]  slot of an active expert
// Output     plain       plain slots of plain_slot_bytes, one an expert: gate_up bf16 [2I, H] at 0, down bf16 [H, I] at
//                        plain_down_offset_bytes of slot number `expert`; biases are left alone
// Launch     block 256, any grid: warps walk over the units of all active experts; 64 blocks an SM measure best
// Compiled   BITS 4 or 8, SCALE_SETS 1, 2 or 4 (scales of a row in a unit)
// Needs      H and I multiples of 8, plain rows at multiples of 16 bytes, sm_80
// Moves      BITS / 8 + SCALE_SETS / 64 + 2 B a weight; 60 experts of 2048 x 1408, INT4 in groups of 128: 1.31 GB, so
//            300 us at 4.37 TB/s
// Layout     lane r * 4 + q of a warp holds rows r and r + 8, columns c * 32 + q * 8 + 0..7 for c = 0..3; 16 bytes a
//            store, 64 consecutive bytes a row and c
// Reference  dequantize in runtime/kernels/reference.py, bit for bit

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common.cuh"

#ifndef BITS
#define BITS 4
#endif
#ifndef SCALE_SETS
#define SCALE_SETS 1
#endif
#define CODE_BYTES (16 * 128 * BITS / 8)
#define UNIT_BYTES (CODE_BYTES + SCALE_SETS * 32)
#define THREADS 256
#define LOADS (CODE_BYTES / 512)  // 16-byte loads of a lane

// A code 0..255 as its value times scale; 2^23 + code is exact, and so is what remains after subtracting.
__device__ __forceinline__ float value_of(u32 code, float scale) {
  constexpr float OFFSET = 8388608.0f + (1 << (BITS - 1));
  return (__uint_as_float(0x4b000000u | code) - OFFSET) * scale;
}

// Registers of step 2c + s (s = 0, 1) and row half rh: four columns, as two words of BF16 pairs.
__device__ __forceinline__ uint2 four_columns(const uint4 (&codes)[LOADS], int c, int s, int rh, float scale) {
#if BITS == 4
  const uint4 half = codes[c / 2];
  const u32 word = (c % 2 ? (s ? half.w : half.z) : (s ? half.y : half.x)) >> (4 * rh);
  const u32 code[4] = {word & 15, word >> 16 & 15, word >> 8 & 15, word >> 24 & 15};
#else
  const uint4 piece = codes[c];
  const u32 word = s ? (rh ? piece.w : piece.z) : (rh ? piece.y : piece.x);
  const u32 code[4] = {word & 255, word >> 16 & 255, word >> 8 & 255, word >> 24};
#endif
  return make_uint2(f32_to_bf16x2(value_of(code[1], scale), value_of(code[0], scale)),
                    f32_to_bf16x2(value_of(code[3], scale), value_of(code[2], scale)));
}

struct Unit {
  uint4 codes[LOADS];
  __half2 scales[SCALE_SETS];  // of rows r and r + 8
};

__device__ __forceinline__ void load(Unit& unit, const u8* from, int lane) {
#pragma unroll
  for (int i = 0; i < LOADS; ++i) unit.codes[i] = __ldcs(reinterpret_cast<const uint4*>(from + 512 * i) + lane);
  const __half2* const scales = reinterpret_cast<const __half2*>(from + CODE_BYTES) + lane / 4;
#pragma unroll
  for (int i = 0; i < SCALE_SETS; ++i) unit.scales[i] = __ldcs(scales + 8 * i);
}

// Write a unit's rows; first_column counts in the linear, row[rh] < 0 is padding.
__device__ __forceinline__ void store(const Unit& unit, __nv_bfloat16* weight, const int (&row)[2], int first_column,
                                      int columns, int lane) {
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const int column = first_column + c * 32 + lane % 4 * 8;
    const float2 scale = __half22float2(unit.scales[c * SCALE_SETS / 4]);
#pragma unroll
    for (int rh = 0; rh < 2; ++rh) {
      const uint2 left = four_columns(unit.codes, c, 0, rh, rh ? scale.y : scale.x);
      const uint2 right = four_columns(unit.codes, c, 1, rh, rh ? scale.y : scale.x);
      if (row[rh] >= 0 && column < columns) {
        uint4* const to = reinterpret_cast<uint4*>(weight + static_cast<long long>(row[rh]) * columns + column);
        *to = make_uint4(left.x, left.y, right.x, right.y);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) dequantize(
    const u8* __restrict__ pool, long long slot_bytes, long long down_offset_bytes,
    const int* __restrict__ active, const int* __restrict__ num_active, const int* __restrict__ slot_of, int inner,
    int hidden, u8* __restrict__ plain, long long plain_slot_bytes, long long plain_down_offset_bytes) {
  const int lane = threadIdx.x % 32, r = lane / 4;
  const u32 gate_up_tile_units = (hidden + 127) / 128, down_tile_units = (inner + 127) / 128;
  const u32 gate_up_units = (inner + 7) / 8 * gate_up_tile_units;
  const u32 expert_units = gate_up_units + (hidden + 15) / 16 * down_tile_units;
  const u32 units = static_cast<unsigned>(*num_active) * expert_units;
  const u32 stride = gridDim.x * (THREADS / 32);
#pragma unroll 2  // both loads before the first stores
  for (u32 u = blockIdx.x * (THREADS / 32) + threadIdx.x / 32; u < units; u += stride) {
    const int expert = active[u / expert_units];
    u32 index = u % expert_units;
    const u8* from = pool + slot_of[expert] * slot_bytes;
    u8* to = plain + expert * plain_slot_bytes;
    const bool down = index >= gate_up_units;
    if (down) {
      index -= gate_up_units;
      from += down_offset_bytes;
      to += plain_down_offset_bytes;
    }
    Unit unit;
    load(unit, from + static_cast<long long>(index) * UNIT_BYTES, lane);
    const u32 tile_units = down ? down_tile_units : gate_up_tile_units;
    const int tile = index / tile_units, first_column = index % tile_units * 128;
    const int low = down ? tile * 16 + r : tile * 8 + r;
    const int limit = down ? hidden : inner;
    const int high = down ? low + 8 : low;
    const int row[2] = {low < limit ? low : -1, high < limit ? (down ? high : inner + high) : -1};
    store(unit, reinterpret_cast<__nv_bfloat16*>(to), row, first_column, down ? inner : hidden, lane);
  }
}

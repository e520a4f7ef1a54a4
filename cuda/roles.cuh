// roles.cuh - what the kernels whose warps have roles share (moe_codes.cu, moe_bf16.cu, moe_residual.cu): COMPUTE warps, then PRODUCERS, then
// FINISHERS. The including kernel defines its places in shared memory and UNIT_K before.
#pragma once
#include "few_tokens.cuh"

#define LISTERS (THREADS - COMPUTE * 32)
#define PRODUCER COMPUTE      // the first of them

__device__ __forceinline__ u32* sources() { return (u32*)(smem + OFF_SOURCE); }
struct Warp { int warp, lane; };

// A piece, 32 k, of the tokens of a unit for this lane's column; `k` is this lane's first k of the unit, x where the token begins, and h where
// that k of it is
__device__ __forceinline__ void load_x(u32* r, const u16* x, int k, int i) {
  uint4 v = make_uint4(0, 0, 0, 0);
  if (HIDDEN % UNIT_K == 0 || k + i * 32 < HIDDEN) v = load_read_only(x + k + i * 32);
  r[4 * i] = v.x, r[4 * i + 1] = v.y, r[4 * i + 2] = v.z, r[4 * i + 3] = v.w;
}
__device__ __forceinline__ void load_h(u32* r, const u16* h, int k, int i) {
  uint4 v = make_uint4(0, 0, 0, 0);
  if (INTER % UNIT_K == 0 || k + i * 32 < INTER) v = load_shared_by_grid(h + i * 32);
  r[4 * i] = v.x, r[4 * i + 1] = v.y, r[4 * i + 2] = v.z, r[4 * i + 3] = v.w;
}
// All four
__device__ __forceinline__ void load_x(u32* r, const u16* x, int k) {
#pragma unroll
  for (int i = 0; i < 4; i++) load_x(r, x, k, i);
}
__device__ __forceinline__ void load_h(u32* r, const u16* h, int k) {
#pragma unroll
  for (int i = 0; i < 4; i++) load_h(r, h, k, i);
}
// Whether all of it is written: 16 bytes that are not are all ones
__device__ __forceinline__ bool is_written(const u32* r) {
  bool all = true;
#pragma unroll
  for (int i = 0; i < 4; i++) all = all && r[4 * i] != 0xffffffffu;
  return all;
}
// Loads again until all that this lane wants is written
__device__ __forceinline__ void await_h(u32* r, const u16* h, int k) {
  while (!is_written(r)) load_h(r, h, k);
}

// By a producer, when its claim in flight has come back (its value is used). The last of all to be here starts the next call's counting
__device__ __forceinline__ void end_claims(const Args& args, int lane, u32 ahead, u32 parity) {
  if (lane == 0 && atomic_add(args.state + 1, 1 + (u32)(ahead == 0xffffffffu)) == gridDim.x * PRODUCERS - 1) {
    args.state[1] = 0;
    args.state[0] = ~(parity << 31) & 0x80000000u;
  }
}

// By finisher f: the other buffer of h is for the next call
__device__ __forceinline__ void refill_h(const Args& args, int f, int lane, u32 parity) {
  uint4* other = (uint4*)(args.h + (u64)(parity ^ 1) * MAX_PAIRS * INTER);
  for (int i = (blockIdx.x * FINISHERS + f) * 32 + lane; i < MAX_PAIRS * INTER / 8; i += gridDim.x * FINISHERS * 32) other[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
}

// By the compute warps: where the columns of an entry have their h, in bytes from a buffer's begin
__device__ __forceinline__ void make_sources(int num_active) {
  for (int i = threadIdx.x; i < num_active * COLUMNS; i += COMPUTE * 32) {
    const u16 pair = active_pairs()[i];
    sources()[i] = (pair == NO_PAIR ? (u32)active_list()[i / COLUMNS].y : pair) * (INTER * 2);
  }
  barrier_of<COMPUTE * 32>(1);
}

// Leaves the sums of a part of an entry's down for finish_rows; they begin anew
__device__ __forceinline__ void put_part(int lane, int entry, int part, float* acc) {
  const u32 two = *(const u32*)(active_pairs() + entry * COLUMNS + (lane % 4) * 2), low = two & 0xffffu, high = two >> 16;
  float* sums = (float*)(smem + OFF_PART) + part * (MAX_PAIRS * 16) + lane / 4;
  if (low != NO_PAIR) sums[low * 16] = acc[0], sums[low * 16 + 8] = acc[2];
  if (high != NO_PAIR) sums[high * 16] = acc[1], sums[high * 16 + 8] = acc[3];
  acc[0] = acc[1] = acc[2] = acc[3] = 0.f;
}

// y of 16 rows, when all compute warps have left their sums
__device__ __forceinline__ void finish_tile(const Args& args, int rt) {
  barrier_of<COMPUTE * 32>(1);
  finish_rows<COMPUTE * 32>(args, rt);
  if (rt + (int)gridDim.x < TILES2) barrier_of<COMPUTE * 32>(1);   // the sums of the next rows come to the same place
}

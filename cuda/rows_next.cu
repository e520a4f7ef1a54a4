// rows_next.cu - what a step of the draft leaves behind: its proposal, for the next step and for the host.
// next_rows    token = the place of the largest of logits[n], the lowest of equals, a NaN above all;
//              tokens[step] = token, routes[step, i] = chosen[i]; then state = token, position + 1, step + 1
//              logits bf16 [n]; state int64 [3]: token, position, step; chosen int32 [count];
//              tokens int64 [steps] and routes int32 [steps, count] in the host's memory;
//              scratch u64 [2], zero before the first call and after each: the best so far, how many blocks are done
// Launch       block 256, grid of any size, programmatic
// Needs        n up to 2^32 - 1, logits at a multiple of 16 bytes; sm_80
// Moves        2 * n B
// Numerics     none
// Reference    tests/kernels/test_rows.py
#include "common.cuh"

#define THREADS 256

// BF16 bits in the order of their numbers; zeros of both signs are alike, a NaN is the largest
__device__ __forceinline__ u32 rank(u32 bits) {
  if ((bits & 0x7fffu) > 0x7f80u) return 0x10000u;
  if (!(bits & 0x7fffu)) return 0x8000u;
  return bits & 0x8000u ? 0xffffu - bits : bits | 0x8000u;
}

// The larger rank, and the lower place of equals, is the larger number
__device__ __forceinline__ u64 entry(u32 bits, u32 at) { return (u64)rank(bits) << 32 | (0xffffffffu - at); }

__device__ __forceinline__ u64 larger_of_warp(u64 most) {
#pragma unroll
  for (int distance = 16; distance; distance >>= 1) {
    const u64 high = __shfl_xor_sync(~0u, (u32)(most >> 32), distance), other = high << 32 | __shfl_xor_sync(~0u, (u32)most, distance);
    most = other > most ? other : most;
  }
  return most;
}

extern "C" __global__ void __launch_bounds__(THREADS) next_rows(const u16* logits, long long* state, const int* chosen, volatile long long* tokens, volatile int* routes, u64* scratch, int n, int count) {
  __shared__ u64 best[THREADS / 32];
  __shared__ bool last;
  wait_for_previous_kernel();
  let_next_kernel_start();
  u64 most = 0;
  const int whole = n / 8, step = gridDim.x * THREADS;
  for (int v = blockIdx.x * THREADS + threadIdx.x; v < whole; v += step) {
    const uint4 eight = *reinterpret_cast<const uint4*>(logits + v * 8);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const u64 here = entry(i & 1 ? (&eight.x)[i >> 1] >> 16 : (&eight.x)[i >> 1] & 0xffffu, v * 8 + i);
      most = here > most ? here : most;
    }
  }
  if (blockIdx.x == 0 && threadIdx.x < n - whole * 8) {
    const u64 here = entry(logits[whole * 8 + threadIdx.x], whole * 8 + threadIdx.x);
    most = here > most ? here : most;
  }
  most = larger_of_warp(most);
  if (!(threadIdx.x & 31)) best[threadIdx.x >> 5] = most;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 1; i < THREADS / 32; ++i) most = best[i] > most ? best[i] : most;
    atomicMax(scratch, most);
    __threadfence();
    last = atomicAdd(scratch + 1, 1ull) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  const long long number = state[2];
  for (int i = threadIdx.x; i < count; i += THREADS) routes[number * count + i] = chosen[i];
  __syncthreads();
  if (threadIdx.x == 0) {
    const long long token = 0xffffffffu - (u32)atomicExch(scratch, 0ull);
    scratch[1] = 0;
    tokens[number] = token;
    state[0] = token, state[1] += 1, state[2] = number + 1;
  }
}

// ahead.cu - has memory brought to the L2 that a later kernel will read, beside kernels that leave the memory idle.
// bring        asks for `bytes` from `from` on, in pieces of PIECE, and returns before they have come; nothing below sm_90
// Launch       block 32, grid ceil(bytes / (32 * PIECE)); on a stream of its own
// Needs        from and bytes at multiples of 16 bytes
// Moves        bytes, at most, once
#include "common.cuh"

#define PIECE 8192

extern "C" __global__ void __launch_bounds__(32) bring(const u8* from, long long bytes) {
#if __CUDA_ARCH__ >= 900
  const long long at = (blockIdx.x * 32ll + threadIdx.x) * PIECE;
  if (at < bytes) {
    const u32 size = (u32)min((long long)PIECE, bytes - at);
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from + at), "r"(size) : "memory");
  }
#endif
}

// wgmma.cuh - what sm_90a has beside common.cuh: barriers that count bytes, tensor copies, clusters, warpgroup MMA.
// Thin wrappers of an instruction each; the rules of their use stand beside them. CLUSTER: blocks of a cluster, or 1.
#pragma once

#include "common.cuh"

#ifndef CLUSTER
#define CLUSTER 1
#endif

struct alignas(64) TensorMap {  // CUtensorMap: pass as const __grid_constant__, use only its address
  u8 bytes[128];
};

// ---- mbarrier: a phase ends when `count` arrivals and all expected bytes have come; waiters name the phase's parity.
__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void mbarrier_init_fence() {  // after the last init, before the block's barrier: for copies
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_expect(u32 barrier, u32 bytes) {  // one arrival that announces bytes
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{ .reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra again; }" ::"r"(barrier), "r"(parity) : "memory");
}

// ---- tensor copies to shared memory; coordinates run from the innermost dimension. `_to_all` writes to the same place
// in every block of the cluster, and counts its bytes at the same barrier in each.
#if CLUSTER > 1
#define TO_ALL ".multicast::cluster"
#define TO_ALL_MASK "%4, "
#else
#define TO_ALL ""
#define TO_ALL_MASK ""
#endif
__device__ __forceinline__ void copy_2d(u32 to, const TensorMap* map, int x, int y, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier) : "memory");
}
__device__ __forceinline__ void copy_3d_to_all(u32 to, const TensorMap* map, int c0, int c1, int c2, u32 barrier,
                                               u64 policy) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes" TO_ALL ".L2::cache_hint "
               "[%0], [%1, {%5, %6, %7}], [%2], " TO_ALL_MASK "%3;"
               ::"r"(to), "l"(map), "r"(barrier), "l"(policy), "h"((u16)((1 << CLUSTER) - 1)), "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}
__device__ __forceinline__ void copy_5d_to_all(u32 to, const TensorMap* map, int c0, int c1, int c2, int c3, int c4,
                                               u32 barrier, u64 policy) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes" TO_ALL ".L2::cache_hint "
               "[%0], [%1, {%5, %6, %7, %8, %9}], [%2], " TO_ALL_MASK "%3;"
               ::"r"(to), "l"(map), "r"(barrier), "l"(policy), "h"((u16)((1 << CLUSTER) - 1)), "r"(c0), "r"(c1),
               "r"(c2), "r"(c3), "r"(c4) : "memory");
}
__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ u64 evict_first() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ u64 evict_normal() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// ---- clusters: blocks that run at the same time on neighbouring SMs and reach each other's shared memory
__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_sync() {  // all threads; what they wrote to shared memory is seen
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive_at(u32 barrier, u32 rank) {  // the same barrier in block `rank`
  // release of the block, the default; release of the cluster is a fence of the whole GPU, about 1 us each time
  asm volatile("{ .reg .b32 there;\n"
               "mapa.shared::cluster.u32 there, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier), "r"(rank) : "memory");
}

// ---- registers move between warpgroups; every warp of the warpgroup executes it.
template <int N>
__device__ __forceinline__ void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// ---- wgmma: D (64 x N, FP32, registers) += A (64 x 16) B^T (N x 16), BF16, both in shared memory with k innermost.
// An operand is rows of 128 bytes under the 128-byte swizzle, in groups of 8 rows; `group_stride` is from one group of
// eight rows to the next. A k step of 16 adds 32 bytes to the address (2 to the descriptor).
__device__ __forceinline__ u64 descriptor(u32 address, u32 group_stride) {
  return (u64)((address & 0x3ffff) >> 4) | 1ull << 16 | (u64)(group_stride >> 4) << 32 | 1ull << 62;
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Wgmma<N>::mma(d, a, b): thread t of the warpgroup holds in d[4j + 2h + c] row 16 * (t / 32) + 8h + t % 32 / 4,
// column 8j + 2 * (t % 4) + c.
template <int N> struct Wgmma;
#define R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R8(i) R4(i), R4(i + 4)
#define R16(i) R8(i), R8(i + 8)
#define R32(i) R16(i), R16(i + 16)
#define R64(i) R32(i), R32(i + 32)
#define T0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define T1 T0 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define T2 T1 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define T3 T2 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define T4 T3 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define T5 T4 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define T6 T5 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define T7 T6 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define T8 T7 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define T9 T8 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define T10 T9 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define T11 T10 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define T12 T11 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define T13 T12 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define T14 T13 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define T15 T14 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA(N, LIST, A, B, ...)                                                                                     \
  template <> struct Wgmma<N> {                                                                                       \
    static __device__ __forceinline__ void mma(float (&d)[N / 2], u64 a, u64 b) {                                     \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" LIST "}, " A ", " B ", 1, 1, 1, 0, 0;" \
                   : __VA_ARGS__ : "l"(a), "l"(b));                                                                   \
    }                                                                                                                 \
  };
WGMMA(16, T0, "%8", "%9", R8(0))
WGMMA(32, T1, "%16", "%17", R16(0))
WGMMA(48, T2, "%24", "%25", R16(0), R8(16))
WGMMA(64, T3, "%32", "%33", R32(0))
WGMMA(80, T4, "%40", "%41", R32(0), R8(32))
WGMMA(96, T5, "%48", "%49", R32(0), R16(32))
WGMMA(112, T6, "%56", "%57", R32(0), R16(32), R8(48))
WGMMA(128, T7, "%64", "%65", R64(0))
WGMMA(144, T8, "%72", "%73", R64(0), R8(64))
WGMMA(160, T9, "%80", "%81", R64(0), R16(64))
WGMMA(176, T10, "%88", "%89", R64(0), R16(64), R8(80))
WGMMA(192, T11, "%96", "%97", R64(0), R32(64))
WGMMA(208, T12, "%104", "%105", R64(0), R32(64), R8(96))
WGMMA(224, T13, "%112", "%113", R64(0), R32(64), R16(96))
WGMMA(240, T14, "%120", "%121", R64(0), R32(64), R16(96), R8(112))
WGMMA(256, T15, "%128", "%129", R64(0), R64(64))
#undef WGMMA
#undef R4
#undef R8
#undef R16
#undef R32
#undef R64
#undef T0
#undef T1
#undef T2
#undef T3
#undef T4
#undef T5
#undef T6
#undef T7
#undef T8
#undef T9
#undef T10
#undef T11
#undef T12
#undef T13
#undef T14
#undef T15

// simt.hpp - runs CUDA kernels of this project on the host, thread by thread, to test their logic without a GPU.
//
// Every CUDA thread is a fiber. One runs until it waits for others (a warp's shuffle, a barrier, a copy, a poll), then the
// scheduler picks a warp at random. Copies land as late as the kernel's waits allow, at once, or at random times, and what they
// will overwrite is destroyed first. Only `resident` blocks run at a time, so that a kernel which needs all of its grid to be
// resident does not end. Some warps are slow for a while, so that others overtake them. Nothing happens for long: a deadlock,
// reported with what every kind of thread waits for.
// Memory is sequentially consistent here, and the lanes of a warp run one after the other until they wait: missing fences and
// missing __syncwarp are not found, missing waits and barriers are.
//
// This header is what a kernel sees of the machine, and little, since each variant of a kernel is compiled with it. The machine
// itself (machine.hpp) is compiled once.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint2 { u32 x, y; };
struct int2 { int x, y; };
struct Dim { u32 x, y, z; };

namespace simt {
enum Copies { LATE, AT_ONCE, RANDOM };

// Where the running thread is
struct Place { u32 thread, block, grid, grid_y, threads, shared_bytes; u8* shared; };
extern Place* here;
inline u32 lane_id() { return here->thread % 32; }

[[noreturn]] void fail(const char* what);
void yield(const char* what);        // to the scheduler, until it comes back
void event();                        // something that others may have waited for
void gate(int id, u32 threads, const char* what);
bool pass(int id, u32 threads);      // arrives at a barrier of threads; whether it was the last
void waited();                       // for the kernel ahead

struct Warp { int op = 0; u32 arrived = 0; u64 round = 0; u32 in[32][12], out[32][8]; };
// All lanes of the warp meet with their words; `work` is done once, by the last
void together(int op, const char* what, const u32* in, int words, u32* out, int results, void (*work)(Warp&));

inline u8* at_shared(u32 address, u32 bytes) {
  if ((u64)address + bytes > here->shared_bytes) fail("an access past shared memory");
  if (address % bytes) fail("a misaligned access to shared memory");
  return here->shared + address;
}

// What the kernel ahead writes: nothing of it is there when a block begins, all of it once a thread has waited
struct Late { int count; u8* const* at; const u64* bytes; };

// One kernel; `kernel` is called with `with` by every thread
struct Launch {
  u32 grid = 1, grid_y = 1, threads = 32, shared_bytes = 0;
  Copies copies = RANDOM;
  u32 seed = 1;
  void (*kernel)(const void* with) = nullptr;
  const void* with = nullptr;
  Late late{};
};
// Runs some kernels side by side, each with at most `resident` blocks at a time. Returns null, or what went wrong, until the next call.
const char* run(const Launch* launches, int count, u32 resident, u32 seed);
template <class F> Launch launch_of(const F& kernel) {  // which must outlive it
  Launch l;
  l.kernel = [](const void* with) { (*(const F*)with)(); }, l.with = &kernel;
  return l;
}
}  // namespace simt

// ---- CUDA's names ----
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define threadIdx (Dim{simt::here->thread, 0, 0})
#define blockIdx (Dim{simt::here->block % simt::here->grid, simt::here->block / simt::here->grid, 0})
#define gridDim (Dim{simt::here->grid, simt::here->grid_y, 1})
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
template <class A, class B> inline auto min(A a, B b) -> decltype(a + b) { return a < b ? a : b; }
template <class A, class B> inline auto max(A a, B b) -> decltype(a + b) { return a > b ? a : b; }
inline int __popc(u32 v) { return __builtin_popcount(v); }
inline int __ffs(u32 v) { return __builtin_ffs((int)v); }
inline int __clz(u32 x) { return x ? __builtin_clz(x) : 32; }
inline u32 __funnelshift_r(u32 low, u32 high, u32 shift) { return (u32)(((u64)high << 32 | low) >> (shift & 31)); }
inline float __uint_as_float(u32 v) { float f; memcpy(&f, &v, 4); return f; }
inline u32 __float_as_uint(float f) { u32 v; memcpy(&v, &f, 4); return v; }
inline float __expf(float v) { return expf(v); }
inline float rsqrtf(float v) { return 1.0f / sqrtf(v); }
inline float __ldcg(const float* p) { return *p; }
inline void __threadfence() {}
inline void __threadfence_system() {}
inline int atomicAdd(int* p, int n) { const int before = *p; *p += n; return before; }
inline u64 atomicAdd(u64* p, u64 n) { const u64 before = *p; *p += n; return before; }
inline u64 atomicMax(u64* p, u64 n) { const u64 before = *p; if (n > before) *p = n; return before; }
inline u64 atomicExch(u64* p, u64 n) { const u64 before = *p; *p = n; return before; }
inline float __fdividef(float a, float b) { return a / b; }
inline void __syncthreads() { simt::gate(0, simt::here->threads, "__syncthreads"); }
void __syncwarp();
u32 __ballot_sync(u32, bool vote);
u32 simt_shuffle(int op, const char* what, u32 v, u32 source);   // each lane may ask for another
template <class T> inline T simt_shuffle(int op, const char* what, T v, int source) {
  u32 word;
  memcpy(&word, &v, 4);
  word = simt_shuffle(op, what, word, (u32)source & 31);
  memcpy(&v, &word, 4);
  return v;
}
template <class T> inline T __shfl_sync(u32, T v, int source) { return simt_shuffle(3, "__shfl_sync", v, source); }
template <class T> inline T __shfl_xor_sync(u32, T v, int mask) { return simt_shuffle(4, "__shfl_xor_sync", v, (int)simt::lane_id() ^ mask); }
template <class T> inline T __shfl_down_sync(u32, T v, int d) {
  const int lane = simt::lane_id();
  return simt_shuffle(5, "__shfl_down_sync", v, lane + d < 32 ? lane + d : lane);
}
template <class T> inline T __shfl_up_sync(u32, T v, int d) {
  const int lane = simt::lane_id();
  return simt_shuffle(8, "__shfl_up_sync", v, lane >= d ? lane - d : lane);
}
u32 __match_any_sync(u32, int v);
inline bool __all_sync(u32, bool vote) { return __ballot_sync(~0u, vote) == ~0u; }
inline u32 atomicOr(u32* p, u32 v) { const u32 old = *p; *p |= v; simt::event(); return old; }

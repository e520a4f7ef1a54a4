// simt.hpp - runs CUDA kernels of this project on the host, thread by thread, to test their logic without a GPU.
//
// Every CUDA thread is a fiber. One runs until it waits for others (a warp's shuffle, a barrier, a copy, a poll), then the
// scheduler picks a warp at random. Copies land as late as the kernel's waits allow, at once, or at random times, and what they
// will overwrite is destroyed first. Only `resident` blocks run at a time, so that a kernel which needs all of its grid to be
// resident does not end. Some warps are slow for a while, so that others overtake them. Nothing happens for long: a deadlock,
// reported with what every kind of thread waits for.
// Memory is sequentially consistent here, and the lanes of a warp run one after the other until they wait: missing fences and
// missing __syncwarp are not found, missing waits and barriers are.
#pragma once
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

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

struct Barrier { u32 expected = 0, pending = 0; long long bytes = 0; u64 phase = 0; };   // an mbarrier
struct Bulk { u32 dst; std::vector<u8> data; u32 barrier; };
struct Gate { u32 arrived = 0; u64 round = 0; };                                         // a barrier of threads
struct Async { u32 dst; std::vector<u8> data; };

struct Block;
struct Warp { int op = 0; u32 arrived = 0; u64 round = 0; u32 in[32][12], out[32][8]; };
struct Lane {
  ucontext_t context;   // only to start on a stack of its own
  jmp_buf place;        // where it goes on; unlike swapcontext, _longjmp calls no system
  bool started = false;
  u32 thread = 0;
  Block* block = nullptr;
  Warp* warp = nullptr;
  bool done = false;
  const char* waits = "";
  std::deque<std::vector<Async>> groups;
  std::vector<Async> open;
};
struct Block {
  u32 index = 0, live = 0;
  std::vector<u8> shared;
  std::vector<std::unique_ptr<Lane>> lanes;
  std::vector<Warp> warps;
  std::vector<u8> slow;     // warps that run a hundred times less often
  std::map<u32, Barrier> barriers;
  std::map<int, Gate> gates;
  std::vector<Bulk> bulks;
  char* stacks = nullptr;
  size_t stack_bytes = 0;
  ~Block() { if (stacks) munmap(stacks, stack_bytes); }
};

struct Machine {
  u32 grid = 1, grid_y = 1, threads = 32, shared_bytes = 0;
  Copies copies = RANDOM;
  std::mt19937 random{1};
  std::function<void()> kernel;
  std::function<void()> begun, waited;  // a block begins; a thread has waited for the kernel ahead
  Lane* now = nullptr;
  jmp_buf scheduler;
  u64 events = 0;                    // things that others may have waited for
  std::string fault;
};
inline Machine* machine = nullptr;   // the one whose fiber runs
inline Lane& lane() { return *machine->now; }
inline u32 lane_id() { return lane().thread % 32; }

inline void leave() {                // to the scheduler, until it comes back
  if (!_setjmp(lane().place)) _longjmp(machine->scheduler, 1);
}
inline void go_on(Machine& m, Lane& l) {
  m.now = &l;
  if (_setjmp(m.scheduler)) return;
  if (l.started) _longjmp(l.place, 1);
  l.started = true;
  setcontext(&l.context);
}
[[noreturn]] inline void fail(const std::string& what) {
  if (machine->fault.empty()) machine->fault = what + " (block " + std::to_string(lane().block->index) + ", thread " + std::to_string(lane().thread) + ")";
  while (true) leave();
}
inline void yield(const char* what) {
  lane().waits = what;
  leave();
}
template <class P> inline void wait_until(const char* what, P ready) { while (!ready()) yield(what); }
inline void event() { machine->events++; }

// All lanes of the warp meet with their words; `work` is done once, by the last
template <class W> inline void together(int op, const char* what, const u32* in, int words, u32* out, int results, W work) {
  Warp& w = *lane().warp;
  const u32 me = lane_id();
  if (w.arrived == 0) w.op = op;
  if (w.op != op) fail(std::string("a warp whose lanes meet in different operations: ") + what);
  memcpy(w.in[me], in, words * 4);
  const u64 round = w.round;
  if (++w.arrived == 32) {
    work(w);
    w.arrived = 0, w.round++;
    event();
  } else wait_until(what, [&] { return w.round != round; });
  memcpy(out, w.out[me], results * 4);
}

inline bool pass(int id, u32 threads) {   // arrives at a barrier of threads; whether it was the last
  Gate& g = lane().block->gates[id];
  if (++g.arrived < threads) return false;
  g.arrived = 0, g.round++;
  event();
  return true;
}
inline void gate(int id, u32 threads, const char* what) {
  Gate& g = lane().block->gates[id];
  const u64 round = g.round;
  if (!pass(id, threads)) wait_until(what, [&] { return g.round != round; });
}

inline u8* at_shared(u32 address, u32 bytes) {
  Block& b = *lane().block;
  if ((u64)address + bytes > b.shared.size()) fail("an access past shared memory");
  if (address % bytes) fail("a misaligned access to shared memory");
  return b.shared.data() + address;
}
inline Barrier& barrier_at(u32 address) {
  auto found = lane().block->barriers.find(address);
  if (found == lane().block->barriers.end()) fail("an mbarrier that was not initialised");
  return found->second;
}
inline void settle(Barrier& b) {
  if (b.pending == 0 && b.bytes == 0) b.phase++, b.pending = b.expected, event();
}
inline void arrive(Barrier& b, u32 count) {
  if (b.pending < count) fail("more arrivals than an mbarrier expects");
  b.pending -= count;
  settle(b);
}
inline void land(Block& block, size_t i) {
  Bulk bulk = std::move(block.bulks[i]);
  block.bulks.erase(block.bulks.begin() + i);
  memcpy(block.shared.data() + bulk.dst, bulk.data.data(), bulk.data.size());
  Barrier& b = block.barriers[bulk.barrier];
  b.bytes -= (long long)bulk.data.size();
  settle(b);
}

// Runs some kernels side by side, each with at most `resident` blocks at a time. Returns "", or what went wrong. In simt.cpp.
std::string run(std::vector<Machine*> machines, std::vector<u32> resident, u32 seed);
}  // namespace simt

// ---- CUDA's names ----
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define threadIdx (Dim{simt::lane().thread, 0, 0})
#define blockIdx (Dim{simt::lane().block->index % simt::machine->grid, simt::lane().block->index / simt::machine->grid, 0})
#define gridDim (Dim{simt::machine->grid, simt::machine->grid_y, 1})
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
inline float __expf(float v) { return std::exp(v); }
inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
inline float __ldcg(const float* p) { return *p; }
inline void __threadfence() {}
inline void __threadfence_system() {}
inline int atomicAdd(int* p, int n) { const int before = *p; *p += n; return before; }
inline u64 atomicAdd(u64* p, u64 n) { const u64 before = *p; *p += n; return before; }
inline u64 atomicMax(u64* p, u64 n) { const u64 before = *p; if (n > before) *p = n; return before; }
inline u64 atomicExch(u64* p, u64 n) { const u64 before = *p; *p = n; return before; }
inline float __fdividef(float a, float b) { return a / b; }
inline void __syncthreads() { simt::gate(0, simt::machine->threads, "__syncthreads"); }
inline void __syncwarp() {
  u32 none = 0;
  simt::together(1, "__syncwarp", &none, 0, &none, 0, [](simt::Warp&) {});
}
inline u32 __ballot_sync(u32, bool vote) {
  u32 in = vote, out;
  simt::together(2, "__ballot_sync", &in, 1, &out, 1, [](simt::Warp& w) {
    u32 bits = 0;
    for (int i = 0; i < 32; i++) bits |= (w.in[i][0] & 1) << i;
    for (int i = 0; i < 32; i++) w.out[i][0] = bits;
  });
  return out;
}
template <class T, class F> inline T simt_shuffle(int op, const char* what, T v, F from) {
  u32 in, out;
  memcpy(&in, &v, 4);
  simt::together(op, what, &in, 1, &out, 1, [&](simt::Warp& w) { for (int i = 0; i < 32; i++) w.out[i][0] = w.in[from(i)][0]; });
  T r;
  memcpy(&r, &out, 4);
  return r;
}
template <class T> inline T __shfl_sync(u32, T v, int source) {   // each lane may ask for another
  u32 in[2] = {0, (u32)source & 31}, out;
  memcpy(in, &v, 4);
  simt::together(3, "__shfl_sync", in, 2, &out, 1, [](simt::Warp& w) { for (int i = 0; i < 32; i++) w.out[i][0] = w.in[w.in[i][1]][0]; });
  T r;
  memcpy(&r, &out, 4);
  return r;
}
template <class T> inline T __shfl_xor_sync(u32, T v, int mask) { return simt_shuffle(4, "__shfl_xor_sync", v, [=](int i) { return i ^ mask; }); }
template <class T> inline T __shfl_down_sync(u32, T v, int d) { return simt_shuffle(5, "__shfl_down_sync", v, [=](int i) { return i + d < 32 ? i + d : i; }); }
template <class T> inline T __shfl_up_sync(u32, T v, int d) { return simt_shuffle(8, "__shfl_up_sync", v, [=](int i) { return i >= d ? i - d : i; }); }
inline u32 __match_any_sync(u32, int v) {
  u32 in = (u32)v, out;
  simt::together(10, "__match_any_sync", &in, 1, &out, 1, [](simt::Warp& w) {
    for (int i = 0; i < 32; i++) {
      w.out[i][0] = 0;
      for (int j = 0; j < 32; j++) w.out[i][0] |= (u32)(w.in[i][0] == w.in[j][0]) << j;
    }
  });
  return out;
}
inline bool __all_sync(u32, bool vote) { return __ballot_sync(~0u, vote) == ~0u; }
inline u32 atomicOr(u32* p, u32 v) { const u32 old = *p; *p |= v; simt::event(); return old; }

// The functions of cuda/common.cuh on the emulated machine; the kernels include this text in its place.
#pragma once
#include "simt.hpp"

#define DYNAMIC_SHARED(name) static const int name##_is_shared = 0
#define smem (simt::here->shared)

inline u32 shared_address(const void* p) { return (u32)((const u8*)p - smem); }
template <class T> inline T simt_lds(u32 a) { T v; memcpy(&v, simt::at_shared(a, sizeof(T)), sizeof(T)); return v; }
template <class T> inline void simt_sts(u32 a, T v) { memcpy(simt::at_shared(a, sizeof(T)), &v, sizeof(T)); }
inline uint4 lds128(u32 a) { return simt_lds<uint4>(a); }
inline u32 lds32(u32 a) { return simt_lds<u32>(a); }
inline u32 lds16(u32 a) { return simt_lds<u16>(a); }
inline u32 lds8(u32 a) { return simt_lds<u8>(a); }
inline float lds_f32(u32 a) { return simt_lds<float>(a); }
inline float4 lds_f128(u32 a) { return simt_lds<float4>(a); }
inline void sts32(u32 a, u32 v) { simt_sts(a, v); }
inline void sts_f32(u32 a, float v) { simt_sts(a, v); }
inline void sts_f128(u32 a, float x, float y, float z, float w) { simt_sts(a, float4{x, y, z, w}); }
inline void sts128(u32 a, u32 x, u32 y, u32 z, u32 w) { simt_sts(a, uint4{x, y, z, w}); }
template <int THREADS_> inline void barrier_of(int id) { simt::gate(id, THREADS_, "a barrier of some warps"); }
template <int THREADS_> inline void barrier_pass(int id) { simt::pass(id, THREADS_); }

// ---- asynchronous copies: they land when they are waited for, at once, or at a random wait before ----
void copy_async_or_zero(u32 dst, const void* src, bool there);
inline void copy_async(u32 dst, const void* src) { copy_async_or_zero(dst, src, true); }
void copy_commit();
void simt_copy_wait(u32 left);
template <int LEFT> inline void copy_wait() { simt_copy_wait(LEFT); }

// ---- global memory that other blocks write ----
inline uint4 load_shared_by_grid(const void* p) {
  simt::yield("a value of another block");
  uint4 v;
  memcpy(&v, p, 16);
  return v;
}
inline void store_shared_by_grid(void* p, uint4 v) { memcpy(p, &v, 16), simt::event(); }
inline uint4 load_read_only(const void* p) { uint4 v; memcpy(&v, p, 16); return v; }
inline void prefetch_l2(const void*) {}
inline u32 load_word_here(const void* p) { u32 v; memcpy(&v, p, 4); return v; }
inline uint4 load_past_l1(const void* p) { return load_read_only(p); }
inline uint4 load_lines(const void* p) { return load_read_only(p); }
inline u32 atomic_add(u32* p, u32 n) { const u32 old = *p; *p += n; simt::event(); return old; }
inline u32 atomic_add_later(u32* p, u32 n, int zero) { return atomic_add(p + zero, n); }
inline u32 atomic_add_by_first(u32* p, u32 n, int lane) { return lane ? 0 : atomic_add(p, n); }

// ---- arithmetic ----
#define MINUS_INFINITY (-INFINITY)
inline float bf16_to_f32(u32 bits) { return __uint_as_float(bits << 16); }
inline u32 simt_bf16(float f) {
  if (f != f) return 0x7fff;
  const u32 v = __float_as_uint(f);
  return (v + 0x7fff + (v >> 16 & 1)) >> 16;
}
inline u32 f32_to_bf16x2(float high, float low) { return simt_bf16(high) << 16 | simt_bf16(low); }
inline float f16_to_f32(u32 bits) { _Float16 h; const u16 b = (u16)bits; memcpy(&h, &b, 2); return (float)h; }
inline u32 and_or(u32 a, u32 mask, u32 bits) { return (a & mask) | bits; }
inline u32 permute(u32 a, u32 b, u32 selector) {   // bit 3 of a selector: the sign of the byte, eight times
  const u64 bytes = (u64)b << 32 | a;
  u32 out = 0;
  for (int i = 0; i < 4; i++) {
    const u32 from = selector >> (4 * i) & 15, byte = bytes >> (8 * (from & 7)) & 255;
    out |= (from & 8 ? (byte >> 7) * 255 : byte) << (8 * i);
  }
  return out;
}
inline u32 and_xor(u32 a, u32 mask, u32 bits) { return (a & mask) ^ bits; }
inline u32 shift_pair(u32 low, u32 high, u32 n) { return n >= 32 ? high : (u32)(((u64)high << 32 | low) >> n); }
inline u32 dot_bytes(u32 a, u32 b, u32 c) {
  for (int i = 0; i < 4; i++) c += (a >> (8 * i) & 255) * (b >> (8 * i) & 255);
  return c;
}
inline u32 multiply_add(u32 a, u32 b, u32 c) { return a * b + c; }
inline u32 sub_bf16x2(u32 a, u32 b) {
  return f32_to_bf16x2(bf16_to_f32(a >> 16) - bf16_to_f32(b >> 16), bf16_to_f32(a & 0xffff) - bf16_to_f32(b & 0xffff));
}
inline u32 fma_bf16x2(u32 a, u32 b, u32 c) {   // exact in double for the few bits of codes and scales
  auto one = [&](int shift) {
    auto half = [&](u32 v) { return (double)bf16_to_f32(v >> shift & 0xffff); };
    return (float)(half(a) * half(b) + half(c));
  };
  return f32_to_bf16x2(one(16), one(0));
}
// c (16 x 8) += a (16 x 16) * b (16 x 8), operands as mma.m16n8k16 spreads them over the lanes
void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1);
void load_transposed(u32 address, u32 (&a)[4]);

inline void wait_for_previous_kernel() { simt::waited(); }
inline void let_next_kernel_start() {}

// ---- mbarriers and bulk copies ----
void barrier_init(u32 barrier, u32 arrivals);
inline void barriers_ready() {}
void barrier_expect_more(u32 barrier, u32 bytes);
void barrier_arrive(u32 barrier);
void barrier_arrive_times(u32 barrier, u32 n);
void barrier_arrive_expect(u32 barrier, u32 bytes);
void barrier_wait(u32 barrier, u32 phase);
bool elect_lane();
void copy_bulk(u32 dst, const void* src, u32 bytes, u32 barrier);

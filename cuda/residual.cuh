// residual.cuh - exact BF16 weights from the INT4 codes of the resident bank and a residual record (docs/format.md), unit by unit.
//
// A record's blocks have any length, so a slot has a directory beside it (residual.cu: residual_index), which is checked when it is made:
// for every unit DIRECTORY_BYTES, u16 [32] with the nibbles of the unit that belong to the lanes before a lane, and an Entry.
//
// The high byte of a weight whose code is not zero is (D + 127 - L) >> 8, with D the bits of bf16((code - 8) * scale) and L the low byte.
//   D - 128 are the bits of half of that, so for two weights at once it is bytes 1 and 3 of bits(half) + 0x00ff00ff - L, without a borrow.
//   A scale has 11 bits and BF16 has 8, so half of it is split in two, high + low: (code - 8) * low is exact, and one fma rounds once.
// A zero code makes that byte 0. Its own, (N >> 3) << 7 | (S - (N & 7)) with S the high byte of bf16(scale), is added: of the eight
//   weights of a step the mask of zero codes chooses, in a table in shared memory, which of the next eight nibbles each one takes.
// Not so where a scale is not positive or an exception is listed: such a unit is marked, and rebuilt weight by weight.
#pragma once
#include "common.cuh"
#include "layout.cuh"

#define DIRECTORY_BYTES 80
#define CHOICES_BYTES 4096   // the table: uint4 [256]
#define BLOCK_UNITS 8        // units of a record's block, at most

// A unit of the directory
struct Entry {
  u32 low;      // its low bytes, from the start of the slot, in 16 bytes
  u32 more;     // bits 0-15: its nibbles, from the low bytes, in 4 bytes; 16-31: high bytes of its exceptions, from their places, in bytes
  u32 counts;   // bits 0-8: words of nibbles; 16-27: exceptions; 31: to be rebuilt weight by weight
  u32 places;   // u16 places of its exceptions, from the low bytes, in bytes
};
__device__ __forceinline__ Entry entry_of(uint4 v) {
  Entry e;
  e.low = v.x, e.more = v.y, e.counts = v.z, e.places = v.w;
  return e;
}
__device__ __forceinline__ u32 nibble_bytes(const Entry& e) { return (e.more & 0xffffu) * 4; }
__device__ __forceinline__ u32 nibble_words(const Entry& e) { return e.counts & 511u; }
__device__ __forceinline__ u32 exceptions(const Entry& e) { return e.counts >> 16 & 4095u; }
__device__ __forceinline__ bool by_weight(const Entry& e) { return e.counts >> 31; }

// Bit 3 of every nibble that is 8
MOESPEQ_HD unsigned int zero_codes(unsigned int word) { return word & ~((word & 0x77777777u) + 0x77777777u) & 0x88888888u; }
// A number below 256, another one for each of the 256 masks of zero_codes
MOESPEQ_HD unsigned int choice_of(unsigned int zero) { return (zero * 0x00804021u) >> 24; }

// What the table holds for a mask: by kh, selectors of prmt over {nibbles 0 2 4 6, nibbles 1 3 5 7} in the order rh, lo, 0 for other codes;
// with the first, in its upper half, four times the number of zero codes; then by kh masks of 7 bits for the zero codes.
__device__ __forceinline__ uint4 choice(u32 zero) {
  u32 select[2] = {0, 0}, mask[2] = {0, 0}, k = 0;
  for (int e = 0; e < 8; e++) {   // 4 kh + 2 rh + lo
    const int kh = e / 4, at = e % 4, nibble = (e / 2) % 2 + 2 * kh + 4 * (e % 2);
    if (zero >> (4 * nibble + 3) & 1) select[kh] |= (k / 2 + 4 * (k % 2)) << (4 * at), mask[kh] |= 0x7fu << (8 * at), k++;
    else select[kh] |= 8u << (4 * at);   // the sign of a byte below 128
  }
  return make_uint4(select[0] | k << 18, select[1], mask[0], mask[1]);
}
// Fills the table at shared address `table`; by COUNT threads of a block, which then must meet
template <int COUNT> __device__ __forceinline__ void fill_choices(u32 table, int thread) {
  for (int m = thread; m < 256; m += COUNT) {
    u32 zero = 0;
    for (int n = 0; n < 8; n++) zero |= (u32)(m >> n & 1) << (4 * n + 3);
    const uint4 v = choice(zero);
    sts128(table + choice_of(zero) * 16, v.x, v.y, v.z, v.w);
  }
}

// The scales of a lane's rows r and r + 8 in one group
struct Scales {
  u32 high[2], low[2];   // of half the scale, twice in a word
  u32 top;               // high bytes of bf16(scale): r, r, r + 8, r + 8
};
__device__ __forceinline__ Scales scales_of(u32 bits) {   // F16 of row r, and of row r + 8 in the upper half
  Scales s;
  float whole[2];
#pragma unroll
  for (int rh = 0; rh < 2; rh++) {
    whole[rh] = f16_to_f32(bits >> (16 * rh) & 0xffffu);
    const float half = whole[rh] * 0.5f, high = __uint_as_float(__float_as_uint(half) & 0xffff0000u);
    s.high[rh] = permute(__float_as_uint(high), 0, 0x3232), s.low[rh] = permute(__float_as_uint(half - high), 0, 0x3232);
  }
  s.top = permute(f32_to_bf16x2(whole[1], whole[0]), 0, 0x3311);
  return s;
}

// The A operand of a step: word of codes, the low bytes of rows r and r + 8, a lane's nibbles from bit `at` of shared memory on; `at` goes on
// behind those of this step.
__device__ __forceinline__ void rebuild_step(u32 word, const u32 (&low)[2], const Scales& s, u32 table, u32& at, u32* a) {
  const u32 chosen = table + choice_of(zero_codes(word)) * 16, from = at >> 3 & ~3u;
  const uint4 choice = lds128(chosen);
  const u32 next = __funnelshift_r(lds32(from), lds32(from + 4), at);
  const u32 even = next & 0x0f0f0f0fu, odd = next >> 4 & 0x0f0f0f0fu;
  at += choice.x >> 16;
#pragma unroll
  for (int kh = 0; kh < 2; kh++) {
    u32 sum[2];
#pragma unroll
    for (int rh = 0; rh < 2; rh++) {
      const u32 code = sub_bf16x2(and_or(word >> (4 * (2 * kh + rh)), 0x000f000fu, 0x43004300u), 0x43084308u);
      const u32 half = fma_bf16x2(code, s.high[rh], fma_bf16x2(code, s.low[rh], 0x80008000u));
      sum[rh] = kh ? half + 0x00ff00ffu - permute(low[rh], 0, 0x4341) : half + (~low[rh] & 0x00ff00ffu);
    }
    const u32 n = permute(even, odd, kh ? choice.y : choice.x);
    const u32 high = permute(sum[0], sum[1], 0x7531) + ((kh ? choice.w : choice.z) & s.top) - n + (n & 0x08080808u) * 17;
    a[2 * kh] = permute(low[0], high, kh ? 0x5341 : 0x5240);
    a[2 * kh + 1] = permute(low[1], high, kh ? 0x7361 : 0x7260);
  }
}

// The same weight by weight, for any scales and with exceptions; `nibbles` and the record in global memory, `at` counts nibbles.
__device__ __forceinline__ void rebuild_step_by_weight(u32 word, const u32 (&low)[2], u32 scales, const u8* record, const Entry& entry, int lane, int step,
                                                       u32& at, u32* a) {
  const u32* nibbles = (const u32*)(record + nibble_bytes(entry));
  const float scale[2] = {f16_to_f32(scales & 0xffffu), f16_to_f32(scales >> 16)};
  u32 high[2] = {0, 0};   // by kh
#pragma unroll
  for (int e = 0; e < 8; e++) {
    const int kh = e / 4, rh = e / 2 % 2, lo = e % 2;
    const int code = word >> (4 * (rh + 2 * kh + 4 * lo)) & 15u;
    const u32 draft = f32_to_bf16x2(0.f, (float)(code == 8 ? 1 : code - 8) * scale[rh]) & 0xffffu;
    u32 byte = (draft + 127 - (low[rh] >> (16 * lo + 8 * kh) & 255u)) >> 8 & 255u;
    if (code == 8) {
      const u32 n = nibbles[at >> 3] >> (4 * (at & 7)) & 15u, top = draft >> 8 & 127u;
      byte = n >> 3 << 7 | (top > (n & 7) ? top - (n & 7) : 0), at++;
    }
    high[kh] |= byte << (8 * (e % 4));
  }
  const u16* places = (const u16*)(record + entry.places);
#pragma unroll 1
  for (u32 i = 0; i < exceptions(entry); i++) {
    const u32 place = places[i];
    if (place / 8 != (u32)(lane * 8 + step)) continue;
    const u32 byte = record[entry.places + (entry.more >> 16) + i], shift = 8 * (place % 4), kh = place / 4 % 2;
    if (kh) high[1] = (high[1] & ~(255u << shift)) | byte << shift;
    else high[0] = (high[0] & ~(255u << shift)) | byte << shift;
  }
  a[0] = permute(low[0], high[0], 0x5240), a[1] = permute(low[1], high[0], 0x7260);
  a[2] = permute(low[0], high[1], 0x5341), a[3] = permute(low[1], high[1], 0x7361);
}

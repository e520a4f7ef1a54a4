// residual.cuh - exact BF16 weights from the INT4 codes of the resident bank and a residual record (docs/format.md), unit by unit.
//
// A record's blocks have any length, so a slot has a directory beside it (residual.cu: residual_index), which is checked when it is made:
// for every unit DIRECTORY_BYTES, u16 [32] with the nibbles of the unit that belong to the lanes before a lane, and an Entry.
//
// The high byte of a weight whose code is not zero is (D + 127 - L) >> 8, with D the bits of bf16((code - 8) * scale) and L the low byte.
//   D - 128 are the bits of half of that, so for two weights at once it is bytes 1 and 3 of bits(half) + 0x00ff00ff - L, without a borrow.
//   A scale has 11 bits and BF16 has 8, so half of it is split in two, high + low: (code - 8) * low is exact, and one fma rounds once. Where all scales
//   have 8 (SHORT_SCALES), one fma takes 8 off the code too: code * scale - 8 * scale, exact before it rounds.
//   As the bits of BF16 a nibble is its number times a power of two, another one for each of the two rows, which their scales make good.
// The byte of a zero code, (N >> 3) << 7 | (S - (N & 7)) with S the high byte of bf16(scale), is put in place of that: of the eight
//   weights of a step the mask of zero codes chooses, in a table in shared memory, which of the next eight nibbles each one takes.
// Where exceptions are listed, each lane then puts its own in their places; they are in the order of lanes. A unit with a scale that is not positive
//   is marked, and rebuilt weight by weight.
// Shifts, masks and sums of integers share a pipe at half rate, which this fills. So some sums are multiplications by `one`, a 1 that the
//   compiler cannot see to be one.
#pragma once
#include "common.cuh"
#include "layout.cuh"

#define DIRECTORY_BYTES 80
#ifndef CHOICE_COPIES
#define CHOICE_COPIES 1      // of the table, 1, 2, 4 or 8: lanes take them in turn; with 8 no two of the lanes that read at once meet in a bank
#endif
#define CHOICES_BYTES (4096 * CHOICE_COPIES)   // the table: uint4 [256][CHOICE_COPIES]
#define BLOCK_UNITS 8        // units of a record's block, at most

// A unit of the directory
struct Entry {
  u32 low;      // its low bytes, from the start of the slot, in 16 bytes
  u32 more;     // bits 0-15: its nibbles, from the low bytes, in 4 bytes; 16-31: high bytes of its exceptions, from their places, in bytes
  u32 counts;   // bits 0-8: words of nibbles; 16-27: exceptions; 31: a scale is not positive
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
__device__ __forceinline__ u32 places_at(const Entry& e) { return e.places; }                       // from the low bytes
__device__ __forceinline__ u32 exception_bytes_at(const Entry& e) { return e.places + (e.more >> 16); }
__device__ __forceinline__ bool by_weight(const Entry& e) { return e.counts >> 31; }

// Bit 3 of every nibble that is 8
MOESPEQ_HD unsigned int zero_codes(unsigned int word) { return word & ~((word & 0x77777777u) + 0x77777777u) & 0x88888888u; }
#define CHOICE_PLACES (CHOICE_COPIES * 0x10080402u)   // whose products with the bytes of a mask are its place in the table, in bytes: another one for each of the 256

// What the table holds for a mask: by kh, selectors of prmt over {nibbles 0 2 4 6, nibbles 1 3 5 7} in the order rh, lo, anything for other
// codes; with the first, in its upper half, four times the number of zero codes; then by kh masks of 8 bits for the zero codes.
__device__ __forceinline__ uint4 choice(u32 zero) {
  u32 select[2] = {0, 0}, mask[2] = {0, 0}, k = 0;
  for (int e = 0; e < 8; e++) {   // 4 kh + 2 rh + lo
    const int kh = e / 4, at = e % 4, nibble = (e / 2) % 2 + 2 * kh + 4 * (e % 2);
    if (zero >> (4 * nibble + 3) & 1) select[kh] |= (k / 2 + 4 * (k % 2)) << (4 * at), mask[kh] |= 0xffu << (8 * at), k++;
  }
  return make_uint4(select[0] | k << 18, select[1], mask[0], mask[1]);
}
// This lane's copy
__device__ __forceinline__ u32 choices_of(u32 table, int lane) { return table + lane % CHOICE_COPIES * 16; }
// Fills the table at shared address `table`; by COUNT threads of a block, which then must meet
template <int COUNT> __device__ __forceinline__ void fill_choices(u32 table, int thread) {
  for (int m = thread; m < 256; m += COUNT) {
    u32 zero = 0;
    for (int n = 0; n < 8; n++) zero |= (u32)(m >> n & 1) << (4 * n + 3);
    const uint4 v = choice(zero);
    for (int c = 0; c < CHOICE_COPIES; c++) sts128(dot_bytes(zero, CHOICE_PLACES, table) + (c + m) % CHOICE_COPIES * 16, v.x, v.y, v.z, v.w);   // in other banks than its neighbours
  }
}

#ifndef SHORT_SCALES
#define SHORT_SCALES 0       // whether all scales have no more significant bits than BF16 has
#endif
#define POWER (SHORT_SCALES ? (20 << 7) * 0x10001u : 0)   // 2^20, by which halves are less, in the bits of two BF16
// The scales of a lane's rows r and r + 8 in one group; each word has its value twice
struct Scales {
#if SHORT_SCALES
  u32 by[2], less[2];    // half((code - 8) * scale) * 2^-20 = fma(bits of the code, by, less), rounded once
#else
  u32 high[2], low[2];   // of half the scale and the power of two of its row's codes
#endif
  u32 top;               // high bytes of bf16(scale) less 7: r, r, r + 8, r + 8
};
__device__ __forceinline__ Scales scales_of(u32 bits, u32 one) {   // F16 of row r, and of row r + 8 in the upper half
  Scales s;
  float whole[2];
#pragma unroll
  for (int rh = 0; rh < 2; rh++) {
    whole[rh] = f16_to_f32(bits >> (16 * rh) & 0xffffu);
#if SHORT_SCALES
    const u32 twice = permute(__float_as_uint(whole[rh]), 0, 0x3232);                      // as BF16
    s.by[rh] = twice + (rh ? 108 << 7 : 112 << 7) * 0x10001u, s.less[rh] = twice + (0x8000u - (18 << 7)) * 0x10001u;   // times 2^112 or 2^108, and -2^-18
#else
    const float half = whole[rh] * (rh ? 2.f : 32.f), high = __uint_as_float(__float_as_uint(half) & 0xffff0000u);
    s.high[rh] = permute(__float_as_uint(high), 0, 0x3232), s.low[rh] = permute(__float_as_uint(half - high), 0, 0x3232);
#endif
  }
#if SHORT_SCALES
  s.top = multiply_add(permute(__float_as_uint(whole[0]), __float_as_uint(whole[1]), 0x7733), one, 0u - 0x07070707u);
#else
  s.top = permute(f32_to_bf16x2(whole[1], whole[0]), 0, 0x3311) - 0x07070707u;
#endif
  return s;
}

// The high bytes of a step, by kh, in the order rh, lo: word of codes, the low bytes of rows r and r + 8, and a lane's next eight nibbles; `at` goes
// on by four for each nibble used.
__device__ __forceinline__ void rebuild_step(u32 word, const u32 (&low)[2], const Scales& s, u32 table, u32 next, u32& at, u32 one, u32* high) {
  const u32 zero = word & ~multiply_add(word & 0x77777777u, one, 0x77777777u) & 0x88888888u;   // zero_codes
  const uint4 choice = lds128(dot_bytes(zero, CHOICE_PLACES, table));
  const u32 masks[2] = {choice.z, choice.w}, seven = 0x07070707u * one;
  // By byte: sign, in bit 7, and 7 - step
  const u32 even = (multiply_add(next, 16, 0) & 0x80808080u) | and_xor(next, 0x07070707u, seven);
  const u32 odd = (next & 0x80808080u) | and_xor(next >> 4, 0x07070707u, seven);
  at = dot_bytes(choice.x, 0x00010000u, at);
  const u32 upper = word >> 8, power = POWER * one;
#pragma unroll
  for (int kh = 0; kh < 2; kh++) {
    u32 sum[2];
#pragma unroll
    for (int rh = 0; rh < 2; rh++) {
      const u32 bits = (kh ? upper : word) & (rh ? 0x00f000f0u : 0x000f000fu);   // the number times 2^-133 or 2^-129
#if SHORT_SCALES
      const u32 half = fma_bf16x2(bits, s.by[rh], s.less[rh]);
#else
      const u32 code = fma_bf16x2(bits, 0x7f007f00u, rh ? 0xc000c000u : 0xbe00be00u);   // less 8, times 2^-6 or 2^-2
      const u32 half = fma_bf16x2(code, s.high[rh], fma_bf16x2(code, s.low[rh], 0x80008000u));
#endif
      sum[rh] = kh ? half + (0x00ff00ffu + POWER) - permute(low[rh], 0, 0x4341) : multiply_add(half, one, (~low[rh] & 0x00ff00ffu) | power);
    }
    const u32 own = multiply_add(permute(even, odd, kh ? choice.y : choice.x), one, s.top);
    high[kh] = (own & masks[kh]) | (permute(sum[0], sum[1], 0x7531) & ~masks[kh]);
  }
}

// Two steps, high[4]; their nibbles, in three words from bit `at` of shared memory on, are loaded at once. `at` goes on behind them.
__device__ __forceinline__ void rebuild_two(u32 left, u32 right, uint4 low, const Scales& s, u32 table, u32& at, u32 one, u32* high) {
  const u32 from = at >> 3 & ~3u, w0 = lds32(from), w1 = lds32(from + 4), w2 = lds32(from + 8);
  const u32 first = __funnelshift_r(w0, w1, at), second = __funnelshift_r(w1, w2, at);
  const u32 left_low[2] = {low.x, low.y}, right_low[2] = {low.z, low.w};
  u32 used = 0;
  rebuild_step(left, left_low, s, table, first, used, one, high);
  const u32 next = shift_pair(first, second, used);
  rebuild_step(right, right_low, s, table, next, used, one, high + 2);
  at += used;
}

// A lane's exceptions of a unit; LIST has place(i) and byte(i) of the unit's count()
template <class LIST> struct Exceptions {
  LIST list;
  u32 next;   // of the lane's next one: its number, and in the upper half its place less the lane's first: 64 or more if there are no more
  __device__ __forceinline__ Exceptions(const LIST& list, u32 count, int lane) : list(list), next(64 << 16) {
    if (count == 0) return;
    u32 i = 0;
#pragma unroll 1
    for (u32 d = 1u << (31 - __clz(count)); d; d /= 2)   // those of the lanes before
      if (i + d <= count && list.place(i + d - 1) < (u32)lane * 64) i += d;
    find(i, count, lane);
  }
  __device__ __forceinline__ void find(u32 i, u32 count, int lane) { next = (i < count ? list.place(i) - lane * 64 : 64) << 16 | i; }
  // Into the high bytes of steps 2 * pair and 2 * pair + 1
  __device__ __forceinline__ void put(int pair, int lane, u32* high) {
#pragma unroll 1
    while (next < 16u * (pair + 1) << 16) {
      const u32 i = next & 0xffffu, place = next >> 16, byte = list.byte(i), word = place / 4 % 4, shift = 4 * (place % 4);
      const u32 select = 0x3210u + ((4 - place % 4) << shift);   // 4, the new byte, in its place
#pragma unroll
      for (u32 w = 0; w < 4; w++)
        if (w == word) high[w] = permute(high[w], byte, select);
      find(i + 1, list.count(), lane);
    }
  }
};

// The A operands of two steps, a[8], from their bytes
__device__ __forceinline__ void join_bytes(uint4 low, const u32* high, u32* a) {
  a[0] = permute(low.x, high[0], 0x5240), a[1] = permute(low.y, high[0], 0x7260), a[2] = permute(low.x, high[1], 0x5341), a[3] = permute(low.y, high[1], 0x7361);
  a[4] = permute(low.z, high[2], 0x5240), a[5] = permute(low.w, high[2], 0x7260), a[6] = permute(low.z, high[3], 0x5341), a[7] = permute(low.w, high[3], 0x7361);
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

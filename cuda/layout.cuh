// layout.cuh - integer functions of the kernels: where weights lie and how codes are unpacked. Plain C, so that the host can
// compile the same text and compare it with NumPy (tests/kernels/test_host_functions.py).
#pragma once
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define MOESPEQ_HD __host__ __device__ __forceinline__
#else
#define MOESPEQ_HD static inline
#endif

// A unit is 16 rows x 128 k in the order in which mma.m16n8k16 wants its A operand: lane = 4 * r + q holds rows r and r + 8,
// step s (0..7), register 2 * kh + rh. The k of an element is permuted so that the four q of a token read 64 contiguous bytes.
MOESPEQ_HD int unit_k(int q, int step, int kh, int low) { return (step / 2) * 32 + q * 8 + (step % 2) * 4 + kh * 2 + low; }
MOESPEQ_HD int unit_row(int r, int rh) { return r + 8 * rh; }

// Byte and bit of an INT4 code in its unit: [2 halves of 4 steps][32 lanes][4 words, one a step]
MOESPEQ_HD int int4_byte(int lane, int step, int reg, int low) { return (step / 4) * 512 + lane * 16 + (step % 4) * 4 + (reg + 4 * low) / 2; }
MOESPEQ_HD int int4_shift(int reg) { return (reg % 2) * 4; }
// Byte of an INT8 code in its unit: [4 pieces of 2 steps][32 lanes][2 steps][2 rh][kh0 low, kh1 low, kh0 high, kh1 high]
MOESPEQ_HD int int8_byte(int lane, int step, int reg, int low) {
  return (step / 2) * 512 + lane * 16 + (step % 2) * 8 + (reg % 2) * 4 + (reg / 2) + 2 * low;
}
// Byte of a scale in its unit, after the codes: [scale sets][8 r][2 rh] F16
MOESPEQ_HD int scale_byte(int set, int r, int rh) { return set * 32 + r * 4 + rh * 2; }

// Part s of `parts` that n things are split into: first thing, and how many; part 0 is never longer than another.
MOESPEQ_HD int part_first(int n, int parts, int s) { return n * s / parts; }
MOESPEQ_HD int part_count(int n, int parts, int s) { return n * (s + 1) / parts - n * s / parts; }

// Start of a tile in a pool whose slots are interleaved in groups of `group` experts (1: each slot contiguous).
MOESPEQ_HD unsigned long long tile_offset(unsigned long long slot, unsigned long long tile, unsigned long long slot_bytes, unsigned long long tile_bytes,
                                          unsigned long long section, unsigned long long group) {
  return slot / group * group * slot_bytes + section * group + (tile * group + slot % group) * tile_bytes;
}

// 16-byte piece of a 128-byte row of a BF16 unit (16 rows x 64 k) in shared memory: two neighbouring rows fill all 32 banks
MOESPEQ_HD int bf16_piece(int row, int piece) { return row * 8 + (piece ^ ((row & 1) * 4)); }

// Registers of one step from its INT4 word: bits of two BF16 numbers 128 + code (reg 0..3)
MOESPEQ_HD unsigned int int4_bits(unsigned int word, int reg) { return ((word >> (4 * reg)) & 0x000f000fu) | 0x43004300u; }
// Registers of one step from its INT8 word (codes value + 128): 128 + low 7 bits, and 256 - 128 * (top bit): first - second = value
MOESPEQ_HD unsigned int int8_low(unsigned int word, int kh) { return ((word >> (8 * kh)) & 0x007f007fu) | 0x43004300u; }
MOESPEQ_HD unsigned int int8_base(unsigned int word, int kh) { return (((word >> (8 * kh)) & 0x00800080u) ^ 0x00800080u) | 0x43004300u; }

// few_tokens.cuh - what the kernels for few tokens share: arguments, the list of active experts, units of codes, h, rows of y.
// The including kernel defines OFF_LISTS, OFF_PART and PARTS before.
#pragma once
#include "common.cuh"
#include "activation.cuh"
#include "expert_layer.cuh"
#include "layout.cuh"

#ifdef EXPECTED_SHARED_BYTES
static_assert(SHARED_BYTES == EXPECTED_SHARED_BYTES, "the launcher counts other bytes of shared memory");
#endif

DYNAMIC_SHARED(smem);
__device__ __forceinline__ float* weights() { return (float*)(smem + OFF_WEIGHT); }
__device__ __forceinline__ int* places() { return (int*)(smem + OFF_PLACE); }
__device__ __forceinline__ u32* masks() { return (u32*)(smem + OFF_MASK); }
__device__ __forceinline__ int* slots() { return (int*)(smem + OFF_SLOT); }
__device__ __forceinline__ int2* active_list() { return (int2*)(smem + OFF_LIST); }
__device__ __forceinline__ u32* active_words() { return (u32*)(smem + OFF_WORDS); }
__device__ __forceinline__ u32& block_claim() { return active_words()[LEVELS * EXPERT_WORDS]; }
__device__ __forceinline__ u16* active_pairs() { return (u16*)(smem + OFF_PAIRS); }
__device__ __forceinline__ int* records() { return (int*)(smem + OFF_RECORD); }
__device__ __forceinline__ int* active_records() { return records() + NUM_EXPERTS; }

struct Args {
  const u16* x; const int* index; const float* weight; const int* slot_of; const u8* pool;
  u32* state; u16* h; u16* y; float* pairs; int num_tokens; int resume; int first_claim;
#if RECORDS
  const int* record_of; const u8* records; u64 record_bytes; const u8* directory;   // residual.cu
#endif
};

// The block's barriers, a lane of each of WARPS_ warps in turn. An initialisation takes a uniform address: the lanes of one warp would come
// one after another, 28 barriers in 1.4 us.
template <int WARPS_, class ARRIVALS_OF> __device__ __forceinline__ void init_barriers(u32 first, int count, int warp, int lane, ARRIVALS_OF arrivals) {
#pragma unroll 1
  for (int i = warp; i < count; i += WARPS_)
    if (lane == 0) barrier_init(first + i * 8, arrivals(i));
}

// By one warp, before the kernel ahead has ended: what the list is made of comes to the L2. What that kernel still writes there goes to the
// same lines.
__device__ __forceinline__ void prefetch_choices(const Args& args, int lane) {
  auto words = [&](const void* p, int count) {
#pragma unroll 1
    for (int i = lane * 32; i < count + 31; i += 1024) prefetch_l2((const u32*)p + min(i, count - 1));
  };
  words(args.index, args.num_tokens * TOP_K), words(args.weight, args.num_tokens * TOP_K), words(args.slot_of, NUM_EXPERTS);
#if RECORDS
  words(args.record_of, NUM_EXPERTS);
#endif
}
__device__ __forceinline__ int count_active() {
  int total = 0;
  for (int w = 0; w < LEVELS * EXPERT_WORDS; w++) total += __popc(active_words()[w]);
  return total;
}
// Who is active: experts that a token chose and that are here, with their tokens in order; by COUNT threads from FIRST on, which
// meet at BARRIER. A block claims its first tiles meanwhile.
template <int FIRST, int COUNT, int BARRIER> __device__ __forceinline__ void make_list(const Args& args) {
  const int tid = threadIdx.x - FIRST, num_pairs = args.num_tokens * TOP_K;
  u32 claim = 0;
  if (tid == COUNT - 32) claim = atomic_add(args.state, args.first_claim);   // the block's first tiles
  for (int e = tid; e < NUM_EXPERTS; e += COUNT) {
#if RECORDS
    const int record = args.record_of[e];
    records()[e] = record, slots()[e] = args.slot_of[e] | record >> 31;   // -1 unless both are here
#else
    slots()[e] = args.slot_of[e];
#endif
  }
  for (int p = tid; p < num_pairs; p += COUNT) {
    const int e = args.index[p];
    places()[p] = e, weights()[p] = args.weight[p];
    atomicOr(&masks()[e], 1u << (p / TOP_K));
  }
  barrier_of<COUNT>(BARRIER);
  for (int w = tid / 32; w < EXPERT_WORDS; w += COUNT / 32) {
    const int e = w * 32 + tid % 32, n = e < NUM_EXPERTS && slots()[e] >= 0 ? __popc(masks()[e]) : 0;
#pragma unroll
    for (int level = 0; level < LEVELS; level++) {
      const u32 there = __ballot_sync(~0u, n > level * COLUMNS);
      if (tid % 32 == 0) active_words()[level * EXPERT_WORDS + w] = there;
    }
  }
  if (tid == COUNT - 32) block_claim() = claim;
  barrier_of<COUNT>(BARRIER);
  for (int p = tid; p < num_pairs; p += COUNT) {
    const int e = places()[p], slot = slots()[e];
    if (slot >= 0) {
      const u32 mask = masks()[e];
      const int before = __popc(mask & ((1u << (p / TOP_K)) - 1)), word = before / COLUMNS * EXPERT_WORDS + e / 32;
      int entry = __popc(active_words()[word] & ((1u << (e % 32)) - 1));
      for (int w = 0; w < word; w++) entry += __popc(active_words()[w]);
      if (before % COLUMNS == 0) {
        active_list()[entry] = make_int2(slot, p);
#if RECORDS
        active_records()[entry] = records()[e];
#endif
      }
      active_pairs()[entry * COLUMNS + (GATHER ? before % COLUMNS : p / TOP_K)] = (u16)p;
    }
    places()[p] = slot;
  }
  barrier_of<COUNT>(BARRIER);
}

// Whether a call's list is made by a single warp, without a barrier: a pair for each lane, and no expert with several entries
__device__ __forceinline__ bool is_short_list(const Args& args) { return LEVELS == 1 && (MAX_PAIRS <= 32 || args.num_tokens * TOP_K <= 32); }

// What make_list does, by one warp; entries are in the order of their first pairs. All that it needs is asked for at once, the slots of all
// experts where these are few.
__device__ __forceinline__ void make_short_list(const Args& args, int lane) {
  constexpr bool FEW = EXPERT_WORDS <= 4;
  const int num_pairs = args.num_tokens * TOP_K, pair = min(lane, num_pairs - 1);
  const bool mine = lane < num_pairs;
  auto slot_of = [&](u32 e) {
#if RECORDS
    return (int)load_word_here(args.slot_of + e) | (int)load_word_here(args.record_of + e) >> 31;   // -1 unless both are here
#else
    return (int)load_word_here(args.slot_of + e);
#endif
  };
  const u32 claim = atomic_add_by_first(args.state, args.first_claim, lane);   // the block's first tiles
  const u32 e = load_word_here(args.index + pair);
  int all[FEW ? EXPERT_WORDS : 1];
  if (FEW)
#pragma unroll
    for (int i = 0; i < EXPERT_WORDS; i++) all[i] = slot_of(min(i * 32 + lane, NUM_EXPERTS - 1));
  const float weight = __uint_as_float(load_word_here(args.weight + pair));
  int slot = -1;
  if (FEW) {
#pragma unroll
    for (int i = 0; i < EXPERT_WORDS; i++) {
      const int s = __shfl_sync(~0u, all[i], e % 32);
      if (e / 32 == i) slot = s;
    }
  } else slot = slot_of(e);
  const bool here = mine && slot >= 0;
  const u32 same = __match_any_sync(~0u, here ? (int)e : -1);
  const int first = __ffs(same) - 1;
  const u32 firsts = __ballot_sync(~0u, here && first == lane);
  const int entry = __popc(firsts & ((1u << first) - 1));
  if (mine) places()[lane] = slot, weights()[lane] = weight;
  if (here) {
    if (first == lane) {
      active_list()[entry] = make_int2(slot, lane);
#if RECORDS
      active_records()[entry] = args.record_of[e];
#endif
    }
    active_pairs()[entry * COLUMNS + lane / TOP_K] = (u16)lane;
  }
  for (int w = lane; w < LEVELS * EXPERT_WORDS; w += 32) active_words()[w] = w == 0 ? firsts : 0;
  if (lane == 0) block_claim() = claim;
  __syncwarp();
}

// Lists for a block whose other threads wait at LISTED: by its last COUNT, from FIRST on, which meet at BARRIER, or by the first warp of these
template <int FIRST, int COUNT, int BARRIER, int LISTED> __device__ __forceinline__ void list_for_block(const Args& args, int warp, int lane) {
  if (!is_short_list(args)) make_list<FIRST, COUNT, BARRIER>(args);
  else if (warp == FIRST / 32) {
    make_short_list(args, lane);
    barrier_pass<COUNT>(BARRIER);
  } else barrier_of<COUNT>(BARRIER);
  barrier_pass<FIRST + COUNT>(LISTED);
}

// acc += unit of codes (16 rows x 128 k) * tokens, in FP32; after(i) is called when piece i of b, 32 k, is used for the last time
template <class AFTER> __device__ __forceinline__ void multiply_codes(u32 unit, int lane, const u32* b, float* acc, AFTER after) {
  constexpr int SET_STEPS = 8 / SCALE_SETS, WORDS = CODE_BYTES / 128;
  u32 word[WORDS];
#pragma unroll
  for (int i = 0; i < WORDS; i += 4) {
    const uint4 v = lds128(unit + i * 128 + lane * 16);
    word[i] = v.x, word[i + 1] = v.y, word[i + 2] = v.z, word[i + 3] = v.w;
  }
#pragma unroll
  for (int set = 0; set < SCALE_SETS; set++) {
    const u32 scales = lds32(unit + CODE_BYTES + scale_byte(set, lane / 4, 0));
    float sum[2][4] = {{0.f, 0.f, 0.f, 0.f}, {0.f, 0.f, 0.f, 0.f}};
#pragma unroll
    for (int step = set * SET_STEPS; step < (set + 1) * SET_STEPS; step++) {
      u32 a[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
#if FORM == INT4
        // as bits of BF16 a nibble is its number times 2^-133, or 2^-129: codes less 8 times 2^-6 in row r, 2^-2 in row r + 8
        a[j] = fma_bf16x2((j / 2 ? word[step] >> 8 : word[step]) & (j % 2 ? 0x00f000f0u : 0x000f000fu), 0x7f007f00u, j % 2 ? 0xc000c000u : 0xbe00be00u);
#else
        a[j] = sub_bf16x2(int8_low(word[2 * step + j % 2], j / 2), int8_base(word[2 * step + j % 2], j / 2));
#endif
      }
      mma(sum[step % 2], a[0], a[1], a[2], a[3], b[2 * step], b[2 * step + 1]);
      if (step % 2) after(step / 2);
    }
    const float s0 = f16_to_f32(scales & 0xffffu) * (FORM == INT4 ? 64.f : 1.f), s1 = f16_to_f32(scales >> 16) * (FORM == INT4 ? 4.f : 1.f);
    acc[0] = fmaf(sum[0][0] + sum[1][0], s0, acc[0]), acc[1] = fmaf(sum[0][1] + sum[1][1], s0, acc[1]);
    acc[2] = fmaf(sum[0][2] + sum[1][2], s1, acc[2]), acc[3] = fmaf(sum[0][3] + sum[1][3], s1, acc[3]);
  }
}

// How many of first, first + STEP, ... are below count
template <int STEP> __device__ __forceinline__ int share_of(int count, int first) { return count > first ? (count - first - 1) / STEP + 1 : 0; }
__device__ __forceinline__ void add4(float* a, const float* b) { a[0] += b[0], a[1] += b[1], a[2] += b[2], a[3] += b[3]; }

// v = the sums of N warps from `at` on, added as a balanced tree
template <int N> __device__ __forceinline__ void add_warps(u32 at, float* v) {
  if constexpr (N == 1) {
    const float4 f = lds_f128(at);
    v[0] = f.x, v[1] = f.y, v[2] = f.z, v[3] = f.w;
  } else {
    float w[4];
    add_warps<N / 2>(at, v);
    add_warps<N / 2>(at + N / 2 * 512, w);
    add4(v, w);
  }
}

// Applies the activation to a tile's sums (gate rows r, up rows r + 8) and stores h
__device__ __forceinline__ void store_h(const Args& args, int lane, int entry, int tile, const float* acc, u32 parity) {
  const int r = lane / 4, q = lane % 4;
  float bias_gate = 0.f, bias_up = 0.f;
#if BIAS
  const u16* bias = (const u16*)(args.pool + tile_offset(active_list()[entry].x, 0, SLOT_BYTES, 4 * INTER, BIAS_OFFSET, INTERLEAVE));
  bias_gate = bf16_to_f32(bias[tile * 8 + r]), bias_up = bf16_to_f32(bias[INTER + tile * 8 + r]);
#endif
  // channel r for the tokens 2q and 2q + 1; even r gathers the channels of token 2q, odd r of 2q + 1, into 16 bytes
  const float h0 = activate(acc[0] + bias_gate, acc[2] + bias_up), h1 = activate(acc[1] + bias_gate, acc[3] + bias_up);
  const float got = __shfl_xor_sync(~0u, r & 1 ? h0 : h1, 4);
  uint4 word;
  word.x = r & 1 ? f32_to_bf16x2(h1, got) : f32_to_bf16x2(got, h0);
  word.y = __shfl_down_sync(~0u, word.x, 8), word.z = __shfl_down_sync(~0u, word.x, 16), word.w = __shfl_down_sync(~0u, word.x, 24);
  const int column = 2 * q + r;
  const u32 pair = active_pairs()[entry * COLUMNS + (column & 7)];
  if (r < 2 && pair != NO_PAIR) {
    store_shared_by_grid(args.h + ((u64)parity * MAX_PAIRS + pair) * INTER + tile * 8, word);
  }
}

// y of 16 rows from the sums of its parts, [PARTS][MAX_PAIRS][16] at OFF_PART: the parts of each pair, then the pairs of each token, in fixed
// order; by the first COUNT threads of the block. A lane has a row and a choice of a token, and gets what the others have for its row from
// their registers.
template <int COUNT> __device__ __forceinline__ void finish_rows(const Args& args, int row_tile) {
  constexpr int ROWS = TOP_K <= 2 ? 16 : TOP_K <= 4 ? 8 : TOP_K <= 8 ? 4 : TOP_K <= 16 ? 2 : 1, CHOICES = 32 / ROWS;   // of a warp at once
  const float* sums = (const float*)(smem + OFF_PART);
  const int lane = threadIdx.x % 32, r = lane % ROWS;
#pragma unroll 1
  for (int n = threadIdx.x / 32; n < args.num_tokens * (16 / ROWS); n += COUNT / 32) {
    const int t = n / (16 / ROWS), at = n % (16 / ROWS) * ROWS + r, row = row_tile * 16 + at;
    float y = 0.f;
#pragma unroll 1
    for (int first = 0; first < TOP_K; first += CHOICES) {
      const int j = first + lane / ROWS, pair = t * TOP_K + min(j, TOP_K - 1), slot = places()[pair];
      float p = 0.f;
      if (slot >= 0) {
        float v[PARTS];
#pragma unroll
        for (int s = 0; s < PARTS; s++) v[s] = sums[(s * MAX_PAIRS + pair) * 16 + at];
#pragma unroll
        for (int d = 1; d < PARTS; d *= 2)
#pragma unroll
          for (int s = 0; s + d < PARTS; s += 2 * d) v[s] += v[s + d];
        p = v[0];
#if BIAS
        if (row < HIDDEN) p += bf16_to_f32(((const u16*)(args.pool + tile_offset(slot, 0, SLOT_BYTES, 2 * HIDDEN, DOWN_BIAS_OFFSET, INTERLEAVE)))[row]);
#endif
      } else if (args.resume && row < HIDDEN) p = args.pairs[(u64)pair * HIDDEN + row];
      if (args.pairs && j < TOP_K && row < HIDDEN) args.pairs[(u64)pair * HIDDEN + row] = p;
      __syncwarp();
#pragma unroll
      for (int i = 0; i < min(CHOICES, TOP_K); i++)
        if (first + i < TOP_K) y = fmaf(weights()[t * TOP_K + first + i], __shfl_sync(~0u, p, i * ROWS + r), y);
    }
    if (lane < ROWS && row < HIDDEN) args.y[(u64)t * HIDDEN + row] = (u16)f32_to_bf16x2(0.f, y);
  }
}

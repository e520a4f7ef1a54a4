// moe_codes.cu - the routed experts of a layer for a few tokens in INT4 or INT8 codes, one launch, warps with roles.
// Computes   y[t] = sum over j < TOP_K of weight[t,j] * p[t,j],  p[t,j] = down_e(h[t,j]) (+ bias),  e = index[t,j]
//            h[t,j] = bf16(act(gate_e(x[t]), up_e(x[t])))
// Inputs     x       bf16  [num_tokens, HIDDEN]          num_tokens <= MAX_TOKENS, num_tokens * TOP_K <= MAX_PAIRS
//            index   int32 [num_tokens, TOP_K]           below NUM_EXPERTS, distinct within a token
//            weight  fp32  [num_tokens, TOP_K]
//            slot_of int32 [NUM_EXPERTS]                 place of an expert in the pool, -1: not here, its pairs are skipped
//            pool    bytes [num_slots, slot_bytes]       units (layout.cuh)
// Scratch    state   u32   [2]                           zero before the first call ever: claims, and blocks that are done claiming
//            h       bf16  [2, MAX_PAIRS, INTER]         every byte 0xff before the first call ever
// Output     y       bf16  [num_tokens, HIDDEN], every element written
//            pairs   fp32  [num_tokens, TOP_K, HIDDEN] or null, with `resume` as in moe_small.cu
// Launch     any grid (one block an SM), block (COMPUTE + 1 + FINISHERS) * 32; first_claim >= 1 tiles are a block's first claim
// Needs      HIDDEN % 8 == 0, INTER % 8 == 0, sm_90; below it the kernel traps
// Moves      distinct experts * slot bytes, as moe_small.cu
// Numerics   as moe_small.cu, in another order of sums, which depends on HIDDEN, INTER, TEAM and nothing else
// Reference  runtime/kernels/reference.py
//
// Where moe_small.cu lets every warp do everything, here warps have roles, so that those which compute run little else.
// Each team of TEAM compute warps has a ring of STAGES stages, filled in order by the producer warp with bulk copies.
//   Phase 1, gate and up: a stage holds 16 units (of 128 k) of a tile (8 gate + 8 up rows); tile n of the block goes to team
//   n % TEAMS, its unit u to member u % TEAM. The members leave their sums in shared memory, a finisher warp adds them in a fixed
//   tree, applies the activation and stores h.
//   Phase 2, down: a stage holds parts of RUN units of (16 rows, expert); entry i goes to team i % TEAMS, its parts to the members
//   in turn. Sums of each (part, pair) stay in shared memory and are added at the end of the rows.
// Progress: tiles are claimed by running blocks, as in moe_small.cu. The block that is the last to be done claiming resets.
#include "common.cuh"
#include "layout.cuh"

#define INT4 0
#define INT8 1
#ifndef FORM
#define FORM INT4
#endif
#ifndef SCALE_SETS
#define SCALE_SETS 1
#endif
#ifndef HIDDEN
#define HIDDEN 2048
#define INTER 1408
#define TOP_K 4
#define NUM_EXPERTS 60
#endif
#ifndef MAX_TOKENS
#define MAX_TOKENS 8
#endif
#ifndef MAX_PAIRS
#define MAX_PAIRS (MAX_TOKENS * TOP_K)
#endif
#ifndef ACTIVATION
#define ACTIVATION 0
#endif
#ifndef BIAS
#define BIAS 0
#endif
#ifndef COMPUTE
#define COMPUTE 24     // compute warps
#endif
#ifndef TEAM
#define TEAM 8         // of them for a tile; divides COMPUTE and 16
#endif
#ifndef FINISHERS
#define FINISHERS (COMPUTE / TEAM > 1 ? COMPUTE / TEAM : 2)
#endif
#ifndef STAGES
#define STAGES 3       // of a team
#endif
#ifndef INTERLEAVE
#define INTERLEAVE 1
#endif
#ifndef SLOT_BYTES
#define SLOT_BYTES 4460544ull
#endif
#ifndef DOWN_OFFSET
#define DOWN_OFFSET 2973696ull
#endif
#ifndef BIAS_OFFSET
#define BIAS_OFFSET 0ull
#define DOWN_BIAS_OFFSET 0ull
#endif

#define UNIT_K 128
#define CODE_BYTES (FORM == INT4 ? 1024 : 2048)
#define UNIT_BYTES (CODE_BYTES + 32 * SCALE_SETS)
#define STAGE_UNITS 16
#define STAGE_BYTES (STAGE_UNITS * UNIT_BYTES)
#define UNITS1 ((HIDDEN + 127) / 128)
#define UNITS2 ((INTER + 127) / 128)
#define TILES1 (INTER / 8)
#define TILES2 ((HIDDEN + 15) / 16)
#define TEAMS (COMPUTE / TEAM)
#define CHUNKS (STAGE_UNITS / TEAM)                            // units of a member in a stage
#define TILE_STAGES ((UNITS1 + STAGE_UNITS - 1) / STAGE_UNITS)
#define OWN_UNITS ((UNITS1 + TEAM - 1) / TEAM)                 // units of a member in a tile
#define RUN ((UNITS2 + 11) / 12)                               // R: units of a part
#define PARTS ((UNITS2 + RUN - 1) / RUN)
#define STAGE_PARTS (STAGE_UNITS / RUN < PARTS ? STAGE_UNITS / RUN : PARTS)
#define ENTRY_STAGES ((PARTS + STAGE_PARTS - 1) / STAGE_PARTS)
#define WARPS (COMPUTE + 1 + FINISHERS)
#define THREADS (WARPS * 32)
#define PRODUCER COMPUTE
#define COLUMNS 8
#define LEVELS ((MAX_TOKENS + 7) / 8)
#define GATHER (MAX_TOKENS > 8)
#define KEEP (!GATHER && OWN_UNITS <= 2)
#define EXPERT_WORDS ((NUM_EXPERTS + 31) / 32)
#define RED_BUFFERS 2
#define NO_PAIR 0xffffu

#define MAX_ACTIVE (MAX_PAIRS < NUM_EXPERTS + MAX_PAIRS / 8 ? MAX_PAIRS : NUM_EXPERTS + MAX_PAIRS / 8)
#define RINGS (TEAMS * STAGES)
#define OFF_RED (RINGS * STAGE_BYTES)                                   // f32x4 [TEAMS][RED_BUFFERS][TEAM][32]
#define OFF_PART (OFF_RED + TEAMS * RED_BUFFERS * TEAM * 512)           // f32 [PARTS][MAX_PAIRS][16]
#define OFF_BARRIER (OFF_PART + PARTS * MAX_PAIRS * 64)                 // u64: full, empty [TEAMS][STAGES]; red full, red empty [TEAMS][RED_BUFFERS]
#define NUM_BARRIERS (2 * RINGS + 2 * TEAMS * RED_BUFFERS)
#define OFF_NOTE (OFF_BARRIER + (NUM_BARRIERS + 1) / 2 * 16)            // int2 [TEAMS][STAGES]: phase 1: entry, tile; phase 2: -1
#define OFF_RED_NOTE (OFF_NOTE + RINGS * 8)                            // int2 [TEAMS][RED_BUFFERS]: entry (-1: the end), tile
#define OFF_WEIGHT (OFF_RED_NOTE + TEAMS * RED_BUFFERS * 8)
#define OFF_PLACE (OFF_WEIGHT + MAX_PAIRS * 4)
#define OFF_MASK (OFF_PLACE + MAX_PAIRS * 4)
#define OFF_SLOT (OFF_MASK + (NUM_EXPERTS + 1) / 2 * 8)
#define OFF_LIST (OFF_SLOT + (NUM_EXPERTS + 1) / 2 * 8)
#define OFF_WORDS (OFF_LIST + MAX_ACTIVE * 8)
#define OFF_PAIRS (OFF_WORDS + (LEVELS * EXPERT_WORDS + 1) * 4)
#define SHARED_BYTES (OFF_PAIRS + MAX_ACTIVE * COLUMNS * 2)

#ifdef EXPECTED_SHARED_BYTES
static_assert(SHARED_BYTES == EXPECTED_SHARED_BYTES, "the launcher asks for another size");
#endif
static_assert(COMPUTE % TEAM == 0 && STAGE_UNITS % TEAM == 0 && RUN <= STAGE_UNITS, "roles");

DYNAMIC_SHARED(smem);
__device__ __forceinline__ float* weights() { return (float*)(smem + OFF_WEIGHT); }
__device__ __forceinline__ int* places() { return (int*)(smem + OFF_PLACE); }
__device__ __forceinline__ u32* masks() { return (u32*)(smem + OFF_MASK); }
__device__ __forceinline__ int* slots() { return (int*)(smem + OFF_SLOT); }
__device__ __forceinline__ int2* active_list() { return (int2*)(smem + OFF_LIST); }
__device__ __forceinline__ u32* active_words() { return (u32*)(smem + OFF_WORDS); }
__device__ __forceinline__ u32& block_claim() { return active_words()[LEVELS * EXPERT_WORDS]; }
__device__ __forceinline__ u16* active_pairs() { return (u16*)(smem + OFF_PAIRS); }

struct Args {
  const u16* x; const int* index; const float* weight; const int* slot_of; const u8* pool;
  u32* state; u16* h; u16* y; float* pairs; int num_tokens; int resume; int first_claim;
};
struct Warp { int warp, lane, num_active; };

__device__ __forceinline__ float activate(float g, float u) {
#if ACTIVATION == 0
  return __fdividef(g, 1.f + __expf(-g)) * u;
#elif ACTIVATION == 1
  return 0.5f * g * (1.f + erff(g * 0.70710678118654752f)) * u;
#elif ACTIVATION == 2
  return 0.5f * g * (1.f + tanhf(0.79788456080286536f * (g + 0.044715f * g * g * g))) * u;
#else
  g = fminf(g, 7.f), u = fminf(fmaxf(u, -7.f), 7.f);
  return __fdividef(g, 1.f + __expf(-1.702f * g)) * (u + 1.f);
#endif
}

// acc += unit (16 rows x UNIT_K) * tokens, in FP32; after(i) is called when piece i of b, 32 k, is used for the last time
template <class AFTER> __device__ __forceinline__ void multiply(u32 unit, int lane, const u32* b, float* acc, AFTER after) {
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
        a[j] = sub_bf16x2(and_or(word[step] >> (4 * j), 0x000f000fu, 0x43004300u), 0x43084308u);
#else
        a[j] = sub_bf16x2(int8_low(word[2 * step + j % 2], j / 2), int8_base(word[2 * step + j % 2], j / 2));
#endif
      }
      mma(sum[step % 2], a[0], a[1], a[2], a[3], b[2 * step], b[2 * step + 1]);
      if (step % 2) after(step / 2);
    }
    const float s0 = f16_to_f32(scales & 0xffffu), s1 = f16_to_f32(scales >> 16);
    acc[0] = fmaf(sum[0][0] + sum[1][0], s0, acc[0]), acc[1] = fmaf(sum[0][1] + sum[1][1], s0, acc[1]);
    acc[2] = fmaf(sum[0][2] + sum[1][2], s1, acc[2]), acc[3] = fmaf(sum[0][3] + sum[1][3], s1, acc[3]);
  }
}

__device__ __forceinline__ void add4(float* a, const float* b) { a[0] += b[0], a[1] += b[1], a[2] += b[2], a[3] += b[3]; }

// Applies the activation to a tile's sums (gate rows r, up rows r + 8) and stores h
__device__ __forceinline__ void store_h(const Args& args, const Warp& me, int entry, int tile, const float* acc, u32 parity) {
  const int r = me.lane / 4, q = me.lane % 4;
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

// v = the sums of N warps of the team from `at` on, added as a balanced tree
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

// y of 16 rows: parts, then pairs, in fixed order
__device__ __forceinline__ void finish_rows(const Args& args, const Warp& me, int row_tile) {
  const int at = me.lane % 16, row = row_tile * 16 + at;
  for (int t0 = me.warp * 2; t0 < args.num_tokens; t0 += COMPUTE * 2) {
    const int t = t0 + me.lane / 16;
    const bool mine = t < args.num_tokens && row < HIDDEN;
    float y = 0.f;
    for (int j = 0; mine && j < TOP_K; j++) {
      const int pair = t * TOP_K + j, slot = places()[pair];
      float p = 0.f;
      if (slot >= 0) {
        float v[PARTS];
#pragma unroll
        for (int s = 0; s < PARTS; s++) v[s] = ((const float*)(smem + OFF_PART))[(s * MAX_PAIRS + pair) * 16 + at];
#pragma unroll
        for (int d = 1; d < PARTS; d *= 2)
#pragma unroll
          for (int s = 0; s + d < PARTS; s += 2 * d) v[s] += v[s + d];
        p = v[0];
#if BIAS
        p += bf16_to_f32(((const u16*)(args.pool + tile_offset(slot, 0, SLOT_BYTES, 2 * HIDDEN, DOWN_BIAS_OFFSET, INTERLEAVE)))[row]);
#endif
      } else if (args.resume) p = args.pairs[(u64)pair * HIDDEN + row];
      if (args.pairs) args.pairs[(u64)pair * HIDDEN + row] = p;
      y = fmaf(weights()[pair], p, y);
    }
    const float above = __shfl_down_sync(~0u, y, 1);
    if (mine && at % 2 == 0) *(u32*)(args.y + (u64)t * HIDDEN + row) = f32_to_bf16x2(above, y);
  }
}

// Who is active: experts that a token chose and that are here, with their tokens in order
__device__ __forceinline__ void make_list(const Args& args, Warp& me) {
  const int tid = threadIdx.x, num_pairs = args.num_tokens * TOP_K;
  u32 claim = 0;
  if (tid == THREADS - 32) claim = atomic_add(args.state, args.first_claim);   // the block's first tiles, one a team
  for (int e = tid; e < NUM_EXPERTS; e += THREADS) slots()[e] = args.slot_of[e];
  for (int p = tid; p < num_pairs; p += THREADS) {
    const int e = args.index[p];
    places()[p] = e, weights()[p] = args.weight[p];
    atomicOr(&masks()[e], 1u << (p / TOP_K));
  }
  __syncthreads();
  for (int w = me.warp; w < EXPERT_WORDS; w += WARPS) {
    const int e = w * 32 + me.lane, n = e < NUM_EXPERTS && slots()[e] >= 0 ? __popc(masks()[e]) : 0;
#pragma unroll
    for (int level = 0; level < LEVELS; level++) {
      const u32 there = __ballot_sync(~0u, n > level * COLUMNS);
      if (me.lane == 0) active_words()[level * EXPERT_WORDS + w] = there;
    }
  }
  if (tid == THREADS - 32) block_claim() = claim;
  __syncthreads();
  int total = 0;
  for (int w = 0; w < LEVELS * EXPERT_WORDS; w++) total += __popc(active_words()[w]);
  me.num_active = total;
  for (int p = tid; p < num_pairs; p += THREADS) {
    const int e = places()[p], slot = slots()[e];
    if (slot >= 0) {
      const u32 mask = masks()[e];
      const int before = __popc(mask & ((1u << (p / TOP_K)) - 1)), word = before / COLUMNS * EXPERT_WORDS + e / 32;
      int entry = __popc(active_words()[word] & ((1u << (e % 32)) - 1));
      for (int w = 0; w < word; w++) entry += __popc(active_words()[w]);
      if (before % COLUMNS == 0) active_list()[entry] = make_int2(slot, p);
      active_pairs()[entry * COLUMNS + (GATHER ? before % COLUMNS : p / TOP_K)] = (u16)p;
    }
    places()[p] = slot;
  }
  __syncthreads();
}


struct Ring {    // a place in the ring and its parity
  int slot, parity;
  __device__ __forceinline__ void next() {
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
};

// The tokens of a unit for this lane's column
__device__ __forceinline__ void load_x(u32* r, const u16* at, int k) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (HIDDEN % UNIT_K == 0 || k + i * 32 < HIDDEN) v = load_read_only(at + k + i * 32);
    r[4 * i] = v.x, r[4 * i + 1] = v.y, r[4 * i + 2] = v.z, r[4 * i + 3] = v.w;
  }
}
__device__ __forceinline__ void load_h_piece(u32* r, const u16* at, int k, int i) {
  uint4 v = make_uint4(0, 0, 0, 0);
  if (INTER % UNIT_K == 0 || k + i * 32 < INTER) v = load_shared_by_grid(at + k + i * 32);
  r[4 * i] = v.x, r[4 * i + 1] = v.y, r[4 * i + 2] = v.z, r[4 * i + 3] = v.w;
}
__device__ __forceinline__ void await_h(u32* r, const u16* at, int k) {
  while (true) {
    bool all = true;
#pragma unroll
    for (int i = 0; i < 4; i++) all = all && r[4 * i] != 0xffffffffu;
    if (all) break;
#pragma unroll
    for (int i = 0; i < 4; i++) load_h_piece(r, at, k, i);
  }
}
__device__ __forceinline__ u32 pair_of(int entry, int column) {
  const u32 pair = active_pairs()[entry * COLUMNS + column];
  return pair == NO_PAIR ? (u32)active_list()[entry].y : pair;
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void produce(const Args& args, const Warp& me, u32 shared, u32 parity) {
  const u32 full = shared + OFF_BARRIER, empty = full + RINGS * 8;
  const int tiles = me.num_active * TILES1;
  Ring at[TEAMS];
#pragma unroll
  for (int t = 0; t < TEAMS; t++) at[t].slot = 0, at[t].parity = 0;
  auto stage = [&](int t, Ring& ring, const u8* src, int units, int entry, int tile) {   // units 0: only the note
    const int slot = t * STAGES + ring.slot;
    barrier_wait(empty + slot * 8, ring.parity ^ 1);   // a new barrier lets the first round pass
    if (elect_lane()) {
      ((int2*)(smem + OFF_NOTE))[slot] = make_int2(entry, tile);
      if (units) {
        barrier_expect(full + slot * 8, units * UNIT_BYTES);
        copy_bulk(shared + slot * STAGE_BYTES, src, units * UNIT_BYTES, full + slot * 8);
      } else barrier_arrive(full + slot * 8, 1);
    }
    __syncwarp();
    ring.next();
  };
  int issued = 0;                                  // tiles of this block
  auto tile_stages = [&](int tile) {
    const int entry = tile / TILES1, t = tile - entry * TILES1, team = issued++ % TEAMS;
    const u8* src = args.pool + tile_offset((u64)active_list()[entry].x, t, SLOT_BYTES, (u64)UNITS1 * UNIT_BYTES, 0, INTERLEAVE);
#pragma unroll 1
    for (int q = 0; q < TILE_STAGES; q++)
#pragma unroll
      for (int i = 0; i < TEAMS; i++)
        if (i == team) stage(i, at[i], src + q * STAGE_BYTES, min(STAGE_UNITS, UNITS1 - q * STAGE_UNITS), entry, t);
  };
  // the block's first claim, then one tile at a time, two claims ahead
  const int first = block_claim() & 0x7fffffffu;
  u32 ahead[2] = {0, 0};
  if (me.lane == 0) ahead[0] = atomic_next(args.state, me.lane), ahead[1] = atomic_next(args.state, me.lane);
  int tile = first, left = args.first_claim;
#pragma unroll 1
  while (true) {
    if (left == 0) {
      tile = (int)(__shfl_sync(~0u, ahead[0], 0) & 0x7fffffffu);
      ahead[0] = ahead[1];
      if (tile < tiles && me.lane == 0) ahead[1] = atomic_next(args.state, me.lane);
    } else left--;
    if (tile >= tiles) {
      if (left == 0) break;
      left = 0;
      continue;
    }
    tile_stages(tile++);
  }
  // claims in flight have come back (their values are used); the last block to be here starts the next call's counting
  if (me.lane == 0 && atomic_add(args.state + 1, 1 + (u32)((ahead[0] & ahead[1]) == 0xffffffffu)) == gridDim.x - 1) {
    args.state[1] = 0;
    args.state[0] = ~(parity << 31) & 0x80000000u;
  }
#pragma unroll
  for (int i = 0; i < TEAMS; i++)                  // a team without rows or entries of its own: only that the tiles are over
    if (blockIdx.x >= TILES2 || i >= me.num_active) stage(i, at[i], nullptr, 0, -1, 0);
#pragma unroll 1
  for (int rt = blockIdx.x; rt < TILES2; rt += gridDim.x)
#pragma unroll 1
    for (int base = 0; base < me.num_active; base += TEAMS)
#pragma unroll
      for (int i = 0; i < TEAMS; i++) {
        const int entry = base + i;
        if (entry >= me.num_active) continue;
        const u8* src = args.pool + tile_offset((u64)active_list()[entry].x, rt, SLOT_BYTES, (u64)UNITS2 * UNIT_BYTES, DOWN_OFFSET, INTERLEAVE);
#pragma unroll 1
        for (int q = 0; q < ENTRY_STAGES; q++) {
          const int first_unit = q * STAGE_PARTS * RUN;
          stage(i, at[i], src + first_unit * UNIT_BYTES, min(STAGE_PARTS * RUN, UNITS2 - first_unit), -1, 0);
        }
      }
}

__device__ __forceinline__ void finish(const Args& args, const Warp& me, u32 shared, u32 parity) {
  const int f = me.warp - PRODUCER - 1;
  {                               // the other buffer of h is for the next call
    uint4* other = (uint4*)(args.h + (u64)(parity ^ 1) * MAX_PAIRS * INTER);
    for (int i = (blockIdx.x * FINISHERS + f) * 32 + me.lane; i < MAX_PAIRS * INTER / 8; i += gridDim.x * FINISHERS * 32) other[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
  }
  const int team = TEAMS > 1 ? f : 0, step = TEAMS > 1 ? 1 : FINISHERS, begin = TEAMS > 1 ? 0 : f;
  if (team >= TEAMS) return;
  const u32 red_full = shared + OFF_BARRIER + (2 * RINGS + team * RED_BUFFERS) * 8, red_empty = red_full + TEAMS * RED_BUFFERS * 8;
#pragma unroll 1
  for (int n = begin;; n += step) {
    const int buffer = n % RED_BUFFERS, place = team * RED_BUFFERS + buffer;
    barrier_wait(red_full + buffer * 8, n / RED_BUFFERS & 1);
    const int2 note = ((const int2*)(smem + OFF_RED_NOTE))[place];
    if (note.x < 0) break;
    float sum[4];
    add_warps<TEAM>(shared + OFF_RED + place * (TEAM * 512) + me.lane * 16, sum);
    __syncwarp();
    if (me.lane == 0) barrier_arrive(red_empty + buffer * 8, 1);
    store_h(args, me, note.x, note.y, sum, parity);
  }
}

__device__ __forceinline__ void compute(const Args& args, const Warp& me, u32 shared, u32 parity) {
  const int team = me.warp / TEAM, member = me.warp % TEAM, column = me.lane / 4, k0 = (me.lane % 4) * 8;
  const u32 barriers = shared + OFF_BARRIER, full = barriers + team * STAGES * 8, empty = full + RINGS * 8;
  const u32 red_full = barriers + (2 * RINGS + team * RED_BUFFERS) * 8, red_empty = red_full + TEAMS * RED_BUFFERS * 8;
  const u32 ring = shared + team * STAGES * STAGE_BYTES;
  const int2* notes = (const int2*)(smem + OFF_NOTE) + team * STAGES;
  Ring at = {0, 0};
  u32 b[KEEP ? OWN_UNITS : 1][16];
  if constexpr (KEEP) {
    const u16* x = args.x + (u64)(column < args.num_tokens ? column : 0) * HIDDEN;
#pragma unroll
    for (int c = 0; c < OWN_UNITS; c++)
      if (UNITS1 % TEAM == 0 || c * TEAM + member < UNITS1) load_x(b[c], x, (c * TEAM + member) * UNIT_K + k0);
  }
  // ---- phase 1
  int done = 0;                   // tiles of this team
#pragma unroll 1
  while (true) {
    barrier_wait(full + at.slot * 8, at.parity);
    const int2 note = notes[at.slot];
    if (note.x < 0) break;
    float acc[4] = {0.f, 0.f, 0.f, 0.f};
    const u16* x = args.x;
    if (!KEEP) x += (u64)(GATHER ? pair_of(note.x, column) / TOP_K : column < args.num_tokens ? column : 0) * HIDDEN;
#pragma unroll
    for (int q = 0; q < TILE_STAGES; q++) {
      if (q) barrier_wait(full + at.slot * 8, at.parity);
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) {
        const int unit = (q * CHUNKS + c) * TEAM + member;
        if (UNITS1 % TEAM == 0 ? (q * CHUNKS + c) * TEAM < UNITS1 : unit < UNITS1) {
          u32* tokens = b[KEEP ? q * CHUNKS + c < OWN_UNITS ? q * CHUNKS + c : 0 : 0];
          if (!KEEP) load_x(tokens, x, unit * UNIT_K + k0);
          __syncwarp();
          multiply(ring + at.slot * STAGE_BYTES + (c * TEAM + member) * UNIT_BYTES, me.lane, tokens, acc, [](int) {});
        }
      }
      __syncwarp();
      if (me.lane == 0) barrier_arrive(empty + at.slot * 8, 1);
      at.next();
    }
    const int buffer = done % RED_BUFFERS, place = team * RED_BUFFERS + buffer;
    if (done >= RED_BUFFERS) barrier_wait(red_empty + buffer * 8, (done / RED_BUFFERS - 1) & 1);
    sts_f128(shared + OFF_RED + place * (TEAM * 512) + member * 512 + me.lane * 16, acc[0], acc[1], acc[2], acc[3]);
    __syncwarp();
    if (me.lane == 0) {
      if (member == 0) ((int2*)(smem + OFF_RED_NOTE))[place] = note;
      barrier_arrive(red_full + buffer * 8, 1);
    }
    done++;
  }
  // the finishers of this team end
#pragma unroll 1
  for (int f = 0; f < (TEAMS > 1 ? 1 : FINISHERS); f++, done++) {
    const int buffer = done % RED_BUFFERS, place = team * RED_BUFFERS + buffer;
    if (done >= RED_BUFFERS) barrier_wait(red_empty + buffer * 8, (done / RED_BUFFERS - 1) & 1);
    __syncwarp();
    if (me.lane == 0) {
      if (member == 0) ((int2*)(smem + OFF_RED_NOTE))[place] = make_int2(-1, 0);
      barrier_arrive(red_full + buffer * 8, 1);
    }
  }
  // ---- phase 2: the first stage is there already
  const int entries = me.num_active > team ? (me.num_active - team - 1) / TEAMS + 1 : 0, parts = entries * PARTS;   // of this team
  int turn = member;              // the next part of this warp, counted over the team's entries
  u32 hb[16];
  const u16* hat = args.h;
  int hk = 0;
  auto aim = [&](int n) {         // at the tokens of part n; of the next rows' if n >= parts
    const int m = n % parts, e = m / PARTS, part = m - e * PARTS;
    hat = args.h + ((u64)parity * MAX_PAIRS + pair_of(e * TEAMS + team, column)) * INTER, hk = part * RUN * UNIT_K + k0;
  };
  if (parts) {
    aim(turn);
#pragma unroll
    for (int i = 0; i < 4; i++) load_h_piece(hb, hat, hk, i);
  }
  bool there = true;
#pragma unroll 1
  for (int rt = blockIdx.x; rt < TILES2; rt += gridDim.x) {
#pragma unroll 1
    for (int base = 0, q = 0; base < parts;) {
      if (!there) barrier_wait(full + at.slot * 8, at.parity);
      there = false;
      const int end = base + min(STAGE_PARTS, PARTS - q * STAGE_PARTS);
#pragma unroll 1
      while (turn < end) {
        const int e = turn / PARTS, part = turn - e * PARTS, units = min(RUN, UNITS2 - part * RUN), entry = e * TEAMS + team;
        const u32 place = ring + at.slot * STAGE_BYTES + (turn - base) * (RUN * UNIT_BYTES);
        float acc[4] = {0.f, 0.f, 0.f, 0.f};
        turn += TEAM;
#pragma unroll 1
        for (int u = 0; u < units; u++) {
          await_h(hb, hat, hk);
          if (u + 1 < units) hk += UNIT_K;
          else aim(turn);
          __syncwarp();
          multiply(place + u * UNIT_BYTES, me.lane, hb, acc, [&](int i) { load_h_piece(hb, hat, hk, i); });
        }
        const int r = me.lane / 4, c = (me.lane % 4) * 2;
        float* sums = (float*)(smem + OFF_PART) + part * MAX_PAIRS * 16;
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const u32 pair = active_pairs()[entry * COLUMNS + c + j];
          if (pair != NO_PAIR) sums[pair * 16 + r] = acc[j], sums[pair * 16 + r + 8] = acc[2 + j];
        }
      }
      __syncwarp();
      if (me.lane == 0) barrier_arrive(empty + at.slot * 8, 1);
      at.next();
      base = end, q = q + 1 == ENTRY_STAGES ? 0 : q + 1;
    }
    turn -= parts;
    barrier_of<COMPUTE * 32>(1);
    finish_rows(args, me, rt);
    barrier_of<COMPUTE * 32>(1);
  }
}

#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) moe_codes(
    const u16* __restrict__ x, const int* __restrict__ index, const float* __restrict__ weight, const int* __restrict__ slot_of, const u8* __restrict__ pool,
    u32* state, u16* h, u16* __restrict__ y, float* pairs, int num_tokens, int resume, int first_claim) {
#if __CUDA_ARCH__ >= 900
  const Args args = {x, index, weight, slot_of, pool, state, h, y, pairs, num_tokens, resume, first_claim};
  Warp me;
  me.warp = threadIdx.x / 32, me.lane = threadIdx.x % 32;
  const u32 shared = shared_address(smem);
  for (int e = threadIdx.x; e < NUM_EXPERTS; e += THREADS) masks()[e] = 0;
  for (int i = threadIdx.x; i < MAX_ACTIVE * COLUMNS; i += THREADS) active_pairs()[i] = NO_PAIR;
  for (int i = threadIdx.x; i < NUM_BARRIERS; i += THREADS) {
    const int red = i - 2 * RINGS;
    barrier_init(shared + OFF_BARRIER + i * 8, i < RINGS ? 1 : red < TEAMS * RED_BUFFERS ? TEAM : 1);   // full; empty and sums there; sums read
  }
  barriers_ready();
  __syncthreads();
  wait_for_previous_kernel();
  make_list(args, me);
  let_next_kernel_start();
  const u32 parity = block_claim() >> 31;
  if (me.warp < COMPUTE) compute(args, me, shared, parity);
  else if (me.warp == PRODUCER) produce(args, me, shared, parity);
  else finish(args, me, shared, parity);
#else
  asm volatile("trap;");
#endif
}

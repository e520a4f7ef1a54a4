// moe_small.cu - the routed experts of a layer for a few tokens (decoding, verification), one launch.
// Computes   y[t] = sum over j < TOP_K of weight[t,j] * p[t,j],  p[t,j] = down_e(h[t,j]) (+ bias),  e = index[t,j]
//            h[t,j] = bf16(act(gate_e(x[t]), up_e(x[t])))
// Inputs     x       bf16  [num_tokens, HIDDEN]          num_tokens * TOP_K <= MAX_PAIRS, num_tokens <= 16
//            index   int32 [num_tokens, TOP_K]           distinct experts within a token
//            weight  fp32  [num_tokens, TOP_K]
//            slot_of int32 [NUM_EXPERTS]                 place of an expert in the pool, -1: not here, its pairs are skipped
//            pool    bytes [num_slots, slot_bytes]       FORM 0 int4, 1 int8 (units, layout.cuh), 2 bf16 (rows)
// Scratch    state   u32   [2]                           zero before the first call ever; the kernel keeps it
//            h       bf16  [2, MAX_PAIRS, INTER]         every byte 0xff before the first call ever
// Output     y       bf16  [num_tokens, HIDDEN], every element written
//            pairs   fp32  [num_tokens, TOP_K, HIDDEN] or null: p of each pair. With `resume`, pairs whose slot is -1 take
//                    their p from here, so that calls over parts of the experts end with the bits of one call over all.
// Launch     any grid (one block an SM measures best), block WARPS * 32, no cooperative launch needed: see "Progress"
// Needs      HIDDEN % 8 == 0, INTER % 8 == 0, sm_80
// Moves      distinct experts * slot bytes; 4 experts of 2048 x 1408 in INT4: 17.8 MB, so no faster than 4.1 us at 4.37 TB/s
// Numerics   weights exact in BF16 (integers for codes), products and sums in FP32 in an order that depends on nothing but
//            HIDDEN, INTER and the splits; group scales applied to the FP32 sum of their group; h and y rounded once
// Reference  runtime/kernels/reference.py
//
// Every warp streams its own share of the weights through its own ring of STAGES chunks in shared memory, with no producer and
// no barrier on the way (bulk copies on sm_90, cp.async below it and for rows). Phase 1, gate and up: a team of TEAM warps takes
// a tile (8 gate + 8 up rows of one expert), each warp a part of its K; the parts are added in a fixed tree, and h is stored.
// Phase 2, down: a block owns 16 output rows; its warps take (expert, part of K) and leave the sums of each pair and part in
// shared memory, where they are added at the end in fixed order. The ring runs on from phase 1 into phase 2, so that memory does
// not idle while h is completed. Who copies notes in the ring what it copied; the arithmetic follows these notes.
//
// Progress. Tiles of phase 1 are claimed from a counter by blocks that run, and phase 1 waits for nobody; phase 2 waits only
// for tiles that running blocks have claimed. So the kernel ends whatever part of the grid is resident, next to any other
// kernel. A reader of h polls the data themselves: the buffer is filled with 0xffff, which no stored value has, and there are two
// buffers; each call uses one and refills the other. The parity rides on the claim counter, and the last claim of a call, which
// is known by its number, since each team claims once in vain, starts the next call's counting.
#include "common.cuh"
#include "layout.cuh"

#define INT4 0
#define INT8 1
#define BF16 2
#ifndef FORM
#define FORM INT4
#endif
#ifndef SCALE_SETS
#define SCALE_SETS 1   // scale sets a unit: groups of 128 k or more 1, of 64 2, of 32 4
#endif
#ifndef HIDDEN
#define HIDDEN 2048
#define INTER 1408
#define TOP_K 4
#define NUM_EXPERTS 60
#endif
#ifndef MAX_PAIRS
#define MAX_PAIRS 32
#endif
#ifndef MAX_TOKENS
#define MAX_TOKENS 8   // of a call: 8, 16, 24 or 32
#endif
#ifndef ACTIVATION
#define ACTIVATION 0   // 0 silu, 1 gelu (erf), 2 gelu (tanh), 3 clamped (gpt-oss)
#endif
#ifndef BIAS
#define BIAS 0
#endif
#ifndef WARPS
#define WARPS 16
#endif
#ifndef TEAM
#define TEAM 4         // warps that share a gate/up tile, a power of two, at most its K units
#endif
#ifndef PARTS
#define PARTS 4        // of the down K, a power of two that divides WARPS, at most its units
#endif
#ifndef CHUNK
#define CHUNK 4        // units of a stage of the ring
#endif
#ifndef STAGES
#define STAGES 3
#endif
#ifndef INTERLEAVE
#define INTERLEAVE 1   // experts whose tiles alternate in the pool (code forms)
#endif
#ifndef SLOT_BYTES
#define SLOT_BYTES 4460544ull
#endif
#ifndef DOWN_OFFSET
#define DOWN_OFFSET 2973696ull
#endif
#ifndef BIAS_OFFSET
#define BIAS_OFFSET 0ull   // of gate_up_bias [2 * INTER]; down_bias [HIDDEN] at DOWN_BIAS_OFFSET
#define DOWN_BIAS_OFFSET 0ull
#endif

#define UNIT_K (FORM == BF16 ? 64 : 128)
#define CODE_BYTES (FORM == INT4 ? 1024 : 2048)
#define UNIT_BYTES (FORM == BF16 ? 2048 : CODE_BYTES + 32 * SCALE_SETS)
#define STAGE_BYTES (CHUNK * UNIT_BYTES)
#define UNITS1 ((HIDDEN + UNIT_K - 1) / UNIT_K)
#define UNITS2 ((INTER + UNIT_K - 1) / UNIT_K)
#define TILES1 (INTER / 8)
#define TILES2 ((HIDDEN + 15) / 16)
#define THREADS (WARPS * 32)
#define TEAMS (WARPS / TEAM)
#define GATHER (MAX_TOKENS > 8)   // an entry's columns hold the tokens of its expert; else column t is token t
#define KEEP (!GATHER && (UNITS1 + TEAM - 1) / TEAM <= CHUNK)   // a warp's part of x stays in registers for all of phase 1
#define QUEUE 32       // claims a team remembers; its warps are never further apart
#define COLUMNS 8      // tokens of an MMA, and of an entry of the list: an expert with more tokens has several entries
#define LEVELS (MAX_TOKENS / COLUMNS)
#define EXPERT_WORDS ((NUM_EXPERTS + 31) / 32)
#define B_REGS (UNIT_K / 8)
#define BULK (__CUDA_ARCH__ >= 900 && FORM != BF16)

// shared memory
#define MAX_ACTIVE (MAX_PAIRS < NUM_EXPERTS + MAX_PAIRS / 8 ? MAX_PAIRS : NUM_EXPERTS + MAX_PAIRS / 8)
#define OFF_RED (WARPS * STAGES * STAGE_BYTES)                          // f32x4 [TEAMS][2][TEAM][32 lanes], none for TEAM 1
#define OFF_PART (OFF_RED + (TEAM > 1 ? WARPS * 2 * 512 : 0)) // f32 [PARTS][MAX_PAIRS][16]
#define OFF_QUEUE (OFF_PART + PARTS * MAX_PAIRS * 64)                  // u64 [TEAMS][QUEUE]
#define OFF_BARRIER (OFF_QUEUE + TEAMS * QUEUE * 8)                    // u64 [WARPS][STAGES]
#define OFF_NOTE (OFF_BARRIER + (WARPS * STAGES + 1) / 2 * 16)         // Note [WARPS][STAGES]
#define OFF_WEIGHT (OFF_NOTE + WARPS * STAGES * 16)                    // f32 [MAX_PAIRS]
#define OFF_PLACE (OFF_WEIGHT + MAX_PAIRS * 4)                         // int [MAX_PAIRS] slot of a pair's expert
#define OFF_MASK (OFF_PLACE + MAX_PAIRS * 4)                           // u32 [NUM_EXPERTS] tokens of an expert
#define OFF_SLOT (OFF_MASK + (NUM_EXPERTS + 1) / 2 * 8)                // int [NUM_EXPERTS]
#define OFF_LIST (OFF_SLOT + (NUM_EXPERTS + 1) / 2 * 8)                // int2 [MAX_ACTIVE]: slot, one of the pairs
#define OFF_WORDS (OFF_LIST + MAX_ACTIVE * 8)                          // u32 [LEVELS][EXPERT_WORDS]: experts with more than 8 * level tokens; then the block's claim
#define OFF_PAIRS (OFF_WORDS + (LEVELS * EXPERT_WORDS + 1) * 4)        // u16 [MAX_ACTIVE][COLUMNS]: pair of a column, NO_PAIR
#define NO_PAIR 0xffffu
#define SHARED_BYTES (OFF_PAIRS + MAX_ACTIVE * COLUMNS * 2)

static_assert(TEAM <= UNITS1 && PARTS <= UNITS2, "more parts than K units");
static_assert((WARPS & (WARPS - 1)) == 0 && WARPS % TEAM == 0 && WARPS % PARTS == 0 && (TEAM == 1 || TEAMS <= 15), "teams");
static_assert(STAGES >= 2 && STAGES < QUEUE, "a team's warps, up to STAGES tiles apart, would lose a claim");
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

template <class T> struct Plain { using type = T; };
template <class T> struct Plain<T&> { using type = T; };

struct Args {
  const u16* x; const int* index; const float* weight; const int* slot_of; const u8* pool;
  u32* state; u16* h; u16* y; float* pairs; int num_tokens; int resume; int first_claim;
};

// What a warp does next: units [first, first + count) of one tile for the tokens of one active expert.
struct Item {
  int phase;   // 1, 2; 0: nothing is left
  int active;  // entry of the list
  int tile;    // phase 1: of 8 channels; phase 2: of 16 rows
  int part;    // of K
  int first, count;
};

// A warp's place in the sequence of its items
struct Walk {
  int ordinal;            // phase 1: tiles of this team so far; -1 in phase 2
  int row_tile, round, n;
};

struct Warp {
  int warp, lane, team, member, num_active;
  u32 queue;       // shared address of the team's claims

  __device__ __forceinline__ u32 claimed(int ordinal) const {
    u64 v;
    do {
      v = lds_volatile64(queue + (ordinal % QUEUE) * 8);
    } while ((u32)(v >> 32) != (u32)ordinal + 1);
    return (u32)v;
  }
  __device__ __forceinline__ void publish(int ordinal, u32 claim) const {
    sts_volatile64(queue + (ordinal % QUEUE) * 8, (u64)(ordinal + 1) << 32 | claim);
  }
  __device__ __forceinline__ int start(int round) const { return (warp - round * num_active * PARTS) & (WARPS - 1); }
  __device__ __forceinline__ Item next(Walk& w) const {
    Item it;
    it.phase = 0;
    if (w.ordinal >= 0) {
      const u32 tile = claimed(w.ordinal) & 0x7fffffffu;
      if (tile < (u32)(num_active * TILES1)) {
        w.ordinal++;
        it.phase = 1, it.active = tile / TILES1, it.tile = tile - it.active * TILES1, it.part = member;
        it.first = part_first(UNITS1, TEAM, member), it.count = part_count(UNITS1, TEAM, member);
        return it;
      }
      w.ordinal = -1, w.round = 0, w.row_tile = blockIdx.x, w.n = start(0);
    }
    while (w.n >= num_active * PARTS && w.row_tile < TILES2) w.row_tile += gridDim.x, w.n = start(++w.round);
    if (w.row_tile >= TILES2) return it;
    it.phase = 2, it.active = w.n / PARTS, it.tile = w.row_tile;
    it.part = (w.n + w.n / WARPS) % PARTS;   // the short part goes round the warps
    it.first = part_first(UNITS2, PARTS, it.part), it.count = part_count(UNITS2, PARTS, it.part);
    w.n += WARPS;
    return it;
  }
};

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

// What lies in a stage of the ring: n units from `unit` on, of an item's tile and active expert
struct Note {
  u32 word;   // phase, 2 bits; last of its item, 1 bit; n, 5 bits; part, 8 bits; unit, 16 bits
  int active, tile;
  __device__ __forceinline__ int phase() const { return word & 3; }
  __device__ __forceinline__ bool last() const { return word & 4; }
  __device__ __forceinline__ int n() const { return word >> 3 & 31; }
  __device__ __forceinline__ int part() const { return word >> 8 & 255; }
  __device__ __forceinline__ int unit() const { return word >> 16; }
};
__device__ __forceinline__ void write_note(u32 at, const Item& it, int unit, int n) {
  const u32 word = it.phase | (unit + n == it.first + it.count ? 4 : 0) | n << 3 | it.part << 8 | unit << 16;
  sts128(at, word, it.active, it.tile, it.tile);
}
__device__ __forceinline__ Note read_note(u32 at) {
  const uint4 v = lds128(at);
  Note n;
  n.word = v.x, n.active = v.y, n.tile = v.z;
  return n;
}

// The copies of an item, chunk by chunk
struct Source {
  const u8* at;     // codes: the next unit; BF16: this lane's 16 bytes of it
  int unit, end;    // next unit, end of the item
#if FORM == BF16
  u64 four, eight;  // bytes from a row to the fourth and to the eighth after it (phase 1: from gate to up rows)
  int k, k_end;     // of this lane's piece; where rows end
  bool upper;       // whether rows 8-15 exist
#endif
};

__device__ __forceinline__ Source source_of(const Args& args, const Warp& me, const Item& it) {
  Source s;
  const u64 slot = (u64)active_list()[it.active].x;
  s.unit = it.first, s.end = it.first + it.count;
#if FORM == BF16
  const u64 pitch = it.phase == 1 ? HIDDEN * 2 : INTER * 2;
  const int row = (it.phase == 1 ? it.tile * 8 : it.tile * 16) + me.lane / 8;
  s.k = it.first * UNIT_K + (me.lane % 8) * 8, s.k_end = it.phase == 1 ? HIDDEN : INTER;
  s.at = args.pool + slot * SLOT_BYTES + (it.phase == 1 ? 0 : DOWN_OFFSET) + (u64)row * pitch + (u64)s.k * 2;
  s.four = 4 * pitch, s.eight = it.phase == 1 ? (u64)INTER * pitch : 8 * pitch;
  s.upper = it.phase == 1 || HIDDEN % 16 == 0 || it.tile * 16 + 8 < HIDDEN;
#else
  s.at = args.pool + tile_offset(slot, it.tile, SLOT_BYTES, (it.phase == 1 ? UNITS1 : UNITS2) * (u64)UNIT_BYTES, it.phase == 1 ? 0 : DOWN_OFFSET, INTERLEAVE) +
         it.first * UNIT_BYTES;
#endif
  return s;
}

__device__ __forceinline__ void copy_chunk(const Warp& me, Source& s, int units, u32 dst, u32 barrier) {
#if BULK
  if (elect_lane()) {
    barrier_expect(barrier, units * UNIT_BYTES);
    copy_bulk(dst, s.at, units * UNIT_BYTES, barrier);
  }
  s.at += units * UNIT_BYTES;
#elif FORM == BF16
  const int row = me.lane / 8, piece = me.lane % 8;
  for (int u = 0; u < units; u++) {
    const bool in = s.k < s.k_end, up = in && s.upper;
    const u8* upper = up ? s.at + s.eight : s.at;
    copy_async_or_zero(dst + bf16_piece(row, piece) * 16, s.at, in);
    copy_async_or_zero(dst + bf16_piece(row + 4, piece) * 16, s.at + s.four, in);
    copy_async_or_zero(dst + bf16_piece(row + 8, piece) * 16, upper, up);
    copy_async_or_zero(dst + bf16_piece(row + 12, piece) * 16, up ? upper + s.four : upper, up);
    s.at += UNIT_K * 2, s.k += UNIT_K, dst += UNIT_BYTES;
  }
#else
  for (int i = me.lane * 16; i < units * UNIT_BYTES; i += 512) copy_async(dst + i, s.at + i);
  s.at += units * UNIT_BYTES;
#endif
  s.unit += units;
}

// The values of the token in this lane's column (lane / 4), from k = 8 q of a unit on. A column without a token takes another's:
// its sums are never read, and the loads cost nothing.
template <int PHASE> struct Column {
  static constexpr int PHASE_ = PHASE, K = PHASE == 1 ? HIDDEN : INTER;
  const u16* at;
  int k;
  __device__ __forceinline__ Column(const Args& args, const Warp& me, const Note& note, u32 parity) {
    const int column = me.lane / 4;
    k = note.unit() * UNIT_K + (me.lane % 4) * 8;
    if (PHASE == 1 && !GATHER) {
      at = args.x + (u64)(column < args.num_tokens ? column : 0) * HIDDEN + k;
      return;
    }
    u32 pair = active_pairs()[note.active * COLUMNS + column];
    if (pair == NO_PAIR) pair = active_list()[note.active].y;
    at = PHASE == 1 ? args.x + (u64)(pair / TOP_K) * HIDDEN + k : args.h + ((u64)parity * MAX_PAIRS + pair) * INTER + k;
  }
  __device__ __forceinline__ void load(u32* r, int unit, int i) const {
    const int ahead = unit * UNIT_K + i * 32;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (K % UNIT_K == 0 || k + ahead < K) v = PHASE == 1 ? load_read_only(at + ahead) : load_shared_by_grid(at + ahead);
    r[4 * i] = v.x, r[4 * i + 1] = v.y, r[4 * i + 2] = v.z, r[4 * i + 3] = v.w;
  }
  __device__ __forceinline__ void load(u32* r, int unit) const {
#pragma unroll
    for (int i = 0; i < UNIT_K / 32; i++) load(r, unit, i);
  }
  // Loads again until all of h that this lane wants is written: 16 bytes that are not are all ones
  __device__ __forceinline__ void await(u32* r, int unit) const {
    while (true) {
      bool all = true;
#pragma unroll
      for (int i = 0; i < UNIT_K / 32; i++) all = all && r[4 * i] != 0xffffffffu;
      if (all) break;
      load(r, unit);
    }
  }
};

// acc += unit (16 rows x UNIT_K) * tokens, in FP32; after(i) is called when piece i of b, 32 k, is used for the last time
template <class AFTER> __device__ __forceinline__ void multiply(u32 unit, int lane, const u32* b, float* acc, AFTER after) {
#if FORM == BF16
  const int r = lane / 4, q = lane % 4;
#pragma unroll
  for (int i = 0; i < UNIT_K / 32; i++) {
    const uint4 low = lds128(unit + bf16_piece(r, i * 4 + q) * 16), high = lds128(unit + bf16_piece(r + 8, i * 4 + q) * 16);
    mma(acc, low.x, high.x, low.y, high.y, b[4 * i], b[4 * i + 1]);
    mma(acc, low.z, high.z, low.w, high.w, b[4 * i + 2], b[4 * i + 3]);
    after(i);
  }
#else
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
#endif
}

// acc += n <= CHUNK units that lie in shared memory one after the other. b holds their tokens; it is loaded with those of the
// following stage, `next_n` units, as soon as it is used (next_n 0: it is left as it is).
template <int PHASE> __device__ __forceinline__ void multiply_chunk(u32 place, int lane, int n, u32 (*b)[B_REGS], float* acc, const Column<PHASE>& column, int next_n,
                                                                    const Column<PHASE>& next) {
#pragma unroll
  for (int u = 0; u < CHUNK; u++) {
    if (u < n) {
      if (PHASE == 2) {
        column.await(b[u], u);
        __syncwarp();
      }
      multiply(place + u * UNIT_BYTES, lane, b[u], acc, [&](int i) { if (u < next_n) next.load(b[u], u, i); });
    } else if (u < next_n) next.load(b[u], u);
  }
}

__device__ __forceinline__ void add4(float* a, const float* b) { a[0] += b[0], a[1] += b[1], a[2] += b[2], a[3] += b[3]; }

// Applies the activation to a tile's sums (gate rows r, up rows r + 8) and stores h
__device__ __forceinline__ void store_h(const Args& args, const Warp& me, const Note& it, const float* acc, u32 parity) {
  const int r = me.lane / 4, q = me.lane % 4;
  float bias_gate = 0.f, bias_up = 0.f;
#if BIAS
  const u16* bias = (const u16*)(args.pool + tile_offset(active_list()[it.active].x, 0, SLOT_BYTES, 4 * INTER, BIAS_OFFSET, INTERLEAVE));
  bias_gate = bf16_to_f32(bias[it.tile * 8 + r]), bias_up = bf16_to_f32(bias[INTER + it.tile * 8 + r]);
#endif
  // channel r for the tokens 2q and 2q + 1; even r gathers the channels of token 2q, odd r of 2q + 1, into 16 bytes
  const float h0 = activate(acc[0] + bias_gate, acc[2] + bias_up), h1 = activate(acc[1] + bias_gate, acc[3] + bias_up);
  const float got = __shfl_xor_sync(~0u, r & 1 ? h0 : h1, 4);
  uint4 word;
  word.x = r & 1 ? f32_to_bf16x2(h1, got) : f32_to_bf16x2(got, h0);
  word.y = __shfl_down_sync(~0u, word.x, 8), word.z = __shfl_down_sync(~0u, word.x, 16), word.w = __shfl_down_sync(~0u, word.x, 24);
  const int column = 2 * q + r;
  const u32 pair = active_pairs()[it.active * COLUMNS + (column & 7)];
  if (r < 2 && pair != NO_PAIR) {
    store_shared_by_grid(args.h + ((u64)parity * MAX_PAIRS + pair) * INTER + it.tile * 8, word);
  }
}

// Adds the sums of a team's warps in the tree of the slabs; one warp of the team in turn goes on with them, the others' are void
__device__ __forceinline__ bool join_team(const Warp& me, u32 shared, int tiles, float* acc) {
#if TEAM > 1
  const u32 red = shared + OFF_RED + (me.team * 2 + (tiles & 1)) * (TEAM * 512);
  sts_f128(red + (me.member * 32 + me.lane) * 16, acc[0], acc[1], acc[2], acc[3]);
  barrier_of<TEAM * 32>(me.team + 1);
  if (tiles % TEAM != me.member) return false;
  float v[TEAM][4];
#pragma unroll
  for (int w = 0; w < TEAM; w++) {
    const float4 f = lds_f128(red + (w * 32 + me.lane) * 16);
    v[w][0] = f.x, v[w][1] = f.y, v[w][2] = f.z, v[w][3] = f.w;
  }
#pragma unroll
  for (int d = 1; d < TEAM; d *= 2)
#pragma unroll
    for (int w = 0; w < TEAM; w += 2 * d) add4(v[w], v[w + d]);
#pragma unroll
  for (int i = 0; i < 4; i++) acc[i] = v[0][i];
#endif
  return true;
}

// Leaves the sums of a part of the down projection: [part][pair][16 rows]
__device__ __forceinline__ void put_part(const Warp& me, const Note& it, const float* acc) {
  const int r = me.lane / 4, q = me.lane % 4;
  float* part = (float*)(smem + OFF_PART) + it.part() * MAX_PAIRS * 16;
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const u32 pair = active_pairs()[it.active * COLUMNS + 2 * q + j];
    if (pair != NO_PAIR) part[pair * 16 + r] = acc[j], part[pair * 16 + r + 8] = acc[2 + j];
  }
}

// y of 16 rows: parts, then pairs, in fixed order
__device__ __forceinline__ void finish_rows(const Args& args, const Warp& me, int row_tile) {
  const int at = me.lane % 16, row = row_tile * 16 + at;
  for (int t0 = me.warp * 2; t0 < args.num_tokens; t0 += WARPS * 2) {
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
          for (int s = 0; s < PARTS; s += 2 * d) v[s] += v[s + d];
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

extern "C" __global__ void __launch_bounds__(THREADS, 1) moe_small(
    const u16* __restrict__ x, const int* __restrict__ index, const float* __restrict__ weight, const int* __restrict__ slot_of, const u8* __restrict__ pool,
    u32* state, u16* h, u16* __restrict__ y, float* pairs, int num_tokens, int resume, int first_claim) {
  const Args args = {x, index, weight, slot_of, pool, state, h, y, pairs, num_tokens, resume, first_claim};
  Warp me;
  me.warp = threadIdx.x / 32, me.lane = threadIdx.x % 32, me.team = me.warp / TEAM, me.member = me.warp % TEAM;
  const u32 shared = shared_address(smem), ring = shared + me.warp * (STAGES * STAGE_BYTES), barriers = shared + OFF_BARRIER + me.warp * STAGES * 8;
  const u32 notes = shared + OFF_NOTE + me.warp * STAGES * 16;
  me.queue = shared + OFF_QUEUE + me.team * QUEUE * 8;
  for (int e = threadIdx.x; e < NUM_EXPERTS; e += THREADS) masks()[e] = 0;
  for (int i = threadIdx.x; i < TEAMS * QUEUE; i += THREADS) ((u64*)(smem + OFF_QUEUE))[i] = 0;
  for (int i = threadIdx.x; i < MAX_ACTIVE * COLUMNS; i += THREADS) active_pairs()[i] = NO_PAIR;
#if BULK
  if (me.lane < STAGES) barrier_init(barriers + me.lane * 8, 1);
  barriers_ready();
#endif
  __syncthreads();
  wait_for_previous_kernel();
  const bool leader = me.member == 0 && me.lane == 0;
  u32 claim = 0;                  // leader: a claim that is not published yet
  bool in_flight = leader && me.team >= first_claim;
  if (in_flight) claim = atomic_next(state, me.lane);
  make_list(args, me);
  let_next_kernel_start();

  const u32 parity = block_claim() >> 31, last_claim = (u32)(me.num_active * TILES1) + gridDim.x * TEAMS - 1;
  auto check = [&](u32 c) {       // the last claim of the call: nobody will claim again
    if ((c & 0x7fffffffu) == last_claim) *state = ~c & 0x80000000u;
  };
  if (threadIdx.x == 0) check(block_claim() + first_claim - 1);
  if (leader && !in_flight) me.publish(0, block_claim() + me.team);

  Walk walk = {0, 0, 0, 0};
  Item copied;
  Source source;
  int fill = 0;
  copied.phase = 1, source.unit = source.end = 0;
  auto copy_next = [&]() {        // fills the next stage and its note; phase 0 in the note: there is no more
    if (source.unit == source.end && copied.phase) {
      if (in_flight) me.publish(walk.ordinal, claim), check(claim), in_flight = false;
      const bool claiming = copied.phase == 1;
      copied = me.next(walk);
      if (leader && claiming && copied.phase == 1) claim = atomic_next(state, me.lane), in_flight = true;
      if (copied.phase) source = source_of(args, me, copied);
    }
    const int n = min(CHUNK, source.end - source.unit);
    write_note(notes + fill * 16, copied, source.unit, n);
    if (n > 0) copy_chunk(me, source, n, ring + fill * STAGE_BYTES, barriers + fill * 8);
    fill = fill + 1 == STAGES ? 0 : fill + 1;
    if (!BULK) copy_commit();
  };
#pragma unroll 1
  for (int i = 0; i < STAGES; i++) copy_next();

  {                               // the other buffer of h is for the next call
    uint4* other = (uint4*)(h + (u64)(parity ^ 1) * MAX_PAIRS * INTER);
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < MAX_PAIRS * INTER / 8; i += gridDim.x * THREADS) other[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
  }

  u32 b[CHUNK][B_REGS];
  float acc[4];
  int use = 0, use_phase = 0;
  __syncwarp();
  Note note = read_note(notes);
  // Adds the units of this stage to acc and goes on to the next stage, whose note becomes `note`
  auto run_stage = [&](auto& column) {
    using Here = typename Plain<decltype(column)>::type;
    constexpr int PHASE = Here::PHASE_;
    const int following = use + 1 == STAGES ? 0 : use + 1;
    const Note next = read_note(notes + following * 16);
    Here after = column;
    int next_n = 0;
    if (next.phase() == PHASE && !(PHASE == 1 && KEEP)) after = Here(args, me, next, parity), next_n = next.n();
#if BULK
    barrier_wait(barriers + use * 8, use_phase);
#else
    copy_wait<STAGES - 1>();
#endif
    __syncwarp();
    const int n = PHASE == 1 && UNITS1 % (TEAM * CHUNK) == 0 ? CHUNK : note.n();
    multiply_chunk<PHASE>(ring + use * STAGE_BYTES, me.lane, n, b, acc, column, next_n, after);
    __syncwarp();
    copy_next();
    use = following, use_phase ^= following == 0;
    column = after;
    note = next;
  };
  auto load_first = [&](auto& column) {
#pragma unroll
    for (int u = 0; u < CHUNK; u++)
      if (u < note.n()) column.load(b[u], u);
  };

  if (note.phase() == 1) {
    Column<1> column(args, me, note, parity);
    load_first(column);
    bool first = true;
#pragma unroll 1
    for (int tiles = 0; note.phase() == 1; tiles++) {
      const Note item = note;
      bool last;
      do {
        if (first) acc[0] = acc[1] = acc[2] = acc[3] = 0.f;
        first = last = note.last();
        run_stage(column);
      } while (!last);
      if (join_team(me, shared, tiles, acc)) store_h(args, me, item, acc, parity);
    }
  }
  int row_tile = blockIdx.x;
  auto rows_until = [&](int end) {         // all items of these rows are behind this warp
    for (; row_tile < end; row_tile += gridDim.x) {
      __syncthreads();
      finish_rows(args, me, row_tile);
      __syncthreads();
    }
  };
  if (note.phase() == 2) {
    Column<2> column(args, me, note, parity);
    load_first(column);
    bool first = true;
#pragma unroll 1
    while (note.phase() == 2) {
      rows_until(note.tile);
      const Note item = note;
      bool last;
      do {
        if (first) acc[0] = acc[1] = acc[2] = acc[3] = 0.f;
        first = last = note.last();
        run_stage(column);
      } while (!last);
      put_part(me, item, acc);
    }
  }
  rows_until(TILES2);
}

extern "C" __global__ void moe_small_shared_bytes(int* bytes) { *bytes = SHARED_BYTES; }

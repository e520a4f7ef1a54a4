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
// no barrier on the way (cp.async). Phase 1, gate and up: a team of TEAM warps takes a tile (8 gate + 8 up rows of one expert), each
// warp a part of its K; the parts are added in a fixed tree, and h is stored.
// Phase 2, down: a block owns 16 output rows; its warps take (expert, part of K) and leave the sums of each pair and part in
// shared memory, where they are added at the end in fixed order. The ring runs on from phase 1 into phase 2, so that memory does
// not idle while h is completed. Who copies notes in the ring what it copied; the arithmetic follows these notes.
//
// Progress. Tiles of phase 1 are claimed from a counter by blocks that run, and phase 1 waits for nobody; phase 2 waits only
// for tiles that running blocks have claimed. So the kernel ends whatever part of the grid is resident, next to any other
// kernel. A reader of h polls the data themselves: the buffer is filled with 0xffff, which no stored value has, and there are two
// buffers; each call uses one and refills the other. The parity rides on the claim counter, and the last claim of a call, which
// is known by its number, since each team claims once in vain, starts the next call's counting.
#include "expert_layer.cuh"

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
#define UNIT_K (FORM == BF16 ? 64 : 128)
#define UNIT_BYTES (FORM == BF16 ? 2048 : CODE_BYTES + 32 * SCALE_SETS)
#define SPAN 2         // units of BF16 that stay together: 128 k, as in moe_residual.cu, whose sums have the same order
#define STAGE_BYTES (CHUNK * UNIT_BYTES)
#define UNITS1 ((HIDDEN + UNIT_K - 1) / UNIT_K)
#define UNITS2 ((INTER + UNIT_K - 1) / UNIT_K)
#define THREADS (WARPS * 32)
#define TEAMS (WARPS / TEAM)
#define KEEP (!GATHER && (UNITS1 + TEAM - 1) / TEAM <= CHUNK)   // a warp's part of x stays in registers for all of phase 1
#ifndef FEW_TILES
#define FEW_TILES 3    // of a team
#endif
#define QUEUE 32       // claims a team remembers; its warps are never further apart
#define B_REGS (UNIT_K / 8)

// shared memory
#define OFF_RED (WARPS * STAGES * STAGE_BYTES)                          // f32x4 [TEAMS][2][TEAM][32 lanes], none for TEAM 1
#define OFF_PART (OFF_RED + (TEAM > 1 ? WARPS * 2 * 512 : 0)) // f32 [PARTS][MAX_PAIRS][16]
#define OFF_QUEUE (OFF_PART + PARTS * MAX_PAIRS * 64)                  // u32 [TEAMS][QUEUE]: claims
#define OFF_BARRIER (OFF_QUEUE + TEAMS * QUEUE * 4)                    // u64 [TEAMS][QUEUE]: a claim is there
#define OFF_NOTE (OFF_BARRIER + TEAMS * QUEUE * 8)                     // Note [WARPS][STAGES]
#define OFF_LISTS (OFF_NOTE + WARPS * STAGES * 16)
#include "few_tokens.cuh"

static_assert(FORM == BF16 ? SPAN * TEAM < UNITS1 + SPAN && SPAN * PARTS < UNITS2 + SPAN && CHUNK <= SPAN : TEAM <= UNITS1 && PARTS <= UNITS2, "more parts than K units");
static_assert((WARPS & (WARPS - 1)) == 0 && WARPS % TEAM == 0 && WARPS % PARTS == 0 && (TEAM == 1 || TEAMS <= 15), "teams");
static_assert(STAGES >= 2 && STAGES < QUEUE, "a team's warps, up to STAGES tiles apart, would lose a claim");

template <class T> struct Plain { using type = T; };
template <class T> struct Plain<T&> { using type = T; };

// What a warp does next: units of one tile for the tokens of one active expert. Of codes they are [first, end); of BF16 SPAN units from
// `first` on, then as many after those of the other parts, and so on until `end`. Part 0 never has more than another: its warp is the
// one that claims, and must not be the last of its team to do so.
struct Item {
  int phase;   // 1, 2; 0: nothing is left
  int active;  // entry of the list
  int tile;    // phase 1: of 8 channels; phase 2: of 16 rows
  int part;    // of K
  int first, end;
};
__device__ __forceinline__ void split(Item& it, int units, int parts) {
  if (FORM == BF16) it.first = (parts - 1 - it.part) * SPAN, it.end = units;
  else it.first = part_first(units, parts, it.part), it.end = it.first + part_count(units, parts, it.part);
}
// The unit behind the n from `unit` on
__device__ __forceinline__ int unit_after(const Item& it, int unit, int n) {
  const int next = unit + n;
  return FORM == BF16 && next % SPAN == 0 ? next + SPAN * ((it.phase == 1 ? TEAM : PARTS) - 1) : next;
}

// A warp's place in the sequence of its items
struct Walk {
  int ordinal;            // phase 1: tiles of this team so far; -1 in phase 2
  int row_tile, round, n;
};

struct Warp {
  int warp, lane, team, member, num_active;
  u32 queue, queued;   // shared addresses of the team's claims and their barriers

  __device__ __forceinline__ u32 claimed(int ordinal) const {
    barrier_wait(queued + ordinal % QUEUE * 8, ordinal / QUEUE & 1);
    return lds32(queue + ordinal % QUEUE * 4);
  }
  __device__ __forceinline__ void publish(int ordinal, u32 claim) const {   // by one thread of the team
    sts32(queue + ordinal % QUEUE * 4, claim);
    barrier_arrive(queued + ordinal % QUEUE * 8);
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
        split(it, UNITS1, TEAM);
        return it;
      }
      w.ordinal = -1, w.round = 0, w.row_tile = blockIdx.x, w.n = start(0);
    }
    while (w.n >= num_active * PARTS && w.row_tile < TILES2) w.row_tile += gridDim.x, w.n = start(++w.round);
    if (w.row_tile >= TILES2) return it;
    it.phase = 2, it.active = w.n / PARTS, it.tile = w.row_tile;
    it.part = (w.n + w.n / WARPS) % PARTS;   // the short part goes round the warps
    split(it, UNITS2, PARTS);
    w.n += WARPS;
    return it;
  }
};

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
  const u32 word = it.phase | (unit_after(it, unit, n) >= it.end ? 4 : 0) | n << 3 | it.part << 8 | unit << 16;
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
  s.unit = it.first, s.end = it.end;
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

__device__ __forceinline__ void copy_chunk(const Warp& me, const Item& it, Source& s, int units, u32 dst) {
#if FORM == BF16
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
  const int next = unit_after(it, s.unit, units);
#if FORM == BF16
  const int others = next - s.unit - units;
  s.at += others * UNIT_K * 2, s.k += others * UNIT_K;
#endif
  s.unit = next;
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
  // Loads n units again until all of h that this lane wants is written: 16 bytes that are not are all ones. All at once, as each time costs a
  // way to the L2 and back.
  __device__ __forceinline__ void await(u32 (*b)[B_REGS], int n) const {
    while (true) {
      bool all = true;
#pragma unroll
      for (int u = 0; u < CHUNK; u++)
#pragma unroll
        for (int i = 0; i < UNIT_K / 32; i++) all = all && (u >= n || b[u][4 * i] != 0xffffffffu);
      if (all) break;
#pragma unroll
      for (int u = 0; u < CHUNK; u++)
        if (u < n) load(b[u], u);
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
  multiply_codes(unit, lane, b, acc, after);
#endif
}

// acc += n <= CHUNK units that lie in shared memory one after the other. b holds their tokens; it is loaded with those of the
// following stage, `next_n` units, as soon as it is used (next_n 0: it is left as it is).
template <int PHASE> __device__ __forceinline__ void multiply_chunk(u32 place, int lane, int n, u32 (*b)[B_REGS], float* acc, const Column<PHASE>& column, int next_n,
                                                                    const Column<PHASE>& next) {
  if (PHASE == 2) {
    column.await(b, n);
    __syncwarp();
  }
#pragma unroll
  for (int u = 0; u < CHUNK; u++) {
    if (u < n) {
      multiply(place + u * UNIT_BYTES, lane, b[u], acc, [&](int i) { if (u < next_n) next.load(b[u], u, i); });
    } else if (u < next_n) next.load(b[u], u);
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

extern "C" __global__ void __launch_bounds__(THREADS, 1) moe_small(
    const u16* __restrict__ x, const int* __restrict__ index, const float* __restrict__ weight, const int* __restrict__ slot_of, const u8* __restrict__ pool,
    u32* state, u16* h, u16* __restrict__ y, float* pairs, int num_tokens, int resume, int first_claim) {
  const Args args = {x, index, weight, slot_of, pool, state, h, y, pairs, num_tokens, resume, first_claim};
  Warp me;
  me.warp = threadIdx.x / 32, me.lane = threadIdx.x % 32, me.team = me.warp / TEAM, me.member = me.warp % TEAM;
  const u32 shared = shared_address(smem), ring = shared + me.warp * (STAGES * STAGE_BYTES);
  const u32 notes = shared + OFF_NOTE + me.warp * STAGES * 16;
  me.queue = shared + OFF_QUEUE + me.team * QUEUE * 4, me.queued = shared + OFF_BARRIER + me.team * QUEUE * 8;
  if (me.warp == 0) prefetch_choices(args, me.lane);
  for (int e = threadIdx.x; e < NUM_EXPERTS; e += THREADS) masks()[e] = 0;
  init_barriers<WARPS>(shared + OFF_BARRIER, TEAMS * QUEUE, me.warp, me.lane, [](int) { return 1; });
  for (int i = threadIdx.x; i < MAX_ACTIVE * COLUMNS; i += THREADS) active_pairs()[i] = NO_PAIR;
  __syncthreads();
  wait_for_previous_kernel();
  const bool leader = me.member == 0 && me.lane == 0;
  u32 claim = 0;                  // leader: a claim that is not published yet
  bool in_flight = leader && me.team >= first_claim;
  if (in_flight) claim = atomic_add_later(state, 1, me.lane);
  if (is_short_list(args)) {
    if (me.warp == 0) make_short_list(args, me.lane);
    if (me.warp == THREADS / 32 - 1) let_next_kernel_start();   // for the block
    __syncthreads();
  } else {
    make_list<0, THREADS, 0>(args);
    if (me.warp == THREADS / 32 - 1) let_next_kernel_start();
  }
  me.num_active = count_active();

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
  // In BF16 with few tiles the blocks that have one more than others are late, and what the others copy for down makes them later. So then a warp
  // leaves its stages empty until its tiles are done.
  const bool few_tiles = FORM == BF16 && me.num_active * TILES1 <= FEW_TILES * TEAMS * (int)gridDim.x;
  auto copy_next = [&](bool hold) {   // fills the next stage and its note; phase 0 in the note: there is no more
    if (source.unit >= source.end && copied.phase) {
      if (in_flight) me.publish(walk.ordinal, claim), check(claim), in_flight = false;
      const bool claiming = copied.phase == 1;
      copied = me.next(walk);
      if (leader && claiming && copied.phase == 1) claim = atomic_add_later(state, 1, me.lane), in_flight = true;
      if (copied.phase) source = source_of(args, me, copied);
    }
    const int n = hold && few_tiles && copied.phase == 2 ? 0 : min(CHUNK, source.end - source.unit);   // below 1 when nothing is left
    if (me.lane == 0) write_note(notes + fill * 16, copied, source.unit, n);
    if (n > 0) copy_chunk(me, copied, source, n, ring + fill * STAGE_BYTES);
    fill = fill + 1 == STAGES ? 0 : fill + 1;
    copy_commit();
  };
  bool begins_with_tile = false;
#pragma unroll 1
  for (int i = 0; i < STAGES; i++) {
    copy_next(begins_with_tile);
    if (i == 0) begins_with_tile = copied.phase == 1;
  }

  {                               // the other buffer of h is for the next call
    uint4* other = (uint4*)(h + (u64)(parity ^ 1) * MAX_PAIRS * INTER);
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < MAX_PAIRS * INTER / 8; i += gridDim.x * THREADS) other[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
  }

  u32 b[CHUNK][B_REGS];
  float acc[4];
  int use = 0;
  __syncwarp();
  Note note = read_note(notes);
  // Adds the units of this stage to acc and goes on to the next stage, whose note becomes `note`
  auto run_stage = [&](auto& column) {
    using Here = typename Plain<decltype(column)>::type;
    constexpr int PHASE = Here::PHASE_;
    const int following = use + 1 == STAGES ? 0 : use + 1;
    if (STAGES == 2) __syncwarp();   // the note of that stage was written just now, by one lane
    const Note next = read_note(notes + following * 16);
    Here after = column;
    int next_n = 0;
    if (next.phase() == PHASE && !(PHASE == 1 && KEEP)) after = Here(args, me, next, parity), next_n = next.n();
    copy_wait<STAGES - 1>();
    __syncwarp();
    const int n = PHASE == 1 && UNITS1 % (TEAM * CHUNK) == 0 ? CHUNK : note.n();
    multiply_chunk<PHASE>(ring + use * STAGE_BYTES, me.lane, n, b, acc, column, next_n, after);
    __syncwarp();
    copy_next(PHASE == 1);
    use = following;
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
      if (join_team(me, shared, tiles, acc)) store_h(args, me.lane, item.active, item.tile, acc, parity);
    }
  }
  int row_tile = blockIdx.x;
  auto rows_until = [&](int end) {         // all items of these rows are behind this warp
    for (; row_tile < end; row_tile += gridDim.x) {
      __syncthreads();
      finish_rows<THREADS>(args, row_tile);
      if (row_tile + (int)gridDim.x < TILES2) __syncthreads();   // the sums of the next rows come to the same place
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

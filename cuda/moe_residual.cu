// moe_residual.cu - the routed experts of a layer for a few tokens, exact, from residual records and the resident INT4 bank, one launch.
// Computes   what moe_small.cu computes in BF16, from the same weights, bit for bit
// Inputs     x, index, weight, num_tokens as moe_small.cu
//            slot_of   int32 [NUM_EXPERTS]   place of an expert's codes in the bank
//            pool      the bank: INT4 units and biases (layout.cuh)
//            record_of int32 [NUM_EXPERTS]   place of an expert's record; an expert with either place -1 is not here
//            records   slots of record_bytes each, of residual records (docs/format.md)
//            directory uint8 [slots of records, units * DIRECTORY_BYTES], as residual.cu made it
// Scratch, output, launch   as moe_codes.cu
// Needs      HIDDEN % 8 == 0, INTER % 8 == 0, sm_90; below it the kernel traps
// Moves      distinct experts * (0.52 + 1.15 B a weight + directory); 4 experts of 2048 x 1408: 59 MB, no faster than 13.6 us at 4.37 TB/s
// Numerics   as moe_small.cu in BF16, with its TEAM and PARTS: the same operands in the same order of sums
// Reference  moe_small.cu in BF16
//
// Warps have roles as in moe_codes.cu. The compute warps form groups of 8, or of 4 where that is enough for a tile. A producer copies blocks of
// records, up to 8 units of 16 rows with their codes and directory, one after the other into its ring of bytes, each as long as it is, and
// numbers them. Each producer serves its share of the groups in turn, so a group knows the numbers of its own stages. A producer gives bytes
// back in the order in which it took them. Unit u of a tile belongs
// to member TEAM - 1 - u % TEAM of its sums (part PARTS - 1 - u % PARTS in phase 2), which is where moe_small.cu adds it.
//   Phase 1, gate and up: tiles of a producer go to its groups in turn; a finisher adds the members' sums.
//   Phase 2, down: entry i of the list goes to groups in turn; the parts are added when the 16 rows are over.
// The tokens of a warp's next unit are loaded into registers as soon as those of this one leave them.
// A unit that the directory marks, or whose exceptions are too many for the stage, is rebuilt weight by weight from global memory.
#define FORM 0         // the bank's
#define RECORDS 1
#include "expert_layer.cuh"
#include "residual.cuh"

#ifndef TEAM
#define TEAM 8         // members of a tile's sums, and
#define PARTS 4        // parts of down's: powers of two up to 8, as in moe_small.cu
#endif
#ifndef PRODUCERS
#define PRODUCERS 2    // warps, 1 or 2
#endif
#ifndef RING_BYTES
#define RING_BYTES 98304      // of each producer
#endif
#ifndef DEPTH
#define DEPTH 16       // places for notes and barriers of a producer's stages: a power of two
#endif
#define COMPUTE 16
#define FINISHERS 2
#define LOOK 2         // tiles of a producer whose directory is read ahead of their copies
#define ROOM_EXCEPTIONS 128   // of a unit, in the mean over a block, that a stage has with it
#define MOST_CLAIM 4
#define UNIT_K 128
#define UNIT_BYTES (CODE_BYTES + 32 * SCALE_SETS)
#define STAGE_UNITS BLOCK_UNITS
#define UNITS1 ((HIDDEN + UNIT_K - 1) / UNIT_K)
#define UNITS2 ((INTER + UNIT_K - 1) / UNIT_K)
#define ALL1 (TILES1 * UNITS1)
#define ALL (ALL1 + TILES2 * UNITS2)
#define STAGES1 ((UNITS1 + STAGE_UNITS - 1) / STAGE_UNITS)     // of a tile
#define STAGES2 ((UNITS2 + STAGE_UNITS - 1) / STAGE_UNITS)
#define MOST_STAGES (STAGES1 > STAGES2 ? STAGES1 : STAGES2)
#define B_REGS 16
#define GROUP1 (TEAM > 4 ? 8 : 4)                              // warps that share a tile
#define GROUP2 (PARTS > 4 ? 8 : 4)
#define GROUPS1 (COMPUTE / GROUP1)
#define GROUPS2 (COMPUTE / GROUP2)
#define WARPS (COMPUTE + PRODUCERS + FINISHERS)
#define THREADS (WARPS * 32)
#define RED_BUFFERS 2

#define SLOTS (PRODUCERS * DEPTH)
#define ARRIVALS (GROUP1 > GROUP2 ? GROUP1 : GROUP2)           // that give a stage back, whatever the phase
#define SUMS (GROUPS1 * RED_BUFFERS)
#define OFF_CHOICES (PRODUCERS * RING_BYTES)                            // uint4 [256]
#define OFF_RED (OFF_CHOICES + CHOICES_BYTES)                           // f32x4 [GROUPS1][RED_BUFFERS][TEAM][32]
#define OFF_PART (OFF_RED + SUMS * TEAM * 512)                          // f32 [PARTS][MAX_PAIRS][16]
#define OFF_NOTE (OFF_PART + PARTS * MAX_PAIRS * 64)                    // Note [PRODUCERS][DEPTH]
#define OFF_ENTRIES (OFF_NOTE + SLOTS * 16)                             // uint4 [PRODUCERS][LOOK][MOST_STAGES][2]: first and last unit of a block
#define OFF_BARRIER (OFF_ENTRIES + PRODUCERS * LOOK * MOST_STAGES * 32) // u64: full, empty [PRODUCERS][DEPTH]; red full, red empty [SUMS]
#define NUM_BARRIERS (2 * SLOTS + 2 * SUMS)
#define OFF_RED_NOTE (OFF_BARRIER + NUM_BARRIERS * 8)                   // int2 [SUMS]: entry (-1: the end), tile
#define OFF_SOURCE (OFF_RED_NOTE + SUMS * 8)                            // u32 [MAX_ACTIVE][COLUMNS]
#define OFF_LISTS (OFF_SOURCE + MAX_ACTIVE * COLUMNS * 4)
#include "roles.cuh"

#define MOST_BLOCK_BYTES (STAGE_UNITS * (2048 + 1024 + 3 * ROOM_EXCEPTIONS) + 64)            // all codes zero, and the block's own table
#define MOST_STAGE_BYTES (STAGE_UNITS * (UNIT_BYTES + DIRECTORY_BYTES) + MOST_BLOCK_BYTES)
static_assert(FORM == INT4 && RING_BYTES % 16 == 0 && RING_BYTES >= MOST_STAGE_BYTES, "any stage fits");
static_assert(TEAM <= 8 && PARTS <= 8 && TEAM <= UNITS1 && PARTS <= UNITS2 && GROUPS1 % FINISHERS == 0 && FINISHERS % PRODUCERS == 0, "members");
static_assert(MOST_STAGES <= 16, "a lane has one entry");
// Copies arrive in any order, and a barrier tells only the last two stages of its place apart: when a group waits for a stage, the one before it in
// the same place must have come, whosever it is. It has been given back: what the group had before is at most AHEAD stages behind, and the
// producer took that only when fewer than MOST_OUT were out.
#define TURNS1 (GROUPS1 / PRODUCERS)
#define TURNS2 (GROUPS2 / PRODUCERS)
#define AHEAD ((TURNS1 - 1) * STAGES1 + (TURNS2 - 1) * STAGES2 + 1)       // reached where phase 2 begins; all groups meet after each 16 rows
#define MOST_OUT (DEPTH - AHEAD < 32 ? DEPTH - AHEAD : 32)     // of a producer's stages under way: a lane has one
static_assert((DEPTH & (DEPTH - 1)) == 0 && MOST_OUT > 0, "places");
static_assert(STAGE_UNITS % TEAM == 0 && STAGE_UNITS % PARTS == 0, "members take the same places of every stage");

// What lies in a stage; entry -1: phase 1 is over, after so many tiles of the producer
struct Note {
  int entry, tile;
  u32 place;
  int count;   // units
  bool far;    // its exceptions are not there
};
__device__ __forceinline__ Note read_note(u32 at) {
  const uint4 v = lds128(at);
  Note n;
  n.entry = v.x, n.tile = v.y, n.place = v.z, n.count = v.w & 0xffffu, n.far = v.w >> 16;
  return n;
}

struct ExceptionsOf {   // in a stage
  u32 places, bytes;
  __device__ __forceinline__ u32 place(u32 i) const { return lds16(places + i * 2); }
  __device__ __forceinline__ u32 byte(u32 i) const { return lds8(bytes + i); }
};
// acc += unit k of a stage (16 rows x 128 columns) * tokens; before() is called when b is needed, after(i) when piece i of it is used for the
// last time
template <class BEFORE, class AFTER> __device__ __forceinline__ void multiply(const Args& args, const Note& note, int k, int active, u32 table, int lane, u32* b,
                                                                              float* acc, BEFORE before, AFTER after) {
  const u32 codes = note.place + k * UNIT_BYTES, in = note.place + note.count * UNIT_BYTES + k * DIRECTORY_BYTES;
  const u32 low = note.place + note.count * (UNIT_BYTES + DIRECTORY_BYTES) + k * 2048;
  const uint4 v = lds128(in + 64);
  const Entry entry = entry_of(v);
  u32 at = lds16(in + lane * 2);
  const u32 own = low + lane * 16;
  before();
  __syncwarp();
  if (by_weight(entry) || (note.far && exceptions(entry))) {
    const u8* global = args.records + active_records()[active] * args.record_bytes + entry.low * 16ull;
#pragma unroll 1
    for (int step = 0; step < 8; step++) {
      const u32 from = own + step / 2 * 512 + step % 2 * 8;
      const u32 bytes[2] = {lds32(from), lds32(from + 4)};
      u32 a[4];
      rebuild_step_by_weight(lds32(codes + int4_byte(lane, step, 0, 0)), bytes, lds32(codes + CODE_BYTES + scale_byte(step * SCALE_SETS / 8, lane / 4, 0)), global, entry,
                             lane, step, at, a);
      mma(acc, a[0], a[1], a[2], a[3], b[0], b[1]);
      const u32 b0 = b[0], b1 = b[1];   // eight turns bring every register back
#pragma unroll
      for (int i = 0; i < B_REGS - 2; i++) b[i] = b[i + 2];
      b[B_REGS - 2] = b0, b[B_REGS - 1] = b1;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) after(i);
    return;
  }
  at = (low + nibble_bytes(entry)) * 8 + at * 4;
  Scales scales;
  const u32 one = ((u32)args.num_tokens >> 31) + 1;   // which the compiler does not know
  Exceptions<ExceptionsOf> listed({low + places_at(entry), low + exception_bytes_at(entry)}, exceptions(entry), lane);
  uint4 words;
#pragma unroll
  for (int i = 0; i < 4; i++) {   // two steps, 32 k
    if (i % 2 == 0) words = lds128(codes + i / 2 * 512 + lane * 16);
    if (i * SCALE_SETS % 4 == 0) scales = scales_of(lds32(codes + CODE_BYTES + scale_byte(i * SCALE_SETS / 4, lane / 4, 0)));
    const uint4 bytes = lds128(own + i * 512);
    u32 high[4], a[8];
    rebuild_two(i % 2 ? words.z : words.x, i % 2 ? words.w : words.y, bytes, scales, table, at, one, high);
    listed.put(i, lane, high);
    join_bytes(bytes, high, a);
    mma(acc, a[0], a[1], a[2], a[3], b[4 * i], b[4 * i + 1]);
    mma(acc, a[4], a[5], a[6], a[7], b[4 * i + 2], b[4 * i + 3]);
    after(i);
  }
}

#if __CUDA_ARCH__ >= 900
// Tiles in the order in which the producer copies them
struct Job { int entry, tile; bool down; };   // entry -1: there are no more

struct Jobs {
  const Args& args;
  int lane, number, num_active, tiles, claim, end, step, batch, row_tile, entry;
  u32 ahead;
  // A producer's part of the block's first claim, then batches that become smaller towards the end, each asked for when the one before is begun;
  // in phase 2 the entries of its groups
  __device__ __forceinline__ Job next() {
    if (entry < 0) {
      if (claim >= end && batch) claim = (int)(__shfl_sync(~0u, ahead, 0) & 0x7fffffffu), end = claim + batch, step = 1, batch = 0;
      if (claim < min(end, tiles)) {
        if (batch == 0) {
          batch = min(MOST_CLAIM, max(1, (tiles - end) / (2 * PRODUCERS * (int)gridDim.x)));
          if (lane == 0) ahead = atomic_add_later(args.state, batch, lane);
        }
        const int tile = claim;
        claim += step;
        return {tile / TILES1, tile % TILES1, false};
      }
      entry = number;
    }
    if (row_tile >= TILES2 || number >= num_active) return {-1, 0, true};
    const Job job = {entry, row_tile, true};
    entry += PRODUCERS;
    if (entry >= num_active) entry = number, row_tile += gridDim.x;
    return job;
  }
};

// Where the stages of a producer have their barriers and notes: each at its number modulo DEPTH
struct Stages {
  u32 full, empty, notes;   // shared addresses
  __device__ __forceinline__ Stages(u32 shared, int number) {
    full = shared + OFF_BARRIER + number * DEPTH * 8, empty = full + SLOTS * 8, notes = shared + OFF_NOTE + number * DEPTH * 16;
  }
  __device__ __forceinline__ Note wait(u32 n) const {
    barrier_wait(full + n % DEPTH * 8, n / DEPTH & 1);
    return read_note(notes + n % DEPTH * 16);
  }
  template <int GROUP> __device__ __forceinline__ void leave(u32 n, int lane) const {
    __syncwarp();
    if (lane == 0) barrier_arrive_times(empty + n % DEPTH * 8, ARRIVALS / GROUP);
  }
};

__device__ __forceinline__ void produce(const Args& args, const Warp& me, u32 shared, u32 parity) {
  const int number = me.warp - PRODUCER, num_active = count_active();
  const Stages stages(shared, number);
  const u32 ring = shared + number * RING_BYTES;
  // Stages that are out are those from tail to head; lane n % 32 knows where stage n begins
  u32 head = 0, tail = 0, write = 0, begin = 0;
  auto reclaim = [&]() { barrier_wait(stages.empty + tail % DEPTH * 8, tail / DEPTH & 1), tail++; };
  auto reserve = [&](u32 bytes) {
    while (head - tail >= MOST_OUT) reclaim();
    while (true) {
      if (head == tail) { write = 0; break; }
      const u32 oldest = __shfl_sync(~0u, begin, tail % 32);
      if (write > oldest) {
        if (RING_BYTES - write >= bytes) break;
        if (bytes < oldest) { write = 0; break; }
      } else if (bytes < oldest - write) break;
      reclaim();
    }
    if (me.lane == (int)(head % 32)) begin = write;
  };
  auto directory_of = [&](const Job& job) {   // of the job's first unit
    const u64 units = (u64)active_records()[job.entry] * ALL + (job.down ? ALL1 + job.tile * UNITS2 : job.tile * UNITS1);
    return args.directory + units * DIRECTORY_BYTES;
  };
  const u32 entries = shared + OFF_ENTRIES + number * (LOOK * MOST_STAGES * 32);
  int pushed = 0, popped = 0, queued_entry = -1, queued_tile = 0;
  bool queued_down = false;
  auto push = [&](const Job& job) {
    const int units = job.down ? UNITS2 : UNITS1, u = me.lane / 2 * STAGE_UNITS;
    if (job.entry >= 0 && u < units)
      copy_async(entries + (pushed % LOOK * MOST_STAGES * 2 + me.lane) * 16, directory_of(job) + (me.lane % 2 ? min(u + STAGE_UNITS, units) - 1 : u) * DIRECTORY_BYTES + 64);
    copy_commit();
    if (me.lane == pushed % LOOK) queued_entry = job.entry, queued_tile = job.tile, queued_down = job.down;
    pushed++;
  };
  int tiles = 0;                  // of phase 1 so far
  auto copy_tile = [&](const Job& job, u32 at) {
    const int units = job.down ? UNITS2 : UNITS1;
    tiles += !job.down;
    const u8* codes = args.pool + (u64)active_list()[job.entry].x * SLOT_BYTES + (job.down ? DOWN_OFFSET : 0) + (u64)(job.tile * units) * UNIT_BYTES;
    const u8* record = args.records + active_records()[job.entry] * args.record_bytes;
    const u8* directory = directory_of(job);
#pragma unroll 1
    for (int first = 0; first < units; first += STAGE_UNITS, at += 32) {
      const uint4 v = lds128(at), w = lds128(at + 16);
      const Entry one = entry_of(v), last = entry_of(w);
      const int count = min(STAGE_UNITS, units - first);
      const u32 low = one.low * 16, all = last.low * 16 + exception_bytes_at(last) + exceptions(last);   // where the block ends
      const bool far = all - low > MOST_BLOCK_BYTES;
      const u32 to = max(far ? last.low * 16 + nibble_bytes(last) + nibble_words(last) * 4 : all, low + count * 2048);
      const u32 code_bytes = count * UNIT_BYTES, directory_bytes = count * DIRECTORY_BYTES, record_bytes = (to - low + 15) & ~15u;
      const u32 bytes = code_bytes + directory_bytes + record_bytes;
      reserve(bytes);
      if (elect_lane()) {
        const u32 slot = head % DEPTH, place = ring + write, barrier = stages.full + slot * 8;
        sts128(stages.notes + slot * 16, job.entry, job.tile, place, count | far << 16);
        barrier_arrive_expect(barrier, bytes);
        copy_bulk(place, codes + first * UNIT_BYTES, code_bytes, barrier);
        copy_bulk(place + code_bytes, directory + first * DIRECTORY_BYTES, directory_bytes, barrier);
        copy_bulk(place + code_bytes + directory_bytes, record + low, record_bytes, barrier);
      }
      __syncwarp();
      head++, write += bytes;
    }
  };
  const int claim = block_claim() & 0x7fffffffu;
  Jobs jobs = {args, me.lane, number, num_active, num_active * TILES1, claim + number, claim + args.first_claim, PRODUCERS, 0, (int)blockIdx.x, -1, 0};
#pragma unroll 1
  for (int i = 0; i < LOOK; i++) push(jobs.next());
  bool over = false;              // phase 1
#pragma unroll 1
  while (true) {
    copy_wait<LOOK - 1>();
    __syncwarp();
    const int q = popped % LOOK;
    const Job job = {__shfl_sync(~0u, queued_entry, q), __shfl_sync(~0u, queued_tile, q), (bool)__shfl_sync(~0u, (int)queued_down, q)};
    if (job.down && !over) {
      over = true;
#pragma unroll 1
      for (int i = 0; i < TURNS1 * STAGES1; i++) {   // a tile without weights for every group
        reserve(0);
        if (me.lane == 0) {
          sts128(stages.notes + head % DEPTH * 16, -1, tiles, 0, 0);
          barrier_arrive(stages.full + head % DEPTH * 8);
        }
        __syncwarp();
        head++;
      }
    }
    if (job.entry < 0) break;
    copy_tile(job, entries + q * (MOST_STAGES * 32));
    popped++;
    __syncwarp();
    push(jobs.next());
  }
  end_claims(args, me.lane, jobs.ahead, parity);
}

__device__ __forceinline__ void finish(const Args& args, const Warp& me, u32 shared, u32 parity) {
  const int f = me.warp - PRODUCER - PRODUCERS;
  refill_h(args, f, me.lane, parity);
  const u32 red_full = shared + OFF_BARRIER + 2 * SLOTS * 8, red_empty = red_full + SUMS * 8;
#pragma unroll 1
  for (int n = 0;; n++) {
    const int turn = n / (GROUPS1 / FINISHERS), place = (f * (GROUPS1 / FINISHERS) + n % (GROUPS1 / FINISHERS)) * RED_BUFFERS + turn % RED_BUFFERS;
    barrier_wait(red_full + place * 8, turn / RED_BUFFERS & 1);
    const int2 note = ((const int2*)(smem + OFF_RED_NOTE))[place];
    if (note.x < 0) break;
    float sum[4];
    add_warps<TEAM>(shared + OFF_RED + place * (TEAM * 512) + me.lane * 16, sum);
    barrier_arrive(red_empty + place * 8);
    store_h(args, me.lane, note.x, note.y, sum, parity);
  }
}

__device__ __forceinline__ void compute(const Args& args, const Warp& me, u32 shared) {
  const int column = me.lane / 4, k0 = (me.lane % 4) * 8, number = me.warp / (COMPUTE / PRODUCERS);
  const Stages stages(shared, number);
  const u32 table = shared + OFF_CHOICES;
  barrier_of<THREADS>(3);         // the list is there
  const u32 parity = block_claim() >> 31;
  const int num_active = count_active();
  make_sources(num_active);
  u32 b[B_REGS];
#pragma unroll
  for (int i = 0; i < B_REGS; i++) b[i] = 0;
  // ---- phase 1
  int tiles = 0;                  // of the producer, known at the end
  {
    const int group = me.warp / GROUP1, first = me.warp % GROUP1, member = TEAM - 1 - first;
    const u32 red_full = shared + OFF_BARRIER + (2 * SLOTS + group * RED_BUFFERS) * 8, red_empty = red_full + SUMS * 8;
    const bool works = first < TEAM;
    const u16* x = args.x + (u64)(column < args.num_tokens ? column : 0) * HIDDEN;
    if (!GATHER && works) load_x(b, x, first * UNIT_K + k0);
    int done = 0;                 // tiles of this group
    auto hand_over = [&](int entry, int tile, const float* acc) {
      const int buffer = done % RED_BUFFERS, place = group * RED_BUFFERS + buffer;
      if (done >= RED_BUFFERS) barrier_wait(red_empty + buffer * 8, (done / RED_BUFFERS - 1) & 1);
      sts_f128(shared + OFF_RED + place * (TEAM * 512) + member * 512 + me.lane * 16, acc[0], acc[1], acc[2], acc[3]);
      if (member == 0 && me.lane == 0) ((int2*)(smem + OFF_RED_NOTE))[place] = make_int2(entry, tile);
      barrier_arrive(red_full + buffer * 8);
      done++;
    };
    float acc[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
    for (u32 n = group % TURNS1 * STAGES1;; n += TURNS1 * STAGES1) {
      Note note = stages.wait(n);
      const int entry = note.entry, tile = note.tile;
      if (entry < 0) {
        tiles = tile;
#pragma unroll 1
        for (int s = 0; s < STAGES1; s++) stages.wait(n + s), stages.leave<GROUP1>(n + s, me.lane);
        break;
      }
      acc[0] = acc[1] = acc[2] = acc[3] = 0.f;
      if (GATHER && works) {
        x = args.x + (u64)(sources()[entry * COLUMNS + column] / (INTER * 2 * TOP_K)) * HIDDEN;
        load_x(b, x, first * UNIT_K + k0);
      }
#pragma unroll 1
      for (int s = 0; s < STAGES1; s++) {
        if (s) note = stages.wait(n + s);
        if (works)
#pragma unroll 1
          for (int k = first; k < note.count; k += TEAM) {
            const int u = s * STAGE_UNITS + k, next = (u + TEAM < UNITS1 ? u + TEAM : first) * UNIT_K + k0;
            __syncwarp();
            multiply(args, note, k, entry, table, me.lane, b, acc, []() {}, [&](int i) { load_x(b, x, next, i); });
          }
        stages.leave<GROUP1>(n + s, me.lane);
      }
      if (works) hand_over(entry, tile, acc);
    }
    if (works) hand_over(-1, 0, acc);   // the finishers end
  }
  // ---- phase 2: the first stage is there already
  const int group = me.warp / GROUP2, own = me.warp % GROUP2;
  const int turn = group % TURNS2, first_entry = turn * PRODUCERS + number;
  const int entries = share_of<GROUPS2>(num_active, first_entry);
  const bool works = own < PARTS && entries > 0;
  const u8* h = (const u8*)(args.h + (u64)parity * MAX_PAIRS * INTER);
  // Numbers of stages behind those of phase 1: of a row tile, and from one entry of the group to its next
  const u32 row_stages = share_of<PRODUCERS>(num_active, number) * STAGES2;
  u32 row = (tiles + TURNS1) * STAGES1;
  auto first_of = [&](int n) { return PARTS == GROUP2 ? (own + n + group) % GROUP2 : own; };   // the short part goes round the warps, and is another one in each group
  auto tokens_of = [&](int n) { return (const u16*)(h + sources()[(first_entry + n * GROUPS2) * COLUMNS + column]); };
  if (works) load_h(b, tokens_of(0) + first_of(0) * UNIT_K + k0, first_of(0) * UNIT_K + k0);
#pragma unroll 1
  for (int rt = blockIdx.x; rt < TILES2; rt += gridDim.x, row += row_stages) {
#pragma unroll 1
    for (int n = 0; n < entries; n++) {
      const int entry = first_entry + n * GROUPS2, first = first_of(n);
      const u32 at = row + (turn + n * TURNS2) * STAGES2;
      float acc[4] = {0.f, 0.f, 0.f, 0.f};
      const u16* tokens = tokens_of(n);
      const int after_n = n + 1 < entries ? n + 1 : 0;
#pragma unroll 1
      for (int s = 0; s < STAGES2; s++) {
        const Note note = stages.wait(at + s);
        if (works)
#pragma unroll 1
          for (int k = first; k < note.count; k += PARTS) {
            const int u = s * STAGE_UNITS + k;
            const bool more = u + PARTS < UNITS2;
            const u16* from = more ? tokens : tokens_of(after_n);
            const int next = (more ? u + PARTS : first_of(after_n)) * UNIT_K + k0;
            __syncwarp();
            multiply(args, note, k, entry, table, me.lane, b, acc, [&]() { await_h(b, tokens + u * UNIT_K + k0, u * UNIT_K + k0); }, [&](int i) { load_h(b, from + next, next, i); });
          }
        stages.leave<GROUP2>(at + s, me.lane);
      }
      if (works) put_part(me.lane, entry, PARTS - 1 - first, acc);
    }
    finish_tile(args, rt);
  }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) moe_residual(
    const u16* __restrict__ x, const int* __restrict__ index, const float* __restrict__ weight, const int* __restrict__ slot_of, const u8* __restrict__ pool,
    u32* state, u16* h, u16* __restrict__ y, float* pairs, int num_tokens, int resume, int first_claim, const int* __restrict__ record_of,
    const u8* __restrict__ records, u64 record_bytes, const u8* __restrict__ directory) {
#if __CUDA_ARCH__ >= 900
  const Args args = {x, index, weight, slot_of, pool, state, h, y, pairs, num_tokens, resume, first_claim, record_of, records, record_bytes, directory};
  Warp me;
  me.warp = threadIdx.x / 32, me.lane = threadIdx.x % 32;
  const u32 shared = shared_address(smem);
  if (me.warp == PRODUCER) prefetch_choices(args, me.lane);
  for (int e = threadIdx.x; e < NUM_EXPERTS; e += THREADS) masks()[e] = 0;
  for (int i = threadIdx.x; i < MAX_ACTIVE * COLUMNS; i += THREADS) active_pairs()[i] = NO_PAIR;
  init_barriers<THREADS / 32>(shared + OFF_BARRIER, NUM_BARRIERS, me.warp, me.lane, [](int i) {   // full; empty; sums there; sums read
    const int out = i - SLOTS, red = out - SLOTS;
    return out < 0 ? 1 : red < 0 ? ARRIVALS : red < SUMS ? TEAM * 32 : 32;
  });
  fill_choices<THREADS>(shared + OFF_CHOICES, threadIdx.x);
  barriers_ready();
  __syncthreads();
  wait_for_previous_kernel();
  if (me.warp < COMPUTE) {
    compute(args, me, shared);
    return;
  }
  list_for_block<COMPUTE * 32, LISTERS, 2, 3>(args, me.warp, me.lane);
  if (me.warp == THREADS / 32 - 1) let_next_kernel_start();   // for the block
  const u32 parity = block_claim() >> 31;
  if (me.warp < PRODUCER + PRODUCERS) produce(args, me, shared, parity);
  else finish(args, me, shared, parity);
#else
  asm volatile("trap;");
#endif
}

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
// numbers them. It plans up to 32 stages at once, one to a lane, and reads the directory for them while it copies those before. Each producer
// serves its share of the groups in turn, so a group knows the numbers of its own stages. A producer gives bytes back in the order in which it
// took them. Unit u of a tile belongs to member TEAM - 1 - u % TEAM of its sums (part PARTS - 1 - u % PARTS in phase 2), which is where
// moe_small.cu adds it.
//   Phase 1, gate and up: tiles of a producer go to its groups in turn; a finisher adds the members' sums.
//   Phase 2, down: entry i of the list goes to groups in turn, whose stages alternate; the parts are added when the 16 rows are over.
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
#define GRANULE 512    // bytes, of which a stage takes a multiple
#define ROOM_EXCEPTIONS 128   // of a unit, in the mean over a block, that a stage has with it
#ifndef MOST_CLAIM
#define MOST_CLAIM 4   // tiles that a producer claims at once
#endif
#define UNIT_K 128
#define UNIT_BYTES (CODE_BYTES + 32 * SCALE_SETS)
#define STAGE_UNITS BLOCK_UNITS
#define UNITS1 ((HIDDEN + UNIT_K - 1) / UNIT_K)
#define UNITS2 ((INTER + UNIT_K - 1) / UNIT_K)
#define ALL1 (TILES1 * UNITS1)
#define ALL (ALL1 + TILES2 * UNITS2)
#define STAGES1 ((UNITS1 + STAGE_UNITS - 1) / STAGE_UNITS)     // of a tile
#define STAGES2 ((UNITS2 + STAGE_UNITS - 1) / STAGE_UNITS)
#define MOST_BATCH (MOST_CLAIM * STAGES1 < 32 ? MOST_CLAIM : 32 / STAGES1)   // a lane has one stage of a batch
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
#define OFF_CHOICES (PRODUCERS * RING_BYTES)                            // uint4 [256][CHOICE_COPIES]
#define OFF_RED (OFF_CHOICES + CHOICES_BYTES)                           // f32x4 [GROUPS1][RED_BUFFERS][TEAM][32]
#define OFF_PART (OFF_RED + SUMS * TEAM * 512)                          // f32 [PARTS][MAX_PAIRS][16]
#define OFF_NOTE (OFF_PART + PARTS * MAX_PAIRS * 64)                    // Note [PRODUCERS][DEPTH]
#define OFF_BARRIER (OFF_NOTE + SLOTS * 16)                             // u64: [PRODUCERS][DEPTH] full, empty; red full, red empty [SUMS]
#define NUM_BARRIERS (2 * SLOTS + 2 * SUMS)
#define OFF_RED_NOTE (OFF_BARRIER + NUM_BARRIERS * 8)                   // int2 [SUMS]: entry (-1: the end), tile
#define OFF_SOURCE (OFF_RED_NOTE + SUMS * 8)                            // u32 [MAX_ACTIVE][COLUMNS]
#define OFF_LISTS (OFF_SOURCE + MAX_ACTIVE * COLUMNS * 4)
#include "roles.cuh"

#define MOST_BLOCK_BYTES (STAGE_UNITS * (2048 + 1024 + 3 * ROOM_EXCEPTIONS) + 64)            // all codes zero, and the block's own table
#define MOST_STAGE_BYTES ((STAGE_UNITS * (UNIT_BYTES + DIRECTORY_BYTES) + MOST_BLOCK_BYTES + GRANULE - 1) / GRANULE * GRANULE)
static_assert(FORM == INT4 && RING_BYTES % 16 == 0 && RING_BYTES >= MOST_STAGE_BYTES, "any stage fits");
static_assert(TEAM <= 8 && PARTS <= 8 && TEAM <= UNITS1 && PARTS <= UNITS2 && GROUPS1 % FINISHERS == 0 && FINISHERS % PRODUCERS == 0, "members");
static_assert(STAGES1 <= 32 && MOST_BATCH * STAGES1 <= 32, "a lane has one stage");
// Copies arrive in any order, and a barrier tells only the last two stages of its place apart: when a group waits for a stage, the one before it in
// the same place must have come, whosever it is. It has been given back: what the group had before is at most AHEAD stages behind, and the
// producer took that only when fewer than MOST_OUT were out.
#define TURNS1 (GROUPS1 / PRODUCERS)
#define TURNS2 (GROUPS2 / PRODUCERS)
#define AHEAD ((TURNS1 - 1) * STAGES1 + TURNS2)                // reached where phase 2 begins; all groups meet after each 16 rows
#define MOST_OUT (DEPTH - AHEAD < 32 ? DEPTH - AHEAD : 32)     // of a producer's stages under way: a lane has one
static_assert((DEPTH & (DEPTH - 1)) == 0 && MOST_OUT > 0, "places");
static_assert(STAGE_UNITS % TEAM == 0 && STAGE_UNITS % PARTS == 0, "members take the same places of every stage");

// What lies in a stage; entry -1: phase 1 is over, after so many tiles of the producer
struct Note {
  int entry, tile;
  u32 place;
  u32 what;    // units; bit 31: its exceptions are not there
  __device__ __forceinline__ int count() const { return what & 0xffffu; }
};
__device__ __forceinline__ Note read_note(u32 at) {
  const uint4 v = lds128(at);
  Note n;
  n.entry = v.x, n.tile = v.y, n.place = v.z, n.what = v.w;
  return n;
}

struct ExceptionsOf {   // in a stage, of the unit with this entry; found again for each, as they are few and registers too
  u32 entry, low;
  __device__ __forceinline__ Entry own() const { return entry_of(lds128(entry)); }
  __device__ __forceinline__ u32 count() const { return exceptions(own()); }
  __device__ __forceinline__ u32 place(u32 i) const { return lds16(low + places_at(own()) + i * 2); }
  __device__ __forceinline__ u32 byte(u32 i) const { return lds8(low + exception_bytes_at(own()) + i); }
};
// acc += unit k of a stage (16 rows x 128 columns) * tokens; before() is called when b is needed, after(i) when piece i of it is used for the
// last time
template <class BEFORE, class AFTER> __device__ __forceinline__ void multiply(const Args& args, const Note& note, int k, int active, u32 table, int lane, u32* b,
                                                                              float* acc, BEFORE before, AFTER after) {
  const u32 codes = note.place + k * UNIT_BYTES, in = note.place + note.count() * UNIT_BYTES + k * DIRECTORY_BYTES;
  const u32 low = note.place + note.count() * (UNIT_BYTES + DIRECTORY_BYTES) + k * 2048;
  const uint4 v = lds128(in + 64);
  const Entry entry = entry_of(v);
  u32 at = lds16(in + lane * 2);
  const u32 own = low + lane * 16;
  before();
  __syncwarp();
  if ((int)(entry.counts | note.what) < 0 && (by_weight(entry) || exceptions(entry))) {   // one test where neither is so
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
  Exceptions<ExceptionsOf> listed({in + 64, low}, exceptions(entry), lane);
  uint4 words;
#pragma unroll
  for (int i = 0; i < 4; i++) {   // two steps, 32 k
    if (i % 2 == 0) words = lds128(codes + i / 2 * 512 + lane * 16);
    if (i * SCALE_SETS % 4 == 0) scales = scales_of(lds32(codes + CODE_BYTES + scale_byte(i * SCALE_SETS / 4, lane / 4, 0)), one);
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

// A piece, 32 k, of a token's values of a unit, from a place in bytes, where k is this lane's first k of the unit
__device__ __forceinline__ void load_x(const Args& args, u32* b, u32 place, int k, int i) {
  uint4 v = make_uint4(0, 0, 0, 0);
  if (HIDDEN % UNIT_K == 0 || k + i * 32 < HIDDEN) v = load_read_only((const u8*)args.x + place + i * 64);
  b[4 * i] = v.x, b[4 * i + 1] = v.y, b[4 * i + 2] = v.z, b[4 * i + 3] = v.w;
}
__device__ __forceinline__ void load_h(const Args& args, u32* b, u32 place, int k, int i) {
  uint4 v = make_uint4(0, 0, 0, 0);
  if (INTER % UNIT_K == 0 || k + i * 32 < INTER) v = load_shared_by_grid((const u8*)args.h + place + i * 64);
  b[4 * i] = v.x, b[4 * i + 1] = v.y, b[4 * i + 2] = v.z, b[4 * i + 3] = v.w;
}

#if __CUDA_ARCH__ >= 900
// Stages that a producer copies one after the other, 32 at most: lane i knows where stage i of them is
struct Plan {
  int stages;                     // the same in all lanes
  bool down;
  int entry, tile, first;         // of this lane's stage: of the list, of the phase, its first unit
  u32 low;                        // of the directory: its first unit's low bytes, and
  uint4 last;                     // its last unit
  __device__ __forceinline__ int units() const { return down ? UNITS2 : UNITS1; }
  __device__ __forceinline__ int count() const { return min(STAGE_UNITS, units() - first); }
  __device__ __forceinline__ int unit() const { return tile * units() + first; }   // of the phase
  __device__ __forceinline__ const u8* directory(const Args& args) const {
    return args.directory + ((u64)active_records()[entry] * ALL + (down ? ALL1 : 0) + unit()) * DIRECTORY_BYTES;
  }
};

// Gate and up: a producer's part of the block's first claim, then batches that become smaller towards the end, each asked for when the one before it
// is known. Down: rounds of an entry for each of its groups, whose stages alternate, so that what all of them have read is given back at once.
struct Plans {
  const Args& args;
  int lane, number, num_active, entries, planned = 0, end = 0, batch = 0;
  u32 ahead = 0;
  bool down = false;
  __device__ __forceinline__ Plans(const Args& args, int lane, int number) : args(args), lane(lane), number(number), num_active(count_active()) {
    entries = share_of<PRODUCERS>(num_active, number);
  }
  __device__ __forceinline__ void ask() {
    batch = min(MOST_BATCH, max(1, (num_active * TILES1 - end) / (2 * PRODUCERS * (int)gridDim.x)));
    if (lane == 0) ahead = atomic_add_later(args.state, batch, lane);
  }
  __device__ __forceinline__ void locate(Plan& p) const {
    if (lane >= p.stages) return;
    const u8* at = p.directory(args) + 64;
    p.low = load_word_here(at), p.last = load_read_only(at + (p.count() - 1) * DIRECTORY_BYTES);
  }
  __device__ __forceinline__ Plan tiles(int from, int count, int step) const {
    Plan p = {};
    const int tile = from + lane / STAGES1 * step;
    p.stages = count * STAGES1, p.entry = tile / TILES1, p.tile = tile % TILES1, p.first = lane % STAGES1 * STAGE_UNITS;
    locate(p);
    return p;
  }
  __device__ __forceinline__ Plan first() {
    const int claim = block_claim() & 0x7fffffff;
    end = claim + args.first_claim;
    const Plan p = tiles(claim + number, share_of<PRODUCERS>(min(end, num_active * TILES1) - claim, number), PRODUCERS);
    ask();
    return p;
  }
  __device__ __forceinline__ Plan next() {
    if (!down) {
      const int claim = (int)(__shfl_sync(~0u, ahead, 0) & 0x7fffffffu), count = min(batch, num_active * TILES1 - claim);
      if (count > 0) {
        end = claim + batch;
        const Plan p = tiles(claim, count, 1);
        ask();
        return p;
      }
      down = true;
    }
    const int row_stages = entries * STAGES2, rows = (int)blockIdx.x < TILES2 ? (TILES2 - 1 - (int)blockIdx.x) / (int)gridDim.x + 1 : 0;
    Plan p = {};
    p.down = true, p.stages = min(32, rows * row_stages - planned);
    if (lane < p.stages) {
      const int row = (planned + lane) / row_stages, in_row = (planned + lane) % row_stages, round = in_row / (TURNS2 * STAGES2), n = in_row % (TURNS2 * STAGES2);
      const int turns = min(TURNS2, entries - round * TURNS2);
      p.entry = number + (round * TURNS2 + n % turns) * PRODUCERS, p.tile = blockIdx.x + row * gridDim.x, p.first = n / turns * STAGE_UNITS;
    }
    planned += p.stages;
    locate(p);
    return p;
  }
};

// Where the stages of a producer have their barriers and notes: each at its number modulo DEPTH
struct Stages {
  u32 base;    // shared address of the first note; the barriers are as far apart as the notes
  __device__ __forceinline__ Stages(u32 shared, int number) { base = shared + OFF_NOTE + number * DEPTH * 16; }
  __device__ __forceinline__ u32 note(u32 n) const { return base + n % DEPTH * 16; }
  __device__ __forceinline__ u32 full(u32 n) const { return note(n) + (OFF_BARRIER - OFF_NOTE); }
  __device__ __forceinline__ u32 empty(u32 n) const { return full(n) + 8; }
  __device__ __forceinline__ Note wait(u32 n) const {
    barrier_wait(full(n), n / DEPTH & 1);
    return read_note(note(n));
  }
  template <int GROUP> __device__ __forceinline__ void leave(u32 n) const { barrier_arrive_times(empty(n), ARRIVALS / GROUP); }
};

__device__ __forceinline__ void produce(const Args& args, const Warp& me, u32 shared, u32 parity) {
  const int number = me.warp - PRODUCER;
  const Stages stages(shared, number);
  const u32 ring = shared + number * RING_BYTES;
  // Stages that are out are those from tail to head; lane n % 32 knows where stage n begins
  u32 head = 0, tail = 0, write = 0, begin = 0;
  auto reclaim = [&]() { barrier_wait(stages.empty(tail), tail / DEPTH & 1), tail++; };
  auto reserve = [&](u32 bytes) {
    while (head - tail >= MOST_OUT) reclaim();
    while (true) {
      if (head == tail) { write = 0; break; }
      const u32 oldest = __shfl_sync(~0u, begin, tail % 32);
      if (write > oldest) {
        if (RING_BYTES - write >= bytes) break;
        if (bytes <= oldest) { write = 0; break; }
      } else if (bytes <= oldest - write) break;
      reclaim();
    }
    if (me.lane == (int)(head % 32)) begin = write;
  };
  auto broadcast = [](const u8* p, int from) {
    const u32 low = __shfl_sync(~0u, (u32)(u64)p, from), high = __shfl_sync(~0u, (u32)((u64)p >> 32), from);
    return (const u8*)((u64)high << 32 | low);
  };
  Plans plans(args, me.lane, number);
  Plan plan = plans.first();
  int tiles = 0;                  // of phase 1 so far
  bool over = false;              // phase 1
#pragma unroll 1
  while (true) {
    if (plan.down && !over) {
      over = true;
#pragma unroll 1
      for (int i = 0; i < TURNS1 * STAGES1; i++) {   // a tile without weights for every group
        reserve(0);
        if (me.lane == 0) {
          sts128(stages.note(head), ~0u, tiles, 0, 0);
          barrier_arrive(stages.full(head));
        }
        __syncwarp();
        head++;
      }
    }
    if (plan.down && plan.stages == 0) break;
    if (!plan.down) tiles += plan.stages / STAGES1;
    const u8 *codes = nullptr, *directory = nullptr, *record = nullptr;
    u32 record_bytes = 0, note = 0;
    if (me.lane < plan.stages) {
      const Entry last = entry_of(plan.last);
      const int count = plan.count();
      const u32 low = plan.low * 16, all = last.low * 16 + exception_bytes_at(last) + exceptions(last);   // where the block ends
      const bool far = all - low > MOST_BLOCK_BYTES;
      const u32 to = max(far ? last.low * 16 + nibble_bytes(last) + nibble_words(last) * 4 : all, low + count * 2048);
      codes = args.pool + (u64)active_list()[plan.entry].x * SLOT_BYTES + (plan.down ? DOWN_OFFSET : 0) + (u64)plan.unit() * UNIT_BYTES;
      directory = plan.directory(args);
      record = args.records + active_records()[plan.entry] * args.record_bytes + low;
      record_bytes = (to - low + 15) & ~15u, note = count | (u32)far << 31;
    }
    Plan next;
#pragma unroll 1
    for (int i = 0; i == 0 || i < plan.stages; i++) {
      if (i < plan.stages) {
        const int entry = __shfl_sync(~0u, plan.entry, i), tile = __shfl_sync(~0u, plan.tile, i);
        const u32 what = __shfl_sync(~0u, note, i), from_record = __shfl_sync(~0u, record_bytes, i);
        const u8 *from_codes = broadcast(codes, i), *from_directory = broadcast(directory, i), *from = broadcast(record, i);
        const u32 code_bytes = (what & 0xffffu) * UNIT_BYTES, directory_bytes = (what & 0xffffu) * DIRECTORY_BYTES;
        const u32 bytes = code_bytes + directory_bytes + from_record;
        const u32 taken = (bytes + GRANULE - 1) / GRANULE * GRANULE;   // so that what one stage gives back is enough for one like it
        reserve(taken);
        if (elect_lane()) {
          const u32 place = ring + write, barrier = stages.full(head);
          sts128(stages.note(head), entry, tile, place, what);
          barrier_arrive_expect(barrier, bytes);
          copy_bulk(place, from_codes, code_bytes, barrier);
          copy_bulk(place + code_bytes, from_directory, directory_bytes, barrier);
          copy_bulk(place + code_bytes + directory_bytes, from, from_record, barrier);
        }
        __syncwarp();
        head++, write += taken;
      }
      if (i == max(0, plan.stages - STAGES1)) next = plans.next();   // not sooner: others may be ready for its tiles before this block is
    }
    plan = next;
  }
  end_claims(args, me.lane, plans.ahead, parity);
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
  const u32 table = choices_of(shared + OFF_CHOICES, me.lane);
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
    u32 x = (column < args.num_tokens ? column : 0) * (HIDDEN * 2);   // where this lane's token begins
    auto load_tokens = [&](int u, int i) { load_x(args, b, x + (u * UNIT_K + k0) * 2, u * UNIT_K + k0, i); };
    auto load_first = [&]() {
#pragma unroll
      for (int i = 0; i < 4; i++) load_tokens(first, i);
    };
    if (!GATHER && works) load_first();
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
        for (int s = 0; s < STAGES1; s++) stages.wait(n + s), stages.leave<GROUP1>(n + s);
        break;
      }
      acc[0] = acc[1] = acc[2] = acc[3] = 0.f;
      if (GATHER && works) {
        x = sources()[entry * COLUMNS + column] / (INTER * 2 * TOP_K) * (HIDDEN * 2);
        load_first();
      }
#pragma unroll 1
      for (int s = 0; s < STAGES1; s++) {
        if (s) note = stages.wait(n + s);
        if (works)
#pragma unroll 1
          for (int k = first; k < note.count(); k += TEAM) {
            const int u = s * STAGE_UNITS + k, next = u + TEAM < UNITS1 ? u + TEAM : first;
            multiply(args, note, k, entry, table, me.lane, b, acc, []() {}, [&](int i) { load_tokens(next, i); });
          }
        stages.leave<GROUP1>(n + s);
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
  const u32 h = parity * (MAX_PAIRS * INTER * 2) + k0 * 2;
  // Numbers of stages behind those of phase 1: of a row tile, and in it a round of an entry for each group of the producer, whose stages alternate
  const int producer_entries = share_of<PRODUCERS>(num_active, number);
  const u32 row_stages = producer_entries * STAGES2;
  u32 row = (tiles + TURNS1) * STAGES1;
  auto first_of = [&](int n) { return PARTS == GROUP2 ? (own + n + group) % GROUP2 : own; };   // the short part goes round the warps, and is another one in each group
  auto tokens_of = [&](int n) { return h + sources()[(first_entry + n * GROUPS2) * COLUMNS + column]; };   // where this lane's token of its entry n begins
  auto load_tokens = [&](u32 tokens, int u, int i) { load_h(args, b, tokens + u * (UNIT_K * 2), u * UNIT_K + k0, i); };
  if (works)
#pragma unroll
    for (int i = 0; i < 4; i++) load_tokens(tokens_of(0), first_of(0), i);
#pragma unroll 1
  for (int rt = blockIdx.x; rt < TILES2; rt += gridDim.x, row += row_stages) {
#pragma unroll 1
    for (int n = 0; n < entries; n++) {
      const int entry = first_entry + n * GROUPS2, first = first_of(n), turns = min(TURNS2, producer_entries - n * TURNS2);
      u32 at = row + n * (TURNS2 * STAGES2) + turn;
      float acc[4] = {0.f, 0.f, 0.f, 0.f};
      const int after_n = n + 1 < entries ? n + 1 : 0;
      const u32 tokens = works ? tokens_of(n) : 0, after = works ? tokens_of(after_n) : 0;
#pragma unroll 1
      for (int s = 0; s < STAGES2; s++, at += turns) {
        const Note note = stages.wait(at);
        if (works)
#pragma unroll 1
          for (int k = first; k < note.count(); k += PARTS) {
            const int u = s * STAGE_UNITS + k;
            const bool more = u + PARTS < UNITS2;
            const u32 from = more ? tokens : after;
            const int next = more ? u + PARTS : first_of(after_n);
            multiply(
                args, note, k, entry, table, me.lane, b, acc,
                [&]() {
                  while (!is_written(b))
#pragma unroll
                    for (int i = 0; i < 4; i++) load_tokens(tokens, u, i);
                },
                [&](int i) { load_tokens(from, next, i); });
          }
        stages.leave<GROUP2>(at);
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
  init_barriers<THREADS / 32>(shared + OFF_BARRIER, NUM_BARRIERS, me.warp, me.lane, [](int i) {   // full, empty; sums there; sums read
    const int red = i - 2 * SLOTS;
    return red < 0 ? i % 2 ? ARRIVALS * 32 : 1 : red < SUMS ? TEAM * 32 : 32;
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

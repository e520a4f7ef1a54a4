// teams.cuh - what moe_codes.cu and moe_bf16.cu share: COMPUTE warps in TEAMS teams, a producer for each team, FINISHERS. See moe_codes.cu. The
// including kernel defines its places in shared memory and STAGES before, and compute and produce behind.
#pragma once
#define PRODUCERS TEAMS
#include "roles.cuh"

static_assert(COMPUTE % TEAM == 0, "teams");
static_assert(TEAMS > 1 ? FINISHERS >= TEAMS : FINISHERS <= RED_BUFFERS, "a finisher for each team, or a buffer for each finisher");

struct Ring {    // a place in the ring and its parity
  int slot, parity;
  __device__ __forceinline__ void next() {
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
};

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void produce(const Args& args, const Warp& me, u32 shared, u32 parity);
__device__ __forceinline__ void compute(const Args& args, const Warp& me, u32 shared);

// Where a team's stages are, as its producer sees them
struct Producer {
  int team, lane, num_active;
  u32 full, empty, ring;
  int2* notes;
  Ring at = {0, 1};               // a new barrier lets the first round pass
  __device__ __forceinline__ Producer(const Warp& me, u32 shared) {
    team = me.warp - PRODUCER, lane = me.lane, num_active = count_active();
    full = shared + OFF_BARRIER + team * STAGES * 8, empty = full + RINGS * 8, ring = shared + team * STAGES * STAGE_BYTES;
    notes = (int2*)(smem + OFF_NOTE) + team * STAGES;
  }
  // Waits for the team's next stage, notes what it is, and lets one lane copy
  template <class COPIES> __device__ __forceinline__ void stage(int entry, int tile, COPIES copies) {
    barrier_wait(empty + at.slot * 8, at.parity);
    if (elect_lane()) {           // the same lane each time
      notes[at.slot] = make_int2(entry, tile);
      copies(ring + at.slot * STAGE_BYTES, full + at.slot * 8);
      barrier_arrive(full + at.slot * 8);
    }
    __syncwarp();
    at.next();
  }
  // The team's part of the block's first claim, dealt to the teams in turn (step TEAMS), then batches of the team's own (step 1) that become
  // smaller towards the end, each asked for while the one ahead of it is copied. Returns what the last claim said.
  template <class COPY_TILE> __device__ __forceinline__ u32 claim_tiles(const Args& args, COPY_TILE copy_tile) {
    const int tiles = num_active * TILES1, first = (int)(block_claim() & 0x7fffffffu);
    int claim = first + team, end = first + args.first_claim, step = TEAMS, batch = 0;
    u32 ahead = 0;
#pragma unroll 1
    while (true) {
      if (claim < min(end, tiles)) copy_tile(claim / TILES1, claim % TILES1), claim += step;
      if (batch == 0) {
        batch = min(MOST_CLAIM, max(1, (tiles - end) / (2 * TEAMS * (int)gridDim.x)));
        if (lane == 0) ahead = atomic_add_later(args.state, batch, lane);
      }
      if (claim < min(end, tiles)) continue;
      claim = (int)(__shfl_sync(~0u, ahead, 0) & 0x7fffffffu), end = claim + batch, step = 1;
      if (claim >= tiles) break;
      batch = 0;
    }
    if (blockIdx.x >= TILES2 || team >= num_active) stage(-1, 0, [](u32, u32) {});   // no rows or entries: only that the tiles are over
    return ahead;
  }
  // Until the team has used all stages of its tiles, if others follow; for speed alone. The stage that was filled last is one behind `at`, of the
  // same round, whose parity has been turned where `at` is a round's first. A team without tiles passes: no round has gone by yet.
  __device__ __forceinline__ void await_tiles() const {
    if (blockIdx.x < TILES2 && team < num_active)
      barrier_wait(empty + (at.slot ? at.slot - 1 : STAGES - 1) * 8, at.slot ? at.parity ^ 1 : at.parity);
  }
};

// Adds the sums that a team's members left of a tile, and stores h
__device__ __forceinline__ void finish(const Args& args, const Warp& me, u32 shared, u32 parity) {
  const int f = me.warp - PRODUCER - TEAMS;
  refill_h(args, f, me.lane, parity);
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
    barrier_arrive(red_empty + buffer * 8);
    store_h(args, me.lane, note.x, note.y, sum, parity);
  }
}

// What a member of a team leaves for its finisher
struct Sums {
  u32 shared, red_full, red_empty;
  int team, member, lane, done = 0;   // tiles of this team
  __device__ __forceinline__ Sums(u32 shared, int team, int member, int lane) : shared(shared), team(team), member(member), lane(lane) {
    red_full = shared + OFF_BARRIER + (2 * RINGS + team * RED_BUFFERS) * 8, red_empty = red_full + TEAMS * RED_BUFFERS * 8;
  }
  __device__ __forceinline__ int reserve() const {
    const int buffer = done % RED_BUFFERS;
    if (done >= RED_BUFFERS) barrier_wait(red_empty + buffer * 8, (done / RED_BUFFERS - 1) & 1);
    return buffer;
  }
  __device__ __forceinline__ void note(int buffer, int2 what) {
    if (member == 0 && lane == 0) ((int2*)(smem + OFF_RED_NOTE))[team * RED_BUFFERS + buffer] = what;
    barrier_arrive(red_full + buffer * 8);
    done++;
  }
  __device__ __forceinline__ void give(int2 tile, const float* acc) {
    const int buffer = reserve();
    sts_f128(shared + OFF_RED + (team * RED_BUFFERS + buffer) * (TEAM * 512) + member * 512 + lane * 16, acc[0], acc[1], acc[2], acc[3]);
    note(buffer, tile);
  }
  __device__ __forceinline__ void end() {   // the finishers of this team end
#pragma unroll 1
    for (int f = 0; f < (TEAMS > 1 ? 1 : FINISHERS); f++) note(reserve(), make_int2(-1, 0));
  }
};

#endif

// The whole of such a kernel
template <bool BESIDE_> __device__ __forceinline__ void run_roles(const Args& args) {
#if __CUDA_ARCH__ >= 900
  Warp me;
  me.warp = threadIdx.x / 32, me.lane = threadIdx.x % 32;
  const u32 shared = shared_address(smem);
  if (me.warp == PRODUCER) prefetch_choices(args, me.lane);
  for (int e = threadIdx.x; e < NUM_EXPERTS; e += THREADS) masks()[e] = 0;
  for (int i = threadIdx.x; i < MAX_ACTIVE * COLUMNS; i += THREADS) active_pairs()[i] = NO_PAIR;
  init_barriers<WARPS>(shared + OFF_BARRIER, NUM_BARRIERS, me.warp, me.lane, [](int i) {   // full; empty and sums there; sums read
    return i < RINGS ? 1 : i < 2 * RINGS + TEAMS * RED_BUFFERS ? TEAM * 32 : 32;
  });
  barriers_ready();
  __syncthreads();
  if (BESIDE_) let_next_kernel_start();
  wait_for_previous_kernel();
  if (me.warp < COMPUTE) {
    compute(args, me, shared);
    return;
  }
  list_for_block<COMPUTE * 32, LISTERS, 2, 3>(args, me.warp, me.lane);
  if (!BESIDE_ && me.warp == WARPS - 1) let_next_kernel_start();   // for the block
  const u32 parity = block_claim() >> 31;
  if (me.warp < PRODUCER + TEAMS) produce(args, me, shared, parity);
  else finish(args, me, shared, parity);
#else
  asm volatile("trap;");
#endif
}

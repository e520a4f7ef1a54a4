// moe_bf16.cu - the routed experts of a layer for up to 8 tokens in BF16, one launch, warps with roles.
// Computes   what moe_small.cu computes, with its bits, from the same arguments and scratch
// Launch     any grid (one block an SM), block (COMPUTE + TEAMS + FINISHERS) * 32; first_claim >= 1 tiles are a block's first claim
// Needs      HIDDEN and INTER multiples of 128, HIDDEN up to 2048, TEAM and PARTS of moe_small.cu, sm_90; below it the kernel traps
// Moves      distinct experts * slot bytes; 4 experts of 2048 x 1408: 69.2 MB, so no faster than 15.8 us at 4.37 TB/s
// Numerics   those of moe_small.cu in BF16: the columns of a tile are dealt out in groups of 128, in turn, to TEAM members, those of down to
//            PARTS; each adds its own in their order, and theirs are added in a balanced tree (whose leaves moe_small.cu has in reverse)
// Reference  runtime/kernels/reference.py
//
// Roles are those of moe_codes.cu. Weights lie in rows, so a stage is 16 rows of up to 8 units of 128 columns, brought by a bulk copy for
// each row: a warp that copies for itself, 16 bytes a lane, takes 0.6 us for what its block multiplies in 0.9.
//   Phase 1, gate and up: unit u of a stage is member u's of the team. A tile (8 gate + 8 up rows) has TILE_STAGES stages.
//   Phase 2, down: PARTS of a team's warps share an entry, so a team has TEAM / PARTS entries at once, and a stage has PARTS units of each.
//   The tokens of all STEPS units that a warp has of an entry are under way together, as each way to the L2 and back takes longer than
//   the products of a unit.
// A producer waits until its team has used its tiles before it copies for down: what it asked for meanwhile would delay the tiles of others.
#include "expert_layer.cuh"

#ifndef COMPUTE
#define COMPUTE 16     // compute warps
#endif
#ifndef TEAM
#define TEAM 8         // of them for a tile
#endif
#ifndef PARTS
#define PARTS 4        // of the down K
#endif
#ifndef FINISHERS
#define FINISHERS 2
#endif
#ifndef MOST_CLAIM
#define MOST_CLAIM 2   // tiles that a team claims at once
#endif
#ifndef STAGES
#define STAGES 3       // of a team
#endif
#define UNIT_K 128
#define STAGE_UNITS TEAM
#define ROW_PITCH (STAGE_UNITS * UNIT_K * 2 + 64)              // two neighbouring rows fill all 32 banks
#define STAGE_BYTES (16 * ROW_PITCH)
#define UNITS1 (HIDDEN / UNIT_K)
#define UNITS2 (INTER / UNIT_K)
#define B_REGS 16                                              // of the tokens of a unit
#define TEAMS (COMPUTE / TEAM)
#define TILE_STAGES ((UNITS1 + STAGE_UNITS - 1) / STAGE_UNITS)
#define ENTRIES (TEAM / PARTS)                                 // of a team at once in down
#define STEPS ((UNITS2 + PARTS - 1) / PARTS)                   // stages that they have in 16 rows
#define WARPS (COMPUTE + TEAMS + FINISHERS)
#define THREADS (WARPS * 32)
#define RED_BUFFERS 1

#define RINGS (TEAMS * STAGES)
#define OFF_RED (RINGS * STAGE_BYTES)                                   // f32x4 [TEAMS][RED_BUFFERS][TEAM][32]
#define OFF_PART (OFF_RED + TEAMS * RED_BUFFERS * TEAM * 512)           // f32 [PARTS][MAX_PAIRS][16]
#define OFF_BARRIER (OFF_PART + PARTS * MAX_PAIRS * 64)                 // u64: full, empty [TEAMS][STAGES]; red full, red empty [TEAMS][RED_BUFFERS]
#define NUM_BARRIERS (2 * RINGS + 2 * TEAMS * RED_BUFFERS)
#define OFF_NOTE (OFF_BARRIER + NUM_BARRIERS * 8)                       // int2 [TEAMS][STAGES]: phase 1: entry, tile; phase 2: -1
#define OFF_RED_NOTE (OFF_NOTE + RINGS * 8)                             // int2 [TEAMS][RED_BUFFERS]: entry (-1: the end), tile
#define OFF_SOURCE (OFF_RED_NOTE + TEAMS * RED_BUFFERS * 8)             // u32 [MAX_ACTIVE][COLUMNS]: where a column's h begins in the buffer
#define OFF_LISTS (OFF_SOURCE + MAX_ACTIVE * COLUMNS * 4)
#include "teams.cuh"

static_assert(FORM == BF16 && !GATHER, "BF16, a column for each token");
static_assert(HIDDEN % UNIT_K == 0 && INTER % UNIT_K == 0 && TILE_STAGES <= 2 && STEPS <= 3, "whole units, whose tokens registers hold");
static_assert(TEAM % PARTS == 0 && TEAM <= UNITS1 && PARTS <= UNITS2, "more parts than units");

// acc += unit (16 rows x 128 k, of which ROW_PITCH bytes lie between rows) * tokens, in FP32; after(i) is called when piece i of b, 32 k, is used
template <class AFTER> __device__ __forceinline__ void multiply(u32 unit, int lane, const u32* b, float* acc, AFTER after) {
  const u32 at = unit + lane / 4 * ROW_PITCH + lane % 4 * 16;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint4 low = lds128(at + i * 64), high = lds128(at + 8 * ROW_PITCH + i * 64);
    mma(acc, low.x, high.x, low.y, high.y, b[4 * i], b[4 * i + 1]);
    mma(acc, low.z, high.z, low.w, high.w, b[4 * i + 2], b[4 * i + 3]);
    after(i);
  }
}

#if __CUDA_ARCH__ >= 900
// Eight rows, each of so many bytes, `pitch` apart; by one lane
__device__ __forceinline__ void copy_rows(u32 to, const u8* from, u64 pitch, u32 bytes, u32 barrier) {
#pragma unroll
  for (int r = 0; r < 8; r++) copy_bulk(to + r * ROW_PITCH, from + r * pitch, bytes, barrier);
}

__device__ __forceinline__ void produce(const Args& args, const Warp& me, u32 shared, u32 parity) {
  Producer producer(me, shared);
  auto copy_16_rows = [](u32 to, const u8* low, const u8* high, u64 pitch, int units, u32 barrier) {
    barrier_expect_more(barrier, units * (16 * UNIT_K * 2));
    copy_rows(to, low, pitch, units * (UNIT_K * 2), barrier);
    copy_rows(to + 8 * ROW_PITCH, high, pitch, units * (UNIT_K * 2), barrier);
  };
  const u32 ahead = producer.claim_tiles(args, [&](int entry, int tile) {
    const u8* src = args.pool + (u64)active_list()[entry].x * SLOT_BYTES + (u64)tile * (8 * HIDDEN * 2);
#pragma unroll 1
    for (int q = 0; q < TILE_STAGES; q++, src += STAGE_UNITS * UNIT_K * 2)
      producer.stage(entry, tile, [&](u32 place, u32 barrier) {
        copy_16_rows(place, src, src + (u64)INTER * HIDDEN * 2, HIDDEN * 2, min(STAGE_UNITS, UNITS1 - q * STAGE_UNITS), barrier);
      });
  });
  producer.await_tiles();
#pragma unroll 1
  for (int rt = blockIdx.x; rt < TILES2; rt += gridDim.x)
#pragma unroll 1
    for (int first = producer.team; first < producer.num_active; first += TEAMS * ENTRIES)
#pragma unroll 1
      for (int k = 0; k < STEPS; k++)
        producer.stage(-1, 0, [&](u32 place, u32 barrier) {
#pragma unroll 1
          for (int entry = first; entry < min(first + TEAMS * ENTRIES, producer.num_active); entry += TEAMS, place += PARTS * UNIT_K * 2) {
            const u8* src = args.pool + (u64)active_list()[entry].x * SLOT_BYTES + DOWN_OFFSET + ((u64)rt * 16 * INTER + k * PARTS * UNIT_K) * 2;
            copy_16_rows(place, src, src + 8 * INTER * 2, INTER * 2, min(PARTS, UNITS2 - k * PARTS), barrier);
          }
        });
  end_claims(args, producer.lane, ahead, parity);
}

__device__ __forceinline__ void compute(const Args& args, const Warp& me, u32 shared) {
  const int team = me.warp / TEAM, place = me.warp % TEAM, column = me.lane / 4, k0 = (me.lane % 4) * 8;   // unit `place` of a stage
  const u32 full = shared + OFF_BARRIER + team * STAGES * 8, empty = full + RINGS * 8, ring = shared + team * STAGES * STAGE_BYTES;
  const int2* notes = (const int2*)(smem + OFF_NOTE) + team * STAGES;
  u32 b[TILE_STAGES][B_REGS];
  const u16* x = args.x + (u64)(column < args.num_tokens ? column : 0) * HIDDEN;
#pragma unroll
  for (int q = 0; q < TILE_STAGES; q++)
    if (UNITS1 % STAGE_UNITS == 0 || q * STAGE_UNITS + place < UNITS1) load_x(b[q], x, (q * STAGE_UNITS + place) * UNIT_K + k0);
  barrier_of<THREADS>(3);         // the list is there
  const u32 parity = block_claim() >> 31;
  const int num_active = count_active();
  make_sources(num_active);
  Ring at = {0, 0};
  auto leave_stage = [&]() {
    barrier_arrive(empty + at.slot * 8);
    at.next();
  };
  // ---- phase 1
  Sums sums(shared, team, place, me.lane);
#pragma unroll 1
  while (true) {
    barrier_wait(full + at.slot * 8, at.parity);
    const int2 note = notes[at.slot];
    if (note.x < 0) break;
    float acc[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int q = 0; q < TILE_STAGES; q++) {
      if (q) barrier_wait(full + at.slot * 8, at.parity);
      if (UNITS1 % STAGE_UNITS == 0 || q * STAGE_UNITS + place < UNITS1) {
        __syncwarp();
        multiply(ring + at.slot * STAGE_BYTES + place * (UNIT_K * 2), me.lane, b[q], acc, [](int) {});
      }
      leave_stage();
    }
    sums.give(note, acc);
  }
  sums.end();
  // ---- phase 2: the first stage is there already
  const int own = place % PARTS, first = team + place / PARTS * TEAMS;   // unit of each PARTS, and the first entry, of this warp
  // Groups of entries that the team has, and how many of them have one for this warp
  const int groups = share_of<TEAMS * ENTRIES>(num_active, team), count = share_of<TEAMS * ENTRIES>(num_active, first);
  const u8* h = (const u8*)(args.h + (u64)parity * MAX_PAIRS * INTER + own * UNIT_K + k0);
  auto tokens_of = [&](int group) { return h + sources()[(first + group * (TEAMS * ENTRIES)) * COLUMNS + column]; };
  auto has_unit = [&](int k) { return UNITS2 % PARTS == 0 || k * PARTS + own < UNITS2; };
  u32 hb[STEPS][B_REGS];
  if (count)
#pragma unroll
    for (int k = 0; k < STEPS; k++)
      if (has_unit(k)) load_h(hb[k], (const u16*)(tokens_of(0) + k * (PARTS * UNIT_K * 2)), 0);
  bool there = true;
#pragma unroll 1
  for (int rt = blockIdx.x; rt < TILES2; rt += gridDim.x) {
    float acc[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
    for (int group = 0; group < groups; group++) {
      const bool works = group < count;
      const u8* tokens = works ? tokens_of(group) : h;   // a warp without entries has no place in the list either
      const u8* next = works ? tokens_of(group + 1 < count ? group + 1 : 0) : h;
#pragma unroll
      for (int k = 0; k < STEPS; k++) {
        if (!there) barrier_wait(full + at.slot * 8, at.parity);
        there = false;
        if (works && has_unit(k)) {
          while (!is_written(hb[k]))   // all that are still to come, as each look takes a way to the L2 and back
#pragma unroll
            for (int j = k; j < STEPS; j++)
              if (has_unit(j)) load_h(hb[j], (const u16*)(tokens + j * (PARTS * UNIT_K * 2)), 0);
          __syncwarp();
          multiply(ring + at.slot * STAGE_BYTES + place * (UNIT_K * 2), me.lane, hb[k], acc, [&](int i) {
            const uint4 v = load_shared_by_grid(next + k * (PARTS * UNIT_K * 2) + i * 64);
            hb[k][4 * i] = v.x, hb[k][4 * i + 1] = v.y, hb[k][4 * i + 2] = v.z, hb[k][4 * i + 3] = v.w;
          });
        }
        leave_stage();
      }
      if (works) put_part(me.lane, first + group * (TEAMS * ENTRIES), own, acc);
    }
    finish_tile(args, rt);
  }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) moe_bf16(
    const u16* __restrict__ x, const int* __restrict__ index, const float* __restrict__ weight, const int* __restrict__ slot_of, const u8* __restrict__ pool,
    u32* state, u16* h, u16* __restrict__ y, float* pairs, int num_tokens, int resume, int first_claim) {
  run_roles<false>({x, index, weight, slot_of, pool, state, h, y, pairs, num_tokens, resume, first_claim});
}

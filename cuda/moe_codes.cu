// moe_codes.cu - the routed experts of a layer for a few tokens in INT4 or INT8 codes, one launch, warps with roles.
// Computes   what moe_small.cu computes, from the same arguments and scratch
// Launch     any grid (one block an SM), block (COMPUTE + TEAMS + FINISHERS) * 32; first_claim >= 1 tiles are a block's first claim
// Needs      HIDDEN % 8 == 0, INTER % 8 == 0, sm_90; below it the kernel traps
// Moves      distinct experts * slot bytes; 4 experts of 2048 x 1408 in INT4: 17.8 MB, so no faster than 4.1 us at 4.37 TB/s
// Numerics   as moe_small.cu, in another order of sums, which depends on HIDDEN, INTER, TEAM and nothing else
// Reference  runtime/kernels/reference.py
//
// Where moe_small.cu lets every warp do everything, here warps have roles, so that those which compute run little else. Each team
// of TEAM compute warps has a ring of STAGES stages of 16 units, filled in order by a producer warp with bulk copies.
//   Phase 1, gate and up: a stage holds units of a tile (8 gate + 8 up rows); tile n of the block goes to team n % TEAMS, its unit u
//   to member u % TEAM. The members leave their sums in shared memory, a finisher warp adds them in a fixed tree, applies the
//   activation and stores h.
//   Phase 2, down: entry i of the list goes to team i % TEAMS. The units of its entries, one after the other, fill its stages and go
//   to its members in turn; unit u of an entry belongs to part u % TEAM of the entry's sums, whoever computes it. The parts stay in
//   shared memory and are added when the 16 rows are over.
// Tokens of phase 2 come from L2 with a latency of many units: those of the next unit are under way while one is multiplied, and
// are waited for before the following ones are asked for, as the hardware counts loads and does not tell them apart.
// Progress: tiles are claimed by running blocks, as in moe_small.cu, by each team for itself and ahead of need: a claim takes over 1 us
// when all blocks claim. The producer that is the last to be done claiming resets.
#include "expert_layer.cuh"

#ifndef COMPUTE
#define COMPUTE 16     // compute warps
#endif
#ifndef TEAM
#define TEAM 8         // of them for a tile; divides COMPUTE and 16
#endif
#ifndef FINISHERS
#define FINISHERS (COMPUTE / TEAM > 1 ? COMPUTE / TEAM : 2)
#endif
#ifndef MOST_CLAIM
#define MOST_CLAIM 2   // tiles that a team claims at once
#endif
#ifndef STAGES
#define STAGES 5       // of a team
#endif
#ifndef KEEP_REGS
#define KEEP_REGS 32   // registers of tokens that a warp may hold on to in phase 1
#endif
#ifndef BESIDE
#define BESIDE 0       // whether the next kernel may run beside this one, and so starts as soon as it can
#endif
#ifndef H_AT_ONCE
#define H_AT_ONCE 4    // pieces of a single token's h that a thread looks for at once
#endif
#define UNIT_K 128
#define UNIT_BYTES (CODE_BYTES + 32 * SCALE_SETS)
#define STAGE_UNITS 16
#define STAGE_BYTES (STAGE_UNITS * UNIT_BYTES)
#define UNITS1 ((HIDDEN + UNIT_K - 1) / UNIT_K)
#define UNITS2 ((INTER + UNIT_K - 1) / UNIT_K)
#define B_REGS 16                                              // of the tokens of a unit
#define TEAMS (COMPUTE / TEAM)
#define CHUNKS (STAGE_UNITS / TEAM)                            // units of a member in a stage
#define TILE_STAGES ((UNITS1 + STAGE_UNITS - 1) / STAGE_UNITS)
#define OWN_UNITS ((UNITS1 + TEAM - 1) / TEAM)                 // units of a member in a tile
#define PARTS (UNITS2 < TEAM ? UNITS2 : TEAM)                  // part p of the down K: units p, p + TEAM, ...
#define WARPS (COMPUTE + TEAMS + FINISHERS)
#define THREADS (WARPS * 32)
#define KEEP (!GATHER && OWN_UNITS * B_REGS <= KEEP_REGS)
#define RED_BUFFERS 2
#define H_PITCH (UNITS2 * UNIT_K * 2)                          // of an entry's h where a single token's lies in shared memory
#define H_SHARED (TOP_K * H_PITCH <= X_BYTES - X_PITCH)        // behind that token's x

#define RINGS (TEAMS * STAGES)
#define X_PITCH (UNITS1 * UNIT_K * 2 + 64)
#define X_BYTES (KEEP ? 0 : MAX_PAIRS / TOP_K * X_PITCH)
#define OFF_X (RINGS * STAGE_BYTES)                                     // bf16 [tokens][X_PITCH / 2]
#define OFF_H (OFF_X + X_PITCH)                                         // bf16 [TOP_K][H_PITCH / 2], once x is there: see H_SHARED
#define OFF_RED (OFF_X + X_BYTES)                                       // f32x4 [TEAMS][RED_BUFFERS][TEAM][32]
#define OFF_PART (OFF_RED + TEAMS * RED_BUFFERS * TEAM * 512)           // f32 [PARTS][MAX_PAIRS][16]
#define OFF_BARRIER (OFF_PART + PARTS * MAX_PAIRS * 64)                 // u64: full, empty [TEAMS][STAGES]; red full, red empty [TEAMS][RED_BUFFERS]
#define NUM_BARRIERS (2 * RINGS + 2 * TEAMS * RED_BUFFERS)
#define OFF_NOTE (OFF_BARRIER + (NUM_BARRIERS + 1) / 2 * 16)            // int2 [TEAMS][STAGES]: phase 1: entry, tile; phase 2: -1
#define OFF_RED_NOTE (OFF_NOTE + RINGS * 8)                            // int2 [TEAMS][RED_BUFFERS]: entry (-1: the end), tile
#define OFF_SOURCE (OFF_RED_NOTE + TEAMS * RED_BUFFERS * 8)            // u32 [MAX_ACTIVE][COLUMNS]: where a column's h begins in the buffer
#define OFF_LISTS (OFF_SOURCE + MAX_ACTIVE * COLUMNS * 4)
#include "teams.cuh"

static_assert(STAGE_UNITS % (2 * TEAM) == 0, "a member has two units of a stage, or four");
static_assert(!H_SHARED || OFF_H + TOP_K * H_PITCH <= OFF_RED, "a single token's h beside its x");

// A single token's h of all entries to shared memory, by the compute warps, zeros behind their ends
__device__ __forceinline__ void hold_h(const Args& args, int num_active, u32 parity) {
  constexpr int PIECES = H_PITCH / 16;
  const u16* h = args.h + (u64)parity * MAX_PAIRS * INTER;
#pragma unroll 1
  for (int first = threadIdx.x; first < num_active * PIECES; first += H_AT_ONCE * COMPUTE * 32) {
    uint4 v[H_AT_ONCE];
    bool all;
    do {                          // as in await_h
      all = true;
#pragma unroll
      for (int i = 0; i < H_AT_ONCE; i++) {
        const int n = first + i * COMPUTE * 32, entry = n / PIECES, piece = n - entry * PIECES;
        v[i] = make_uint4(0, 0, 0, 0);
        if (n < num_active * PIECES && piece * 8 < INTER) v[i] = load_shared_by_grid(h + (u64)active_list()[entry].y * INTER + piece * 8);
      }
#pragma unroll
      for (int i = 0; i < H_AT_ONCE; i++) all = all && v[i].x != 0xffffffffu;
    } while (!all);
#pragma unroll
    for (int i = 0; i < H_AT_ONCE; i++) {
      const int n = first + i * COMPUTE * 32;
      if (n < num_active * PIECES) *(uint4*)(smem + OFF_H + n * 16) = v[i];
    }
  }
}

__device__ __forceinline__ void load_x_shared(u32* r, u32 at) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint4 v = lds128(at + i * 64);
    r[4 * i] = v.x, r[4 * i + 1] = v.y, r[4 * i + 2] = v.z, r[4 * i + 3] = v.w;
  }
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void produce(const Args& args, const Warp& me, u32 shared, u32 parity) {
  Producer producer(me, shared);
  auto copy_units = [](u32 to, const u8* from, int units, u32 barrier) {
    barrier_expect_more(barrier, units * UNIT_BYTES);
    copy_bulk(to, from, units * UNIT_BYTES, barrier);
  };
  const u32 ahead = producer.claim_tiles(args, [&](int entry, int tile) {
    const u8* src = args.pool + tile_offset((u64)active_list()[entry].x, tile, SLOT_BYTES, (u64)UNITS1 * UNIT_BYTES, 0, INTERLEAVE);
#pragma unroll 1
    for (int q = 0; q < TILE_STAGES; q++)
      producer.stage(entry, tile, [&](u32 place, u32 barrier) { copy_units(place, src + q * STAGE_BYTES, min(STAGE_UNITS, UNITS1 - q * STAGE_UNITS), barrier); });
  });
  const int units = share_of<TEAMS>(producer.num_active, producer.team) * UNITS2;
#pragma unroll 1
  for (int rt = blockIdx.x; rt < TILES2; rt += gridDim.x) {
    int entry = producer.team, unit = 0;
#pragma unroll 1
    for (int left = units; left > 0; left -= STAGE_UNITS)
      producer.stage(-1, 0, [&](u32 place, u32 barrier) {
#pragma unroll 1
        for (int room = min(left, STAGE_UNITS), n; room > 0; room -= n) {
          n = min(UNITS2 - unit, room);
          const u8* src = args.pool + tile_offset((u64)active_list()[entry].x, rt, SLOT_BYTES, (u64)UNITS2 * UNIT_BYTES, DOWN_OFFSET, INTERLEAVE);
          copy_units(place, src + unit * UNIT_BYTES, n, barrier);
          place += n * UNIT_BYTES, unit += n;
          if (unit == UNITS2) unit = 0, entry += TEAMS;
        }
      });
  }
  end_claims(args, producer.lane, ahead, parity);
}

__device__ __forceinline__ void compute(const Args& args, const Warp& me, u32 shared) {
  const int team = me.warp / TEAM, member = me.warp % TEAM, column = me.lane / 4, k0 = (me.lane % 4) * 8;
  const u32 barriers = shared + OFF_BARRIER, full = barriers + team * STAGES * 8, empty = full + RINGS * 8;
  const u32 ring = shared + team * STAGES * STAGE_BYTES;
  const int2* notes = (const int2*)(smem + OFF_NOTE) + team * STAGES;
  u32 b[KEEP ? OWN_UNITS : 1][B_REGS];
  if constexpr (KEEP) {
    const u16* x = args.x + (u64)(column < args.num_tokens ? column : 0) * HIDDEN;
#pragma unroll
    for (int c = 0; c < OWN_UNITS; c++)
      if (UNITS1 % TEAM == 0 || c * TEAM + member < UNITS1) load_x(b[c], x, (c * TEAM + member) * UNIT_K + k0);
  } else {                        // tokens to shared memory, zeros behind their ends
    constexpr int ROW = UNITS1 * UNIT_K / 8;
#pragma unroll 1
    for (int n = threadIdx.x; n < args.num_tokens * ROW; n += COMPUTE * 32) {
      const int t = n / ROW, i = n - t * ROW;
      const bool there = HIDDEN % UNIT_K == 0 || i * 8 < HIDDEN;
      copy_async_or_zero(shared + OFF_X + t * X_PITCH + i * 16, args.x + (u64)t * HIDDEN + (there ? i * 8 : 0), there);
    }
    copy_commit();
    copy_wait<0>();
  }
  barrier_of<THREADS>(3);         // the list is there
  const u32 parity = block_claim() >> 31;
  const int num_active = count_active();
  Ring at = {0, 0};
  make_sources(num_active);
  // ---- phase 1
  constexpr int UNROLL = KEEP ? TILE_STAGES : 1;
  Sums sums(shared, team, member, me.lane);
#pragma unroll 1
  while (true) {
    barrier_wait(full + at.slot * 8, at.parity);
    const int2 note = notes[at.slot];
    if (note.x < 0) break;
    float acc[4] = {0.f, 0.f, 0.f, 0.f};
    u32 x = 0;
    if constexpr (!KEEP) {
      const int token = GATHER ? sources()[note.x * COLUMNS + column] / (INTER * 2 * TOP_K) : column < args.num_tokens ? column : 0;
      x = shared + OFF_X + token * X_PITCH + k0 * 2;
    }
#pragma unroll UNROLL
    for (int q = 0; q < TILE_STAGES; q++) {
      if (q) barrier_wait(full + at.slot * 8, at.parity);
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) {
        const int unit = (q * CHUNKS + c) * TEAM + member;
        if (UNITS1 % TEAM == 0 ? (q * CHUNKS + c) * TEAM < UNITS1 : unit < UNITS1) {
          u32* tokens = b[KEEP ? q * CHUNKS + c < OWN_UNITS ? q * CHUNKS + c : 0 : 0];
          if constexpr (!KEEP) load_x_shared(tokens, x + unit * (UNIT_K * 2));
          __syncwarp();
          multiply_codes(ring + at.slot * STAGE_BYTES + (c * TEAM + member) * UNIT_BYTES, me.lane, tokens, acc, [](int) {});
        }
      }
      barrier_arrive(empty + at.slot * 8);
      at.next();
    }
    sums.give(note, acc);
  }
  sums.end();
  // ---- phase 2: the first stage is there already. The units of the team's entries, one after the other, go to its members in turn.
  const int units = share_of<TEAMS>(num_active, team) * UNITS2;
  bool there = true;
  auto next_stage = [&]() {
    if (!there) barrier_wait(full + at.slot * 8, at.parity);
    there = false;
    return ring + at.slot * STAGE_BYTES + member * UNIT_BYTES;
  };
  auto leave_stage = [&]() {
    barrier_arrive(empty + at.slot * 8);
    at.next();
  };
  if (H_SHARED && args.num_tokens == 1) {                         // all of h to shared memory, once for all rows
    if (blockIdx.x < TILES2) hold_h(args, num_active, parity);
    __syncwarp();
    barrier_of<COMPUTE * 32>(1);
    const u32 tokens = shared + OFF_H + team * H_PITCH + k0 * 2;
#pragma unroll 1
    for (int rt = blockIdx.x; rt < TILES2; rt += gridDim.x) {
      float acc[4] = {0.f, 0.f, 0.f, 0.f};
      int e = 0, u = member;
#pragma unroll 1
      for (int first = 0; first < units; first += STAGE_UNITS) {
        const u32 unit0 = next_stage();
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
          if (first + i * TEAM + member >= units) break;
          while (u >= UNITS2) u -= UNITS2, e++;
          u32 token[B_REGS];
          __syncwarp();
          load_x_shared(token, tokens + e * (TEAMS * H_PITCH) + u * (UNIT_K * 2));
          multiply_codes(unit0 + i * (TEAM * UNIT_BYTES), me.lane, token, acc, [](int) {});
          if (u + TEAM >= UNITS2) put_part(me.lane, e * TEAMS + team, u % TEAM, acc);
          u += TEAM;
        }
        leave_stage();
      }
      finish_tile(args, rt);
    }
    return;
  }
  u32 hb[2][B_REGS];                                              // tokens of this unit, and those of the next one under way
  const u8* h = (const u8*)(args.h + (u64)parity * MAX_PAIRS * INTER + k0);
  const u8* from = h;                                             // where the coming ones are
  int next_entry = 0, next_unit = member;                         // entry of the team, unit of it
  auto fold = [&]() {
    if (UNITS2 >= TEAM) {
      if (next_unit >= UNITS2) next_unit -= UNITS2, next_entry++;
    } else next_entry += next_unit / UNITS2, next_unit %= UNITS2;
  };
  auto aim = [&](u32* b) {
    from = h + (sources()[(next_entry * TEAMS + team) * COLUMNS + column] + next_unit * (UNIT_K * 2));
    load_h(b, (const u16*)from, next_unit * UNIT_K + k0);
  };
  fold();
  if (member < units) aim(hb[0]);
#pragma unroll 1
  for (int rt = blockIdx.x; rt < TILES2; rt += gridDim.x) {
    float acc[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
    for (int left = units; left > 0; left -= STAGE_UNITS) {      // units of the team in these rows
      const u32 unit0 = next_stage();
#pragma unroll
      for (int i = 0; i < CHUNKS; i++) {
        if (i * TEAM + member >= left) {
          if (i % 2) {                                            // tokens of the next rows came into the other buffer
            await_h(hb[1], (const u16*)from, next_unit * UNIT_K + k0);
#pragma unroll
            for (int j = 0; j < B_REGS; j++) hb[0][j] = hb[1][j];
          }
          break;
        }
        const int e = next_entry, u = next_unit;
        await_h(hb[i % 2], (const u16*)from, u * UNIT_K + k0);
        next_unit += TEAM;
        fold();
        if ((i + 1) * TEAM + member >= left) next_entry = 0, next_unit = member, fold();   // of the next rows
        aim(hb[(i + 1) % 2]);
        __syncwarp();
        multiply_codes(unit0 + i * (TEAM * UNIT_BYTES), me.lane, hb[i % 2], acc, [](int) {});
        if (u + TEAM >= UNITS2) put_part(me.lane, e * TEAMS + team, u % TEAM, acc);       // the last of its part
      }
      leave_stage();
    }
    finish_tile(args, rt);
  }
}

#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) moe_codes(
    const u16* __restrict__ x, const int* __restrict__ index, const float* __restrict__ weight, const int* __restrict__ slot_of, const u8* __restrict__ pool,
    u32* state, u16* h, u16* __restrict__ y, float* pairs, int num_tokens, int resume, int first_claim) {
  run_roles<BESIDE>({x, index, weight, slot_of, pool, state, h, y, pairs, num_tokens, resume, first_claim});
}

// residual.cu - residual records on the device: the directory of a record that has arrived, and records as BF16 slots.
//
// residual_index   makes and checks the directory of records, a warp a block of 8 units
// Inputs     pool         records of slot_bytes each (docs/format.md, `residual`)
//            bank         slots of bank_slot_bytes: INT4 units (runtime/kernels/units.py), down from bank_down_offset on
//            slots, bank_slots  int32 [num_records], records with slot -1 are left out; payload_bytes  int64 [num_records], of records that fit into their slots
// Output     directory    uint8 [slots, units * DIRECTORY_BYTES] of the slots named
//            faults       int32 [num_records]: 1 is added for every block that contradicts itself or the codes; its units then have
//                         an entry that is safe to follow and means nothing
// Moves      0.52 + DIRECTORY_BYTES / 2048 B a weight
//
// residual_decode  writes experts in BF16, a warp a unit
// Inputs     the same pool, bank and directory; active int32 [num_active], experts; slot_of, bank_slot_of int32 [num_experts]
// Output     plain        slots of plain_slot_bytes, one an expert: gate_up bf16 [2I, H] at 0, down bf16 [H, I] at plain_down_offset,
//                         biases as the record has them
// Moves      0.52 + 1.15 + 2 B a weight and DIRECTORY_BYTES / 2048; 60 experts of 2048 x 1408: 1.93 GB, 442 us at 4.37 TB/s
// Layout     as dequant.cu
//
// Launch     block 256, any grid
// Compiled   HIDDEN, INTER, SCALE_SETS (1, 2 or 4), BIAS
// Needs      HIDDEN and INTER multiples of 8, every slot at a multiple of 16 bytes, sm_80
// Reference  runtime/artifacts/residual.py, bit for bit
#include "residual.cuh"

#ifndef HIDDEN
#define HIDDEN 2048
#define INTER 1408
#endif
#ifndef SCALE_SETS
#define SCALE_SETS 1
#endif
#ifndef BIAS
#define BIAS 0
#endif
#define UNIT_BYTES (1024 + 32 * SCALE_SETS)
#define UNITS1 ((HIDDEN + 127) / 128)       // of a tile of gate and up
#define UNITS2 ((INTER + 127) / 128)        // of a tile of down
#define TILES1 (INTER / 8)
#define TILES2 ((HIDDEN + 15) / 16)
#define ALL1 (TILES1 * UNITS1)
#define ALL (ALL1 + TILES2 * UNITS2)
#define TILE_BLOCKS1 ((UNITS1 + BLOCK_UNITS - 1) / BLOCK_UNITS)
#define TILE_BLOCKS2 ((UNITS2 + BLOCK_UNITS - 1) / BLOCK_UNITS)
#define BLOCKS1 (TILES1 * TILE_BLOCKS1)
#define BLOCKS2 (TILES2 * TILE_BLOCKS2)
#define ALIGN64(n) (((n) + 63) / 64 * 64)
#define TABLE2 ALIGN64(4 * (BLOCKS1 + 1))
#define BIAS1 (TABLE2 + ALIGN64(4 * (BLOCKS2 + 1)))   // gate_up_bias, where there are biases
#define BIAS2 (BIAS1 + ALIGN64(4 * INTER))            // down_bias
#define BEGIN (BIAS ? BIAS2 + ALIGN64(2 * HIDDEN) : BIAS1)
#define THREADS 256
#define WARPS (THREADS / 32)
#define NIBBLE_BYTES (256 * 4 + 16)         // of a unit, and what a window reaches beyond
#define DECODE_SHARED_BYTES (CHOICES_BYTES + WARPS * NIBBLE_BYTES)

DYNAMIC_SHARED(smem);

struct Codes { uint4 half[2]; };
__device__ __forceinline__ Codes codes_of(const u8* unit, int lane) {
  Codes c;
  c.half[0] = load_read_only(unit + lane * 16), c.half[1] = load_read_only(unit + 512 + lane * 16);
  return c;
}
__device__ __forceinline__ u32 word_of(const Codes& c, int step) {
  const uint4 v = c.half[step / 4];
  return step % 4 == 0 ? v.x : step % 4 == 1 ? v.y : step % 4 == 2 ? v.z : v.w;
}
__device__ __forceinline__ u32 scales_at(const u8* unit, int set, int lane) { return *(const u32*)(unit + 1024 + scale_byte(set, lane / 4, 0)); }
struct ExceptionsOf {
  const u8* record;   // from the unit's low bytes on
  u32 places, bytes, all;
  __device__ __forceinline__ u32 count() const { return all; }
  __device__ __forceinline__ u32 place(u32 i) const { return ((const u16*)(record + places))[i]; }
  __device__ __forceinline__ u32 byte(u32 i) const { return record[bytes + i]; }
};
__device__ __forceinline__ int padded16(int n) { return (n + 15) / 16 * 16; }

extern "C" __global__ void __launch_bounds__(THREADS, 4) residual_index(
    const u8* __restrict__ pool, long long slot_bytes, const u8* __restrict__ bank, long long bank_slot_bytes, long long bank_down_offset,
    const int* __restrict__ slots, const int* __restrict__ bank_slots, const long long* __restrict__ payload_bytes, int num_records, u8* directory, int* faults) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int job = blockIdx.x * WARPS + threadIdx.x / 32; job < num_records * (BLOCKS1 + BLOCKS2); job += gridDim.x * WARPS) {
    const int n = job / (BLOCKS1 + BLOCKS2), block = job - n * (BLOCKS1 + BLOCKS2);
    if (slots[n] < 0) continue;
    const bool down = block >= BLOCKS1;
    const int b = down ? block - BLOCKS1 : block, tile_units = down ? UNITS2 : UNITS1, tile_blocks = down ? TILE_BLOCKS2 : TILE_BLOCKS1;
    const int tile = b / tile_blocks, within = b - tile * tile_blocks, units = min(BLOCK_UNITS, tile_units - within * BLOCK_UNITS);
    const int in_matrix = tile * tile_units + within * BLOCK_UNITS;
    const u8* record = pool + slots[n] * slot_bytes;
    const u8* unit = bank + bank_slots[n] * bank_slot_bytes + (down ? bank_down_offset : 0) + (long long)in_matrix * UNIT_BYTES;
    u8* to = directory + ((long long)slots[n] * ALL + (down ? ALL1 : 0) + in_matrix) * DIRECTORY_BYTES;
    // where the block is: inside the record, behind the one before, large enough for its table
    const u32* starts = (const u32*)(record + (down ? TABLE2 : 0)) + b;
    const long long begin = starts[0] * 16ll, end = starts[1] * 16ll, bytes = payload_bytes[n] < slot_bytes ? payload_bytes[n] : slot_bytes;
    const int words_at = padded16(units * 2048 + 4 * (units + 1));
    bool right = end <= bytes && begin >= BEGIN && end - begin >= words_at && end - begin <= 0xffff * 4;
    if (block == 0) right = right && begin == BEGIN;
    if (block == BLOCKS1) right = right && begin == ((const u32*)record)[BLOCKS1] * 16ll;
    if (block == BLOCKS1 + BLOCKS2 - 1) right = right && end == payload_bytes[n];
    const u32* rows = (const u32*)(record + begin + units * 2048);   // words, exceptions before each unit, and all
    const u32 all = right ? rows[units] : 0;
    const int places_at = words_at + 4 * (all & 0xffffu), total = all >> 16;
    right = right && padded16(places_at + 3 * total) == end - begin && rows[0] == 0;
#pragma unroll 1
    for (int k = 0; k < units; k++) {
      const Codes codes = codes_of(unit + k * UNIT_BYTES, lane);
      int count = 0;
#pragma unroll
      for (int step = 0; step < 8; step++) count += __popc(zero_codes(word_of(codes, step)));
      int before = count;           // of the lanes up to this one
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(~0u, before, d);
        if (lane >= d) before += other;
      }
      const int zeros = __shfl_sync(~0u, before, 31);
      bool plain = true;            // scales positive, or 0 behind the end of the columns
      const int columns = (within * BLOCK_UNITS + k) * 128, width = down ? INTER : HIDDEN;
#pragma unroll
      for (int set = 0; set < SCALE_SETS; set++) {
        const u32 scales = scales_at(unit + k * UNIT_BYTES, set, lane);
        const bool both = !(scales & 0x80008000u) && (scales & 0xffffu) && scales >> 16;
        plain = plain && (both || (scales == 0 && columns + set * (128 / SCALE_SETS) >= width));
      }
      plain = __all_sync(~0u, plain);
      if (right) {                  // the same in all lanes
        const u32 row = rows[k], next = rows[k + 1];
        const int words = (next & 0xffffu) - (row & 0xffffu), count = (int)(next >> 16) - (int)(row >> 16), first = row >> 16;
        right = words == (zeros + 7) / 8 && count >= 0 && count <= 2048 && first + count <= total;
        const u16* places = (const u16*)(record + begin + places_at) + first;
        bool rising = true;
        if (right)
          for (int i = lane; i < count; i += 32) rising = rising && places[i] < 2048 && (i == 0 || places[i - 1] < places[i]);
        right = __all_sync(~0u, right && rising);
        const u32 nibbles = (words_at - k * 2048 + 4 * (row & 0xffffu)) / 4, places_from = places_at + 2 * first - k * 2048;
        const u32 high = 2 * total - first;   // from the unit's places to the high bytes
        if (right && lane == 0)
          *(uint4*)(to + k * DIRECTORY_BYTES + 64) = make_uint4((u32)(begin / 16) + k * 128, nibbles | high << 16, words | count << 16 | (plain ? 0 : 0x80000000u), places_from);
      }
      *(u16*)(to + k * DIRECTORY_BYTES + lane * 2) = before - count;
    }
    if (right) continue;            // else what is there means nothing, but leads nowhere else
    __syncwarp();
#pragma unroll 1
    for (int k = 0; k < units; k++) {
      *(u16*)(to + k * DIRECTORY_BYTES + lane * 2) = 0;
      if (lane == 0) *(uint4*)(to + k * DIRECTORY_BYTES + 64) = make_uint4(k * 128, 0, 0, 0);
    }
    if (lane == 0) atomic_add((u32*)faults + n, 1);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) residual_decode(
    const u8* __restrict__ pool, long long slot_bytes, const u8* __restrict__ bank, long long bank_slot_bytes, long long bank_down_offset,
    const u8* __restrict__ directory, const int* __restrict__ active, const int* __restrict__ num_active, const int* __restrict__ slot_of,
    const int* __restrict__ bank_slot_of, u8* __restrict__ plain, long long plain_slot_bytes, long long plain_down_offset, long long plain_bias_offset,
    long long plain_down_bias_offset) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane / 4;
  const u32 table = shared_address(smem), own = table + CHOICES_BYTES + warp * NIBBLE_BYTES;
  fill_choices<THREADS>(table, threadIdx.x);
  __syncthreads();
  const int units = *num_active * ALL;
#pragma unroll 1
  for (int n = blockIdx.x * WARPS + warp; n < units; n += gridDim.x * WARPS) {
    const int expert = active[n / ALL], slot = slot_of[expert], bank_slot = bank_slot_of[expert];
    if (slot < 0 || bank_slot < 0) continue;
    int index = n % ALL;
    const u8* in = directory + ((long long)slot * ALL + index) * DIRECTORY_BYTES;
    const bool down = index >= ALL1;
    if (down) index -= ALL1;
    const u8* unit = bank + bank_slot * bank_slot_bytes + (down ? bank_down_offset : 0) + (long long)index * UNIT_BYTES;
    const Codes codes = codes_of(unit, lane);
    u32 scales[SCALE_SETS];
#pragma unroll
    for (int set = 0; set < SCALE_SETS; set++) scales[set] = scales_at(unit, set, lane);
    const Entry entry = entry_of(load_read_only(in + 64));
    const u8* record = pool + slot * slot_bytes + entry.low * 16ll;
    u32 at = ((const u16*)in)[lane] * 4;
    uint4 low[4];
#pragma unroll
    for (int i = 0; i < 4; i++) low[i] = load_read_only(record + i * 512 + lane * 16);
    const u32* nibbles = (const u32*)(record + nibble_bytes(entry));
    for (int i = lane; i < (int)nibble_words(entry); i += 32) sts32(own + i * 4, nibbles[i]);
    __syncwarp();
    const int tile_units = down ? UNITS2 : UNITS1, columns = down ? INTER : HIDDEN, tile = index / tile_units;
    const int first = down ? tile * 16 + r : tile * 8 + r, second = down ? first + 8 : first + INTER;
    const int column = (index - tile * tile_units) * 128 + lane % 4 * 8;
    u8* weights = plain + expert * plain_slot_bytes + (down ? plain_down_offset : 0);
    u16* rows[2] = {(u16*)weights + (long long)first * columns, (u16*)weights + (long long)second * columns};
    const bool here[2] = {!down || first < HIDDEN, !down || second < HIDDEN};
    auto write = [&](int c, const u32* a) {   // columns c * 32 + lane % 4 * 8 to + 7 of both rows
#pragma unroll
      for (int rh = 0; rh < 2; rh++)
        if (here[rh] && column + c * 32 < columns) *(uint4*)(rows[rh] + column + c * 32) = make_uint4(a[rh], a[2 + rh], a[4 + rh], a[6 + rh]);
    };
    u32 a[8];
    if (by_weight(entry)) {
      at /= 4;
#pragma unroll 1
      for (int step = 0; step < 8; step++) {
        const u32* from = (const u32*)(record + step / 2 * 512 + lane * 16 + step % 2 * 8);
        const u32 bytes[2] = {from[0], from[1]}, scale = scales_at(unit, step * SCALE_SETS / 8, lane);
        u32 made[4];
        rebuild_step_by_weight(*(const u32*)(unit + int4_byte(lane, step, 0, 0)), bytes, scale, record, entry, lane, step, at, made);
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = a[4 + i], a[4 + i] = made[i];
        if (step % 2) write(step / 2, a);
      }
    } else {
      Scales scale;
      at += own * 8;
      const u32 one = ((u32)units >> 31) + 1;
      Exceptions<ExceptionsOf> own_exceptions({record, places_at(entry), exception_bytes_at(entry), exceptions(entry)}, exceptions(entry), lane);
#pragma unroll
      for (int c = 0; c < 4; c++) {
        if (c * SCALE_SETS % 4 == 0) scale = scales_of(scales[c * SCALE_SETS / 4], one);
        u32 high[4];
        rebuild_two(word_of(codes, 2 * c), word_of(codes, 2 * c + 1), low[c], scale, table, at, one, high);
        own_exceptions.put(c, lane, high);
        join_bytes(low[c], high, a);
        write(c, a);
      }
    }
#if BIAS
    if (n % ALL < (4 * INTER + 2 * HIDDEN + 511) / 512) {   // a piece of the biases
      const u8* whole = pool + slot * slot_bytes;
      const int i = n % ALL * 512 + lane * 16;
      for (int k = i; k < i + 16; k += 2)
        if (k < 4 * INTER) *(u16*)(plain + expert * plain_slot_bytes + plain_bias_offset + k) = *(const u16*)(whole + BIAS1 + k);
        else if (k < 4 * INTER + 2 * HIDDEN)
          *(u16*)(plain + expert * plain_slot_bytes + plain_down_bias_offset + k - 4 * INTER) = *(const u16*)(whole + BIAS2 + k - 4 * INTER);
    }
#endif
    __syncwarp();
  }
}

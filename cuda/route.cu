// route.cu - pairs of token and expert sorted by expert, or by the expert's slot: a stable counting sort on the device.
// Key        of pair p = t * top_k + j with expert e = top_k_index[t, j]: e, or slot_of[e] when by_slot; none when
//            slot_of[e] < 0 or e is outside 0..num_experts-1
// Inputs     top_k_index  int32 [max_tokens, top_k]  distinct experts within a row
//            slot_of      int32 [num_experts]        place in the pool, -1 not here
//            num_tokens   int32 [1] or null          tokens of this call, at most max_tokens; null for max_tokens
// Outputs    num_active   int32 [1]                  keys with at least one pair
//            active       int32 [num_keys]           these keys, ascending; the rest is left alone
//            first        int32 [num_keys + 1]       where each active key's pairs begin; first[num_active] ends all
//            ends         int32 [num_keys]           where the pairs of every key end, keys without pairs included
//            pairs        int32 [max_tokens * top_k] sorted by (key, p); the rest is left alone
//            position     int32 [max_tokens * top_k] where in pairs each pair is, -1 without a key
// Launch     chunk = 1024 * ITEMS pairs a block, ITEMS of 1 or 4 in the kernel's name, grid ceil(max_tokens * top_k /
//            chunk). route_place alone for a grid of 1; else route_count before it with the same grid, and block_counts
//            int32 [grid, num_keys] between them; a programmatic launch may start route_place early
// Shared     route_count num_keys * 4 + num_experts * 2, route_place chunk * 6 + num_keys * 72 + num_experts * 2
// Needs      num_keys <= 1024 (a thread each), num_experts <= 1024, max_tokens * top_k < 2^31 - 2^15, sm_80
// Numerics   integers only; the order depends on nothing but the inputs, so it is the same in every run
// Reference  sort_pairs in tests/kernels/test_route.py

#include "common.cuh"

#define THREADS 1024
#define WARPS (THREADS / 32)
#define FULL 0xffffffffu

// The lanes of this warp that hold the same key: a ballot a bit, as keys have few.
__device__ __forceinline__ u32 lanes_like_me(int key, int bits) {
  u32 lanes = FULL;
  for (int bit = 0; bit < bits; ++bit) {
    const bool set = key >> bit & 1;
    const u32 with = __ballot_sync(FULL, set);
    lanes &= set ? with : ~with;
  }
  return lanes;
}

// Inclusive sum over the block's threads, in their order; every thread calls it, once in a kernel.
__device__ __forceinline__ long long sum_up_to(long long value) {
  __shared__ long long warp_sums[WARPS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const long long other = __shfl_up_sync(FULL, value, step);
    if (lane >= step) value += other;
  }
  if (lane == 31) warp_sums[warp] = value;
  __syncthreads();
  long long before = lane < warp ? warp_sums[lane] : 0;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) before += __shfl_xor_sync(FULL, before, step);
  return value + before;
}

__device__ __forceinline__ int num_pairs(const int* num_tokens, int max_tokens, int top_k) {
  return (num_tokens ? max(0, min(*num_tokens, max_tokens)) : max_tokens) * top_k;
}

// The key of expert threadIdx.x, -1 for none; a load that nothing has to be waited for.
__device__ __forceinline__ int key_of_my_expert(const int* slot_of, int num_experts, int num_keys, int by_slot) {
  const int slot = threadIdx.x < num_experts ? slot_of[threadIdx.x] : -1;
  const int key = by_slot ? slot : threadIdx.x;
  return slot >= 0 && key < num_keys ? key : -1;
}

// A warp owns 32 * ITEMS consecutive pairs of its block's chunk; a lane every 32nd of them.
template <int ITEMS>
__device__ __forceinline__ int first_pair_of_lane() {
  return blockIdx.x * (THREADS * ITEMS) + threadIdx.x / 32 * (32 * ITEMS) + threadIdx.x % 32;
}

template <int ITEMS>
__device__ __forceinline__ void load_experts(int (&expert)[ITEMS], const int* top_k_index, int bound) {
  const int pair = first_pair_of_lane<ITEMS>();
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) expert[i] = pair + 32 * i < bound ? top_k_index[pair + 32 * i] : -1;
}

template <int ITEMS>
__device__ __forceinline__ void count(const int* __restrict__ top_k_index, const int* __restrict__ slot_of,
                                      const int* __restrict__ num_tokens, int max_tokens, int top_k, int num_experts,
                                      int num_keys, int by_slot, int* __restrict__ block_counts) {
  extern __shared__ int shared[];
  int* const counts = shared;                                     // [num_keys]
  short* const key_of = reinterpret_cast<short*>(counts + num_keys);  // [num_experts]
  let_next_kernel_start();
  int expert[ITEMS];
  load_experts<ITEMS>(expert, top_k_index, max_tokens * top_k);  // not bounded by num_pairs, which is still on its way
  const int my_key = key_of_my_expert(slot_of, num_experts, num_keys, by_slot);
  const int pairs_now = num_pairs(num_tokens, max_tokens, top_k);
  if (blockIdx.x * (THREADS * ITEMS) >= pairs_now) return;
  if (threadIdx.x < num_experts) key_of[threadIdx.x] = my_key;
  for (int key = threadIdx.x; key < num_keys; key += THREADS) counts[key] = 0;
  __syncthreads();
  const int pair = first_pair_of_lane<ITEMS>();
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    if (pair + 32 * i >= pairs_now || static_cast<u32>(expert[i]) >= num_experts) continue;
    const int key = key_of[expert[i]];
    if (key >= 0) atomicAdd(&counts[key], 1);
  }
  __syncthreads();
  for (int key = threadIdx.x; key < num_keys; key += THREADS) {
    block_counts[static_cast<long long>(blockIdx.x) * num_keys + key] = counts[key];
  }
}

// Pairs of each key in all chunks and in those before this block's, from the counts of route_count.
__device__ __forceinline__ void add_chunks(int* total, int* before, const int* block_counts, int num_chunks,
                                           int num_keys) {
  int width = 32;  // threads for the keys of one chunk; the block reads THREADS / width chunks at a time
  while (width < num_keys) width *= 2;
  const int key = threadIdx.x & (width - 1);
  if (key >= num_keys) return;
  int all = 0, earlier = 0;
#pragma unroll 8
  for (int chunk = threadIdx.x / width; chunk < num_chunks; chunk += THREADS / width) {
    const int count = block_counts[static_cast<long long>(chunk) * num_keys + key];
    all += count;
    earlier += chunk < blockIdx.x ? count : 0;
  }
  if (all) atomicAdd(&total[key], all);
  if (earlier) atomicAdd(&before[key], earlier);
}

template <int ITEMS>
__device__ __forceinline__ void place(const int* __restrict__ top_k_index, const int* __restrict__ slot_of,
                                      const int* __restrict__ num_tokens, int max_tokens, int top_k, int num_experts,
                                      int num_keys, int by_slot, const int* __restrict__ block_counts,
                                      int* __restrict__ num_active, int* __restrict__ active, int* __restrict__ first,
                                      int* __restrict__ ends, int* __restrict__ pairs, int* __restrict__ position) {
  extern __shared__ int shared[];
  __shared__ int sorted_in_chunk;
  int* const total = shared;             // [num_keys] pairs in all chunks; reused below
  int* const begin = total + num_keys;   // [num_keys] pairs in earlier chunks; reused below
  int* const sorted = begin + num_keys;  // [THREADS * ITEMS] the chunk's pairs by key
  u16* const sorted_key = reinterpret_cast<u16*>(sorted + THREADS * ITEMS);   // [THREADS * ITEMS]
  u16* const counts = sorted_key + THREADS * ITEMS;                           // [WARPS, num_keys]
  short* const key_of = reinterpret_cast<short*>(counts + WARPS * num_keys);  // [num_experts]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  int key[ITEMS];
  load_experts<ITEMS>(key, top_k_index, max_tokens * top_k);
  const int key_of_mine = key_of_my_expert(slot_of, num_experts, num_keys, by_slot);
  const int pairs_now = num_pairs(num_tokens, max_tokens, top_k);
  const int chunk_begin = blockIdx.x * (THREADS * ITEMS);
  if (blockIdx.x > 0 && chunk_begin >= pairs_now) return;
  const int num_warps = min(WARPS, (pairs_now - chunk_begin + 32 * ITEMS - 1) / (32 * ITEMS));  // that have pairs

  if (threadIdx.x < num_experts) key_of[threadIdx.x] = key_of_mine;
  for (int i = threadIdx.x; i < num_warps * num_keys; i += THREADS) counts[i] = 0;
  for (int i = threadIdx.x; i < 2 * num_keys; i += THREADS) total[i] = 0;
  __syncthreads();

  // rank of each pair among the pairs of its key in its warp
  int bits = 0;
  while (num_keys >> bits) ++bits;  // num_keys itself stands for no key
  const int pair = first_pair_of_lane<ITEMS>();
  u16* const mine = counts + warp * num_keys;
  int rank[ITEMS];
  if (warp < num_warps) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const bool valid = pair + 32 * i < pairs_now && static_cast<u32>(key[i]) < num_experts;
      key[i] = valid ? key_of[key[i]] : -1;
      const u32 lanes = lanes_like_me(key[i] < 0 ? num_keys : key[i], bits);
      const u32 before = lanes & ((1u << lane) - 1);
      rank[i] = key[i] < 0 ? 0 : mine[key[i]] + __popc(before);
      __syncwarp();
      if (key[i] >= 0 && before == 0) mine[key[i]] += __popc(lanes);
      __syncwarp();
    }
  }
  __syncthreads();

  // counts become the pairs of a key in earlier warps
  const int my_key = threadIdx.x;
  int in_chunk = 0;
  if (my_key < num_keys) {
    constexpr int BATCH = 8;  // loads in flight
    for (int w = 0; w < num_warps; w += BATCH) {
      int count[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) count[i] = w + i < num_warps ? counts[(w + i) * num_keys + my_key] : 0;
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        if (w + i < num_warps) counts[(w + i) * num_keys + my_key] = in_chunk;
        in_chunk += count[i];
      }
    }
  }
  const int num_chunks = (pairs_now + THREADS * ITEMS - 1) / (THREADS * ITEMS);
  wait_for_previous_kernel();  // also where its counts are not needed: who comes next may overwrite them
  if (num_chunks > 1) {
    add_chunks(total, begin, block_counts, num_chunks, num_keys);
    __syncthreads();
  }
  const int count = my_key >= num_keys ? 0 : num_chunks > 1 ? total[my_key] : in_chunk;

  // one sum over the keys for three numbers: pairs (31 bits), active keys (11 bits), pairs in this chunk (13 bits)
  const long long own = static_cast<long long>(in_chunk) << 42 | static_cast<long long>(count > 0) << 31 | count;
  const long long through = sum_up_to(own), earlier = through - own;
  const int start = static_cast<int>(earlier & 0x7fffffff), start_in_chunk = static_cast<int>(earlier >> 42);
  if (my_key < num_keys) {
    const int here = start + begin[my_key];  // where this chunk's pairs of the key begin in `pairs`,
    begin[my_key] = start_in_chunk;          // in `sorted`,
    total[my_key] = here - start_in_chunk;   // and how far the one is from the other
  }
  if (blockIdx.x == 0) {
    if (my_key < num_keys) ends[my_key] = start + count;
    if (count > 0) {
      const int index = static_cast<int>(earlier >> 31) & 0x7ff;
      active[index] = my_key;
      first[index] = start;
    }
    if (threadIdx.x == THREADS - 1) {
      const int all = static_cast<int>(through >> 31) & 0x7ff;
      *num_active = all;
      first[all] = static_cast<int>(through & 0x7fffffff);
    }
  }
  if (threadIdx.x == THREADS - 1) sorted_in_chunk = static_cast<int>(through >> 42);
  __syncthreads();

  const bool direct = pairs_now - chunk_begin <= 8 * 32;  // so few scattered stores cost less than sorting them
  if (warp < num_warps) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (pair + 32 * i >= pairs_now) continue;
      int where = -1;
      if (key[i] >= 0) {
        const int in_sorted = begin[key[i]] + mine[key[i]] + rank[i];
        where = in_sorted + total[key[i]];
        if (direct) {
          pairs[where] = pair + 32 * i;
        } else {
          sorted[in_sorted] = pair + 32 * i;
          sorted_key[in_sorted] = key[i];
        }
      }
      position[pair + 32 * i] = where;
    }
  }
  if (direct) return;
  __syncthreads();
  for (int i = threadIdx.x; i < sorted_in_chunk; i += THREADS) pairs[i + total[sorted_key[i]]] = sorted[i];
}

#define ROUTE(ITEMS)                                                                                                   \
  extern "C" __global__ void __launch_bounds__(THREADS) route_count_##ITEMS(                                           \
      const int* __restrict__ top_k_index, const int* __restrict__ slot_of, const int* __restrict__ num_tokens,        \
      int max_tokens, int top_k, int num_experts, int num_keys, int by_slot, int* __restrict__ block_counts) {         \
    count<ITEMS>(top_k_index, slot_of, num_tokens, max_tokens, top_k, num_experts, num_keys, by_slot, block_counts);   \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(THREADS) route_place_##ITEMS(                                           \
      const int* __restrict__ top_k_index, const int* __restrict__ slot_of, const int* __restrict__ num_tokens,        \
      int max_tokens, int top_k, int num_experts, int num_keys, int by_slot, const int* block_counts,                  \
      int* __restrict__ num_active, int* __restrict__ active, int* __restrict__ first, int* __restrict__ ends,         \
      int* __restrict__ pairs, int* __restrict__ position) {                                                           \
    place<ITEMS>(top_k_index, slot_of, num_tokens, max_tokens, top_k, num_experts, num_keys, by_slot, block_counts,    \
                 num_active, active, first, ends, pairs, position);                                                    \
  }

ROUTE(1)
ROUTE(4)

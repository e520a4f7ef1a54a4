// moe_gemm.cu - the routed experts for many tokens: two grouped matrix products over BF16 slots, by wgmma.
// moe_gate_up  hs[p] = activate(gate_e xs[p] + bias, up_e xs[p] + bias)    row p: a token at its expert e, sorted by e
// moe_down     ps[p] = down_e hs[p] + bias
// Inputs     weights     gate_up [2I, H] or down [H, I] of every slot, BF16, through one tensor map
//            tokens      xs bf16 [P, H] or hs bf16 [P, I], through one tensor map for each width of a tile
//            num_active  int32 [1]    experts that have rows
//            active      int32 [E]    these experts
//            first       int32 [E+1]  where the rows of active expert i begin; first[num_active] ends the last one's
//            slot_of     int32 [E]    an expert's slot among the weights; null: its own number
//            bias_pool, bias_slot_of  with BIAS 1: those of expert e, bf16 [2I] or [H], begin at byte
//                                     bias_slot_of[e] * bias_slot_bytes + bias_offset_bytes
// Output     hs bf16 [P, I], ps fp32 [P, H]: all of rows 0 to first[num_active] - 1, nothing else
// Launch     384 threads, SMEM_BYTES of dynamic shared memory, any grid of whole clusters (best one block an SM); may
//            start before the kernel ahead has ended. moe_down must follow moe_gate_up: it reads lists at once.
// Needs      sm_90a (elsewhere it compiles to a trap); H % 8 == 0, I % 8 == 0, slots at multiples of 16 bytes
// Tile       128 * SUB weight rows, the M side of wgmma, x 16 * units tokens, the N side, units <= MAX_UNITS. The rows
//            of an expert are cut into tiles of nearly equal units: at most 15 columns an expert are for nothing.
//            With CLUSTER 2 two blocks take neighbouring tokens for the same weights, and each copies half of these to
//            both.
// Order      by expert; within one in bands of BAND token tiles, weight tile by weight tile: blocks that run at the
//            same time share weights and tokens through L2. Tile i belongs to cluster i mod (number of clusters).
// Pipeline   warp 0 copies steps of 64 columns into a ring of STAGES; two warpgroups multiply, 64 * SUB weight rows
//            each. full[s] ends when the bytes of stage s have landed, empty[s] when all warps have read it.
// Gate/up    the tensor map interleaves 8 * SUB gate rows with the up rows of the same numbers, so that a thread holds
//            both factors of its activations.
// Moves      each weight once, if all tiles of an expert run at the same time: 60 experts of 3 x 2048 x 1408 are
//            1038 MB, 237 us at 4.37 TB/s. 4096 tokens at 4 of them are 283 GFLOP, 381 us at 744 TFLOP/s. From L2 to
//            the SMs go (128 SUB + 16 units) * 128 B for 2 * 64 * 128 SUB * 16 units operations: 3.2 GB for these with
//            SUB 2 and units 9, which is near what bounds them. ps is 4 * H bytes a row.
// Numerics   fp32 sums by the tensor core, step after step of 16 columns whatever the tile; fp32 activation; h rounded
//            to BF16 once, p not. No atomics, so the bits of a row depend on that row and its expert alone.
// Reference  compute in runtime/kernels/reference.py
#include "activation.cuh"
#include "wgmma.cuh"

#ifndef SUB
#define SUB 2
#endif
#ifndef MAX_UNITS
#define MAX_UNITS 10
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef BIAS
#define BIAS 0
#endif

#if CLUSTER > 1 && __CUDA_ARCH__ >= 900
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

constexpr int THREADS = 384;                     // a warpgroup that copies and two that multiply
constexpr int UNIT = 16;                         // tokens: the step in which the width of a tile is chosen
constexpr int BAND = 12;                         // token tiles: with as many weight tiles about what runs at once
constexpr int K_STEP = 64;                       // columns: 128 bytes, a row of the 128-byte swizzle
constexpr int WEIGHT_ROWS = 128 * SUB;           // of a tile
constexpr u32 WEIGHT_BYTES = WEIGHT_ROWS * 128;  // of a stage
constexpr u32 STAGE_BYTES = WEIGHT_BYTES + MAX_UNITS * UNIT * 128;
constexpr u32 RING_BYTES = STAGES * STAGE_BYTES;  // SMEM_BYTES is 16 * STAGES more, for full[STAGES] and empty[STAGES]
constexpr int CONSUMER_WARPS = 8;
constexpr int PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = 224;  // 128 * (56 + 2 * 224) of the SM's 65536
static_assert(MAX_UNITS <= 16, "wgmma has at most 256 columns");
static_assert(SUB * MAX_UNITS <= 20, "160 sums a thread; 192 spill");
static_assert(SUB <= 2 && CLUSTER <= 2, "not made for more");

__device__ __forceinline__ int block_rank() { return CLUSTER > 1 ? cluster_rank() : 0; }

struct TokenMaps {
  TensorMap box[MAX_UNITS];  // box[u - 1] copies u * UNIT rows
};

struct Lists {
  const int *num_active, *active, *first, *slot_of;
};

struct Biases {
  const u8* pool;
  const int* slot_of;
  long long slot_bytes, offset_bytes;
  __device__ __forceinline__ const u16* of(int expert) const {
    return (const u16*)(pool + slot_of[expert] * slot_bytes + offset_bytes);
  }
};

struct Tile {
  int expert;      // place in `active`
  int weight;      // tile of weight rows
  int row, count;  // first token row, and how many are the expert's
  int units;       // width in UNIT rows
  bool alone;      // the expert's rows are all in this tile, or in those of the cluster: its weights are read once
};

// One warp's way through the tiles, asked for in ascending order. A lane looks after one expert of a window of 32.
class Walk {
 public:
  __device__ __forceinline__ Walk(const Lists& lists, int weight_tiles)
      : first_(lists.first),
        num_active_(*lists.num_active),
        weight_tiles_(weight_tiles),
        lane_(threadIdx.x % 32),
        rank_(block_rank()) {
    look();
  }

  __device__ __forceinline__ bool find(int number, Tile& tile) {
    int total;
    while (number - before_ >= (total = __shfl_sync(~0u, sum_, 31))) {
      window_ += 32;
      if (window_ >= num_active_) return false;
      before_ += total;
      look();
    }
    int local = number - before_;
    const int source = __ffs(__ballot_sync(~0u, sum_ > local)) - 1;
    const int begin = __shfl_sync(~0u, begin_, source), count = __shfl_sync(~0u, count_, source);
    const int units = (count + UNIT - 1) / UNIT, tiles = token_tiles(count);
    local -= __shfl_sync(~0u, sum_, source) - tiles * weight_tiles_;
    const int band = local / (BAND * weight_tiles_), in_band = local - band * BAND * weight_tiles_;
    const int width = min(BAND, tiles - band * BAND);
    const int which = (band * BAND + in_band % width) * CLUSTER + rank_, all = tiles * CLUSTER;
    const int even = units / all, longer = units - even * all;  // the first `longer` tiles have one unit more
    const int start = (which * even + min(which, longer)) * UNIT;
    tile.expert = window_ + source;
    tile.weight = in_band / width;
    tile.row = begin + start;
    tile.units = max(1, even + (which < longer));
    tile.count = min(tile.units * UNIT, count - start);
    tile.alone = tiles == 1;
    return true;
  }

 private:
  // of an expert, counting those of a cluster's blocks as one
  __device__ __forceinline__ static int token_tiles(int count) {
    return (count + UNIT * MAX_UNITS * CLUSTER - 1) / (UNIT * MAX_UNITS * CLUSTER);
  }

  __device__ __forceinline__ void look() {
    const int i = window_ + lane_;
    begin_ = count_ = 0;
    if (i < num_active_) {
      begin_ = first_[i];
      count_ = first_[i + 1] - begin_;
    }
    sum_ = token_tiles(count_) * weight_tiles_;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum_, step);
      if (lane_ >= step) sum_ += other;
    }
  }

  const int* first_;
  int num_active_, weight_tiles_, lane_, rank_, window_ = 0, before_ = 0;
  int begin_, count_, sum_;  // of the lane's expert; sum_ counts the tiles of the window up to and with it
};

struct Ring {
  u32 base;
  int stage = 0;
  u32 phase = 0;
  __device__ __forceinline__ u32 weights() const { return base + stage * STAGE_BYTES; }
  __device__ __forceinline__ u32 tokens() const { return weights() + WEIGHT_BYTES; }
  __device__ __forceinline__ u32 full() const { return base + RING_BYTES + stage * 8; }
  __device__ __forceinline__ u32 empty() const { return full() + STAGES * 8; }
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

// Transpose of an 8x8 matrix of 16-bit elements, of which thread t holds row t / 4, columns 2 * (t % 4) and the next.
__device__ __forceinline__ u32 transpose(u32 pair) {
  u32 turned;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}

// ---- what is particular to each product: which weights a tile copies, and how its sums leave
struct GateUp {
  static constexpr bool BEGINS_EARLY = false;
  int inner;  // I
  u16* out;   // hs
  __device__ __forceinline__ int weight_tiles() const { return (2 * inner + WEIGHT_ROWS - 1) / WEIGHT_ROWS; }

  // gate_up as [slot][block of 8 SUB rows][gate, up][row][k]: a stage holds 8 SUB gate rows, as many up rows, and so on
  __device__ __forceinline__ static void copy_weights(u32 to, const TensorMap* map, int k, int part, int slot,
                                                      u32 barrier, u64 policy) {
    copy_5d_to_all(to, map, k, 0, 0, part * (8 / CLUSTER), slot, barrier, policy);
  }

  template <int WIDTH>
  __device__ __forceinline__ void store(const float (&sums)[SUB][WIDTH / 2], const Tile& tile, const u16* bias) const {
    const int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32, r = lane / 4, q = lane % 4;
    const int base = (tile.weight * 8 + warp) * 8 * SUB;  // the warp makes 8 SUB neighbouring elements of each row
    float gate_bias[SUB], up_bias[SUB];
#pragma unroll
    for (int s = 0; s < SUB; s++) {
      const int i = min(base + 8 * s + r, inner - 1);
      gate_bias[s] = BIAS ? bf16_to_f32(bias[i]) : 0.0f;
      up_bias[s] = BIAS ? bf16_to_f32(bias[inner + i]) : 0.0f;
    }
    u32 pair[WIDTH / 8][SUB];  // in steps over all columns, so that long latencies overlap
#pragma unroll
    for (int j = 0; j < WIDTH / 8; j++) {
#pragma unroll
      for (int s = 0; s < SUB; s++) {
        float h[2];
#pragma unroll
        for (int c = 0; c < 2; c++) {
          const float gate = sums[s][4 * j + c], up = sums[s][4 * j + 2 + c];
          h[c] = BIAS ? activate(gate + gate_bias[s], up + up_bias[s]) : activate(gate, up);
        }
        pair[j][s] = f32_to_bf16x2(h[1], h[0]);
      }
    }
#pragma unroll
    for (int j = 0; j < WIDTH / 8; j++) {
#pragma unroll
      for (int s = 0; s < SUB; s++) pair[j][s] = transpose(pair[j][s]);  // now token 8j + r, elements 2q, 2q + 1
    }
    const bool odd = q & 1;
    if (SUB == 2) {  // even q takes the first eight's pair of its neighbour, odd q the second eight's: 8 bytes a thread
#pragma unroll
      for (int j = 0; j < WIDTH / 8; j++) {
        const u32 other = __shfl_xor_sync(~0u, odd ? pair[j][0] : pair[j][SUB - 1], 1);
        (odd ? pair[j][0] : pair[j][SUB - 1]) = other;
      }
    }
    const int i = SUB == 1 ? 2 * q : odd ? 8 + 2 * (q - 1) : 2 * q;
    u16* row = out + (long long)(tile.row + r) * inner + base + i;
    const int rows = base + i < inner ? tile.count - r : 0;
#pragma unroll
    for (int j = 0; j < WIDTH / 8; j++) {
      if (8 * j < rows) {
        if (SUB == 1) *(u32*)row = pair[j][0];
        else *(uint2*)row = make_uint2(pair[j][0], pair[j][SUB - 1]);
      }
      row += 8 * (long long)inner;
    }
  }
};

struct Down {
  static constexpr bool BEGINS_EARLY = true;  // its weights and lists are there before moe_gate_up, just ahead, ends
  int hidden;  // H
  float* out;  // ps
  __device__ __forceinline__ int weight_tiles() const { return (hidden + WEIGHT_ROWS - 1) / WEIGHT_ROWS; }

  // down as [slot][row][k]
  __device__ __forceinline__ static void copy_weights(u32 to, const TensorMap* map, int k, int part, int slot,
                                                      u32 barrier, u64 policy) {
    copy_3d_to_all(to, map, k, part * (WEIGHT_ROWS / CLUSTER), slot, barrier, policy);
  }

  template <int WIDTH>
  __device__ __forceinline__ void store(const float (&sums)[SUB][WIDTH / 2], const Tile& tile, const u16* bias) const {
    const int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32, r = lane / 4, q = lane % 4;
    const int base = (tile.weight * 8 + warp) * 16 * SUB;  // the warp makes 16 SUB neighbouring elements of each row
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int s = 0; s < SUB; s++) {
        const int i = base + 8 * (h * SUB + s) + r;
        if (i >= hidden) continue;
        const float add = BIAS ? bf16_to_f32(bias[i]) : 0.0f;
        float* row = out + (long long)(tile.row + 2 * q) * hidden + i;
#pragma unroll
        for (int j = 0; j < WIDTH / 8; j++) {
#pragma unroll
          for (int c = 0; c < 2; c++) {
            if (8 * j + 2 * q + c < tile.count) row[(long long)c * hidden] = sums[s][4 * j + 2 * h + c] + add;
          }
          row += 8 * (long long)hidden;
        }
      }
    }
  }
};

template <class Product>
__device__ __forceinline__ void produce(const Product& product, const Lists& lists, const TensorMap* weights,
                                        const TokenMaps* tokens, int k_steps, Ring ring) {
  const bool leader = threadIdx.x == 0;
  Walk walk(lists, product.weight_tiles());
  const u64 once = evict_first(), keep = evict_normal();
  bool waited = !Product::BEGINS_EARLY;
  const int rank = block_rank();
  const u32 share = rank * (WEIGHT_BYTES / CLUSTER);  // where the weights go that this block copies for its cluster
  Tile tile;
  for (int number = blockIdx.x / CLUSTER; walk.find(number, tile); number += gridDim.x / CLUSTER) {
    if (leader) {
      const int expert = lists.active[tile.expert], slot = lists.slot_of ? lists.slot_of[expert] : expert;
      const TensorMap* map = &tokens->box[tile.units - 1];
      const u32 bytes = WEIGHT_BYTES + tile.units * UNIT * 128;
      const u64 policy = tile.alone ? once : keep;
      const int part = tile.weight * CLUSTER + rank;
      int step = 0;
      if (!waited) {  // the first fill: weights at once, the rows that the kernel ahead writes when it has ended
        const int fill = min(k_steps, STAGES);
        Ring early = ring;
        for (; step < fill; step++, early.advance()) {
          mbarrier_expect(early.full(), bytes);
          Product::copy_weights(early.weights() + share, weights, step * K_STEP, part, slot, early.full(), policy);
        }
        wait_for_previous_kernel();
        waited = true;
        for (step = 0; step < fill; step++, ring.advance())
          copy_2d(ring.tokens(), map, step * K_STEP, tile.row, ring.full());
      }
      for (; step < k_steps; step++, ring.advance()) {
        mbarrier_wait(ring.empty(), ring.phase ^ 1);  // passes at once in the first round
        mbarrier_expect(ring.full(), bytes);
        Product::copy_weights(ring.weights() + share, weights, step * K_STEP, part, slot, ring.full(), policy);
        copy_2d(ring.tokens(), map, step * K_STEP, tile.row, ring.full());
      }
    }
    __syncwarp();
  }
  if (leader && !waited) wait_for_previous_kernel();  // a block without tiles ends no sooner than the kernel ahead
}

// A warp has read a stage. Every block of the cluster writes to it, so each of their producers must know: lane i tells
// block i.
__device__ __forceinline__ void release(u32 empty) {
  const int lane = threadIdx.x % 32;
  if (lane < CLUSTER) CLUSTER > 1 ? mbarrier_arrive_at(empty, lane) : mbarrier_arrive(empty);
}

template <int WIDTH>
__device__ __forceinline__ void multiply(float (&sums)[SUB][WIDTH / 2], Ring& ring, int k_steps) {
  const int group = threadIdx.x / 128 - 1;
  u32 previous = 0;
  for (int step = 0; step < k_steps; step++) {
    mbarrier_wait(ring.full(), ring.phase);
    u64 a = descriptor(ring.weights() + group * (64 * SUB * 128), 1024 * SUB);  // groups of 8 rows alternate over s
    u64 b = descriptor(ring.tokens(), 1024);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < K_STEP / 16; k++) {
#pragma unroll
      for (int s = 0; s < SUB; s++) Wgmma<WIDTH>::mma(sums[s], a + 2 * k + 64 * s, b + 2 * k);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (step > 0) release(previous);
    previous = ring.empty();
    ring.advance();
  }
  wgmma_wait<0>();
  release(previous);
}

template <class Product, int WIDTH>
__device__ __forceinline__ void compute(const Product& product, const Tile& tile, const u16* bias, int k_steps,
                                        Ring& ring) {
  if constexpr (WIDTH <= MAX_UNITS * UNIT) {
    float sums[SUB][WIDTH / 2] = {};  // left unset for wgmma to set, they would take registers in all other widths too
    multiply<WIDTH>(sums, ring, k_steps);
    product.template store<WIDTH>(sums, tile, bias);
  }
}

template <class Product>
__device__ __forceinline__ void consume(const Product& product, const Lists& lists, const Biases& biases, int k_steps,
                                        Ring ring) {
  Walk walk(lists, product.weight_tiles());
  Tile tile;
  for (int number = blockIdx.x / CLUSTER; walk.find(number, tile); number += gridDim.x / CLUSTER) {
    const u16* bias = BIAS ? biases.of(lists.active[tile.expert]) : nullptr;
#define WIDE(U)                                               \
  case U:                                                     \
    compute<Product, U * UNIT>(product, tile, bias, k_steps, ring); \
    break;
    switch (tile.units) {
      WIDE(1) WIDE(2) WIDE(3) WIDE(4) WIDE(5) WIDE(6) WIDE(7) WIDE(8)
      WIDE(9) WIDE(10) WIDE(11) WIDE(12) WIDE(13) WIDE(14) WIDE(15) WIDE(16)
    }
#undef WIDE
  }
}

template <class Product>
__device__ __forceinline__ void run(const Product& product, const Lists& lists, const Biases& biases,
                                    const TensorMap* weights, const TokenMaps* tokens, int columns) {
  extern __shared__ __align__(1024) u8 memory[];
  const Ring ring{shared_address(memory)};
  const int k_steps = (columns + K_STEP - 1) / K_STEP;
  if (threadIdx.x == 0) {
    if (ring.base % 1024) __trap();  // the swizzle goes by address
    prefetch_map(weights);
    for (int s = 0; s < STAGES; s++) {
      mbarrier_init(ring.base + RING_BYTES + s * 8, 1);
      mbarrier_init(ring.base + RING_BYTES + (STAGES + s) * 8, CONSUMER_WARPS * CLUSTER);
    }
    mbarrier_init_fence();
  }
  CLUSTER > 1 ? cluster_sync() : __syncthreads();
  if (!Product::BEGINS_EARLY) wait_for_previous_kernel();
  let_next_kernel_start();
  if (threadIdx.x < 128) {
    registers_down<PRODUCER_REGISTERS>();
    if (threadIdx.x < 32) produce(product, lists, weights, tokens, k_steps, ring);
  } else {
    registers_up<CONSUMER_REGISTERS>();
    consume(product, lists, biases, k_steps, ring);
  }
#if CLUSTER > 1
  __syncwarp();
  cluster_sync();  // until the others have told this block's barriers their last
#endif
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define RUN(product, columns)                                                                      \
  run(product, Lists{num_active, active, first, slot_of},                                          \
      Biases{bias_pool, bias_slot_of, bias_slot_bytes, bias_offset_bytes}, &weights, &tokens, columns)
#else
#define RUN(product, columns) __trap()
#endif

// The lists are not __restrict__: as read-only data they might be read before the kernel ahead has written them.
extern "C" __global__ void __launch_bounds__(THREADS, 1) CLUSTERED moe_gate_up(
    const __grid_constant__ TensorMap weights, const __grid_constant__ TokenMaps tokens, const int* num_active,
    const int* active, const int* first, const int* slot_of, const u8* bias_pool, const int* bias_slot_of,
    long long bias_slot_bytes, long long bias_offset_bytes, u16* hs, int hidden, int inner) {
  RUN((GateUp{inner, hs}), hidden);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) CLUSTERED moe_down(
    const __grid_constant__ TensorMap weights, const __grid_constant__ TokenMaps tokens, const int* num_active,
    const int* active, const int* first, const int* slot_of, const u8* bias_pool, const int* bias_slot_of,
    long long bias_slot_bytes, long long bias_offset_bytes, float* ps, int hidden, int inner) {
  RUN((Down{hidden, ps}), inner);
}

// common.cpp - what of common.cuh and of CUDA's own functions waits, copies or computes for a whole warp.
#include "common.cuh"
#include "machine.hpp"

void __syncwarp() {
  simt::together(1, "__syncwarp", nullptr, 0, nullptr, 0, [](simt::Warp&) {});
}
u32 __ballot_sync(u32, bool vote) {
  u32 in = vote, out;
  simt::together(2, "__ballot_sync", &in, 1, &out, 1, [](simt::Warp& w) {
    u32 bits = 0;
    for (int i = 0; i < 32; i++) bits |= (w.in[i][0] & 1) << i;
    for (int i = 0; i < 32; i++) w.out[i][0] = bits;
  });
  return out;
}
u32 simt_shuffle(int op, const char* what, u32 v, u32 source) {
  u32 in[2] = {v, source}, out;
  simt::together(op, what, in, 2, &out, 1, [](simt::Warp& w) {
    for (int i = 0; i < 32; i++) w.out[i][0] = w.in[w.in[i][1]][0];
  });
  return out;
}
u32 __match_any_sync(u32, int v) {
  u32 in = (u32)v, out;
  simt::together(10, "__match_any_sync", &in, 1, &out, 1, [](simt::Warp& w) {
    for (int i = 0; i < 32; i++) {
      w.out[i][0] = 0;
      for (int j = 0; j < 32; j++) w.out[i][0] |= (u32)(w.in[i][0] == w.in[j][0]) << j;
    }
  });
  return out;
}

static void land(const simt::Async& a) { memcpy(smem + a.dst, a.data, sizeof a.data); }
void copy_async_or_zero(u32 dst, const void* src, bool there) {
  simt::Async a{dst, {}};
  simt::at_shared(dst, 16);
  if (there) memcpy(a.data, src, 16);
  memset(smem + dst, 0xff, 16);
  if (simt::lane().machine->copies == simt::AT_ONCE) land(a);
  simt::lane().open.push_back(a);
}
void copy_commit() { simt::lane().groups.push_back(std::move(simt::lane().open)), simt::lane().open.clear(); }
void simt_copy_wait(u32 left) {
  auto& groups = simt::lane().groups;
  while (groups.size() > left) {
    for (auto& a : groups.front()) land(a);
    groups.pop_front();
  }
}

void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  u32 in[6] = {a0, a1, a2, a3, b0, b1}, out[4];
  simt::together(6, "mma", in, 6, out, 4, [](simt::Warp& w) {
    float a[16][16], b[16][8];
    for (int l = 0; l < 32; l++) {
      const int r = l / 4, k = l % 4 * 2;
      for (int h = 0; h < 2; h++) {
        auto half = [&](int i) { return bf16_to_f32(w.in[l][i] >> (16 * h) & 0xffff); };
        a[r][k + h] = half(0), a[r + 8][k + h] = half(1), a[r][k + 8 + h] = half(2), a[r + 8][k + 8 + h] = half(3);
        b[k + h][r] = half(4), b[k + 8 + h][r] = half(5);
      }
    }
    float sums[16][8] = {};
    for (int i = 0; i < 16; i++)
      for (int k = 0; k < 16; k++)
        for (int j = 0; j < 8; j++) sums[i][j] += a[i][k] * b[k][j];
    for (int l = 0; l < 32; l++)
      for (int i = 0; i < 4; i++) w.out[l][i] = __float_as_uint(sums[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2]);
  });
  for (int i = 0; i < 4; i++) c[i] += __uint_as_float(out[i]);
}
void load_transposed(u32 address, u32 (&a)[4]) {
  simt::together(9, "ldmatrix", &address, 1, a, 4, [](simt::Warp& w) {
    for (int l = 0; l < 32; l++)
      for (int i = 0; i < 4; i++) {
        auto half = [&](int row) { return (u32)simt_lds<u16>(w.in[8 * i + row][0] + 2 * (l / 4)); };
        w.out[l][i] = half(l % 4 * 2) | half(l % 4 * 2 + 1) << 16;
      }
  });
}

static simt::Barrier& barrier_at(u32 address) {
  auto& barriers = simt::lane().own->barriers;
  auto found = barriers.find(address);
  if (found == barriers.end()) simt::fail("an mbarrier that was not initialised");
  return found->second;
}
static void settle(simt::Barrier& b, simt::Machine& machine) {
  if (b.pending == 0 && b.bytes == 0) b.phase++, b.pending = b.expected, machine.events++;
}
void simt::land(Block& block, size_t i) {
  Bulk bulk = std::move(block.bulks[i]);
  block.bulks.erase(block.bulks.begin() + i);
  memcpy(block.shared.data() + bulk.dst, bulk.data.data(), bulk.data.size());
  Barrier& b = block.barriers[bulk.barrier];
  b.bytes -= (long long)bulk.data.size();
  settle(b, *block.machine);
}
void barrier_init(u32 barrier, u32 arrivals) {
  simt::at_shared(barrier, 8);
  simt::Barrier b;
  b.expected = b.pending = arrivals;
  simt::lane().own->barriers[barrier] = b;
}
void barrier_expect_more(u32 barrier, u32 bytes) {
  simt::Barrier& b = barrier_at(barrier);
  if (b.pending == 0) simt::fail("bytes expected of a phase that may be over");
  b.bytes += bytes;
}
void barrier_arrive(u32 barrier) {
  barrier_arrive_times(barrier, 1);
  if (simt::lane().machine->random() % 8 == 0) simt::yield("others, behind an arrival");   // what follows may come after what it lets go
}
void barrier_arrive_times(u32 barrier, u32 n) {
  simt::Barrier& b = barrier_at(barrier);
  if (b.pending < (int)n) simt::fail("more arrivals than an mbarrier expects");
  b.pending -= n;
  settle(b, *simt::lane().machine);
}
void barrier_arrive_expect(u32 barrier, u32 bytes) {
  barrier_expect_more(barrier, bytes);
  barrier_arrive(barrier);
}
void barrier_wait(u32 barrier, u32 phase) {
  simt::wait_while("an mbarrier", &barrier_at(barrier).phase, 1, phase & 1);
}
bool elect_lane() {
  simt::together(7, "elect", nullptr, 0, nullptr, 0, [](simt::Warp&) {});
  return simt::lane_id() == 0;
}
void copy_bulk(u32 dst, const void* src, u32 bytes, u32 barrier) {
  if (bytes % 16 || dst % 16 || (uintptr_t)src % 16) simt::fail("a bulk copy that is not in pieces of 16 bytes");
  simt::Block& block = *simt::lane().own;
  if ((u64)dst + bytes > block.shared.size()) simt::fail("a bulk copy past shared memory");
  block.bulks.push_back({dst, std::vector<u8>((const u8*)src, (const u8*)src + bytes), barrier});
  memset(smem + dst, 0xff, bytes);
  if (simt::lane().machine->copies == simt::AT_ONCE) simt::land(block, block.bulks.size() - 1);
}

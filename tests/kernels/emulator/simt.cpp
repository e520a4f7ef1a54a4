// simt.cpp - the scheduler of the emulated machine: it picks a warp, lets its lanes run until they wait, and so on.
#include "simt.hpp"

namespace simt {
static void enter() {
  Machine* m = machine;
  Lane* self = m->now;
  m->kernel();
  self->done = true, self->block->live--;
  event();
  while (true) leave();
}

static std::unique_ptr<Block> make_block(Machine& m, u32 index) {
  if (m.begun) m.begun();
  auto block = std::make_unique<Block>();
  block->index = index, block->live = m.threads;
  block->shared.resize(m.shared_bytes);
  for (auto& byte : block->shared) byte = (u8)m.random();         // nothing may rely on zeros
  block->warps.resize(m.threads / 32), block->slow.resize(m.threads / 32);
  const size_t stack = 64 << 10;
  block->stack_bytes = stack * m.threads;
  block->stacks = (char*)mmap(nullptr, block->stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  for (u32 t = 0; t < m.threads; t++) {
    auto lane = std::make_unique<Lane>();
    lane->thread = t, lane->block = block.get(), lane->warp = &block->warps[t / 32];
    getcontext(&lane->context);
    lane->context.uc_stack.ss_sp = block->stacks + stack * t, lane->context.uc_stack.ss_size = stack, lane->context.uc_link = nullptr;
    makecontext(&lane->context, (void (*)())enter, 0);
    block->lanes.push_back(std::move(lane));
  }
  return block;
}

std::string run(std::vector<Machine*> machines, std::vector<u32> resident, u32 seed) {
  std::mt19937 random(seed);
  struct State { std::vector<std::unique_ptr<Block>> blocks; u32 started = 0; };
  std::vector<State> states(machines.size());
  u64 seen = 0, steps = 0;
  u32 idle = 0;
  while (true) {
    bool left = false;
    u64 events = 0;
    u32 live_warps = 0;
    for (size_t k = 0; k < machines.size(); k++) {
      Machine& m = *machines[k];
      State& s = states[k];
      for (size_t i = 0; i < s.blocks.size();)
        if (s.blocks[i]->live == 0) {
          if (!s.blocks[i]->bulks.empty()) return "a block ended before its copies";
          s.blocks.erase(s.blocks.begin() + i);
        } else i++;
      while (s.started < m.grid * m.grid_y && s.blocks.size() < resident[k]) s.blocks.push_back(make_block(m, s.started++)), m.events++;
      left = left || !s.blocks.empty();
      events += m.events;
      for (auto& b : s.blocks) live_warps += b->warps.size();
    }
    if (!left) return "";
    idle = events == seen ? idle + 1 : 0;
    seen = events;
    if (idle > 4000 * live_warps) {
      std::map<std::string, int> waits;
      for (auto& s : states) for (auto& b : s.blocks) for (auto& l : b->lanes) if (!l->done) waits[l->waits]++;
      std::string what = "no thread gets on:";
      for (auto& w : waits) what += " " + std::to_string(w.second) + " wait for " + w.first + ";";
      return what;
    }
    const size_t k = random() % machines.size();
    Machine& m = *machines[k];
    State& s = states[k];
    if (s.blocks.empty()) continue;
    Block& b = *s.blocks[random() % s.blocks.size()];
    if (!b.bulks.empty() && (m.copies == RANDOM ? random() % 8 == 0 : idle > 4 * live_warps)) land(b, random() % b.bulks.size());
    if (steps++ % 4000 == 0)
      for (auto& state : states)
        for (auto& block : state.blocks) {
          const u32 slow_of_8 = random() % 4;         // none, few, half or most of the warps
          for (auto& slow : block->slow) slow = random() % 8 < std::vector<u32>{0, 1, 4, 7}[slow_of_8];
        }
    u32 w;
    do w = random() % b.warps.size();
    while (b.slow[w] && random() % 128);
    machine = &m;
    for (u32 i = 0; i < 32; i++) {
      Lane& l = *b.lanes[w * 32 + i];
      if (l.done) continue;
      go_on(m, l);
      if (!m.fault.empty()) return m.fault;
    }
  }
}
}  // namespace simt

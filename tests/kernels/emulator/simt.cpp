// simt.cpp - the scheduler of the emulated machine: it picks a warp, lets its lanes run until they wait, and so on.
#include "machine.hpp"

namespace simt {
Place* here = nullptr;
static jmp_buf scheduler;

static void leave() {  // to the scheduler, until it comes back
  if (!_setjmp(lane().at)) _longjmp(scheduler, 1);
}
static void go_on(Lane& l) {
  here = &l;
  if (_setjmp(scheduler)) return;
  if (l.started) _longjmp(l.at, 1);
  l.started = true;
  setcontext(&l.context);
}
void fail(const char* what) {
  std::string& fault = lane().machine->fault;
  if (fault.empty()) fault = std::string(what) + " (block " + std::to_string(here->block) + ", thread " + std::to_string(here->thread) + ")";
  while (true) leave();
}
void yield(const char* what) {
  lane().waits = what;
  leave();
}
void wait_while(const char* what, const u64* watched, u64 mask, u64 before) {
  if ((*watched & mask) != before) return;
  Lane& l = lane();
  l.waits = what, l.watched = watched, l.mask = mask, l.before = before;
  leave();
  l.watched = nullptr;
}
void event() { lane().machine->events++; }

void together(int op, const char* what, const u32* in, int words, u32* out, int results, void (*work)(Warp&)) {
  Warp& w = *lane().warp;
  const u32 me = lane_id();
  if (w.arrived == 0) w.op = op;
  if (w.op != op) fail((std::string("a warp whose lanes meet in different operations: ") + what).c_str());
  memcpy(w.in[me], in, words * 4);
  if (++w.arrived == 32) {
    work(w);
    w.arrived = 0, w.round++;
    event();
  } else wait_while(what, &w.round, ~0ull, w.round);
  memcpy(out, w.out[me], results * 4);
}
static bool pass(Gate& g, u32 threads) {
  if (g.arrived == 0) g.threads = threads;
  if (g.threads != threads) fail("a barrier for different numbers of threads");
  if (++g.arrived < threads) return false;
  g.arrived = 0, g.round++;
  event();
  return true;
}
bool pass(int id, u32 threads) { return pass(lane().own->gates[id], threads); }
void gate(int id, u32 threads, const char* what) {
  Gate& g = lane().own->gates[id];
  const u64 round = g.round;
  if (!pass(g, threads)) wait_while(what, &g.round, ~0ull, round);
}

static void all_there(Machine& m) {
  if (!m.there) for (int i = 0; i < m.late.count; i++) memcpy(m.late.at[i], m.ahead[i].data(), m.ahead[i].size());
  m.there = true;
}
void waited() { all_there(*lane().machine); }

static void enter() {
  Lane& self = lane();
  self.machine->kernel(self.machine->with);
  self.done = true, self.own->live--;
  event();
  while (true) leave();
}

static std::unique_ptr<Block> make_block(Machine& m, u32 index) {
  m.there = false;
  for (int i = 0; i < m.late.count; i++) memset(m.late.at[i], 0xff, m.late.bytes[i]);
  auto block = std::make_unique<Block>();
  block->machine = &m, block->live = m.threads;
  block->shared.resize(m.shared_bytes);
  for (auto& byte : block->shared) byte = (u8)m.random();         // nothing may rely on zeros
  block->warps.resize(m.threads / 32), block->slow.resize(m.threads / 32);
  const size_t stack = 64 << 10;
  block->stack_bytes = stack * m.threads;
  block->stacks = (char*)mmap(nullptr, block->stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  block->lanes = std::make_unique<Lane[]>(m.threads);
  for (u32 t = 0; t < m.threads; t++) {
    Lane& lane = block->lanes[t];
    (Place&)lane = {t, index, m.grid, m.grid_y, m.threads, m.shared_bytes, block->shared.data()};
    lane.machine = &m, lane.own = block.get(), lane.warp = &block->warps[t / 32];
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = block->stacks + stack * t, lane.context.uc_stack.ss_size = stack, lane.context.uc_link = nullptr;
    makecontext(&lane.context, (void (*)())enter, 0);
  }
  return block;
}

static std::string run(std::vector<std::unique_ptr<Machine>>& machines, u32 resident, u32 seed) {
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
      while (s.started < m.grid * m.grid_y && s.blocks.size() < resident) s.blocks.push_back(make_block(m, s.started++)), m.events++;
      left = left || !s.blocks.empty();
      events += m.events;
      for (auto& b : s.blocks) live_warps += b->warps.size();
    }
    if (!left) return "";
    idle = events == seen ? idle + 1 : 0;
    seen = events;
    if (idle > 4000 * live_warps) {
      std::map<std::string, int> waits;
      for (auto& s : states)
        for (auto& b : s.blocks)
          for (u32 t = 0; t < b->warps.size() * 32; t++) if (!b->lanes[t].done) waits[b->lanes[t].waits]++;
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
    for (u32 i = 0; i < 32; i++) {
      Lane& l = b.lanes[w * 32 + i];
      if (l.done || (l.watched && (*l.watched & l.mask) == l.before)) continue;
      go_on(l);
      if (!m.fault.empty()) return m.fault;
    }
  }
}

const char* run(const Launch* launches, int count, u32 resident, u32 seed) {
  std::vector<std::unique_ptr<Machine>> machines;
  for (int i = 0; i < count; i++) {
    machines.push_back(std::make_unique<Machine>());
    Machine& m = *machines.back();
    (Launch&)m = launches[i];
    m.random.seed(m.seed);
    for (int k = 0; k < m.late.count; k++) m.ahead.emplace_back(m.late.at[k], m.late.at[k] + m.late.bytes[k]);
  }
  static std::string fault;
  fault = run(machines, resident, seed);
  for (auto& m : machines) all_there(*m);
  return fault.empty() ? nullptr : fault.c_str();
}
}  // namespace simt

// machine.hpp - the emulated machine's own state, of which a kernel sees only what simt.hpp says.
#pragma once
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "simt.hpp"

namespace simt {
template <class T> struct Guarded {   // memory between pages that nobody may touch, at whose end it ends
  using value_type = T;
  static size_t whole(size_t n) { return (n + 4095) / 4096 * 4096 + 8192; }
  T* allocate(size_t n) {
    char* at = (char*)mmap(nullptr, whole(n), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == (char*)MAP_FAILED) throw std::bad_alloc();
    mprotect(at, 4096, PROT_NONE), mprotect(at + whole(n) - 4096, 4096, PROT_NONE);
    return (T*)(at + whole(n) - 4096 - (n + 15) / 16 * 16);
  }
  void deallocate(T* p, size_t n) { munmap((char*)p + (n + 15) / 16 * 16 + 4096 - whole(n), whole(n)); }
};
struct Barrier { u32 expected = 0, pending = 0; long long bytes = 0; u64 phase = 0; };   // an mbarrier
struct Bulk { u32 dst; std::vector<u8> data; u32 barrier; };
struct Gate { u32 arrived = 0, threads = 0; u64 round = 0; };                            // a barrier of so many threads
struct Async { u32 dst; u8 data[16]; };

struct Block;
struct Machine;
struct Lane : Place {
  ucontext_t context;   // only to start on a stack of its own
  jmp_buf at;           // where it goes on; unlike swapcontext, a jump calls no system
  bool started = false, done = false;
  Machine* machine = nullptr;
  Block* own = nullptr;
  Warp* warp = nullptr;
  const char* waits = "";
  const u64* watched = nullptr;   // while *watched & mask is `before`, it would only wait on
  u64 mask = 0, before = 0;
  std::deque<std::vector<Async>> groups;
  std::vector<Async> open;
};
struct Block {
  Machine* machine = nullptr;
  u32 live = 0;
  std::vector<u8, Guarded<u8>> shared;
  std::unique_ptr<Lane[]> lanes;
  std::vector<Warp> warps;
  std::vector<u8> slow;     // warps that run a hundred times less often
  std::map<u32, Barrier> barriers;
  std::map<int, Gate> gates;
  std::vector<Bulk> bulks;
  char* stacks = nullptr;
  size_t stack_bytes = 0;
  ~Block() { if (stacks) munmap(stacks, stack_bytes); }
};

struct Machine : Launch {
  std::mt19937 random;
  u64 events = 0;                    // things that others may have waited for
  std::string fault;
  std::vector<std::vector<u8>> ahead;  // what the kernel ahead has written
  bool there = false;
};

inline Lane& lane() { return *(Lane*)here; }
// Lets others run until *watched & mask is no longer `before`
void wait_while(const char* what, const u64* watched, u64 mask, u64 before);
void land(Block& block, size_t i);   // a bulk copy
}  // namespace simt

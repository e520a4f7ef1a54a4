// Runs the kernel for few tokens, which is included as it is, on the emulated machine.
#include KERNEL_FILE

constexpr int MAX_CALLS = 8;

#if RECORDS
static struct { const int* record_of; const u8* records; u64 record_bytes; const u8* directory; } own;
#define MORE , own.record_of, own.records, own.record_bytes, own.directory
// What further calls take beside their arguments
extern "C" void set_records(const int* record_of, const u8* records, u64 record_bytes, const u8* directory) { own = {record_of, records, record_bytes, directory}; }
#else
#define MORE
#endif

static bool late = false;
// Whether what further calls read and the kernel ahead may write comes late: one call of one block then
extern "C" void come_late(int yes) { late = yes; }

// `calls` launches of one geometry, all at once: call i takes x, index, weight, y, state and h from its place. Returns null or what failed.
extern "C" const char* run_experts(int calls, u32 grid, u32 resident, int copies, u32 seed, const u16* x, const int* index, const float* weight, const int* slot_of,
                                   const u8* pool, u32* state, u16* h, u16* y, float* pairs, int num_tokens, int resume, int first_claim) {
  struct Call {
    const u16* x;
    const int* index;
    const float* weight;
    const int* slot_of;
    const u8* pool;
    u32* state;
    u16 *h, *y;
    float* pairs;
    int num_tokens, resume, first_claim;
    void operator()() const { KERNEL_NAME(x, index, weight, slot_of, pool, state, h, y, pairs, num_tokens, resume, first_claim MORE); }
  };
  if (calls > MAX_CALLS) return "more calls at once than MAX_CALLS";
  Call all[MAX_CALLS];
  simt::Launch launches[MAX_CALLS];
  for (int i = 0; i < calls; i++) {
    all[i] = {x + (size_t)i * num_tokens * HIDDEN, index + (size_t)i * num_tokens * TOP_K, weight + (size_t)i * num_tokens * TOP_K, slot_of, pool, state + 2 * i,
              h + (size_t)i * 2 * MAX_PAIRS * INTER, y + (size_t)i * num_tokens * HIDDEN, pairs, num_tokens, resume, first_claim};
    launches[i] = simt::launch_of(all[i]);
    launches[i].grid = grid, launches[i].threads = THREADS, launches[i].shared_bytes = SHARED_BYTES;
    launches[i].copies = (simt::Copies)copies, launches[i].seed = seed + i;
  }
  const size_t choices = (size_t)num_tokens * TOP_K * 4;
  u8* const at[] = {(u8*)x, (u8*)index, (u8*)weight, (u8*)slot_of, (u8*)state, (u8*)h, (u8*)pairs};
  const u64 bytes[] = {(u64)num_tokens * HIDDEN * 2, choices, choices, NUM_EXPERTS * 4, 8, (u64)MAX_PAIRS * INTER * 4, choices * HIDDEN};
  if (late && (calls > 1 || grid > 1)) return "what comes late, for several blocks";
  if (late) launches[0].late = {pairs ? 7 : 6, at, bytes};
  return simt::run(launches, calls, resident, seed);
}
extern "C" int shared_bytes() { return SHARED_BYTES; }

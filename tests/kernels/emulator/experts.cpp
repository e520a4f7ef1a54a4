// Runs the kernel for few tokens, which is included as it is, on the emulated machine.
#include KERNEL_FILE

static simt::Machine machine_of(u32 grid, u32 shared_bytes, int copies, u32 seed, std::function<void()> kernel) {
  simt::Machine m;
  m.grid = grid, m.threads = THREADS, m.shared_bytes = shared_bytes, m.copies = (simt::Copies)copies, m.random.seed(seed), m.kernel = kernel;
  return m;
}
static char message[512];
#if RECORDS
static struct { const int* record_of; const u8* records; u64 record_bytes; const u8* directory; } own;
#define MORE , own.record_of, own.records, own.record_bytes, own.directory
// What further calls take beside their arguments
extern "C" void set_records(const int* record_of, const u8* records, u64 record_bytes, const u8* directory) { own = {record_of, records, record_bytes, directory}; }
#else
#define MORE
#endif

// `calls` launches of one geometry, all at once: call i takes x, index, weight, y, state and h from its place. Returns null or what failed.
extern "C" const char* run_experts(int calls, u32 grid, u32 resident, int copies, u32 seed, const u16* x, const int* index, const float* weight, const int* slot_of,
                                   const u8* pool, u32* state, u16* h, u16* y, float* pairs, int num_tokens, int resume, int first_claim) {
  std::vector<simt::Machine> machines;
  for (int i = 0; i < calls; i++)
    machines.push_back(machine_of(grid, SHARED_BYTES, copies, seed + i, [=] {
      KERNEL_NAME(x + (size_t)i * num_tokens * HIDDEN, index + (size_t)i * num_tokens * TOP_K, weight + (size_t)i * num_tokens * TOP_K, slot_of, pool, state + 2 * i,
                  h + (size_t)i * 2 * MAX_PAIRS * INTER, y + (size_t)i * num_tokens * HIDDEN, pairs, num_tokens, resume, first_claim MORE);
    }));
  std::vector<simt::Machine*> all;
  for (auto& m : machines) all.push_back(&m);
  const std::string fault = simt::run(all, std::vector<u32>(calls, resident), seed);
  snprintf(message, sizeof message, "%s", fault.c_str());
  return fault.empty() ? nullptr : message;
}
extern "C" int shared_bytes() { return SHARED_BYTES; }

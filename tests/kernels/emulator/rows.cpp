// Runs the kernels of a decoding pass's dense steps, included as they are, on the emulated machine: one block at a time.
#define __shared__ static
#include KERNEL_FILE

#include <utility>

template <class... A, size_t... I>
static std::function<void()> bound(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  return [=] { kernel(*(A*)arguments[I]...); };
}
template <class... A> static std::function<void()> bound(void (*kernel)(A...), void** arguments) {
  return bound(kernel, arguments, std::index_sequence_for<A...>());
}
static std::function<void()> kernel_of(const std::string& name, void** arguments) {
#define KERNEL(function) if (name == #function) return bound(function, arguments);
  KERNELS
  return nullptr;
}

// What the kernel ahead writes: nothing of it is there when a block begins, all of it once a thread has waited
struct Late { u8* at; std::vector<u8> data; };
static char message[512];

extern "C" const char* launch(const char* name, u32 grid, u32 grid_y, u32 threads, u32 shared_bytes, u32 seed, void** arguments, int num_late, u8** late, const u64* late_bytes) {
  std::vector<Late> ahead;
  for (int i = 0; i < num_late; i++) ahead.push_back({late[i], std::vector<u8>(late[i], late[i] + late_bytes[i])});
  bool there = false;
  simt::Machine m;
  m.grid = grid, m.grid_y = grid_y, m.threads = threads, m.shared_bytes = shared_bytes, m.random.seed(seed);
  m.kernel = kernel_of(name, arguments);
  m.begun = [&] {
    there = false;
    for (auto& l : ahead) memset(l.at, 0xff, l.data.size());
  };
  m.waited = [&] {
    if (!there) for (auto& l : ahead) memcpy(l.at, l.data.data(), l.data.size());
    there = true;
  };
  const std::string fault = simt::run({&m}, {1}, seed);
  m.waited();
  snprintf(message, sizeof message, "%s", fault.c_str());
  return fault.empty() ? nullptr : message;
}

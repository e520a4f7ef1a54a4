// Runs the kernels of a decoding pass's dense steps, included as they are, on the emulated machine: one block at a time.
#include <utility>

#define __shared__ static
#include KERNEL_FILE

// Calls a kernel with arguments that lie at some addresses
template <class... A, size_t... I> static void call(void (*kernel)(A...), void* const* arguments, std::index_sequence<I...>) { kernel(*(A*)arguments[I]...); }
template <class... A> static void call(void (*kernel)(A...), void* const* arguments) { call(kernel, arguments, std::index_sequence_for<A...>()); }

extern "C" const char* launch(const char* name, u32 grid, u32 grid_y, u32 threads, u32 shared_bytes, u32 seed, void** arguments, int num_late, u8** late, const u64* late_bytes) {
  simt::Launch launch;
#define KERNEL(function) if (!strcmp(name, #function)) launch.kernel = [](const void* arguments) { call(function, (void* const*)arguments); };
  KERNELS
  launch.with = arguments, launch.grid = grid, launch.grid_y = grid_y, launch.threads = threads, launch.shared_bytes = shared_bytes, launch.seed = seed;
  launch.late = {num_late, late, late_bytes};
  return simt::run(&launch, 1, 1, seed);
}

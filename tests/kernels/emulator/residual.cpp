// Runs the kernels of residual.cu, which is included as it is, on the emulated machine.
#include KERNEL_FILE

template <class F> static const char* run(u32 grid, u32 shared_bytes, u32 seed, const F& kernel) {
  simt::Launch launch = simt::launch_of(kernel);
  launch.grid = grid, launch.threads = THREADS, launch.shared_bytes = shared_bytes, launch.seed = seed;
  return simt::run(&launch, 1, 1, seed);
}

extern "C" const char* run_index(u32 grid, u32 seed, const u8* pool, long long slot_bytes, const u8* bank, long long bank_slot_bytes, long long bank_down,
                                 const int* slots, const int* bank_slots, const long long* payload_bytes, int n, u8* directory, int* faults) {
  return run(grid, 16, seed, [=] { residual_index(pool, slot_bytes, bank, bank_slot_bytes, bank_down, slots, bank_slots, payload_bytes, n, directory, faults); });
}
extern "C" const char* run_decode(u32 grid, u32 seed, const u8* pool, long long slot_bytes, const u8* bank, long long bank_slot_bytes, long long bank_down,
                                  const u8* directory, const int* active, const int* num_active, const int* slot_of, const int* bank_slot_of, u8* plain,
                                  long long plain_slot_bytes, long long plain_down, long long plain_bias, long long plain_down_bias) {
  return run(grid, DECODE_SHARED_BYTES, seed, [=] {
    residual_decode(pool, slot_bytes, bank, bank_slot_bytes, bank_down, directory, active, num_active, slot_of, bank_slot_of, plain, plain_slot_bytes, plain_down,
                    plain_bias, plain_down_bias);
  });
}
extern "C" int decode_shared_bytes() { return DECODE_SHARED_BYTES; }

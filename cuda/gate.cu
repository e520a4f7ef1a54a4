// gate.cu - where a decoding pass asks the host for a layer's experts and waits for them, without leaving the GPU.
// gate_open    told = index, unless `told` is null and a kernel ahead has told it; here[e] = slot of each expert in `index` that is on the board and admitted, -1 for all others
// gate_wait    waits until every expert in `index` is on the board, or `stop` is set; late[e] = slot of those that `here` has not, -1
//              for all others; those of them that are not admitted are listed in `fresh`, the list filled up with -1, and their
//              `faults` set to 0
//              index int32 [count <= 256], an expert may be in it more than once; here, late int32 [num_experts]
//              told int32 [count], board int32 [num_experts], stop int32 [1]: in the host's memory
//              fresh: slots, experts int32 [room], bytes int64 [room], faults int32 [room], or all null; bytes from
//              payload_bytes int64 [num_experts]
// Board        -1 for an expert that is not there, else its slot, with FRESH where it is not admitted. The host takes an entry back
//              (writes -1, fence, reads `told`) only if what it then reads says that this pass has not looked yet; here `told` is
//              written, fence, the board read. So one of them sees the other.
// Launch       block 256, grid 1; programmatic. They do not let the next kernel start early: its blocks would wait on every SM.
// Needs        the host's own memory, and a host that brings what `told` asks for whatever the GPU does; sm_80
// Moves        a few hundred bytes over the link, once across it and back: 2 to 4 us
// Reference    tests/kernels/test_gate.py
#include "common.cuh"

#define THREADS 256
#define FRESH (1 << 30)

extern "C" __global__ void __launch_bounds__(THREADS) gate_open(const int* index, int count, volatile int* told, const volatile int* board, int* here, int num_experts) {
  wait_for_previous_kernel();
  for (int e = threadIdx.x; e < num_experts; e += THREADS) here[e] = -1;
  if (told)
    for (int i = threadIdx.x; i < count; i += THREADS) told[i] = index[i];
  __threadfence_system();
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += THREADS) {
    const int slot = board[index[i]];
    here[index[i]] = slot & FRESH ? -1 : slot;  // -1 has every bit
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) gate_wait(
    const int* index, int count, const volatile int* board, const volatile int* stop, const int* here, int* late, int num_experts,
    const long long* payload_bytes, int* fresh_slots, int* fresh_experts, long long* fresh_bytes, int* faults, int room) {
  __shared__ int num_fresh, needed[THREADS];
  if (threadIdx.x == 0) num_fresh = 0;
  wait_for_previous_kernel();
  for (int e = threadIdx.x; e < num_experts; e += THREADS) late[e] = -1;
  for (int n = threadIdx.x; n < room; n += THREADS) fresh_slots[n] = -1, faults[n] = 0;
  if (threadIdx.x < count) needed[threadIdx.x] = index[threadIdx.x];
  __syncthreads();
  const int i = threadIdx.x, expert = i < count ? needed[i] : 0;
  bool first = i < count && here[expert] < 0;
  for (int j = 0; j < i && first; ++j) first = needed[j] != expert;
  if (first) {
    int slot = board[expert];
    while (slot < 0 && !*stop) slot = board[expert];
    __threadfence_system();  // what was copied to the slot before its entry
    if (slot >= 0 && slot & FRESH) {
      slot ^= FRESH;
      if (room) {
        const int n = atomicAdd(&num_fresh, 1);
        fresh_slots[n] = slot, fresh_experts[n] = expert, fresh_bytes[n] = payload_bytes[expert];
      }
    }
    late[expert] = slot;
  }
}

// read_bytes.cu - reads memory and does nothing else: the bandwidth that kernels of weights are held against.
// Inputs     data    bytes [count * 16], 16-byte aligned
// Output     never   u32 [1], written only if the words' exclusive or is one number in 2^32, so that no load can be left out
// Launch     any grid; block 512, four blocks an SM fill it; a thread has four 16-byte loads in flight
// Needs      sm_80
// Moves      count * 16 B; 4 GiB: no faster than 895 us at the 4.8 TB/s of an H200's data sheet
#define READ_THREADS 512
#define LOADS 4

extern "C" __global__ void __launch_bounds__(READ_THREADS, 4) read_bytes(const uint4* __restrict__ data, long long count,
                                                                        unsigned int* __restrict__ never) {
  const long long stride = static_cast<long long>(gridDim.x) * READ_THREADS;
  long long i = static_cast<long long>(blockIdx.x) * READ_THREADS + threadIdx.x;
  unsigned int mixed = 0;
  for (; i + (LOADS - 1) * stride < count; i += LOADS * stride) {
    uint4 words[LOADS];
#pragma unroll
    for (int j = 0; j < LOADS; ++j) words[j] = __ldcs(data + i + j * stride);
#pragma unroll
    for (int j = 0; j < LOADS; ++j) mixed ^= words[j].x ^ words[j].y ^ words[j].z ^ words[j].w;
  }
  for (; i < count; i += stride) {
    const uint4 words = __ldcs(data + i);
    mixed ^= words.x ^ words.y ^ words.z ^ words.w;
  }
  if (mixed == 0x9e3779b9u) *never = mixed;
}

// team_barriers.cu - what racecheck loses: a block's barrier behind barriers of teams that some teams pass more often than others.
// No race is in it. With a toolkit of CUDA 13.0 racecheck reports the last two lines of `probe` for kind 2, and nothing for kinds 0 and 1:
//   nvcc -arch=sm_90 -lineinfo -o team_barriers team_barriers.cu && compute-sanitizer --tool racecheck ./team_barriers
// moe_small.cu does the same: teams of warps claim tiles, meet once for each, and the block meets before rows of y are added up.
#include <cstdio>

__global__ void probe(float* out, int kind) {
  __shared__ float part[512], sums[512];
  const int team = threadIdx.x / 64, turns = kind == 0 ? 0 : kind == 1 ? 2 : 1 + team % 3;
  for (int i = 0; i < turns; i++) {
    sums[threadIdx.x] = i + threadIdx.x;
    asm volatile("bar.sync %0, 64;" ::"r"(team + 1) : "memory");
    out[threadIdx.x] += sums[threadIdx.x ^ 32];
    asm volatile("bar.sync %0, 64;" ::"r"(team + 1) : "memory");
  }
  part[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] += part[(threadIdx.x * 37 + 11) % 512];
}

int main() {
  float* out;
  if (cudaMalloc(&out, 512 * sizeof(float)) != cudaSuccess) return 1;
  for (int kind = 0; kind < 3; kind++) {
    printf("kind %d\n", kind);
    probe<<<4, 512>>>(out, kind);
    if (cudaDeviceSynchronize() != cudaSuccess) return 1;
  }
}

// launch_probe.cu - small kernels that show whether a launch passes what it was given.
// Computes   add      out[i] = a[i] + b[i] for i < n
//            types    the value of each parameter as a double, so that each size and kind is seen
//            step     x[i] = (3 x[i] + i) mod 1021, where every launch reads what the one before it wrote
//            meet     out[block] = the sum over all blocks of 1 + block, known only after every block has arrived
//            fill     out[i] = i through dynamic shared memory, as much as there is
//            copy2d   out = one box of a tensor map, as the tensor memory accelerator writes it to shared memory
//            copy3d   the same from three dimensions
// Launch     as each says; one block where blockIdx is not used
// Needs      sm_80; copy2d, copy3d and an early start of step: sm_90

#include <cuda_bf16.h>

struct Pack {
    double first;
    int second;
    float third;
};

struct __align__(64) Map {
    char bytes[128];
};

extern "C" __global__ void add(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = a[i] + b[i];
}

extern "C" __global__ void types(double* __restrict__ out, signed char a, short b, int c, long long d, unsigned e,
                                 float f, double g, Pack h, const void* null) {
    const double values[11] = {double(a), double(b), double(c), double(d), double(e), double(f),
                               g, h.first, double(h.second), double(h.third), double(null == nullptr)};
    if (threadIdx.x == 0)
        for (int i = 0; i < 11; ++i) out[i] = values[i];
}

// The next launch may start at once: all that it reads comes after its own wait.
extern "C" __global__ void step(int* x, int n) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = (3 * x[i] + i) % 1021;
}

// Blocks wait for each other: a cooperative launch, counter zero before.
extern "C" __global__ void meet(int* counter, int* sum, int* out) {
    if (threadIdx.x != 0) return;
    atomicAdd(sum, 1 + int(blockIdx.x));
    __threadfence();
    atomicAdd(counter, 1);
    while (atomicAdd(counter, 0) < int(gridDim.x)) __nanosleep(64);
    out[blockIdx.x] = atomicAdd(sum, 0);
}

extern "C" __global__ void fill(int* out, int n) {
    extern __shared__ int shared[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) shared[n - 1 - i] = i;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = n - 1 - shared[i];
}

#if __CUDA_ARCH__ >= 900
// Thread 0 asks for the box and all wait for its bytes, then write them out in the order of shared memory.
#define COPY_BOX(out, bytes, ...)                                                                                       \
    do {                                                                                                                \
        extern __shared__ __align__(1024) unsigned char box[];                                                          \
        __shared__ __align__(8) unsigned long long bar;                                                                 \
        const unsigned b = __cvta_generic_to_shared(&bar), to = __cvta_generic_to_shared(box);                          \
        if (threadIdx.x == 0) {                                                                                         \
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(b));                                            \
            asm volatile("fence.mbarrier_init.release.cluster;");                                                       \
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");     \
            asm volatile(__VA_ARGS__);                                                                                  \
        }                                                                                                               \
        __syncthreads();                                                                                                \
        unsigned done = 0;                                                                                              \
        while (!done)                                                                                                   \
            asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"   \
                         : "=r"(done) : "r"(b) : "memory");                                                             \
        for (int i = threadIdx.x; i < bytes; i += blockDim.x) out[i] = box[i];                                          \
    } while (0)
#else
#define COPY_BOX(out, bytes, ...)
#endif

extern "C" __global__ void copy2d(const __grid_constant__ Map map, unsigned char* out, int column, int row, int bytes) {
    COPY_BOX(out, bytes,
             "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
             "l"(&map), "r"(column), "r"(row), "r"(b) : "memory");
}

extern "C" __global__ void copy3d(const __grid_constant__ Map map, unsigned char* out, int column, int row, int plane, int bytes) {
    COPY_BOX(out, bytes,
             "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
             "l"(&map), "r"(column), "r"(row), "r"(plane), "r"(b) : "memory");
}

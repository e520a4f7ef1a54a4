// hold.cu - blocks that keep their SMs busy, so that another kernel gets only what they leave.
// Computes   nothing; each block counts itself in running[0], then waits until *release is not 0 or `limit_ns` has passed
// Launch     any grid, block 32, with as much dynamic shared memory as keeps other blocks away
// Needs      sm_80

extern "C" __global__ void hold(int* running, const int* release, long long limit_ns) {
    if (threadIdx.x != 0) return;
    unsigned long long begun, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begun));
    atomicAdd(running, 1);
    do {
        __nanosleep(1000);
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (*(const volatile int*)release == 0 && now - begun < (unsigned long long)limit_ns);
}

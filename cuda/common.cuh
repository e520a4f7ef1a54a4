// common.cuh - the PTX that the kernels share: shared-memory access, asynchronous copies, MMA, ordering between kernels.
#pragma once
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

// ---- shared memory ----
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ uint4 lds128(u32 a) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
  return v;
}
__device__ __forceinline__ u32 lds32(u32 a) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a));
  return v;
}
__device__ __forceinline__ u32 lds16(u32 a) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(a));
  return v;
}
__device__ __forceinline__ u32 lds8(u32 a) {
  u16 v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=h"(v) : "r"(a));
  return v;
}
__device__ __forceinline__ float lds_f32(u32 a) { return __uint_as_float(lds32(a)); }
__device__ __forceinline__ float4 lds_f128(u32 a) {
  uint4 v = lds128(a);
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}
__device__ __forceinline__ void sts32(u32 a, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(v) : "memory"); }
__device__ __forceinline__ void sts_f32(u32 a, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(v) : "memory"); }
__device__ __forceinline__ void sts_f128(u32 a, float x, float y, float z, float w) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(a), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}
__device__ __forceinline__ void sts128(u32 a, u32 x, u32 y, u32 z, u32 w) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
// A barrier of some warps of the block
template <int THREADS_> __device__ __forceinline__ void barrier_of(int id) { asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS_) : "memory"); }
// The same for warps that need not wait
template <int THREADS_> __device__ __forceinline__ void barrier_pass(int id) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(THREADS_) : "memory"); }
// The block's dynamic shared memory
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) u8 name[]

// ---- asynchronous copies (sm_80): 16 bytes a lane past L1, the rest of the 16 filled with zeros ----
__device__ __forceinline__ void copy_async(u32 dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
__device__ __forceinline__ void copy_async_or_zero(u32 dst, const void* src, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

// ---- global memory that other blocks write during this kernel: never from L1 ----
// 16 bytes at once: a reader sees all of a store or nothing of it (.b128 is single-copy atomic)
__device__ __forceinline__ uint4 load_shared_by_grid(const void* p) {
  u64 a, b;
  asm volatile("{ .reg .b128 t; ld.relaxed.gpu.global.b128 t, [%2]; mov.b128 {%0, %1}, t; }" : "=l"(a), "=l"(b) : "l"(p) : "memory");
  return make_uint4((u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32));
}
__device__ __forceinline__ void store_shared_by_grid(void* p, uint4 v) {
  const u64 a = (u64)v.y << 32 | v.x, b = (u64)v.w << 32 | v.z;
  asm volatile("{ .reg .b128 t; mov.b128 t, {%1, %2}; st.relaxed.gpu.global.b128 [%0], t; }" ::"l"(p), "l"(a), "l"(b) : "memory");
}
__device__ __forceinline__ uint4 load_read_only(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
// Asked for in the order of the program, which the assembler keeps for such loads and atomics
__device__ __forceinline__ u32 load_word_here(const void* p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// Brings the line of an address to the L2. Nothing is read, so it may come before wait_for_previous_kernel.
__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
// From the L2, whatever an L1 still holds
__device__ __forceinline__ uint4 load_past_l1(const void* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
// Read-only again, of what is read once from its first byte on: 256 bytes come to the L2 at a time
__device__ __forceinline__ uint4 load_lines(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ u32 atomic_add(u32* p, u32 n) {
  u32 v;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(v) : "l"(p), "r"(n) : "memory");
  return v;
}
// The same by one lane, at p[zero]. Were the address known to be the same in all lanes, the assembler would gather the lanes of the
// warp and wait for the result at once; `zero` is a 0 that it cannot see to be one.
__device__ __forceinline__ u32 atomic_add_later(u32* p, u32 n, int zero) { return atomic_add(p + zero, n); }
// The same by lane 0 of a warp, without a branch; 0 in all others
__device__ __forceinline__ u32 atomic_add_by_first(u32* p, u32 n, int lane) {
  u32 v = 0;
  asm volatile("{ .reg .pred first; setp.eq.s32 first, %3, 0; @first atom.relaxed.gpu.global.add.u32 %0, [%1], %2; }" : "+r"(v) : "l"(p + lane), "r"(n), "r"(lane) : "memory");
  return v;
}

// ---- arithmetic ----
#define MINUS_INFINITY __int_as_float(0xff800000)
// c += a (16 x 16, row) * b (16 x 8, column), BF16 in, FP32 sums
__device__ __forceinline__ void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Four 8 x 8 matrices of BF16, transposed, as mma takes them for `a`; lane l has the address of row l % 8 of matrix l / 8
__device__ __forceinline__ void load_transposed(u32 address, u32 (&a)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address));
}
__device__ __forceinline__ float bf16_to_f32(u32 bits) { return __uint_as_float(bits << 16); }
__device__ __forceinline__ u32 f32_to_bf16x2(float high, float low) {  // round to nearest even; NaN becomes 0x7fff
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
__device__ __forceinline__ float f16_to_f32(u32 bits) {
  float f;
  asm("{ .reg .f16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }" : "=f"(f) : "h"((u16)bits));
  return f;
}
// (a & mask) | bits in one instruction
__device__ __forceinline__ u32 and_or(u32 a, u32 mask, u32 bits) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
  return d;
}
// Four bytes of {a, b} by the four lowest nibbles of `selector`; with bit 3 of a nibble the sign of its byte, eight times. __byte_perm has not that.
__device__ __forceinline__ u32 permute(u32 a, u32 b, u32 selector) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}
// (a & mask) ^ bits in one instruction, if mask and bits are not both constants
__device__ __forceinline__ u32 and_xor(u32 a, u32 mask, u32 bits) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
  return d;
}
// The lower half of {high, low} >> n, n up to 32
__device__ __forceinline__ u32 shift_pair(u32 low, u32 high, u32 n) {
  u32 d;
  asm("shf.r.clamp.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(low), "r"(high), "r"(n));
  return d;
}
// c + the products of the four bytes of a and b
__device__ __forceinline__ u32 dot_bytes(u32 a, u32 b, u32 c) {
  u32 d;
  asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
// a * b + c, which is not on the pipe of shifts and masks
__device__ __forceinline__ u32 multiply_add(u32 a, u32 b, u32 c) {
  u32 d;
  asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
// a - b on two BF16 values; exact for the integers used here. sm_80 has no BF16 subtraction: a * 1 + (-b).
__device__ __forceinline__ u32 sub_bf16x2(u32 a, u32 b) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(0x3f803f80u), "r"(b ^ 0x80008000u));
  return d;
}
// a * b + c on two BF16 values, rounded once; c = 0x80008000, two negative zeros, leaves the product
__device__ __forceinline__ u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// ---- order between kernels of one stream (programmatic launch, sm_90; no effect in an ordinary launch) ----
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- mbarriers: a phase ends with its last arrival and, on sm_90, the last byte that it expects ----
__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory"); }
__device__ __forceinline__ void barrier_arrive(u32 barrier) { asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory"); }
// Waits for the end of the phase of this parity
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{ .reg .pred done; AGAIN: mbarrier.try_wait.parity.shared.b64 done, [%0], %1; @done bra READY; bra AGAIN; READY: }" ::"r"(barrier), "r"(parity) : "memory");
#else
  asm volatile("{ .reg .pred done; AGAIN: mbarrier.test_wait.parity.shared.b64 done, [%0], %1; @done bra READY; bra AGAIN; READY: }" ::"r"(barrier), "r"(parity) : "memory");
#endif
}

// ---- bulk copies (sm_90): one thread starts them, an mbarrier counts their bytes ----
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_expect_more(u32 barrier, u32 bytes) {   // in this phase, which an arrival still keeps open
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive_expect(u32 barrier, u32 bytes) {   // both at once
  asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive_times(u32 barrier, u32 n) {   // n arrivals at once
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0], %1; }" ::"r"(barrier), "r"(n) : "memory");
}
__device__ __forceinline__ bool elect_lane() {   // true in one lane; all lanes of the warp must ask
  u32 one;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(one));
  return one;
}
__device__ __forceinline__ void copy_bulk(u32 dst, const void* src, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src), "r"(bytes), "r"(barrier) : "memory");
}
#endif

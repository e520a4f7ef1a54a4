// The type of CUDA's header of this name and the conversions of it that the kernels use.
#pragma once
#include "common.cuh"

struct __nv_bfloat16 { u16 bits; };
inline float __bfloat162float(__nv_bfloat16 v) { return bf16_to_f32(v.bits); }
inline __nv_bfloat16 __float2bfloat16_rn(float v) { return {(u16)simt_bf16(v)}; }

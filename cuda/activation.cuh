// activation.cuh - how an expert joins a gate and an up value, in fp32; ACTIVATION is Activation.code of shape.py.
#pragma once
#ifndef ACTIVATION
#define ACTIVATION 0
#endif

// 1 / (1 + exp(-x)), good to 2 ulp; exp may become infinite, the quotient is 0 then
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

__device__ __forceinline__ float activate(float gate, float up) {
#if ACTIVATION == 0  // silu
  return gate * sigmoid(gate) * up;
#elif ACTIVATION == 1  // gelu
  return 0.5f * gate * (1.0f + erff(gate * 0.70710678118654752f)) * up;
#elif ACTIVATION == 2  // gelu_tanh: (1 + tanh u) / 2 is sigmoid(2 u)
  return gate * sigmoid(1.5957691216057308f * (gate + 0.044715f * gate * gate * gate)) * up;
#elif ACTIVATION == 3  // clamped: gpt-oss
  gate = gate > 7.0f ? 7.0f : gate;   // what is no number stays none, which fminf would not let it
  up = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;
  return gate * sigmoid(1.702f * gate) * (up + 1.0f);
#else
#error "no such ACTIVATION"
#endif
}

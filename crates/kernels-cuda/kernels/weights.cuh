// Weights as a lane holds them: 16 bytes that are consecutive inputs of one output, FP8 or BF16. A
// warp multiplies chunks of four such pieces.
#pragma once
#include "fp8.cuh"

#ifdef FP8
constexpr u32 VALUES = 16;  // weights in a lane's 16 bytes
// Weights are 2^-120 times too small. Half of that is compensated in the inputs, half in the sums,
// so that nothing leaves the range of f32.
constexpr float INPUT_FACTOR = 0x1p60f, SUM_FACTOR = FP8_TOO_SMALL_BY / INPUT_FACTOR;
#else
constexpr u32 VALUES = 8;
constexpr float INPUT_FACTOR = 1.0f, SUM_FACTOR = 1.0f;
#endif
constexpr u32 CHUNK = 4 * VALUES;     // inputs that a warp multiplies at a time
constexpr u32 ELEMENT = 16 / VALUES;  // bytes of a weight

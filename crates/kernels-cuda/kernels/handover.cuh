// Results that one block hands another of the same launch, through memory.
//
// A word that nothing was written to is EMPTY: whoever waits for it reads it until it is not, and empties it again for the next
// launch. So a result is on its way in one step, and nothing has to be counted. Blocks that wait for one another must all be
// there at the same time: no more of them than multiprocessors.
#pragma once
#include "common.cuh"

constexpr u32 EMPTY = 0xffffffffu;  // a NaN that no arithmetic gives

DEVICE bool is_full(float x) { return __float_as_uint(x) != EMPTY; }
DEVICE bool is_full(float2 x) { return is_full(x.x) && is_full(x.y); }
DEVICE bool is_full(float4 x) { return is_full(x.x) && is_full(x.y) && is_full(x.z) && is_full(x.w); }

// Stores that others read while the kernel runs.
DEVICE void put(float4* to, float4 x) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
}
DEVICE void put(float2* to, float2 x) {
    asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x.x), "f"(x.y) : "memory");
}
// Hands over: nothing of it is left EMPTY.
DEVICE float full_word(float x) { return is_full(x) ? x : __uint_as_float(0x7fffffffu); }
DEVICE void hand_over(float4* to, float4 x) { put(to, make_float4(full_word(x.x), full_word(x.y), full_word(x.z), full_word(x.w))); }
DEVICE void hand_over(float2* to, float2 x) { put(to, make_float2(full_word(x.x), full_word(x.y))); }

DEVICE void look(const float4* from, float4& x) {
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(from)
                 : "memory");
}
DEVICE void look(const float2* from, float2& x) {
    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(from) : "memory");
}
DEVICE void empty(float4* at) {
    const float e = __uint_as_float(EMPTY);
    put(at, make_float4(e, e, e, e));
}
DEVICE void empty(float2* at) { put(at, make_float2(__uint_as_float(EMPTY), __uint_as_float(EMPTY))); }

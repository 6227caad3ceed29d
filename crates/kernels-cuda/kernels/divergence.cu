// KL divergence between rows of logits: oscar_backend::Divergence in CUDA, sums in f32.
#include "common.cuh"

struct DivergenceParams {
    const float* exact;  // [exact_rows][width]
    const float* other;  // row i is compared with row i % exact_rows of `exact`
    float* out;          // [row][2]: divergence in nats; 1 if the most likely tokens agree, else 0
    u32 width;
    u32 exact_rows;
};
CHECK_LAYOUT(DivergenceParams);

constexpr u32 THREADS = 512, WARPS = THREADS / 32;
constexpr float MOST_DIFFERENCE = 80.f;  // kernels-cpu: larger differences would overflow

DEVICE float block_sum(float x) {
    __shared__ float parts[WARPS];
    x = warp_sum(x);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = x;
    __syncthreads();
    float sum = 0.f;
    for (u32 i = 0; i < WARPS; i++) sum += parts[i];
    return sum;
}

DEVICE u64 block_largest(u64 key) {
    __shared__ u64 parts[WARPS];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const u64 other = __shfl_xor_sync(0xffffffffu, key, step);
        key = other > key ? other : key;
    }
    __syncthreads();
    if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = key;
    __syncthreads();
    for (u32 i = 0; i < WARPS; i++) key = parts[i] > key ? parts[i] : key;
    return key;
}

// Orders logits; of equal ones the lower token wins (pick.cu).
DEVICE u64 key_of(float x, u32 token) {
    if (x != x) return 0;
    u32 bits = __float_as_uint(x == 0.f ? 0.f : x);
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (u64)bits << 32 | (u32)~token;
}

DEVICE float logit_of(u64 key) {
    const u32 bits = (u32)(key >> 32);
    return __uint_as_float(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits);
}

DEVICE float exponential(float x) { return exp2f(x * LOG2E); }

// One block per row of `other`.
extern "C" __global__ void __launch_bounds__(THREADS) divergence(DivergenceParams p) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const float* exact = p.exact + (u64)(blockIdx.x % p.exact_rows) * p.width;
    const float* other = p.other + (u64)blockIdx.x * p.width;
    u64 first = 0, second = 0;
    for (u32 i = threadIdx.x; i < p.width; i += THREADS) {
        const u64 a = key_of(exact[i], i), b = key_of(other[i], i);
        first = a > first ? a : first, second = b > second ? b : second;
    }
    first = block_largest(first), second = block_largest(second);
    const float largest = logit_of(first);
    float total = 0.f, mean = 0.f;
    for (u32 i = threadIdx.x; i < p.width; i += THREADS) {
        const float weight = exponential(exact[i] - largest);
        total += weight, mean += weight * (exact[i] - other[i]);
    }
    total = block_sum(total), mean = block_sum(mean) / total;
    float sum = 0.f;
    for (u32 i = threadIdx.x; i < p.width; i += THREADS) {
        const float y = exact[i] - other[i] - mean;
        const float series = y * y * (0.5f - y * (1.f / 6.f - y / 24.f));
        const float whole = exponential(fminf(-y, MOST_DIFFERENCE)) - 1.f + y;
        sum += exponential(exact[i] - largest) * (fabsf(y) < 0.05f ? series : whole);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        p.out[2 * blockIdx.x] = log1pf(fmaxf(sum / total, 0.f));
        p.out[2 * blockIdx.x + 1] = (u32)first == (u32)second ? 1.f : 0.f;
    }
}

// Random weights and pages for benchmarks that need a model's shape but not its contents.
#include "common.cuh"

DEVICE u32 mix(u64 x) {
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdull;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ull;
    x ^= x >> 33;
    return (u32)x;
}

DEVICE float uniform(u64 x) { return (float)(mix(x) >> 8) / 8388608.0f - 1.0f; }

struct RandomParams {
    u16* out;
    u64 count;
    u64 seed;
    float amplitude;
};
CHECK_LAYOUT(RandomParams);

// BF16 values, uniform in +- amplitude.
extern "C" __global__ void random_bf16(RandomParams p) {
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < p.count; i += (u64)gridDim.x * blockDim.x)
        p.out[i] = f32_to_bf16(uniform(p.seed + i) * p.amplitude);
}

struct RandomPagesParams {
    u8* pages;
    u64 page_bytes;
    u64 parameters;  // byte offset of the (scale, minimum) pairs in a page
    u64 count;       // pages
    u64 seed;
};
CHECK_LAYOUT(RandomPagesParams);

// Coded pages: random bits are valid codes; every (scale, minimum) is (1.0, -1.5) in fp16.
extern "C" __global__ void random_pages(RandomPagesParams p) {
    u64 words = p.page_bytes / 4, total = words * p.count;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += (u64)gridDim.x * blockDim.x) {
        u64 word = i % words;
        ((u32*)p.pages)[i] = word * 4 >= p.parameters ? 0xbe003c00u : mix(p.seed + i);
    }
}

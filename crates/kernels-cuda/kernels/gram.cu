// Weighted Gram matrix of some columns of the activations: the statistic of calibration. Each block
// computes a 16x16 tile of the result. Sums are f64, so the order of the rows does not matter.
#include "common.cuh"

struct GramParams {
    const float* x;
    const float* weights;  // by row, or null
    double* gram;          // [width][width]
    u32 stride;            // of x
    u32 first;
    u32 width;
    u32 rows;
};
CHECK_LAYOUT(GramParams);

extern "C" __global__ void gram(GramParams p) {
    __shared__ float left[32][17], right[32][17];
    const u32 i = threadIdx.x / 16, j = threadIdx.x % 16;  // 256 threads
    const u32 row0 = blockIdx.y * 16, column0 = blockIdx.x * 16;
    allow_next_kernel();
    wait_for_previous_kernel();
    double sum = 0.0;
    for (u32 r0 = 0; r0 < p.rows; r0 += 32) {
        for (u32 k = threadIdx.x; k < 512; k += 256) {
            u32 r = k / 16, c = k % 16;
            bool inside = r0 + r < p.rows;
            const float* x = p.x + (u64)(r0 + r) * p.stride + p.first;
            float w = inside && p.weights ? p.weights[r0 + r] : 1.0f;
            left[r][c] = inside && row0 + c < p.width ? x[row0 + c] * w : 0.0f;
            right[r][c] = inside && column0 + c < p.width ? x[column0 + c] : 0.0f;
        }
        __syncthreads();
#pragma unroll 8
        for (u32 r = 0; r < 32; r++) sum += (double)left[r][i] * (double)right[r][j];
        __syncthreads();
    }
    if (row0 + i < p.width && column0 + j < p.width) p.gram[(u64)(row0 + i) * p.width + column0 + j] = sum;
}

// A plain read, as fast as the memory allows.
extern "C" __global__ void __launch_bounds__(512) read_all(const uint4* p, unsigned long long n, unsigned* out) {
    unsigned x = 0;
    unsigned long long step = (unsigned long long)gridDim.x * blockDim.x, i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * step < n; i += 4 * step) {
        uint4 a = __ldcs(p + i), b = __ldcs(p + i + step), c = __ldcs(p + i + 2 * step), d = __ldcs(p + i + 3 * step);
        x ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    for (; i < n; i += step) x ^= p[i].x;
    if (x == 0x12345678) *out = x;
}

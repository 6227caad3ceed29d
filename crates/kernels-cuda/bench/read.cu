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

// What a product of few rows does to the memory: a block a multiprocessor streams its share through shared memory (16 slots of
// 8 KB), and begins before the kernel before it has ended.
extern "C" __global__ void __launch_bounds__(512, 1) read_ahead(const uint4* p, unsigned long long n, unsigned* out) {
    extern __shared__ uint4 slots[];
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    unsigned x = 0;
    unsigned long long step = (unsigned long long)gridDim.x * 512, next = (unsigned long long)blockIdx.x * 512 + threadIdx.x, at = next;
    auto begin = [&](int slot) {
        unsigned to = (unsigned)__cvta_generic_to_shared(slots + slot * 512 + threadIdx.x);
        if (next < n) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(p + next) : "memory");
        asm volatile("cp.async.commit_group;" ::: "memory");
        next += step;
    };
    for (int i = 0; i < 15; i++) begin(i);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int slot = 0; at < n; at += step, slot = (slot + 1) % 16) {
        asm volatile("cp.async.wait_group 14;" ::: "memory");
        uint4 v = slots[slot * 512 + threadIdx.x];
        x ^= v.x ^ v.y ^ v.z ^ v.w;
        begin((slot + 15) % 16);
    }
    if (x == 0x12345678) *out = x;
}

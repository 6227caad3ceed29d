// Hopper's asynchronous tensor-core products (wgmma), memory barriers and bulk copies. Needs sm_90a.
//
// A warp group (four warps) multiplies 64 rows at a time. B always comes from shared memory through a
// descriptor; A comes from shared memory or from registers. Sums stay in registers: thread 4g + t of
// warp w holds, for each block n of eight columns, rows 16w + g (elements 4n, 4n+1) and 16w + g + 8
// (elements 4n+2, 4n+3) at columns 8n + 2t and 8n + 2t + 1.
//
// The products below run until wgmma_wait. Until then their registers must not be touched:
// `hold` keeps the compiler from moving accesses across the wait.
#pragma once
#include "common.cuh"

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
template <int N>
DEVICE void hold(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}

// ---- Descriptors of operands in shared memory. Strides are in bytes. ----

// Operands lie in rows of 128 bytes with the 128-byte swizzle. `leading` matters only where rows run
// along the columns of B.
DEVICE u64 descriptor(u32 address, u32 leading, u32 stride) {
    return (u64)(address >> 4 & 0x3fff) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 | 1ull << 62;
}
// The same operand, `bytes` further on.
DEVICE u64 advance(u64 operand, u32 bytes) { return operand + (bytes >> 4); }

// The numbers of a page: E4M3 stands for its keys, with values in FP16.
enum Form { BF16, F16, E4M3 };

// In the text of a product its sums are %0, %1 and so on, separated by commas.
#define TEN(t) "%" t "0,%" t "1,%" t "2,%" t "3,%" t "4,%" t "5,%" t "6,%" t "7,%" t "8,%" t "9"
#define NAMES_32 TEN("") "," TEN("1") "," TEN("2") ",%30,%31"
#define NAMES_64 NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39," TEN("4") "," TEN("5") ",%60,%61,%62,%63"
#define NAMES_128                                                                                     \
    NAMES_64 ",%64,%65,%66,%67,%68,%69," TEN("7") "," TEN("8") "," TEN("9") "," TEN("10") "," TEN("11")   \
    ",%120,%121,%122,%123,%124,%125,%126,%127"
// The registers that these names stand for.
#define SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_16(i) SUMS_4(i), SUMS_4(i + 4), SUMS_4(i + 8), SUMS_4(i + 12)
#define SUMS_32 SUMS_16(0), SUMS_16(16)
#define SUMS_64 SUMS_32, SUMS_16(32), SUMS_16(48)
#define SUMS_128 SUMS_64, SUMS_16(64), SUMS_16(80), SUMS_16(96), SUMS_16(112)

// scores(64 x 64) = or += A(64 x 32 bytes) B(32 bytes x 64), both in shared memory, K along their rows.
template <Form FORM, bool ADD>
DEVICE void wgmma_scores(float (&d)[32], u64 a, u64 b) {
#define SCORES(shape, types, layout)                                                                  \
    asm volatile("wgmma.mma_async.sync.aligned." shape ".f32." types                                  \
                 " {" NAMES_32 "}, %32, %33, %34, 1, 1" layout ";"                                    \
                 : SUMS_32                                                                            \
                 : "l"(a), "l"(b), "n"(ADD))
    if constexpr (FORM == E4M3) SCORES("m64n64k32", "e4m3.e4m3", "");
    else if constexpr (FORM == F16) SCORES("m64n64k16", "f16.f16", ", 0, 0");
    else SCORES("m64n64k16", "bf16.bf16", ", 0, 0");
#undef SCORES
}

// sums(64 x HEAD_DIM) += A(64 x 16, registers) B(16 x HEAD_DIM, columns along its rows).
template <Form FORM>
DEVICE void wgmma_values(float (&d)[HEAD_DIM / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
#define VALUES_OF(types, shape, names, sums, operands)                                                \
    asm volatile("wgmma.mma_async.sync.aligned." shape ".f32." types                                  \
                 " {" names "}, " operands ", 1, 1, 1, 1;"                                            \
                 : sums                                                                               \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b))
#if HEAD_DIM == 64
#define VALUES(types) VALUES_OF(types, "m64n64k16", NAMES_32, SUMS_32, "{%32,%33,%34,%35}, %36")
#elif HEAD_DIM == 128
#define VALUES(types) VALUES_OF(types, "m64n128k16", NAMES_64, SUMS_64, "{%64,%65,%66,%67}, %68")
#else
#define VALUES(types) VALUES_OF(types, "m64n256k16", NAMES_128, SUMS_128, "{%128,%129,%130,%131}, %132")
#endif
    if constexpr (FORM != BF16) VALUES("f16.f16");
    else VALUES("bf16.bf16");
#undef VALUES
#undef VALUES_OF
}

// ---- Memory barriers in shared memory, and copies that complete on them. ----

DEVICE void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and lets the phase wait for this many copied bytes as well.
DEVICE void barrier_arrive_expecting(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier), "r"(parity) : "memory");
}
DEVICE void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}
// Ordinary stores to shared memory become visible to tensor cores and bulk copies.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Waits for the `threads` threads that use barrier `id`; 0 belongs to __syncthreads.
DEVICE void sync_threads_of(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

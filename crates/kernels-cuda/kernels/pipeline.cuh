// Producer/consumer pipeline through shared memory. Every consumer ("reading") warp has a ring of
// slots; one producer warp (the "filler") fills the slots of all rings ahead of use.
//
// Two mbarriers guard a slot. The filler waits for `empty`, copies, and completes `full`. The
// reader waits for `full`, reads, and arrives at `empty`. On sm_90 lane w of the filler serves ring
// w with bulk copies. Before sm_90 the whole warp serves one ring after the other with cp.async.
#pragma once
#include "common.cuh"

#if __CUDA_ARCH__ >= 900
#define BULK_COPIES 1
#else
#define BULK_COPIES 0
#endif

DEVICE bool barrier_passed(u32 barrier, u32 parity) {
    u32 passed;
#if BULK_COPIES
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
#else
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
#endif
                 : "=r"(passed)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return passed != 0;
}

// Like barrier_passed, but never suspends the thread.
DEVICE bool barrier_passed_now(u32 barrier, u32 parity) {
    u32 passed;
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(passed)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return passed != 0;
}

DEVICE void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}

// Arrivals that complete a phase of each barrier.
constexpr u32 FULL_ARRIVALS = BULK_COPIES ? 1 : 32, EMPTY_ARRIVALS = 32;

// The position of a reading warp in its ring.
template <int SLOTS>
struct ReadRing {
    u32 full, empty;  // shared addresses of the ring's barriers
    u32 slot, phase;

    DEVICE void wait() const {
        while (!barrier_passed(full + 8 * slot, phase)) {
        }
    }

    // Returns the slot to the filler and advances to the next one. Every lane calls it.
    DEVICE void release() {
        barrier_arrive(empty + 8 * slot);
        if (++slot == SLOTS) slot = 0, phase ^= 1;
    }
};

#if BULK_COPIES
DEVICE void expect_bytes(u32 full, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full), "r"(bytes) : "memory");
}

// Copies a multiple of 16 bytes. A page is read once per step, so it is marked evict-first in L2.
DEVICE void copy_bulk(u32 to, const u8* from, u32 bytes, u32 full) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(full), "l"(read_once())
        : "memory");
}
#else
DEVICE void copy_by_lanes(u32 to, const u8* from, u32 bytes, int lane) {
    for (u32 i = 16 * lane; i < bytes; i += 512) copy_to_shared(to + i, from + i);
}

// Arrives at the barrier once the copies that this lane has issued so far are complete.
DEVICE void arrive_after_copies(u32 full) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(full) : "memory");
}
#endif

// Makes initialized barriers visible to bulk copies.
DEVICE void barriers_before_bulk_copies() {
#if BULK_COPIES
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// Orders ordinary writes to a slot before the next bulk copy into it.
DEVICE void writes_before_bulk_copies() {
#if BULK_COPIES
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

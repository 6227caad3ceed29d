// A warp's own ring of shared-memory slots, filled ahead of use.
//
// On sm_90 a slot is filled by bulk copies that complete on its mbarrier; before that, by cp.async groups. Exactly one
// `end_fill` stands for every slot that is filled (or would be, past the end of the work), and slots are waited for in the
// order in which they were filled.
#pragma once
#include "common.cuh"

#if __CUDA_ARCH__ >= 900
#define BULK_COPIES 1
#else
#define BULK_COPIES 0
#endif

template <int SLOTS, int SLOT_BYTES>
struct Ring {
    u32 data;      // shared address of this warp's slots
    u32 barriers;  // shared address of this warp's mbarriers
    u32 slot;      // next slot to read
    u32 phase;

    DEVICE void init(u32 data_address, u32 barrier_address, int lane) {
        data = data_address, barriers = barrier_address, slot = 0, phase = 0;
#if BULK_COPIES
        if (lane == 0) {
#pragma unroll
            for (int s = 0; s < SLOTS; s++)
                asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + 8 * s) : "memory");
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncwarp();
#endif
    }

    // Waits until the slot at hand is filled.
    DEVICE void wait() const {
#if BULK_COPIES
        asm volatile(
            "{ .reg .pred p;\n"
            "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
            "@p bra DONE; bra AGAIN;\n"
            "DONE: }" ::"r"(barriers + 8 * slot),
            "r"(phase)
            : "memory");
#else
        asm volatile("cp.async.wait_group %0;" ::"n"(SLOTS - 1) : "memory");
        __syncwarp();
#endif
    }

    // Fills slot `s` by up to four copies, `from[i]` to offset `at[i]`, each of a multiple of 16 bytes. All lanes.
    template <int N>
    DEVICE void fill(u32 s, const u8* const (&from)[N], const u32 (&at)[N], const u32 (&bytes)[N], int lane) const {
        u32 to = data + s * SLOT_BYTES;
#if BULK_COPIES
        u32 elected, barrier = barriers + 8 * s;
        asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(elected));
        if (elected) {
            u32 all = 0;
#pragma unroll
            for (int i = 0; i < N; i++) all += bytes[i];
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(all) : "memory");
            // Pages are read once a step: they need not push anything else out of L2.
            u64 policy;
            asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#pragma unroll
            for (int i = 0; i < N; i++)
                asm volatile(
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                    "[%0], [%1], %2, [%3], %4;" ::"r"(to + at[i]),
                    "l"(from[i]), "r"(bytes[i]), "r"(barrier), "l"(policy)
                    : "memory");
        }
#else
#pragma unroll
        for (int n = 0; n < N; n++)
            for (u32 i = 16 * lane; i < bytes[n]; i += 512)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + at[n] + i), "l"(from[n] + i) : "memory");
#endif
    }

    // Stands after every fill, and where one would be past the end of the work.
    DEVICE void end_fill() const {
#if !BULK_COPIES
        asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    }

    // The slot at hand has been read.
    DEVICE void advance() {
        if (++slot == SLOTS) slot = 0, phase ^= 1;
    }
};

// Orders ordinary writes to a slot before the bulk copy that fills it next.
DEVICE void writes_before_bulk_copies() {
#if BULK_COPIES
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

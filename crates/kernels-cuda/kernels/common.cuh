// Shared by all kernels: the tables of a step, number formats, tensor-core products, copies, warp
// reductions. These files include no toolkit headers, so NVRTC alone compiles them.
#pragma once

#include "page.cuh"

#define DEVICE __device__ __forceinline__
#define NO_PAGE 0xffffffffu
#define NEGATIVE_INFINITY __int_as_float(0xff800000)

// ---- Tables of a step. The host writes them once for all layers (src/step). ----

// The rows and pages of one sequence.
struct SequenceInfo {
    u32 first_row;       // its rows in the step: first_row .. first_row + rows
    u32 rows;
    u32 first_position;  // position of its first row
    u32 table;           // index of its first page id in `full` and `coded`
    // Codes of positions below this existed before the step's plan kernel ran. If old_codes equals
    // the boundary, everything the sequence reads existed then, except its new token.
    u32 old_codes;
    u32 boundary;        // of its last row: positions sink .. boundary are read as codes
    u32 view;            // index of its first ViewHead; NO_VIEW: it reads its whole history
    u32 view_end;        // the view stands for positions sink .. view_end
};
CHECK_LAYOUT(SequenceInfo);

#define NO_VIEW 0xffffffffu

// The rows that a view keeps of one layer and KV head, and the index of their first page id.
struct ViewHead {
    u32 rows, pages;
};
CHECK_LAYOUT(ViewHead);

// A tile of 16 tokens that this step quantizes.
struct DemotedTile {
    u32 full;   // id of the BF16 page
    u32 coded;  // id of the coded page
    u32 tile;   // 0..3 within both pages
};
CHECK_LAYOUT(DemotedTile);

struct StepTables {
    const SequenceInfo* sequences;
    const u32* row_sequence;  // by row
    const u32* row_position;
    const u32* full;          // page ids by sequence and block of 64 tokens; NO_PAGE: absent
    const u32* coded;
    const DemotedTile* demoted;
    const ViewHead* view_heads;  // of the launch's layer: by view and KV head
    const u32* view_pages;       // page ids
    u32 sequence_count;
    u32 rows;
    u32 demoted_count;
    // Windows: the query at position t reads position j as code if sink <= j < boundary(t).
    u32 sink;
    u32 recent;
    u32 unit;
};
CHECK_LAYOUT(StepTables);

// A sequence's codes as one head reads them. The rows of a view take the blocks just before
// view_end, so that later positions stay where they are; nothing lies between the sink and `first`.
struct History {
    u32 first;     // first block that may be read as code
    u32 view_end;  // blocks before it are those of the view; 0 without a view
    u32 hole;      // positions hole .. view_end hold no rows
    u32 pages;     // index of the page id of block 0 of the view, had it one

    DEVICE u32 page(const StepTables& step, u32 table, u32 block) const {
        return block * PAGE_TOKENS < view_end ? __ldcg(step.view_pages + (u32)(pages + block)) : step.coded[table + block];
    }
    DEVICE bool has_hole(u32 begin, u32 end) const { return begin < view_end && end > hole; }
    DEVICE bool in_hole(u32 position) const { return position >= hole && position < view_end; }
};

DEVICE History history_of(const StepTables& step, u32 view, u32 view_end, u32 head) {
    if (view == NO_VIEW) return {step.sink / PAGE_TOKENS, 0, 0, 0};
    const uint2 kept = __ldcg((const uint2*)(step.view_heads + view) + head);
    const u32 first = view_end / PAGE_TOKENS - (kept.x + PAGE_TOKENS - 1) / PAGE_TOKENS;
    return {first, view_end, first * PAGE_TOKENS + kept.x, kept.y - first};
}

// First position at or beyond the sink that the query at `t` reads in BF16 (codec::window). `unit`
// tokens enter the history at a time.
DEVICE u32 boundary(u32 sink, u32 recent, u32 unit, u32 t) {
    const u64 kept = (u64)sink + recent;
    const u64 past = (u64)t + 1 > kept ? (u64)t + 1 - kept : 0;
    return sink + (u32)(past / unit) * unit;
}
DEVICE u32 boundary_of(const StepTables& s, u32 t) { return boundary(s.sink, s.recent, s.unit, t); }

// Attention sinks of a layer: one more score for each query head in the softmax, without a value.
// `scores` is null in layers without sinks. Kernels compiled with SINKS=1 add them at their end.
struct Sinks {
    const float* scores;  // [row][query head] if `stride` is not 0, else [query head]
    u32 stride;           // from row to row
};
CHECK_LAYOUT(Sinks);

// The weight of a sink, where `largest` is the reference of the row's weights, a base-2 logarithm.
DEVICE float sink_weight(const Sinks& sinks, u32 row, u32 head, float largest) {
    return exp2f(__fmaf_rn(sinks.scores[(u64)row * sinks.stride + head], 1.4426950408889634f, -largest));
}

// ---- Number formats. ----

DEVICE float bf16_to_f32(u16 x) { return __uint_as_float((u32)x << 16); }

// Round to nearest even, as the CPU does; NaN stays NaN.
DEVICE u16 f32_to_bf16(float x) {
    u16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

// Two values in one register, the first in the low half.
DEVICE u32 pack_bf16(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

DEVICE float low_bf16(u32 x) { return __uint_as_float(x << 16); }
DEVICE float high_bf16(u32 x) { return __uint_as_float(x & 0xffff0000u); }

// Two numbers, each as the sum of two BF16 numbers: high + low.
DEVICE void split(float a, float b, u32& high, u32& low) {
    high = pack_bf16(a, b);
    low = pack_bf16(a - low_bf16(high), b - high_bf16(high));
}

// Two E4M3 codes in 16 bits, the first in the low half; numbers beyond the largest become the largest.
DEVICE u16 pack_e4m3(float low, float high) {
    u16 y;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
    return y;
}

DEVICE float f16_to_f32(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

// 2^x, to about 2 units in the last place.
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#define LOG2E 1.4426950408889634f

// ---- Tensor cores: D(16x8) += A(16x16) B(16x8), sums in f32. ----

DEVICE void mma_bf16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Four 8x8 blocks of 16-bit elements from shared memory. Lane l passes the address of row l % 8 of
// block l / 8. It receives two neighbours of row l / 4 of each block (transposed: of column l / 4).
DEVICE void load_matrix(u32 (&a)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address)
                 : "memory");
}
DEVICE void load_matrix_transposed(u32 (&a)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address)
                 : "memory");
}

// L2 policy for data that is read once: evict first.
DEVICE u64 read_once() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Prefetches one cache line.
DEVICE void prefetch_to_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// 16-byte asynchronous copies into shared memory. `wait_for_copied_bytes` waits for the copies of
// the calling thread only.
DEVICE void copy_to_shared(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void wait_for_copied_bytes() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Asynchronous copies are counted in groups; a group may be empty.
DEVICE void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all groups except the last `PENDING` are complete.
template <int PENDING>
DEVICE void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
DEVICE uint4 read_shared(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}

// ---- Warps. ----

DEVICE float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}
// The sum over the four lanes that hold a row of a tensor-core product.
DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// Programmatic dependent launch: wait until the previous kernel of the stream has finished, and let
// the next one start early. Before sm_90 kernels do not overlap, and both do nothing.
DEVICE void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The most likely tokens of rows of logits: oscar_backend::pick in CUDA, identical values and
// order.
//
// A candidate is one 64-bit key. The upper half is the logit, mapped so that larger logits have
// larger keys. The lower half is the complement of the token id, so that of equal logits the lower
// id wins. Keys of different tokens differ. 0 means no candidate.
#include "common.cuh"

// A request for one row.
struct PickedRow {
    u32 row;
    u32 count;  // top_candidates: number of candidates, 1 to MOST
    u32 mask;   // 0: all tokens are allowed; else the number of a mask, counted from 1
};
CHECK_LAYOUT(PickedRow);

struct PickParams {
    const float* logits;    // [row][width]
    const PickedRow* rows;  // one per block (greedy_parts: per blockIdx.y)
    u64* parts;             // best keys of slices, [row][part_count]
    u64* out;               // keys, largest first
    const u32* masks;       // [mask][mask_words]: a bit for each token
    u32 width;
    u32 part_count;
    u32 mask_words;
};
CHECK_LAYOUT(PickParams);

constexpr u32 MOST = 256;
constexpr u32 ALL_LANES = 0xffffffffu;

// Key of a candidate; NaN is none.
DEVICE u64 key_of(float x, u32 token) {
    if (x != x) return 0;
    u32 bits = __float_as_uint(x);
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (u64)bits << 32 | (u32)~token;
}

// Greedy choice: -0 equals 0, and -infinity is no candidate.
DEVICE u64 greedy_key(float x, u32 token) {
    return x == NEGATIVE_INFINITY ? 0 : key_of(x == 0.0f ? 0.0f : x, token);
}

// The logit of a token, or NaN if its row may not choose it.
struct Logits {
    const float* row;
    const u32* mask;

    DEVICE Logits(const PickParams& p, const PickedRow& picked)
        : row(p.logits + (u64)picked.row * p.width),
          mask(picked.mask ? p.masks + (u64)(picked.mask - 1) * p.mask_words : nullptr) {}
    DEVICE float operator[](u32 token) const {
        return mask && !(mask[token / 32] >> token % 32 & 1) ? __int_as_float(0x7fffffff) : row[token];
    }
};

DEVICE u64 larger(u64 a, u64 b) { return a > b ? a : b; }

// The largest key of the block, in thread 0. At most 1024 threads, a multiple of 32.
DEVICE u64 block_largest(u64 key) {
    __shared__ u64 of_warp[32];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) key = larger(key, __shfl_xor_sync(ALL_LANES, key, step));
    if ((threadIdx.x & 31) == 0) of_warp[threadIdx.x >> 5] = key;
    __syncthreads();
    if (threadIdx.x < 32) {
        key = threadIdx.x < blockDim.x / 32 ? of_warp[threadIdx.x] : 0;
#pragma unroll
        for (int step = 16; step > 0; step /= 2) key = larger(key, __shfl_xor_sync(ALL_LANES, key, step));
    }
    return key;
}

// The best key of each slice of a row. Block (part, row).
extern "C" __global__ void __launch_bounds__(256) greedy_parts(PickParams p) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const Logits row(p, p.rows[blockIdx.y]);
    u64 best = 0;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < p.width; i += gridDim.x * blockDim.x)
        best = larger(best, greedy_key(row[i], i));
    best = block_largest(best);
    if (threadIdx.x == 0) p.parts[(u64)blockIdx.y * p.part_count + blockIdx.x] = best;
}

// The best key of a row's slices. One block per row.
extern "C" __global__ void __launch_bounds__(64) greedy_merge(PickParams p) {
    allow_next_kernel();
    wait_for_previous_kernel();
    u64 best = 0;
    for (u32 i = threadIdx.x; i < p.part_count; i += blockDim.x)
        best = larger(best, p.parts[(u64)blockIdx.x * p.part_count + i]);
    best = block_largest(best);
    if (threadIdx.x == 0) p.out[blockIdx.x] = best;
}

constexpr u32 TOP_THREADS = 1024;

// The `count` largest keys of a row, sorted, then zeros. One block per row. A radix select finds
// the smallest key of the list, digit by digit from the top. Keys are unique, so at most one is
// undecided at the last digit.
extern "C" __global__ void __launch_bounds__(TOP_THREADS) top_candidates(PickParams p) {
    __shared__ u32 bins[256];
    __shared__ u64 found[MOST];
    __shared__ u32 found_count;
    __shared__ u32 chosen_digit, chosen_above, chosen_share;
    allow_next_kernel();
    wait_for_previous_kernel();
    const u32 tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const Logits row(p, p.rows[blockIdx.x]);
    u32 wanted = p.rows[blockIdx.x].count;  // keys with this `prefix` that belong to the list
    u64 prefix = 0, mask = 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
        if (tid < 256) bins[tid] = 0;
        __syncthreads();
        // All threads take part in every round: __match_any_sync needs whole warps.
        for (u32 base = 0; base < p.width; base += TOP_THREADS) {
            const u32 i = base + tid;
            const u64 key = i < p.width ? key_of(row[i], i) : 0;
            const bool counts = key != 0 && (key & mask) == prefix;
            const u32 digit = counts ? (u32)(key >> shift) & 255u : 256u;
            const u32 peers = __match_any_sync(ALL_LANES, digit);
            if (counts && lane == (u32)__ffs(peers) - 1) atomicAdd(&bins[digit], (u32)__popc(peers));
        }
        __syncthreads();
        // The digit, from the largest down, at which the list is full. Eight digits per lane.
        if (warp == 0) {
            u32 sum = 0;
            for (u32 k = 0; k < 8; k++) sum += bins[255 - (8 * lane + k)];
            u32 up_to = sum;
            for (int step = 1; step < 32; step *= 2) {
                const u32 other = __shfl_up_sync(ALL_LANES, up_to, step);
                if (lane >= (u32)step) up_to += other;
            }
            const u32 full = __ballot_sync(ALL_LANES, up_to >= wanted);
            // If there are fewer candidates than wanted, take all down to digit 0.
            if (lane == (full ? (u32)__ffs(full) - 1 : 31u)) {
                u32 above = up_to - sum, k = 0;
                while (k < 7 && above + bins[255 - (8 * lane + k)] < wanted) above += bins[255 - (8 * lane + k++)];
                chosen_digit = 255 - (8 * lane + k);
                chosen_above = above;
                chosen_share = bins[chosen_digit];
            }
        }
        __syncthreads();
        wanted -= chosen_above;
        prefix |= (u64)chosen_digit << shift;
        mask |= 255ull << shift;
        const bool decided = chosen_share <= wanted;
        __syncthreads();
        if (decided) break;
    }
    if (tid == 0) found_count = 0;
    if (tid < MOST) found[tid] = 0;
    __syncthreads();
    for (u32 i = tid; i < p.width; i += TOP_THREADS) {
        const u64 key = key_of(row[i], i);
        if (key != 0 && (key & mask) >= prefix) {
            const u32 at = atomicAdd(&found_count, 1u);
            if (at < MOST) found[at] = key;
        }
    }
    __syncthreads();
    // Bitonic sort, largest first.
    for (u32 k = 2; k <= MOST; k *= 2) {
        for (u32 j = k / 2; j > 0; j /= 2) {
            const u32 other = tid ^ j;
            if (tid < MOST && other > tid) {
                const u64 a = found[tid], b = found[other];
                if ((a < b) == ((tid & k) == 0)) found[tid] = b, found[other] = a;
            }
            __syncthreads();
        }
    }
    if (tid < MOST) p.out[(u64)blockIdx.x * MOST + tid] = found[tid];
}

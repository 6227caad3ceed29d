// What the checks and timings of this folder share: the driver API, page bytes on the host, a cache of random pages.
// Plain C++; kernels come as cubins (see run.sh).
#pragma once
#include <cuda.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#define __device__
#define __forceinline__ inline
template <class T> T atomicOr(T* p, T v) { T o = *p; *p |= v; return o; }
#include "../kernels/page.cuh"

#define CK(x) do { CUresult r_ = (x); if (r_) { const char* e_; cuGetErrorString(r_, &e_); printf("%s:%d %s: %s\n", __FILE__, __LINE__, #x, e_); exit(1); } } while (0)

struct SequenceInfo { u32 first_row, rows, first_position, table, old_codes, boundary; };
struct StepTables { u64 sequences, row_sequence, row_position, full, coded, demoted; u32 sequence_count, rows, demoted_count, sink, recent, unit; };
struct DecodePlan { u64 memory; u32 workers, pad; };
struct PlanArgs { StepTables step; u64 heads, cost_before; DecodePlan plan; u32 kv_heads, head_dim, least_cost, spare, round_cost, own_workers; };
struct HeadConstants { u64 query_norm, key_norm, cosines, sines, rotation, mean; float eps; u32 unused; };
struct AppendParams { StepTables step; u64 pages, qkv, queries; HeadConstants heads; u32 query_heads, kv_heads, rows_per_block, unused; };
struct DecodeArgs { StepTables step; DecodePlan plan; u64 heads, queries, qkv; HeadConstants new_heads; u64 out, rounded, partials; u32 kv_heads, group; float scale; };

inline float half_to_float(u16 h) {
    u32 s = (h & 0x8000u) << 16, e = (h >> 10) & 31, m = h & 1023;
    float v = e == 0 ? std::ldexp((float)m, -24) : e == 31 ? (m ? NAN : INFINITY) : std::ldexp((float)(m + 1024), (int)e - 25);
    return s ? -v : v;
}
inline u16 float_to_half(float f) {  // round to nearest even
    u32 x; memcpy(&x, &f, 4);
    u32 s = (x >> 16) & 0x8000; float a = std::fabs(f);
    if (!(a < 65520.f)) return s | 0x7c00;
    if (a < 6.103515625e-5f) { float r = std::nearbyint(a * 16777216.f); return s | (u16)r; }
    int e; std::frexp(a, &e); float q = std::nearbyint(std::ldexp(a, 11 - e));
    if (q == 2048) { q = 1024; e++; }
    return s | (u16)((e + 14) << 10) | ((u16)q & 1023);
}
inline u16 float_to_bf16(float f) { u32 x; memcpy(&x, &f, 4); return (u16)((x + 0x7fff + ((x >> 16) & 1)) >> 16); }
inline float bf16_to_float(u16 h) { u32 x = (u32)h << 16; float f; memcpy(&f, &x, 4); return f; }

struct Random {
    u64 s;
    explicit Random(u64 seed) : s(seed * 0x9e3779b97f4a7c15ull + 1) {}
    u32 next() { s ^= s << 13; s ^= s >> 7; s ^= s << 17; return (u32)(s >> 32); }
    float unit() { return (next() >> 8) * (1.f / 16777216.f); }
    float normal() { float a = 0; for (int i = 0; i < 6; i++) a += unit(); return (a - 3.f) * 1.4142f; }
    u32 below(u32 n) { return (u32)(((u64)next() * n) >> 32); }
};

inline CUdeviceptr device_alloc(size_t n) { CUdeviceptr p; CK(cuMemAlloc(&p, n ? n : 16)); return p; }
template <class T> CUdeviceptr upload(const std::vector<T>& v) {
    CUdeviceptr p = device_alloc(v.size() * sizeof(T));
    if (!v.empty()) CK(cuMemcpyHtoD(p, v.data(), v.size() * sizeof(T)));
    return p;
}

struct Variant {
    int head_dim, tiles, warps, stages, split;
    std::string file() const { char b[96]; snprintf(b, 96, "decode_%d_%d_%d_%d_%d.cubin", head_dim, tiles, warps, stages, split); return b; }
};

// Dynamic shared memory of a variant: the bound that src/attention/decode.rs computes.
inline u32 shared_bytes(const Variant& v, bool projections) {
    u32 steps = v.head_dim / 16, heads = 8 * v.tiles, room = heads * (v.head_dim + 4) * 4, slot = 32 * v.head_dim + 512;
    u32 bytes = v.warps * v.stages * (slot + 20) + (room <= slot ? 16 : v.warps * room) + v.tiles * steps * (32 * 24 + 32) + (v.warps + 3) * (8 + heads * 8 + 96) + heads * 4 + steps * 16 + 1280;
    if (projections) bytes += 4 * 9 * (v.head_dim + 8) + 32 * (v.head_dim + 4) + 4 * v.head_dim + 32;
    return (bytes + 127) / 128 * 128;
}

inline u32 round_cost(const Variant& v) { return v.warps * (32 * v.head_dim + 512); }

struct Kernel {
    CUmodule module; CUfunction decode, from_projections, plan; u32 shared; int workers, threads; Variant v;
    static std::string folder;
    explicit Kernel(Variant variant) : v(variant) {
        CK(cuModuleLoad(&module, (folder + "/" + v.file()).c_str()));
        CK(cuModuleGetFunction(&decode, module, "decode_attention"));
        shared = shared_bytes(v, false);
        CK(cuFuncSetAttribute(decode, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared));
        from_projections = 0;
        if (CUmodule m; v.tiles == 1 && v.head_dim == 128 && !cuModuleLoad(&m, (folder + "/from_projections_" + v.file()).c_str())) {
            CK(cuModuleGetFunction(&from_projections, m, "decode_attention"));
            CK(cuFuncSetAttribute(from_projections, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes(v, true)));
        }
        threads = 32 * v.warps;
        int occupancy, sms; CUdevice d; CK(cuCtxGetDevice(&d));
        CK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&occupancy, decode, threads + 32, shared));
        CK(cuDeviceGetAttribute(&sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, d));
        workers = occupancy * sms;
        CUmodule m; CK(cuModuleLoad(&m, (folder + "/plan.cubin").c_str())); CK(cuModuleGetFunction(&plan, m, "decode_plan"));
    }
    size_t partial_bytes() const { return 2ull * workers * (8 * v.tiles) * v.head_dim * 8; }
};
inline std::string Kernel::folder = ".";

inline u32 boundary_of(u32 sink, u32 recent, u32 t) { return sink + (t + 1 > sink + recent ? (t + 1 - sink - recent) / 16 * 16 : 0); }

// A step of sequences of given lengths, with shuffled page ids.
struct Step {
    std::vector<SequenceInfo> sequences; std::vector<u32> full, coded; u32 sink, recent, full_pages = 0, coded_pages = 0;
    bool has_codes;
    Step(const std::vector<u32>& lengths, u32 sink_, u32 recent_, bool codes, Random& random, bool mixed = false) : sink(sink_), recent(recent_), has_codes(codes) {
        if (!codes) sink = 0, recent = 0x7fffffff;
        for (u32 i = 0; i < lengths.size(); i++) {
            u32 n = lengths[i], b = codes ? std::min(boundary_of(sink, recent, n - 1), n) : 0;
            u32 table = (u32)full.size(), blocks = (n + 63) / 64;
            // Mixed: some bring more rows, which is not decoding. Every other one has codes of this step.
            sequences.push_back({i, mixed && i % 3 == 1 ? 2u : 1u, n - 1, table, i % 2 ? b - std::min(b, 16u) : b, b});
            for (u32 p = 0; p < blocks; p++) {
                bool is_coded = codes && b > sink && p >= sink / 64 && p * 64 < b;
                bool is_full = !(is_coded && p * 64 >= sink && p * 64 + 64 <= b);
                full.push_back(is_full ? full_pages++ : 0xffffffffu);
                coded.push_back(is_coded ? coded_pages++ : 0xffffffffu);
            }
        }
        shuffle(full, full_pages, random); shuffle(coded, coded_pages, random);
    }
    static void shuffle(std::vector<u32>& ids, u32 n, Random& random) {
        std::vector<u32> p(n); for (u32 i = 0; i < n; i++) p[i] = i;
        for (u32 i = n; i > 1; i--) std::swap(p[i - 1], p[random.below(i)]);
        for (u32& x : ids) if (x != 0xffffffffu) x = p[x];
    }
    StepTables tables() const {
        StepTables t{}; t.sequences = upload(sequences); t.full = upload(full); t.coded = upload(coded);
        t.sequence_count = t.rows = (u32)sequences.size(); t.sink = sink; t.recent = recent; t.unit = 16; return t;
    }
};

inline void launch_plan(const Kernel& k, PlanArgs& a, CUstream s) { void* p[] = {&a}; CK(cuLaunchKernel(k.plan, k.workers, 1, 1, 256, 1, 1, 0, s, p, 0)); }
inline void launch_decode(const Kernel& k, DecodeArgs& a, CUstream s, bool projections = false) {  // may begin while the kernel before it ends
    void* p[] = {&a}; CUlaunchAttribute at{}; at.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION; at.value.programmaticStreamSerializationAllowed = 1;
    CUlaunchConfig c{}; c.gridDimX = k.workers; c.gridDimY = c.gridDimZ = 1; c.blockDimX = k.threads + 32; c.blockDimY = c.blockDimZ = 1; c.sharedMemBytes = shared_bytes(k.v, projections); c.hStream = s; c.attrs = &at; c.numAttrs = getenv("NO_OVERLAP") ? 0 : 1;
    CK(cuLaunchKernelEx(&c, projections ? k.from_projections : k.decode, p, 0));
}
inline void launch_overlapping(CUfunction f, u32 x, u32 y, u32 threads, u32 shared, void** p, CUstream s) {
    CUlaunchAttribute at{}; at.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION; at.value.programmaticStreamSerializationAllowed = 1;
    CUlaunchConfig c{}; c.gridDimX = x; c.gridDimY = y; c.gridDimZ = 1; c.blockDimX = threads; c.blockDimY = c.blockDimZ = 1; c.sharedMemBytes = shared; c.hStream = s; c.attrs = &at; c.numAttrs = 1;
    CK(cuLaunchKernelEx(&c, f, p, 0));
}
// Workers of a plan that have something to read.
inline u32 active_workers(CUdeviceptr plan, int workers) {
    std::vector<u32> w(76 * workers); CK(cuMemcpyDtoH(w.data(), plan, w.size() * 4));
    u32 n = 0; for (int i = 0; i < workers; i++) n += memcmp(&w[76 * i], &w[76 * i + 3], 12) != 0;
    return n;
}


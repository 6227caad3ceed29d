// Times decode attention over cold caches: a CUDA graph of launches, each on its own layer's pages, best and median of replays.
//   time FOLDER                                       all shapes
//   time FOLDER one CONTEXT BATCH GROUP CODES         three plain launches, for a profiler
//   time FOLDER layer                                 behind a product-like read of 48 MB and the append of the new row, or with that in it
#include "harness.hpp"

constexpr u32 APPEND_THREADS = 256, APPEND_SHARED = 2 * 16 * 136 * 2 + 128 * 128 * 4;  // src/backend/launches.rs

static float ceiling(CUstream s) {  // GB/s of a plain read of 4 GB
    CUmodule m; CUfunction f; CK(cuModuleLoad(&m, (Kernel::folder + "/read.cubin").c_str())); CK(cuModuleGetFunction(&f, m, "read_all"));
    size_t bytes = 4ull << 30; CUdeviceptr p = device_alloc(bytes), out = device_alloc(16); CK(cuMemsetD8(p, 1, bytes));
    u64 n = bytes / 16; void* a[] = {&p, &n, &out}; CUevent e0, e1; cuEventCreate(&e0, 0); cuEventCreate(&e1, 0); float best = 1e9;
    for (int grid : {132 * 4, 132 * 8, 132 * 16}) for (int i = 0; i < 6; i++) { cuEventRecord(e0, s); CK(cuLaunchKernel(f, grid, 1, 1, 512, 1, 1, 0, s, a, 0)); cuEventRecord(e1, s); cuEventSynchronize(e1); float ms; cuEventElapsedTime(&ms, e0, e1); best = std::min(best, ms); }
    cuMemFree(p); cuMemFree(out); return bytes / best * 1e-6f;
}

int main(int argc, char** argv) {
    Kernel::folder = argc > 1 ? argv[1] : "."; std::string which = argc > 2 ? argv[2] : "all";
    CK(cuInit(0)); CUdevice d; CUcontext ctx; CK(cuDeviceGet(&d, 0)); CK(cuDevicePrimaryCtxRetain(&ctx, d)); CK(cuCtxSetCurrent(ctx));
    CUstream s; CK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING)); float top = ceiling(s);
    printf("read ceiling %.0f GB/s\n", top);
    struct Shape { u32 context, batch; int group; bool codes; };
    std::vector<Shape> shapes;
    for (int g : {4, 8}) { for (auto [c, b] : std::vector<std::pair<u32, u32>>{{8192, 1}, {32768, 1}, {131072, 1}, {8192, 32}, {32768, 8}, {32768, 32}, {131072, 8}, {131072, 32}}) shapes.push_back({c, b, g, true}); }
    shapes.push_back({32768, 32, 16, true});
    for (auto [c, b] : std::vector<std::pair<u32, u32>>{{8192, 1}, {32768, 1}, {131072, 1}, {32768, 8}, {131072, 8}}) shapes.push_back({c, b, 4, false});
    bool only = false, layer = which == "layer";
    if (layer) { shapes.clear(); for (auto [c, b] : std::vector<std::pair<u32, u32>>{{8192, 1}, {32768, 1}, {100000, 1}, {131072, 1}, {32768, 8}, {100000, 8}}) for (int g : {4, 8}) shapes.push_back({c, b, g, true}); }
    if (which == "one") { shapes = {{(u32)atoi(argv[3]), (u32)atoi(argv[4]), atoi(argv[5]), atoi(argv[6]) != 0}}; only = true; }
    std::vector<Variant> variants = {{128, 1, 15, 3, 1}, {128, 1, 15, 3, 2}, {128, 2, 7, 3, 0}};
    const int D = 128; const u32 heads = 8;
    size_t arena_bytes = 24ull << 30; CUdeviceptr arena = device_alloc(arena_bytes);
    {   // random codes with sane parameters everywhere: 16 MB of pages, copied over the arena
        std::vector<u8> block(3641 * 4608); Random r(1); for (auto& x : block) x = (u8)r.next();
        for (size_t p = 0; p < 3641; p++) for (int i = 0; i < 128; i++) { u16* pair = (u16*)&block[p * 4608 + 4096 + 4 * i]; pair[0] = float_to_half(0.2f + 0.3f * r.unit()); pair[1] = float_to_half(-0.5f + 0.2f * r.unit()); }
        CUdeviceptr b = upload(block); for (size_t o = 0; o + block.size() <= arena_bytes; o += block.size()) CK(cuMemcpyDtoD(arena + o, b, block.size())); cuMemFree(b);
    }
    const size_t weight_bytes = 48ull << 20; CUfunction product, append; { CUmodule m; CK(cuModuleLoad(&m, (Kernel::folder + "/read.cubin").c_str())); CK(cuModuleGetFunction(&product, m, "read_ahead")); CK(cuModuleLoad(&m, (Kernel::folder + "/append.cubin").c_str())); CK(cuModuleGetFunction(&append, m, "append")); }
    CK(cuFuncSetAttribute(product, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 128 << 10)); CK(cuFuncSetAttribute(append, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, APPEND_SHARED));
    CUdeviceptr weights = device_alloc(36 * weight_bytes), rope = device_alloc((131072 + 64) * 64 * 4), rotation = device_alloc(36 * 8 * 65536), norm = device_alloc(512);
    CK(cuMemsetD32(weights, 0x3c003c00, 9 * weight_bytes)); CK(cuMemsetD32(rope, 0x3f000000, (131072 + 64) * 64)); CK(cuMemsetD32(rotation, 0x3d000000, 36 * 8 * 16384)); CK(cuMemsetD32(norm, 0x3f800000, 128));
    size_t bf16_bytes = 20ull << 30; CUdeviceptr bf16 = device_alloc(bf16_bytes);
    { std::vector<u16> block(8 << 20); Random r(2); for (auto& x : block) x = float_to_bf16(r.normal() * .5f); CUdeviceptr b = upload(block); for (size_t o = 0; o < bf16_bytes; o += block.size() * 2) CK(cuMemcpyDtoD(bf16 + o, b, block.size() * 2)); cuMemFree(b); }
    for (auto& sh : shapes) for (auto& v : variants) {
        if (v.tiles != (sh.group + 7) / 8 || (v.split == 1 && sh.group > 4) || (v.split == 2 && sh.group <= 4)) continue;
        Kernel k(v); Random random(3); Step step(std::vector<u32>(sh.batch, sh.context), 64, 256, sh.codes, random);
        size_t full_layer = (size_t)step.full_pages * full_page_bytes(D) * heads, coded_layer = (size_t)step.coded_pages * 4608 * heads;
        int layers = (int)std::min<size_t>(36, std::min(bf16_bytes / full_layer, coded_layer ? arena_bytes / coded_layer : 1000));
        std::vector<HeadPages> table((size_t)layers * heads);
        for (int l = 0; l < layers; l++) for (u32 h = 0; h < heads; h++) table[l * heads + h] = {bf16 + l * full_layer + h * (full_layer / heads), arena + l * coded_layer + h * (coded_layer / heads), sh.codes ? 2u : 0, sh.codes ? 2u : 0, 0, 0};
        std::vector<float> q((size_t)sh.batch * heads * sh.group * D); for (auto& x : q) x = random.normal();
        CUdeviceptr dq = upload(q), ht = upload(table), out = device_alloc(q.size() * 4), partials = device_alloc(k.partial_bytes()), cost = device_alloc((sh.batch + 1) * 8), words = device_alloc(304 * k.workers + 16 * sh.batch * heads);
        CK(cuMemsetD8(partials, 0xff, k.partial_bytes()));
        StepTables tables = step.tables(); DecodePlan plan{words, (u32)k.workers, 0};
        double bytes = 0; for (auto& i : step.sequences) { u32 n = i.first_position + 1, c = sh.codes ? i.boundary - step.sink : 0; bytes += heads * (c * 72.0 + (n - c) * 512.0); }
        const u32 spare = heads * sh.batch <= (u32)k.workers / 8 ? heads * sh.batch : 0;  // as src/attention/decode.rs
        std::vector<u32> leasts = sh.batch == 1 ? std::vector<u32>{16384} : std::vector<u32>{65536};
        if (only) {
            PlanArgs pa{tables, ht, cost, plan, heads, (u32)D, 16384, spare, round_cost(v), 0}; launch_plan(k, pa, s);
            for (int l = 0; l < std::min(layers, 3); l++) { DecodeArgs da{tables, plan, ht + l * heads * sizeof(HeadPages), dq, 0, {}, 0, out, partials, heads, (u32)sh.group, 0.08838834764f * 1.44269504f}; launch_decode(k, da, s); }
            CK(cuStreamSynchronize(s));
            return 0;
        }
        std::vector<u32> rows(sh.batch), ends(sh.batch, sh.context - 1); for (u32 i = 0; i < sh.batch; i++) rows[i] = i;
        tables.row_sequence = upload(rows); tables.row_position = upload(ends); CUdeviceptr qkv = device_alloc(q.size() * 8); CK(cuMemsetD32(qkv, 0x3e800000, q.size() * 2));
        for (u32 least : leasts) for (int part = layer ? 0 : 3; part < (layer && k.from_projections && sh.batch <= 2 ? 5 : 4); part++) {  // bit 0: with the append, bit 1: with attention; 4: with both in one
            PlanArgs pa{tables, ht, cost, plan, heads, (u32)D, least, spare, round_cost(v), part == 4};
            CUgraph g; CUgraphExec ge; CK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
            launch_plan(k, pa, s);
            for (int l = 0; l < layers; l++) {
                if (layer) {
                    CUdeviceptr w = weights + l * weight_bytes; u64 n = weight_bytes / 16; void* wp[] = {&w, &n, &out}; launch_overlapping(product, k.workers, 1, 512, 128 << 10, wp, s);
                    HeadConstants constants{norm, norm, rope, rope, rotation + l * heads * 65536, 0, 1e-6f, 0}; AppendParams ap{tables, ht + l * heads * sizeof(HeadPages), qkv, dq, constants, heads * sh.group, heads, 1, 0};
                    if (part == 4) { DecodeArgs da{tables, plan, ht + l * heads * sizeof(HeadPages), 0, qkv, constants, 0, out, partials, heads, (u32)sh.group, 0.08838834764f * 1.44269504f}; launch_decode(k, da, s, true); continue; }
                    if (part & 1) { void* xp[] = {&ap}; launch_overlapping(append, sh.batch, heads, APPEND_THREADS, APPEND_SHARED, xp, s); }
                    if (!(part & 2)) continue;
                }
                DecodeArgs da{tables, plan, ht + l * heads * sizeof(HeadPages), dq, 0, {}, 0, out, partials, heads, (u32)sh.group, 0.08838834764f * 1.44269504f}; launch_decode(k, da, s);
            }
            CK(cuStreamEndCapture(s, &g)); CK(cuGraphInstantiate(&ge, g, 0));
            CUevent e0, e1; cuEventCreate(&e0, 0); cuEventCreate(&e1, 0); std::vector<float> ms;
            double est = bytes / 3e9 * layers * 1e-3; int reps = est > 20 ? 5 : layer ? 41 : 15;
            for (int i = 0; i < reps + 2; i++) { cuEventRecord(e0, s); CK(cuGraphLaunch(ge, s)); cuEventRecord(e1, s); CK(cuEventSynchronize(e1)); float t; cuEventElapsedTime(&t, e0, e1); if (i >= 2) ms.push_back(t); }
            std::sort(ms.begin(), ms.end()); float us = ms[ms.size() / 2] * 1e3f / layers; u32 active = active_workers(words, k.workers);
            if (layer) printf("layer %6u x%-2u %2d/8 heads %s: %8.2f us (best %.2f)\n", sh.context, sh.batch, sh.group * 8, part == 0 ? "product                   " : part == 1 ? "product, append           " : part == 2 ? "product,         attention" : part == 3 ? "product, append, attention" : "product, attention with it", us, ms[0] * 1e3f / layers);
            else printf("%s %6uK x%-2u %2d/8 heads %s least %6u active %4u: %8.2f us (best %.2f) %6.0f GB/s = %3.0f %% of ceiling, floor %.1f us, %d layers\n", sh.codes ? "int2" : "bf16", sh.context / 1024, sh.batch, sh.group * 8, v.file().c_str(), least, active, us, ms[0] * 1e3f / layers, bytes / us * 1e-3, bytes / us * 1e-3 / top * 100, bytes / top * 1e-3, layers);
            cuGraphExecDestroy(ge); cuGraphDestroy(g);
        }
        for (CUdeviceptr p : {dq, ht, out, partials, cost, words, qkv, (CUdeviceptr)tables.row_sequence, (CUdeviceptr)tables.row_position, (CUdeviceptr)tables.sequences, (CUdeviceptr)tables.full, (CUdeviceptr)tables.coded}) cuMemFree(p);
        fflush(stdout);
    }
}

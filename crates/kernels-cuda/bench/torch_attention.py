"""BF16 decode attention of PyTorch (SDPA flash and cuDNN) for comparison with
`oscar bench attention --device cuda`.

One query token, 8 KV heads of size 128, contiguous caches. A CUDA graph runs several layers, each on a cache of its own,
so that nothing is left in L2; the time is the median of its replays over the number of layers.
"""
import sys
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def median_us(call, layers, replays):
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for i in range(replays + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(end) * 1e3 / layers)
    return sorted(times)[len(times) // 2]


def main():
    shapes = [(8192, 1), (32768, 1), (131072, 1), (8192, 32), (32768, 8), (32768, 32), (131072, 8), (131072, 32)]
    for query_heads in (32, 64):
        for context, batch in shapes:
            layer_bytes = 2 * batch * 8 * context * 128 * 2
            layers = max(1, min(8, (24 << 30) // layer_bytes))
            caches = [torch.randn(2, batch, 8, context, 128, device="cuda", dtype=torch.bfloat16) for _ in range(layers)]
            q = torch.randn(batch, query_heads, 1, 128, device="cuda", dtype=torch.bfloat16)
            row = []
            for name, backend in BACKENDS.items():
                try:
                    def call():
                        with sdpa_kernel(backend):
                            for k, v in caches:
                                F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
                    us = median_us(call, layers, 9)
                    row.append(f"{name} {us:8.1f} us {layer_bytes / us * 1e-3:5.0f} GB/s")
                except RuntimeError as error:
                    row.append(f"{name} refused: {str(error).splitlines()[0][:60]}")
            print(f"torch {torch.__version__} {context // 1024:4}K x{batch:<2} {query_heads}/8 heads: " + "   ".join(row), flush=True)
            del caches, q
            torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())

// Whole blocks of the cache, between their pages and one run of bytes.
#include "common.cuh"

// The part of a block that belongs to one layer and head.
struct BlockPiece {
    u64 start;   // address of page 0 of the region
    u64 offset;  // of the part in a block
    u64 bytes;   // of a page, a multiple of 16
};
CHECK_LAYOUT(BlockPiece);

struct CopyBlocksParams {
    const BlockPiece* pieces;
    u8* packed;
    u64 stride;   // bytes of a block in `packed`
    u64 first;    // offset in the block of what `packed` begins with
    u32 scatter;  // whether pages are written rather than read
    u32 ids[96];  // page ids of the blocks
};
CHECK_LAYOUT(CopyBlocksParams);

// Grid: parts of a block by blocks.
extern "C" __global__ void copy_blocks(CopyBlocksParams p) {
    const BlockPiece piece = p.pieces[blockIdx.x];
    uint4* page = (uint4*)(piece.start + p.ids[blockIdx.y] * piece.bytes);
    uint4* packed = (uint4*)(p.packed + blockIdx.y * p.stride + (piece.offset - p.first));
    uint4* to = p.scatter ? page : packed;
    const uint4* from = p.scatter ? packed : page;
    for (u32 i = threadIdx.x; i < piece.bytes / 16; i += blockDim.x) to[i] = from[i];
}

// The bytes of a page on the GPU: oscar_codec::gpu_tile in CUDA.
//
// A page holds 64 tokens of keys and values of one layer and KV head.
//
// FULL page (BF16), 4*64*D bytes: keys, then values. Each side consists of D/64 panels of
// [64 tokens][64 channels]. A token's row of a panel is 128 bytes; its eight 16-byte chunks are
// permuted by chunk ^ (token & 7). This is the 128-byte swizzle: ldmatrix reads it without bank
// conflicts, wgmma descriptors support it, and the rows of a 16-token tile are contiguous.
//
// CODED page: [key codes][value codes][key (scale, minimum)][value (scale, minimum)]. Codes come in
// 16-token tiles, in the order in which a lane feeds mma.m16n8k16 (see gpu_tile.rs). A 32-bit word
// holds pairs of codes for 16/bits planes; plane p of half h starts at bit 16h + bits*p. Parameters
// are fp16 pairs; those of tokens r and r+8 of a tile are neighbours.
#pragma once

#include "layout.cuh"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int PAGE_TOKENS = 64;
constexpr int TILE_TOKENS = 16;

enum Side { KEY = 0, VALUE = 1 };

// ---- Full pages. ----

__device__ __forceinline__ u32 full_page_bytes(u32 head_dim) { return 4 * PAGE_TOKENS * head_dim; }

// Index of one element, in BF16 elements from the start of the page. `channel` is 0 .. head_dim.
__device__ __forceinline__ u32 full_element(u32 side, u32 head_dim, u32 token, u32 channel) {
  u32 chunk = ((channel & 63) >> 3) ^ (token & 7);
  return side * PAGE_TOKENS * head_dim + ((channel >> 6) * PAGE_TOKENS + token) * 64 + chunk * 8 + (channel & 7);
}

// ---- Coded pages. ----

// Byte offsets of the parts of a coded page, for one pair of widths.
struct CodedPage {
  u32 key_bits, value_bits, head_dim;

  __device__ __forceinline__ u32 side_bits(u32 side) const { return side == KEY ? key_bits : value_bits; }
  __device__ __forceinline__ u32 codes(u32 side) const { return side == KEY ? 0 : 8 * head_dim * key_bits; }
  __device__ __forceinline__ u32 params(u32 side) const {
    return 8 * head_dim * (key_bits + value_bits) + side * PAGE_TOKENS * 4;
  }
  __device__ __forceinline__ u32 bytes() const { return params(VALUE) + PAGE_TOKENS * 4; }
};

// Byte offset of a token's fp16 pair (scale, minimum) in its page.
__device__ __forceinline__ u32 param_byte(const CodedPage &page, u32 side, u32 token) {
  u32 t = token & 15;
  return page.params(side) + (token >> 4) * 64 + (t & 7) * 8 + (t >> 3) * 4;
}

// Some bits of one code: `width` bits at `bit` of the 32-bit word at `byte`. They are the bits of
// the code from `code_shift` up.
struct CodeField {
  u32 byte, bit, width, code_shift;
};

// Position of a code within its tile, for widths that are powers of two.
struct CodePlace {
  u32 lane, word, half, plane;
};

__device__ __forceinline__ CodePlace code_place(u32 side, u32 bits, u32 head_dim, u32 token, u32 channel) {
  u32 steps = head_dim >> 4, planes = 16 / bits, j = channel >> 4, within = channel & 15;
  u32 row = side == KEY ? token : within, column = side == KEY ? within : token;
  u32 row_half = row >> 3, column_half = column >> 3;
  u32 channel_half = side == KEY ? column_half : row_half, token_half = side == KEY ? row_half : column_half;
  CodePlace at;
  at.lane = (row & 7) * 4 + ((column & 7) >> 1);
  at.half = column & 1;
  if (planes <= steps) {
    at.word = row_half + 2 * column_half + 4 * (j / planes);
    at.plane = j % planes;
  } else if (planes == 2 * steps) {
    at.word = token_half;
    at.plane = j + steps * channel_half;
  } else {
    at.word = 0;
    at.plane = j + steps * channel_half + 2 * steps * token_half;
  }
  return at;
}

// Byte offset of a lane's word within its tile; each lane has `words` words.
__device__ __forceinline__ u32 word_byte(u32 words, u32 lane, u32 word) {
  u32 group = words < 4 ? words : 4;
  return (word / group * 32 * group + lane * group + word % group) * 4;
}

// The one or two fields of the code at (token, channel); returns their number. A 3-bit code has
// two: its low two bits are stored like 2-bit codes, its high bit separately. Byte offsets are
// relative to the side's codes.
__device__ __forceinline__ int code_fields(u32 side, u32 bits, u32 head_dim, u32 token, u32 channel, CodeField (&f)[2]) {
  u32 tile = (token >> 4) * 2 * head_dim * bits, low_bits = bits == 3 ? 2 : bits;
  CodePlace at = code_place(side, low_bits, head_dim, token & 15, channel);
  u32 words = head_dim * low_bits / 64;
  f[0] = {tile + word_byte(words, at.lane, at.word), 16 * at.half + low_bits * at.plane, low_bits, 0};
  if (bits != 3) return 1;
  f[1] = {tile + head_dim * 4 + word_byte(words / 2, at.lane, at.word / 2), 16 * at.half + 2 * at.plane + (at.word & 1),
          1, 2};
  return 2;
}

// Reads one code of a page.
__device__ __forceinline__ u32 load_code(const u8 *page, const CodedPage &shape, u32 side, u32 token, u32 channel) {
  CodeField f[2];
  int n = code_fields(side, shape.side_bits(side), shape.head_dim, token, channel, f);
  u32 code = 0;
  for (int i = 0; i < n; i++) {
    u32 word = *(const u32 *)(page + shape.codes(side) + f[i].byte);
    code |= ((word >> f[i].bit) & ((1u << f[i].width) - 1)) << f[i].code_shift;
  }
  return code;
}

// Stores a token's scale and minimum, both as fp16 bit patterns.
__device__ __forceinline__ void store_params(u8 *page, const CodedPage &shape, u32 side, u32 token, u16 scale, u16 minimum) {
  *(u32 *)(page + param_byte(shape, side, token)) = (u32)scale | (u32)minimum << 16;
}

// ---- The pages of one layer. ----

// The pages of one layer and KV head. Page i of a kind starts at base + i * page bytes. The host
// makes one table of these for all layers and heads when it creates the pool. key_clip and
// value_clip are order-statistic indices (oscar_codec::clip::order_index); 0xffffffff: no clipping.
// A zero-width head (0 bits) has no coded pages; its queries read only the BF16 windows.
struct HeadPages {
  u64 full;
  u64 coded;
  u32 key_bits, value_bits;
  u32 key_clip, value_clip;

  __device__ __forceinline__ bool keeps_history() const { return key_bits != 0; }
};
CHECK_LAYOUT(HeadPages);

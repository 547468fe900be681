// Packing: converts ggml's row-major layout to tiles of 16 interleaved rows.
#include "layout.h"

#include <cstring>

namespace specdec {
namespace {

// The layout of ggml's blocks in bytes. The sizes are checked against the loaded ggml in plugin.cpp.
struct Source {
    size_t bytes;   // of one block
    size_t scale;   // offset of the half-precision scale
    size_t second;  // offset of the second half-precision number: the scale of the minimum
    size_t codes;   // offset of the (low) codes
};

constexpr Source source_of(Type t) {
    switch (t) {
        case Type::Q4_0: return {18, 0, 0, 2};
        case Type::Q4_1: return {20, 0, 2, 4};
        case Type::Q5_0: return {22, 0, 0, 6};
        case Type::Q8_0: return {34, 0, 0, 2};
        case Type::IQ4_NL: return {18, 0, 0, 2};
        case Type::Q4_K: return {144, 0, 2, 16};
        case Type::Q5_K: return {176, 0, 2, 48};
        case Type::Q6_K: return {210, 208, 0, 0};
    }
    return {};
}

// Store four codes of a row in its lane.
void put(uint8_t *line, int row, const uint8_t *four) { std::memcpy(line + row * CODES, four, CODES); }

void pack_simple(Type t, int row, const uint8_t *block, uint8_t *scales, uint8_t *minima, uint8_t *codes) {
    const Source s = source_of(t);
    std::memcpy(scales + row * 2, block + s.scale, 2);
    if (has_minimum(t)) std::memcpy(minima + row * 2, block + s.second, 2);
    if (t == Type::Q8_0) {
        for (int i = 0; i < BLOCK; i++) codes[i / CODES * LINE + row * CODES + i % CODES] = block[s.codes + i] ^ 0x80;
        return;
    }
    // A byte holds codes i and i + 16, as in ggml's block.
    for (int i = 0; i < BLOCK / 2; i += CODES) put(codes + i / CODES * LINE, row, block + s.codes + i);
    if (t == Type::Q5_0) {
        uint32_t bits;
        std::memcpy(&bits, block + 2, sizeof bits);
        uint8_t four[CODES] = {};  // bit i of byte c is the fifth bit of code 4 i + c
        for (int i = 0; i < BLOCK; i++) four[i % CODES] |= (bits >> i & 1) << (i / CODES);
        put(codes + BLOCK / 2 / CODES * LINE, row, four);
    }
}

// Q4_K and Q5_K: scales, scales of the minima, 12 bytes of 6-bit scales and minima, fifth bits (Q5_K), codes.
void pack_k(Type t, int row, const uint8_t *block, uint8_t *tile) {
    const Source s = source_of(t);
    std::memcpy(tile + row * 2, block + s.scale, 2);
    std::memcpy(tile + 2 * ROWS + row * 2, block + s.second, 2);
    for (size_t i = 4; i < source_of(t).bytes; i += CODES) put(tile + i / CODES * LINE, row, block + i);
}

// Q6_K: scales, 16 int8 scales, the low four bits, the high two bits. A step is four weights. Line z of the low bits
// holds steps z and z + 32; line z of the high bits holds steps z, z + 16, z + 32 and z + 48.
void pack_q6_k(int row, const uint8_t *block, uint8_t *tile) {
    const uint8_t *low = block, *high = block + 128, *scales = block + 192;
    std::memcpy(tile + row * 2, block + 208, 2);
    for (int i = 0; i < 16; i += CODES) put(tile + LINE + i / CODES * LINE, row, scales + i);
    uint8_t code[SUPER_BLOCK];
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 32; i++) {
            const uint8_t a = low[half * 64 + i], b = low[half * 64 + i + 32], h = high[half * 32 + i];
            uint8_t *out = code + half * 128 + i;
            out[0] = (a & 15) | (h & 3) << 4;
            out[32] = (b & 15) | (h >> 2 & 3) << 4;
            out[64] = a >> 4 | (h >> 4 & 3) << 4;
            out[96] = b >> 4 | (h >> 6) << 4;
        }
    uint8_t *lows = tile + 5 * LINE, *highs = lows + 32 * LINE;
    for (int z = 0; z < 32; z++)
        for (int c = 0; c < CODES; c++)
            lows[z * LINE + row * CODES + c] = (code[z * 4 + c] & 15) | (code[(z + 32) * 4 + c] & 15) << 4;
    for (int z = 0; z < 16; z++)
        for (int c = 0; c < CODES; c++) {
            uint8_t bits = 0;
            for (int quarter = 0; quarter < 4; quarter++)
                bits |= (code[(z + quarter * 16) * 4 + c] >> 4) << (2 * quarter);
            highs[z * LINE + row * CODES + c] = bits;
        }
}

}  // namespace

size_t source_bytes(Type t) { return source_of(t).bytes; }

void pack(Type t, int64_t rows, int64_t k, const uint8_t *source, uint8_t *packed, int64_t first, int64_t last) {
    const size_t bytes = source_of(t).bytes, header = header_bytes(t, k);
    const int64_t blocks = k / block_length(t);
    for (int64_t tile = first; tile < last; tile++) {
        uint8_t *out = packed + tile * tile_bytes(t, k);
        const int present = rows - tile * ROWS < ROWS ? int(rows - tile * ROWS) : ROWS;
        // With a scale of zero, missing rows and the padding between parts contribute nothing.
        std::memset(out, 0, present < ROWS ? tile_bytes(t, k) : header);
        for (int row = 0; row < present; row++) {
            const uint8_t *in = source + (tile * ROWS + row) * blocks * bytes;
            for (int64_t b = 0; b < blocks; b++) {
                uint8_t *block = out + header + b * block_bytes(t);
                const uint8_t *from = in + b * bytes;
                if (t == Type::Q6_K) {
                    if (row == 0) std::memset(block, 0, LINE);
                    pack_q6_k(row, from, block);
                } else if (is_k_quant(t)) {
                    pack_k(t, row, from, block);
                } else {
                    uint8_t *scales = out + b * 2 * ROWS;
                    pack_simple(t, row, from, scales, scales + header / 2, block);
                }
            }
        }
    }
}

}  // namespace specdec

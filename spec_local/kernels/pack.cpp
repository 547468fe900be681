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
        case Type::Q5_1: return {24, 0, 2, 8};
        case Type::Q8_0: return {34, 0, 0, 2};
        case Type::IQ4_NL: return {18, 0, 0, 2};
        case Type::MXFP4: return {17, 0, 0, 1};
        case Type::Q2_K: return {84, 80, 82, 16};
        case Type::Q3_K: return {110, 108, 0, 32};
        case Type::Q4_K: return {144, 0, 2, 16};
        case Type::Q5_K: return {176, 0, 2, 48};
        case Type::Q6_K: return {210, 208, 0, 0};
        case Type::IQ4_XS: return {136, 0, 2, 8};
    }
    return {};
}

// Store four codes of a row in its lane.
void put(uint8_t *line, int row, const uint8_t *four) { std::memcpy(line + row * CODES, four, CODES); }
void put(uint8_t *line, int row, uint32_t four) { std::memcpy(line + row * CODES, &four, CODES); }

// Four codes as one number, and a number with the same byte four times: what is done to all four is done once.
uint32_t four_at(const uint8_t *codes) {
    uint32_t four;
    std::memcpy(&four, codes, CODES);
    return four;
}
constexpr uint32_t all_four(uint32_t byte) { return byte * 0x01010101; }

// Store eight steps of five-bit codes in five lines: five steps in the low bits, three in the upper ones.
void put_fives(uint8_t *lines, int row, const uint8_t *low, const uint8_t *upper) {
    const uint32_t a = four_at(upper), b = four_at(upper + CODES), c = four_at(upper + 2 * CODES);
    const uint32_t one = all_four(1), two = all_four(3), three = all_four(7);
    const uint32_t bits[5] = {a >> 2 & three, b >> 2 & three, c >> 2 & three, (a & two) << 1 | (c >> 1 & one),
                              (b & two) << 1 | (c & one)};
    for (int i = 0; i < 5; i++) put(lines + i * LINE, row, four_at(low + i * CODES) | bits[i] << 5);
}

void pack_simple(Type t, int row, const uint8_t *block, uint8_t *scales, uint8_t *minima, uint8_t *codes) {
    const Source s = source_of(t);
    if (t == Type::MXFP4) scales[row] = block[s.scale];
    else std::memcpy(scales + row * 2, block + s.scale, 2);
    if (has_minimum(t)) std::memcpy(minima + row * 2, block + s.second, 2);
    if (t == Type::Q8_0) {
        for (int i = 0; i < BLOCK; i += CODES)
            put(codes + i / CODES * LINE, row, four_at(block + s.codes + i) ^ all_four(PACKED_ZERO));
        return;
    }
    // A byte holds codes i and i + 16.
    if (t == Type::Q5_0 || t == Type::Q5_1) {
        uint32_t bits;
        std::memcpy(&bits, block + s.codes - sizeof bits, sizeof bits);
        uint8_t five[BLOCK];
        for (int i = 0; i < BLOCK; i++)
            five[i] = uint8_t((block[s.codes + i % 16] >> (i / 16 * 4) & 15) | (bits >> i & 1) << 4);
        put_fives(codes, row, five, five + 5 * CODES);
        return;
    }
    for (int i = 0; i < BLOCK / 2; i += CODES) put(codes + i / CODES * LINE, row, block + s.codes + i);
}

// The half-precision scale and, 32 bytes later, what follows it in ggml's block: the scale of the minima, or two bits of
// each scale of IQ4_XS.
void pack_scales(Type t, int row, const uint8_t *block, uint8_t *tile) {
    const Source s = source_of(t);
    std::memcpy(tile + row * 2, block + s.scale, 2);
    if (s.second) std::memcpy(tile + 2 * ROWS + row * 2, block + s.second, 2);
}

// Q4_K: 12 bytes of 6-bit scales and minima, codes. IQ4_XS: four bits of each scale, codes.
void pack_k(Type t, int row, const uint8_t *block, uint8_t *tile) {
    for (size_t i = 4; i < source_of(t).bytes; i += CODES) put(tile + i / CODES * LINE, row, block + i);
}

// Q5_K: 12 bytes of 6-bit scales and minima, codes. `super_codes` tells where those are, of this type and the next ones.
void pack_q5_k(int row, const uint8_t *block, uint8_t *tile) {
    for (size_t i = 4; i < 16; i += CODES) put(tile + i / CODES * LINE, row, block + i);
    const uint8_t *bits = block + 16, *nibbles = block + source_of(Type::Q5_K).codes;
    for (int group = 0; group < 4; group++) {
        uint8_t codes[64];
        for (int i = 0; i < 64; i++)
            codes[i] = uint8_t((nibbles[group * 32 + i % 32] >> (i / 32 * 4) & 15) | (bits[i % 32] >> (2 * group + i / 32) & 1) << 4);
        uint8_t *lines = tile + (4 + group * 10) * LINE;
        put_fives(lines, row, codes, codes + 10 * CODES);
        put_fives(lines + 5 * LINE, row, codes + 5 * CODES, codes + 13 * CODES);
    }
}

// The codes of a super-block that are step i of a part of a group of 64.
uint32_t step_at(const uint8_t (&codes)[SUPER_BLOCK], int group, int part, int i) {
    return four_at(codes + (part * 16 + group * 4 + i) * CODES);
}

// Q2_K: 16 bytes of 4-bit scales and minima, codes. Q3_K: 12 bytes of 6-bit scales, codes.
void pack_q2_k_or_q3_k(Type t, int row, const uint8_t *block, uint8_t *tile) {
    const bool three = t == Type::Q3_K;
    const uint8_t *third = block, *twos = block + source_of(t).codes, *scales = three ? block + 96 : block;
    const int n_scales = three ? 12 : 16;
    for (int i = 0; i < n_scales; i += CODES) put(tile + LINE + i / CODES * LINE, row, scales + i);
    uint8_t codes[SUPER_BLOCK];
    for (int part = 0; part < 8; part++) {  // of 32 codes
        const int half = part / 4, quarter = part % 4;
        for (int i = 0; i < 32; i++) {
            codes[part * 32 + i] = twos[half * 32 + i] >> (2 * quarter) & 3;
            if (three) codes[part * 32 + i] |= (third[i] >> part & 1) << 2;
        }
    }
    uint8_t *lines = tile + LINE + n_scales / CODES * LINE;
    for (int group = 0; group < 4; group++) {
        const auto step = [&](int part, int i) { return step_at(codes, group, part, i); };
        for (int i = 0; i < 4; i++, lines += LINE) {
            const uint32_t all = step(0, i) | step(1, i) << 2 | step(2, i) << 4 | step(3, i) << 6;
            put(lines, row, three ? step(0, i) | step(1, i) << 3 | (step(3, i) >> 1 & all_four(3)) << 6 : all);
        }
        for (int i = 0; i < 2 && three; i++, lines += LINE) {
            const uint32_t one = all_four(1), last = (step(3, 2 * i) & one) << 7 | (step(3, 2 * i + 1) & one) << 6;
            put(lines, row, step(2, 2 + i) | step(2, i) << 3 | last);
        }
    }
}

// Q6_K: 16 int8 scales, codes.
void pack_q6_k(int row, const uint8_t *block, uint8_t *tile) {
    const uint8_t *low = block, *high = block + 128, *scales = block + 192;
    for (int i = 0; i < 16; i += CODES) put(tile + LINE + i / CODES * LINE, row, scales + i);
    uint8_t codes[SUPER_BLOCK];
    for (int part = 0; part < 8; part++) {  // of 32 codes
        const int half = part / 4, quarter = part % 4;
        for (int i = 0; i < 32; i++) {
            const uint8_t four = low[half * 64 + quarter % 2 * 32 + i] >> (quarter / 2 * 4) & 15;
            codes[part * 32 + i] = four | (high[half * 32 + i] >> (2 * quarter) & 3) << 4;
        }
    }
    for (int group = 0; group < 4; group++)
        for (int i = 0; i < 4; i++) {
            const uint32_t last = step_at(codes, group, 3, i), two = all_four(3);
            uint8_t *lines = tile + (5 + group * 12 + i) * LINE;
            for (int part = 0; part < 3; part++)
                put(lines + 4 * part * LINE, row, step_at(codes, group, part, i) | (last >> (4 - 2 * part) & two) << 6);
        }
}

void pack_super_block(Type t, int row, const uint8_t *block, uint8_t *tile) {
    pack_scales(t, row, block, tile);
    switch (t) {
        case Type::Q2_K:
        case Type::Q3_K: return pack_q2_k_or_q3_k(t, row, block, tile);
        case Type::Q5_K: return pack_q5_k(row, block, tile);
        case Type::Q6_K: return pack_q6_k(row, block, tile);
        default: return pack_k(t, row, block, tile);
    }
}

}  // namespace

size_t source_bytes(Type t) { return source_of(t).bytes; }

void pack(Type t, int64_t rows, int64_t k, const uint8_t *source, uint8_t *packed, int64_t first, int64_t last) {
    const size_t bytes = source_of(t).bytes, header = header_bytes(t);
    const int64_t blocks = k / block_length(t);
    for (int64_t tile = first; tile < last; tile++) {
        uint8_t *out = packed + tile * tile_bytes(t, k);
        const int present = rows - tile * ROWS < ROWS ? int(rows - tile * ROWS) : ROWS;
        // With a scale of zero, missing rows contribute nothing.
        if (present < ROWS) std::memset(out, 0, tile_bytes(t, k));
        for (int row = 0; row < present; row++) {
            const uint8_t *in = source + (tile * ROWS + row) * blocks * bytes;
            for (int64_t b = 0; b < blocks; b++) {
                uint8_t *block = out + block_at(t, b);
                const uint8_t *from = in + b * bytes;
                if (is_k_quant(t)) {
                    if (row == 0) std::memset(block, 0, LINE);
                    pack_super_block(t, row, from, block);
                } else {
                    uint8_t *scales = out + header_at(t, b) + b % TOGETHER * scales_bytes(t);
                    pack_simple(t, row, from, scales, scales + header / 2, block);
                }
            }
        }
    }
}

}  // namespace specdec

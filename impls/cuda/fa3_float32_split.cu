// The parts of float32 tensors, in CUDA C++ for Hopper: reads up to four tensors and writes the three bfloat16 parts of
// their numbers (parts.cuh) to scratch, from where the copy engine fetches them for the other kernels.
#include "parts.cuh"

constexpr int BLOCK_ROWS = 64;  // rows of a block

// A tensor [batches, heads, rows, dim], and room for its parts, [3, batches, heads, rows, 8 pieces].
struct Source {
    View from;
    uint4* to;
    long long all;  // pieces of a part
    int heads, rows, dim, pieces;
    int vectors;  // whether rows can be read in aligned pieces of 16 bytes
    int blocks;
};
struct Sources {
    Source of[4];
};

// Splits eight columns of a row. Columns from dim on get zeros. The largest numbers, which round to an infinite first
// part, get the largest finite one. An infinity becomes NaN in the other parts.
DEVICE void split_piece(const Source& source, const float* tile, uint4* to, int row, int column) {
    const float* const numbers = tile + row * source.from.row + column * source.from.column;
    float x[8];
    if (source.vectors) {
        const float4 low = load_numbers(numbers), high = load_numbers(numbers + 4);
        x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
        x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    } else {
        UNROLL
        for (int i = 0; i < 8; ++i)
            x[i] = column + i < source.dim ? load_number(numbers + i * source.from.column) : 0.0f;
    }
    unsigned parts[PARTS][4];
    UNROLL
    for (int i = 0; i < 4; ++i) {
        float first[2];
        UNROLL
        for (int j = 0; j < 2; ++j) {
            const float y = x[2 * i + j];
            const bool rounds_up = fabsf(y) > LARGEST_PART && fabsf(y) < INFINITY;
            first[j] = rounds_up ? copysignf(LARGEST_PART, y) : y;
        }
        unsigned unused;
        parts[0][i] = pack(first[0], first[1]);
        split_two(x[2 * i] - low_of(parts[0][i]), x[2 * i + 1] - high_of(parts[0][i]), parts[1][i], parts[2][i],
                  unused);
    }
    UNROLL
    for (int part = 0; part < PARTS; ++part)
        store_eight(reinterpret_cast<Element*>(to + part * source.all),
                    make_uint4(parts[part][0], parts[part][1], parts[part][2], parts[part][3]));
}

// Writes the parts of up to four tensors, one after the other. A thread splits eight columns at a time.
extern "C" __global__ void __launch_bounds__(256) split(const __grid_constant__ Sources sources) {
    int block = blockIdx.x, which = 0;
    while (block >= sources.of[which].blocks) block -= sources.of[which++].blocks;
    const Source& source = sources.of[which];
    const int tiles = (source.rows + BLOCK_ROWS - 1) / BLOCK_ROWS, pair = block / tiles;
    const int first_row = block % tiles * BLOCK_ROWS;
    const int count = smaller_of(source.rows - first_row, BLOCK_ROWS) * source.pieces;
    const float* const tile = source.from.data + pair / source.heads * source.from.batch +
                              pair % source.heads * source.from.head + first_row * source.from.row;
    uint4* const to = source.to + (static_cast<long long>(pair) * source.rows + first_row) * source.pieces;
    UNROLL
    for (int i = 0; i < 4; ++i) {
        const int index = threadIdx.x + 256 * i;  // at most 16 pieces of a row: 1024 of a block
        if (index < count) split_piece(source, tile, to + index, index / source.pieces, index % source.pieces * 8);
    }
}
EXPORT(split)

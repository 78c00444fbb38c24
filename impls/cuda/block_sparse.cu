// Block-sparse FlashAttention in CUDA C++: FlashAttention-2 over a block mask (Dao et al., "FlashAttention", NeurIPS 2022, section 3.3 and Algorithm 5).
//
// What changed against FlashAttention-2: which tiles a loop visits, and nothing else, so this file is a Mask for the kernels of fa2.cu. A block mask has one entry
// for each block of 128 x 128 scores. For each row of blocks there is a list: first the blocks that are seen whole, which are computed without a mask, then
// the partial ones, which the diagonal or the tensor's end cuts. Blocks that are hidden, by the block mask or by the causal one, are on no list. dK and dV go over
// the transposed lists. Tiles divide 128, so a tile lies in one row and one column of blocks.
#include "tiles.cuh"

#define MASK

struct Mask {
    static constexpr int SIDE = 128;  // of a block, in queries and in keys

    int offset;  // with CAUSAL, query i sees key j when j <= i + offset
    Global<const int> lists;  // [batch, heads, rows of blocks, 2 + blocks]: how many are seen whole, how many are seen, then their numbers
    long long batch, head, row;  // strides; 0 where all share one list

    DEVICE bool sees(int query, int key) const { return !CAUSAL || key <= query + offset; }

    // The tiles of a list: each block makes SIDE / STEP of them.
    struct Visits {
        static_assert(SIDE % STEP == 0 && SIDE % (WARPS / SPLIT * ROWS) == 0, "tiles divide a block");
        Global<const int> blocks;
        int whole, count;

        DEVICE int first(int visit) const { return blocks[visit / (SIDE / STEP)] * SIDE + visit % (SIDE / STEP) * STEP; }
        DEVICE bool masked(int visit) const { return visit >= whole; }
    };

    DEVICE Visits list_of(int of_batch, int of_head, int first_row) const {
        const Global<const int> list = lists + (of_batch * batch + of_head * head + first_row / SIDE * row);
        return {list + 2, list[0] * (SIDE / STEP), list[1] * (SIDE / STEP)};
    }
    DEVICE Visits keys_of(int of_batch, int of_head, int first_query, int, int) const { return list_of(of_batch, of_head, first_query); }
    DEVICE Visits queries_of(int of_batch, int of_head, int first_key, int, int) const { return list_of(of_batch, of_head, first_key); }
};

#include "fa2.cu"

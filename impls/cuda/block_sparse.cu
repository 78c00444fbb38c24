// Block-sparse FlashAttention in CUDA C++: FlashAttention-2 with a block mask (Dao et al., "FlashAttention", NeurIPS
// 2022, section 3.3 and Algorithm 5).
//
// Only one thing changes against FlashAttention-2: which tiles a loop visits. So this file is a Mask for the kernels of
// fa2.cu. A block mask has one entry for each block of 128 x 128 scores. Each row of blocks has a list. The list names
// first the whole blocks, in which every query sees every key. They are computed without a mask. Then it names the
// partial blocks, which the diagonal or the end of the tensor cuts. The loops do not visit blocks that the block mask
// or the causal mask hides. The loops of dK and dV use the lists of the transposed mask. The sizes of tiles divide 128,
// so a tile lies in one row and one column of blocks.
#include "tiles.cuh"

#define MASK

struct Mask {
    static constexpr int SIDE = 128;  // queries and keys of a block

    int offset;  // with CAUSAL, query i sees key j if j <= i + offset
    // [batch, heads, rows of blocks, 2 + blocks]: the number of whole blocks, the number of visible blocks, then the
    // numbers of the blocks.
    Global<const int> lists;
    long long batch, head, row;  // strides in elements; 0 if all batch entries or all heads share a list

    // With CAUSAL: the key after the last one that the query sees, and the first query that sees the key.
    DEVICE int end_of_keys(int query) const { return query + offset + 1; }
    DEVICE int first_query(int key) const { return key - offset; }

    // The tiles of a list. Each block consists of SIDE / STEP tiles along the loop.
    struct Visits {
        static_assert(SIDE % STEP == 0 && SIDE % (WARPS / SPLIT * ROWS) == 0, "tiles divide a block");
        Global<const int> blocks;
        int whole, count;

        DEVICE int first(int visit) const {
            return blocks[visit / (SIDE / STEP)] * SIDE + visit % (SIDE / STEP) * STEP;
        }
        DEVICE bool masked(int visit) const { return visit >= whole; }
    };

    DEVICE Visits list_of(int of_batch, int of_head, int first_row) const {
        const Global<const int> list = lists + (of_batch * batch + of_head * head + first_row / SIDE * row);
        return {list + 2, list[0] * (SIDE / STEP), list[1] * (SIDE / STEP)};
    }
    DEVICE Visits keys_of(int of_batch, int of_head, int first_query, int, int) const {
        return list_of(of_batch, of_head, first_query);
    }
    DEVICE Visits queries_of(int of_batch, int of_head, int first_key, int, int) const {
        return list_of(of_batch, of_head, first_key);
    }
};

#include "fa2.cu"

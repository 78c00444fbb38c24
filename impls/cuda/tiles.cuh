// Tiles of matrices in shared memory, a warp's share of a product in registers, and the products of attention. This
// file uses primitives.cuh.
//
// For one compilation, the loader defines
//
//   Element           the type of the inputs: float, half or bfloat16
//   DIM               the head dim, padded to 64, 128 or 256
//   VECTOR            whether kernels can copy rows in aligned pieces of 16 bytes
//   CAUSAL, DROPOUT   whether there is a causal mask, and whether there is dropout
//
// and the shape of the work:
//
//   WARPS    the number of warps of a block
//   ROWS     the number of rows of scores that a warp computes: 16 or 32
//   STEP     the number of columns of scores in one step of the block's loop
//   SPLIT    the number of warps that own the same rows of scores. Of the gradients of these rows, each of these warps
//            sums another part of the columns. This serves head dims at which one warp cannot hold all the sums.
//   HOLD     whether the forward keeps the queries in registers
//   BLOCKS   the number of blocks that share a multiprocessor; it limits the registers of a thread
//
// FMA units compute float32 products, and tensor cores compute 16-bit products. Both keep a tile of float32 sums in the
// same array of registers (Sums), so each kernel is written once.
#pragma once
#include "primitives.cuh"

constexpr bool TENSOR_CORES = sizeof(Element) == 2;
constexpr int CHUNK = 16 / sizeof(Element);  // elements in 16 bytes, the unit of copies and of the swizzle

// ---------------------------------------------------------------------------------------------------------- parameters

// The sizes, the scale and the dropout of a call.
struct Problem {
    int heads, kv_heads, queries, keys, dim;
    // The scale, |scale| and |scale| log2 e. If the scale is 0, the last two are 1 and log2 e.
    float scale, magnitude, exponent_scale;
    unsigned long long seed;  // of the dropout mask
    unsigned last_dropped;    // the largest word that drops a weight
    float kept_scale;         // 1 / (1 - p)

    DEVICE int groups() const { return heads / kv_heads; }
};

// ------------------------------------------------------------------------------------------------------- device memory

// A tensor [batch, heads, length, dim] with any strides. Strides are in elements.
template <class T>
struct View {
    Global<T> data;
    long long batch, head, row, column;
};

// One head of a tensor, [rows, dim].
template <class T>
struct Head {
    Global<T> data;
    long long row, column;
    int rows, dim;

    DEVICE Global<T> at(int i, int j) const { return data + (i * row + j * column); }
};

template <class T>
DEVICE Head<T> head_of(const View<T>& view, int batch, int head, int rows, int dim) {
    return {view.data + (batch * view.batch + head * view.head), view.row, view.column, rows, dim};
}

// ------------------------------------------------------------------------------------------------------- shared memory

// A tile [rows, COLUMNS] of shared memory. COLUMNS is a power of two. Each row permutes its chunks of 16 bytes by its
// row number. So the eight rows of a column that ldmatrix reads are in different banks, and so are the rows that the
// lanes of a warp read with read_four.
template <int COLUMNS>
struct Tile {
    static constexpr int CHUNKS = COLUMNS / CHUNK;
    static constexpr int PERMUTED = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : CHUNKS % 2 == 0 ? 2 : 1;
    Element* start;

    static constexpr DEVICE int bytes(int rows) { return rows * COLUMNS * static_cast<int>(sizeof(Element)); }
    DEVICE Element* chunk(int row, int number) const {
        const int swizzle = TENSOR_CORES ? row : row ^ (row >> 2);
        return start + row * COLUMNS + (number ^ (swizzle & (PERMUTED - 1))) * CHUNK;
    }
    // The address of chunk `even` + `odd` of a row, for tensor cores. `even` is an even number that is known at compile
    // time, and `odd` is 0 or 1 and may differ between lanes. The swizzle permutes chunks within 128 bytes, so four
    // flipped addresses serve a row, and the others are at known distances from them.
    DEVICE Spot spot(int row, int odd) const { return spot_of(chunk(row, odd)); }
    static DEVICE Spot spot(Spot first, int even) { return flipped(first, 16 * even % 128) + 16 * even / 128 * 128; }
    static constexpr int ROW = COLUMNS * static_cast<int>(sizeof(Element));  // bytes of a row

    DEVICE Element* at(int row, int column) const { return chunk(row, column / CHUNK) + column % CHUNK; }
    // The tile of the rows from `row` on. It is a multiple of 32, after which the swizzle repeats. With tensor cores, a
    // multiple of 8 will do.
    DEVICE Tile from(int row) const { return {start + row * COLUMNS}; }
};

// Two tiles [LENGTH, DIM]. While the block computes with one, copies fill the other.
template <int LENGTH>
struct Pair {
    Element* start;

    DEVICE Tile<DIM> operator[](int which) const { return {start + which * LENGTH * DIM}; }
};

// Allocates the block's shared memory from front to back.
struct Arena {
    char* next = shared_memory();

    template <int COLUMNS>
    DEVICE Tile<COLUMNS> tile(int rows) {
        const Tile<COLUMNS> result{reinterpret_cast<Element*>(next)};
        next += Tile<COLUMNS>::bytes(rows);
        return result;
    }
    DEVICE Pair<STEP> pair() { return {tile<DIM>(2 * STEP).start}; }
    DEVICE float* numbers(int count) {
        float* result = reinterpret_cast<float*>(next);
        next += count * sizeof(float);
        return result;
    }
};

// Starts to copy LENGTH rows of a head into a tile [LENGTH, DIM]. All threads of the block call it. The tile gets zeros
// past the last row and past the head dim. Memory there is never read, because it may hold NaN, and 0 NaN is NaN.
//
// If rows are not vectors, each element is copied by itself. Elements of 16 bits pass through registers, because no
// asynchronous copy is so small. Several of these reads wait for memory together. Their number leaves enough registers
// for the sums.
template <int LENGTH>
DEVICE void copy_tile(Tile<DIM> to, const Head<const Element>& from, int first_row) {
    // AT_ONCE: rows that the block copies in one turn, in which each thread copies 16 bytes.
    constexpr int CHUNKS = Tile<DIM>::CHUNKS, AT_ONCE = 32 * WARPS / CHUNKS;
    constexpr int TURNS = LENGTH / AT_ONCE, TOGETHER = TENSOR_CORES && TURNS % 2 == 0 ? 2 : 1;
    static_assert(AT_ONCE * CHUNKS == 32 * WARPS && LENGTH % AT_ONCE == 0,
                  "a turn copies whole rows, and the last turn as many as the others");
    const int thread = thread_index_again(), first = thread / CHUNKS, number = thread % CHUNKS, column = number * CHUNK;
    const long long jump = AT_ONCE * from.row;
    Global<const Element> at = from.at(first_row + first, column);
    if (VECTOR) {
        UNROLL
        for (int turn = 0; turn < TURNS; ++turn) {
            const int row = turn * AT_ONCE + first;
            const bool inside = first_row + row < from.rows;
            copy_async<16>(spot_of(to.chunk(row, number)), at, inside && column < from.dim);
            at = at + jump;
        }
        return;
    }
    ROLLED
    for (int turn = 0; turn < TURNS; turn += TOGETHER) {
        Element elements[TOGETHER][CHUNK] = {};
        UNROLL
        for (int t = 0; t < TOGETHER; ++t) {
            const int row = (turn + t) * AT_ONCE + first;
            UNROLL
            for (int i = 0; i < CHUNK; ++i) {
                const bool inside = first_row + row < from.rows && column + i < from.dim;
                if constexpr (TENSOR_CORES) {
                    if (inside) elements[t][i] = at[i * from.column];
                } else {
                    copy_async<4>(spot_of(to.chunk(row, number) + i), at + i * from.column, inside);
                }
            }
            at = at + jump;
        }
        if constexpr (TENSOR_CORES) {
            UNROLL
            for (int t = 0; t < TOGETHER; ++t) {
                UNROLL
                for (int i = 0; i < CHUNK; ++i)
                    write(to.chunk((turn + t) * AT_ONCE + first, number) + i, elements[t][i]);
            }
        }
    }
}

// Multiplies a tile [LENGTH, DIM] of queries by the sign of the scale, which is exact. So the largest product in a row
// belongs to the row's largest score, also if the scale is negative. A scale of 0 makes every product 0. All threads
// see the tile before the call, and the result after it.
template <int LENGTH>
DEVICE void times_sign(Tile<DIM> tile, float scale) {
    if (scale > 0.0f) return;
    ROLLED
    for (int i = thread_index(); i < LENGTH * DIM; i += 32 * WARPS)
        write(tile.start + i, rounded<Element>(scale == 0.0f ? 0.0f : -to_float(read(tile.start + i))));
    barrier();
}

// Starts to copy LENGTH float32 numbers, one for each row. Past the last row it writes 0.
template <int LENGTH>
DEVICE void copy_numbers(float* to, Global<const float> from, int first_row, int rows) {
    UNROLL
    for (int turn = 0; turn < (LENGTH + 32 * WARPS - 1) / (32 * WARPS); ++turn) {
        const int i = turn * 32 * WARPS + thread_index_again();
        if (i < LENGTH) copy_async<4>(spot_of(to + i), from + (first_row + i), first_row + i < rows);
    }
}

// ----------------------------------------------------------------------------------------------------------- registers

// A warp's float32 tile [HEIGHT, WIDTH], in the layout of mma's c. Lane 4g + t holds elements of the rows 16m + g and
// 16m + g + 8. With tensor cores it holds two neighbours in every 8 columns, from column 8n + 2t on. With float32
// inputs it holds four neighbours in every 16 columns, from column 16(n/2) + 4t on, so that they are read and written
// as one vector. at[m][n] holds two of them, from column 16(n/2) + 4t + 2(n%2) on.
template <int HEIGHT, int WIDTH>
struct Sums {
    static constexpr int M = HEIGHT / 16, N = WIDTH / 8;
    Registers<float, 4> at[M][N];

    // The row and the column of element i, 0 to 3, of at[m][n].
    static DEVICE int row(int m, int i) { return 16 * m + lane_index() / 4 + 8 * (i / 2); }
    static DEVICE int column(int n, int i) { return lane_index() % 4 * (TENSOR_CORES ? 2 : 4) + across(n, i); }
    // The lane's first row and first column, and the distance of an element's column from the first one. The distance
    // is known at compile time. The lane's other rows are 8, 16 ... after the first one.
    static DEVICE int first_row() { return lane_index_again() / 4; }
    static DEVICE int first_column() { return lane_index_again() % 4 * (TENSOR_CORES ? 2 : 4); }
    static constexpr DEVICE int across(int n, int i) {
        return TENSOR_CORES ? 8 * n + i % 2 : 16 * (n / 2) + 2 * (n % 2) + i % 2;
    }
    // The index of the row of element i of at[m][n] among the lane's HEIGHT / 8 rows.
    static constexpr DEVICE int slot(int m, int i) { return 2 * m + i / 2; }

    DEVICE void clear() {
        UNROLL
        for (int m = 0; m < M; ++m) {
            UNROLL
            for (int n = 0; n < N; ++n) {
                UNROLL
                for (int i = 0; i < 4; ++i) at[m][n][i] = 0.0f;
            }
        }
    }
    // Calls visit(number, m, n, i) for each number.
    template <class Visit>
    DEVICE void each(Visit visit) {
        UNROLL
        for (int m = 0; m < M; ++m) {
            UNROLL
            for (int n = 0; n < N; ++n) {
                UNROLL
                for (int i = 0; i < 4; ++i) visit(at[m][n][i], m, n, i);
            }
        }
    }
};

// A tile of sums as the left operand of a product, rounded to the inputs' type. With 16-bit inputs, the layout of two
// 16x8 tiles of mma's c is the layout of one 16x16 tile of mma's a. So no lane needs the numbers of another lane. With
// float32 inputs nothing is rounded.
template <int HEIGHT, int WIDTH>
struct Weights {
    Registers<unsigned, 4> at[TENSOR_CORES ? WIDTH / 16 : 1][HEIGHT / 16];
    const Sums<HEIGHT, WIDTH>& exact;

    DEVICE explicit Weights(const Sums<HEIGHT, WIDTH>& sums) : exact(sums) {
        if constexpr (TENSOR_CORES) {
            UNROLL
            for (int k = 0; k < WIDTH / 16; ++k) {
                UNROLL
                for (int m = 0; m < HEIGHT / 16; ++m) {
                    UNROLL
                    for (int i = 0; i < 4; ++i) {  // a: [g, 2t], [g + 8, 2t], [g, 2t + 8], [g + 8, 2t + 8]
                        const Registers<float, 4>& c = sums.at[m][2 * k + i / 2];
                        at[k][m][i] = pack<Element>(c[2 * (i % 2)], c[2 * (i % 2) + 1]);
                    }
                }
            }
        }
    }
};

// The dropout mask of a lane's numbers of a tile, with one bit for each number. It is drawn separately from the
// products of the tile, in a loop that is not unrolled and that draws four numbers in each turn. An unrolled Philox
// beside the sums would not fit in the registers, and it would take longer to compile than the rest of the kernel.
template <int HEIGHT, int WIDTH>
struct Drawn {
    using Numbers = Sums<HEIGHT, WIDTH>;
    static constexpr int TILES = Numbers::M * Numbers::N, WORDS = (TILES + 7) / 8;
    Registers<unsigned, WORDS> dropped;

    // Calls keeps(row, column) for each number.
    template <class Keeps>
    DEVICE void draw(Keeps keeps) {
        UNROLL
        for (int word = 0; word < WORDS; ++word) {
            dropped[word] = 0;
            ROLLED
            for (int tile = 8 * word; tile < smaller_of(8 * word + 8, TILES); ++tile) {
                UNROLL
                for (int i = 0; i < 4; ++i) {
                    const bool keep = keeps(Numbers::row(tile / Numbers::N, i), Numbers::column(tile % Numbers::N, i));
                    dropped[word] |= static_cast<unsigned>(!keep) << (4 * tile % 32 + i);
                }
            }
        }
    }
    DEVICE bool drops(int m, int n, int i) const {
        const int tile = m * Numbers::N + n;
        return dropped[tile / 8] >> (4 * tile % 32 + i) & 1;
    }
};

// HEIGHT rows of a tile of shared memory, from `first_row` on, as the left operand of a product. If HELD, the fragments
// for the tensor cores are read once, by `hold`, and stay in registers.
template <int HEIGHT, bool HELD>
struct Operand {
    Tile<DIM> tile;
    int first_row, below;
    Registers<unsigned, 4> held[HELD && TENSOR_CORES ? DIM / 16 : 1][HEIGHT / 16];

    // The rows begin `below` rows after first_row, a number that is known at compile time.
    DEVICE Operand(Tile<DIM> tile, int first_row, int below = 0) : tile(tile), first_row(first_row), below(below) {}
    DEVICE Registers<unsigned, 4> read_fragment(int k, int m) const {
        Registers<unsigned, 4> fragment;
        const Spot first = tile.spot(first_row + lane_index() % 16, lane_index() / 16);
        ldmatrix(fragment, tile.spot(first, 2 * k) + (below + 16 * m) * tile.ROW);
        return fragment;
    }
    DEVICE void hold() {
        if constexpr (HELD && TENSOR_CORES) {
            UNROLL
            for (int k = 0; k < DIM / 16; ++k) {
                UNROLL
                for (int m = 0; m < HEIGHT / 16; ++m) held[k][m] = read_fragment(k, m);
            }
        }
    }
    DEVICE Registers<unsigned, 4> fragment(int k, int m) const {
        if constexpr (HELD && TENSOR_CORES)
            return held[k][m];
        else
            return read_fragment(k, m);
    }
};

// ------------------------------------------------------------------------------------------------------------ products

// Rows by rows, as in Q K^T: sums[r, c] += sum_d left[r, d] right[c, d]. left is [HEIGHT, DIM], right is [WIDTH, DIM],
// and sums is [HEIGHT, WIDTH].
template <int HEIGHT, int WIDTH, bool HELD>
DEVICE void rows_by_rows(Sums<HEIGHT, WIDTH>& sums, const Operand<HEIGHT, HELD>& left, Tile<DIM> right) {
    constexpr int M = HEIGHT / 16;
    const int lane = lane_index_again();
    if constexpr (TENSOR_CORES) {
        const Spot first = right.spot(lane / 16 * 8 + lane % 8, lane / 8 % 2);
        UNROLL
        for (int k = 0; k < DIM / 16; ++k) {
            Registers<unsigned, 4> a[M];
            UNROLL
            for (int m = 0; m < M; ++m) a[m] = left.fragment(k, m);
            const Spot spot = right.spot(first, 2 * k);
            UNROLL
            for (int n = 0; n < WIDTH / 16; ++n) {
                // Rows 16n.. at d = 16k.. and d = 16k + 8.., then rows 16n + 8.. at the same d.
                Registers<unsigned, 4> b;
                ldmatrix(b, spot + 16 * n * right.ROW);
                UNROLL
                for (int m = 0; m < M; ++m) {
                    mma<Element>(sums.at[m][2 * n], a[m], b[0], b[1]);
                    mma<Element>(sums.at[m][2 * n + 1], a[m], b[2], b[3]);
                }
            }
        }
    } else {
        ROLLED
        for (int d = 0; d < DIM / 4; ++d) {
            float4 a[2 * M];
            UNROLL
            for (int r = 0; r < 2 * M; ++r)
                a[r] =
                    read_four(left.tile.chunk(left.below + left.first_row + 16 * (r / 2) + lane / 4 + 8 * (r % 2), d));
            UNROLL
            for (int n = 0; n < WIDTH / 8; ++n) {
                UNROLL
                for (int i = 0; i < 2; ++i) {
                    const float4 b = read_four(right.chunk(Sums<HEIGHT, WIDTH>::column(n, i), d));
                    UNROLL
                    for (int r = 0; r < 2 * M; ++r) {
                        float& sum = sums.at[r / 2][n][2 * (r % 2) + i];
                        sum = multiply_add(a[r].x, b.x, sum);
                        sum = multiply_add(a[r].y, b.y, sum);
                        sum = multiply_add(a[r].z, b.z, sum);
                        sum = multiply_add(a[r].w, b.w, sum);
                    }
                }
            }
        }
    }
}

// One step of the two products below, in float32: sums[r, c] += left[r] right[row, first_column + c]. left holds one
// number for each of the lane's rows.
template <int HEIGHT, int WIDTH, int COLUMNS>
DEVICE void add_outer(Sums<HEIGHT, WIDTH>& sums, const Registers<float, HEIGHT / 8>& left, Tile<COLUMNS> right, int row,
                      int first_column) {
    UNROLL
    for (int c = 0; c < WIDTH / 16; ++c) {
        const float4 b = read_four(right.chunk(row, first_column / 4 + 4 * c + lane_index() % 4));
        UNROLL
        for (int r = 0; r < HEIGHT / 8; ++r) {
            Registers<float, 4>&low = sums.at[r / 2][2 * c], &high = sums.at[r / 2][2 * c + 1];
            const int i = 2 * (r % 2);
            low[i] = multiply_add(left[r], b.x, low[i]);
            low[i + 1] = multiply_add(left[r], b.y, low[i + 1]);
            high[i] = multiply_add(left[r], b.z, high[i]);
            high[i + 1] = multiply_add(left[r], b.w, high[i + 1]);
        }
    }
}

// One step of the two products below, on tensor cores. It takes 16 rows of the right operand, from `row` on. `first` is
// the address of the lane's row among the first 16 rows.
template <int HEIGHT, int WIDTH, int COLUMNS>
DEVICE void add_sixteen(Sums<HEIGHT, WIDTH>& sums, const Registers<unsigned, 4> (&a)[HEIGHT / 16], Tile<COLUMNS> right,
                        Spot first, int row, int first_column) {
    UNROLL
    for (int n = 0; n < WIDTH / 16; ++n) {
        // Columns 16n.. at rows from `row` and from `row` + 8, then columns 16n + 8.. at the same rows.
        Registers<unsigned, 4> b;
        ldmatrix_transposed(b, right.spot(first, first_column / 8 + 2 * n) + row * right.ROW);
        UNROLL
        for (int m = 0; m < HEIGHT / 16; ++m) {
            mma<Element>(sums.at[m][2 * n], a[m], b[0], b[1]);
            mma<Element>(sums.at[m][2 * n + 1], a[m], b[2], b[3]);
        }
    }
}

// Rows by columns, as in P V: sums[r, c] += sum_k left[r, k] right[k, first_column + c]. left is [HEIGHT, LENGTH] in
// registers, right is [LENGTH, DIM], and sums is [HEIGHT, WIDTH].
template <int HEIGHT, int WIDTH, int LENGTH>
DEVICE void rows_by_columns(Sums<HEIGHT, WIDTH>& sums, const Weights<HEIGHT, LENGTH>& left, Tile<DIM> right,
                            int first_column = 0) {
    const int lane = lane_index_again();
    const Spot first = right.spot(lane % 16, lane / 16);
    UNROLL
    for (int k = 0; k < LENGTH / 16; ++k) {
        if constexpr (TENSOR_CORES) {
            add_sixteen(sums, left.at[k], right, first, 16 * k, first_column);
        } else {
            ROLLED
            for (int t = 0; t < 4; ++t) {  // lane t of the quad holds columns 16k + 4t to 16k + 4t + 3 of left
                UNROLL
                for (int j = 0; j < 4; ++j) {
                    Registers<float, HEIGHT / 8> a;
                    UNROLL
                    for (int r = 0; r < HEIGHT / 8; ++r)
                        a[r] = from_lane(left.exact.at[r / 2][2 * k + j / 2][2 * (r % 2) + j % 2],
                                         lane_index() / 4 * 4 + t);
                    add_outer(sums, a, right, 16 * k + 4 * t + j, first_column);
                }
            }
        }
    }
}

// A left operand [HEIGHT, LENGTH] that one warp leaves in shared memory for another. Each lane writes its registers of
// each fragment, and the same lane of the other warp reads them.
template <int HEIGHT, int LENGTH>
struct Left {
    static constexpr int FRAGMENT = 32 * 16, BYTES = LENGTH / 16 * (HEIGHT / 16) * FRAGMENT;
    char* start;

    DEVICE char* place(int k, int m) const {
        return start + (k * (HEIGHT / 16) + m) * FRAGMENT + lane_index_again() * 16;
    }
    DEVICE void put(const Weights<HEIGHT, LENGTH>& weights) const {
        UNROLL
        for (int k = 0; k < LENGTH / 16; ++k) {
            UNROLL
            for (int m = 0; m < HEIGHT / 16; ++m) write_registers(place(k, m), weights.at[k][m]);
        }
    }
};

// The same product, with a left operand of another warp.
template <int HEIGHT, int WIDTH, int LENGTH>
DEVICE void rows_by_columns(Sums<HEIGHT, WIDTH>& sums, const Left<HEIGHT, LENGTH>& left, Tile<DIM> right,
                            int first_column) {
    const int lane = lane_index_again();
    const Spot first = right.spot(lane % 16, lane / 16);
    UNROLL
    for (int k = 0; k < LENGTH / 16; ++k) {
        Registers<unsigned, 4> a[HEIGHT / 16];
        UNROLL
        for (int m = 0; m < HEIGHT / 16; ++m) read_registers(a[m], left.place(k, m));
        add_sixteen(sums, a, right, first, 16 * k, first_column);
    }
}

// Columns by columns, as in P^T dO with P in shared memory: sums[r, c] += sum_k left[k, first_row + r]
// right[k, first_column + c]. left is [LENGTH, COLUMNS], right is [LENGTH, DIM], and sums is [HEIGHT, WIDTH].
template <int LENGTH, int HEIGHT, int WIDTH, int COLUMNS>
DEVICE void columns_by_columns(Sums<HEIGHT, WIDTH>& sums, Tile<COLUMNS> left, int first_row, Tile<DIM> right,
                               int first_column = 0) {
    const int lane = lane_index();
    if constexpr (TENSOR_CORES) {
        const Spot first = left.spot(lane / 16 * 8 + lane % 8, lane / 8 % 2), row = right.spot(lane % 16, lane / 16);
        UNROLL
        for (int k = 0; k < LENGTH / 16; ++k) {
            Registers<unsigned, 4> a[HEIGHT / 16];
            UNROLL
            for (int m = 0; m < HEIGHT / 16; ++m)
                ldmatrix_transposed(a[m], left.spot(first, (first_row + 16 * m) / 8) + 16 * k * left.ROW);
            add_sixteen(sums, a, right, row, 16 * k, first_column);
        }
    } else {
        ROLLED
        for (int k = 0; k < LENGTH; ++k) {
            Registers<float, HEIGHT / 8> a;
            UNROLL
            for (int r = 0; r < HEIGHT / 8; ++r)
                a[r] = read(left.at(k, first_row + 16 * (r / 2) + lane / 4 + 8 * (r % 2)));
            add_outer(sums, a, right, k, first_column);
        }
    }
}

// ------------------------------------------------------------------------------------------------------------- results

// Multiplies each row of the sums by its factor, rounds it to the tensor's type and stores it. The sums go to the rows
// from first_row on and to the columns from first_column on. Elements outside the tensor are not stored. factors holds
// one number for each of the lane's rows. The tensor is contiguous.
template <int HEIGHT, int WIDTH, class T>
DEVICE void store_rows(const Head<T>& to, const Sums<HEIGHT, WIDTH>& sums, const Registers<float, HEIGHT / 8>& factors,
                       int first_row, int first_column = 0) {
    UNROLL
    for (int r = 0; r < HEIGHT / 8; ++r) {
        const int i = 2 * (r % 2), row = first_row + sums.first_row() + 8 * r;
        if (row >= to.rows) continue;
        const Global<T> start = to.at(row, first_column);
        UNROLL
        for (int n = 0; n < WIDTH / 8; ++n) {
            const int column = sums.first_column() + sums.across(n, i);
            const float low = factors[r] * sums.at[r / 2][n][i], high = factors[r] * sums.at[r / 2][n][i + 1];
            if (VECTOR) {  // a row starts at a multiple of 16 bytes
                if (first_column + column < to.dim) write_two(start + column, low, high);
            } else {
                if (first_column + column < to.dim) start[column] = rounded<T>(low);
                if (first_column + column + 1 < to.dim) start[column + 1] = rounded<T>(high);
            }
        }
    }
}

// The same factor for all rows.
template <int N>
DEVICE Registers<float, N> all(float factor) {
    Registers<float, N> factors;
    UNROLL
    for (int r = 0; r < N; ++r) factors[r] = factor;
    return factors;
}

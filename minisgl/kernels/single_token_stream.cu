// A product of one token with a quantised weight, ``W x``: see single_token_stream.py.
//
// On every multiprocessor a block stays to the end. Each has its share of the rows, eight at a time, and its warps take
// pieces of them in turn, 128 bytes of each row. The next pieces are on their way in registers, also beyond the end of
// the rows: memory is asked for something from the first moment, before the kernel in front has ended, to the last.
//
// Tensor cores do the sums. A matrix has 16 rows: of eight rows of W the first 64 bytes and the other 64, as lanes read
// them. The columns of the other matrix are the x that belongs to the one and to the other half, and a lane takes from
// the product what fits together. e4m3 becomes float16 in one instruction for two. Four bits become bytes with a sign,
// 16 (q - 8), and x integers of 15 bits, with a scale for a piece's columns; their two bytes are two columns of the
// matrix, so sums are exact. A tensor core wants a row's numbers spread over four lanes in an order of its own. But
// a sum may be taken in any order, so a lane multiplies the bytes that it has, and x lies in shared memory as it needs
// it.
//
// Before this text stand quantized.cu, and the sizes that `single_token_stream.py` compiles it for, as constants.

constexpr int THREADS = 32 * WARPS, PIECE = 128;  // bytes of a row; its columns share a scale of x
constexpr int WIDTH = COLUMNS * BITS / 8, PIECES = WIDTH / PIECE;
constexpr int OF_BYTE = 8 / BITS, LANES = 8 * OF_BYTE;  // columns; lanes that multiply with different x
constexpr int GROUPS = COLUMNS / GROUP, HALF = GROUP / 2;
constexpr int UNIT = 8, OUTPUTS = GATED ? UNIT / 2 : UNIT;  // rows; a gate's have the up projection's beside them
constexpr int ALL_UNITS = ROWS / OUTPUTS;
constexpr bool GROUPED = GROUPS > 1;
static_assert(WIDTH % PIECE == 0 && ROWS % OUTPUTS == 0 && GROUP % 128 == 0, "single_token_stream.fits");

__device__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ float larger(float first, float second) {  // unlike fmaxf, NaN if one of them is
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(first), "f"(second));
    return larger;
}
__device__ u32 halves(float first, float second) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
}
// The first two bytes of a word of e4m3 as float16, and the last two.
__device__ u32 lower_halves(u32 word) {
    u32 both;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low; }" : "=r"(both) : "r"(word));
    return both;
}
__device__ u32 upper_halves(u32 word) {
    u32 both;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high; }" : "=r"(both) : "r"(word));
    return both;
}
// 16 (q - 8) of the upper half q of each byte: & 0xf0 ^ 0x80, as one instruction.
__device__ u32 less_8(u32 bytes) {
    u32 numbers;
    asm("lop3.b32 %0, %1, 0xf0f0f0f0, 0x80808080, 0x6a;" : "=r"(numbers) : "r"(bytes));
    return numbers;
}
__device__ void multiply_halves(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ void multiply_bytes(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

struct Part {  // of x: the columns of a piece
    float scale;
    int sums[2];  // of its integers, those of the first 64 bytes and the others
};

struct Shared {
    alignas(16) u32 x[PIECES][2][LANES][4];  // two float16 a word, or four bytes
    Part parts[PIECES];
    float sums[UNITS][WARPS][UNIT];
    float squares[WARPS];
};
static_assert(sizeof(Shared) <= SHARED, "single_token_stream.linear");

// x on its way to shared memory: a lane has the columns of four bytes. The norm's weights are read before x is there.
struct Input {
    static constexpr int TURNS = (PIECES + WARPS - 1) / WARPS;
    uint2 weights[NORM ? TURNS : 1][OF_BYTE];

    __device__ static int piece(int turn) { return turn * WARPS + threadIdx.x / 32; }
    // With 4 bits the low halves of a group's bytes come before its high halves.
    __device__ static uint2 four(const u16* from, int turn, int half) {
        int byte = min(piece(turn), PIECES - 1) * PIECE + threadIdx.x % 32 * 4;
        return *(const uint2*)(from + (BITS == 8 ? byte : byte / HALF * GROUP + half * HALF + byte % HALF));
    }
    __device__ static void unpack(float (&values)[4], uint2 four) {
        values[0] = low(four.x), values[1] = high(four.x), values[2] = low(four.y), values[3] = high(four.y);
    }
    __device__ Input(const u16* norm) {
#pragma unroll
        for (int i = 0; NORM && i < TURNS * OF_BYTE; i++)
            weights[i / OF_BYTE][i % OF_BYTE] = four(norm, i / OF_BYTE, i % OF_BYTE);
    }
    // What a norm multiplies by is taken up at the end, when `squares` are complete.
    __device__ void store(Shared& shared, const u16* x) const {
        int lane = threadIdx.x % 32;
        float squares = 0;
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {  // each asks for its own: all of x at once takes longer
            if (piece(turn) >= PIECES) break;
            float v[OF_BYTE][4], largest = 0;
#pragma unroll
            for (int half = 0; half < OF_BYTE; half++) {
                float w[4];
                unpack(v[half], four(x, turn, half));
                if (NORM) unpack(w, weights[turn][half]);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    if (NORM) {
                        squares += v[half][i] * v[half][i];
                        v[half][i] *= w[i];
                    }
                    largest = larger(largest, fabsf(v[half][i]));
                }
            }
            // A power of two that takes the largest to 2¹³ or beyond, so that 14 bits and a sign have room for all.
            // `scale` undoes it, and the 16 of `less_8` with it.
            u32 exponent = max(__reduce_max_sync(~0u, __float_as_uint(largest)) >> 23, 18u);
            float factor = __uint_as_float((267 - exponent) << 23);
            Part& part = shared.parts[piece(turn)];
            u32 scale = exponent == 255 ? 0x7fc00000u : (exponent - (BITS == 8 ? 13 : 17)) << 23;
            if (lane == 0) part.scale = __uint_as_float(scale);
            // Four bytes are word `lane % 4` of the 16 that a lane reads; see `multiply`.
            int of_lane = lane / 16 * (LANES / 2) + lane % 16 / 4, at = lane % 2 * 2;
            auto& to = shared.x[piece(turn)][lane % 4 / 2];
            if (BITS == 8) {
                *(uint2*)&to[of_lane][at] = {halves(v[0][0] * factor, v[0][1] * factor),
                                             halves(v[0][2] * factor, v[0][3] * factor)};
            } else {
                u32 upper[OF_BYTE], lower[OF_BYTE];
                int sum = 0;
#pragma unroll
                for (int half = 0; half < OF_BYTE; half++) {
                    // Beyond 1.5 × 2²³ a float32 counts in ones, and its last bits are the integer: nothing is
                    // converted. With 128 more the second byte is rounded, and the last one's sign the other way round.
                    u32 n[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        n[i] = __float_as_uint(fmaf(v[half][i], factor, 12582912.0f + 128));
                        if (ZERO) sum += n[i] - (0x4b400000 + 128);
                    }
                    u32 first = __byte_perm(n[0], n[1], 0x5140), second = __byte_perm(n[2], n[3], 0x5140);
                    upper[half] = __byte_perm(first, second, 0x7632);
                    lower[half] = __byte_perm(first, second, 0x5410) ^ 0x80808080u;
                }
                *(uint2*)&to[of_lane][at] = {upper[0], upper[OF_BYTE - 1]};
                *(uint2*)&to[of_lane + 4][at] = {lower[0], lower[OF_BYTE - 1]};
#pragma unroll
                for (int i = 0; ZERO && i < 2; i++) {
                    int all = __reduce_add_sync(~0u, lane / 16 == i ? sum : 0);
                    if (lane == 0) part.sums[i] = all;
                }
            }
        }
        if (NORM) {
#pragma unroll
            for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
            if (lane == 0) shared.squares[threadIdx.x / 32] = squares;
        }
    }
};

struct Piece {  // what a lane has of it: 16 bytes of a row, and of the row four further on, with their scales
    uint4 words[2];
    Scale scale[2], zero[2];
};

__device__ int row_of(int unit, int i) {  // row i of a unit
    return GATED ? unit * OUTPUTS + i % OUTPUTS + i / OUTPUTS * ROWS : unit * UNIT + i;
}

struct Weight {
    const char* weight;
    const Scale *scale, *zero;
    __device__ void load(Piece& piece, int first_unit, int pieces, int index) const {
        if (index >= pieces) return;
        int lane = threadIdx.x % 32, unit = first_unit + index / PIECES, at = index % PIECES;
        int group = (at * OF_BYTE + lane / 4 % OF_BYTE) * 128 / GROUP;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int row = row_of(unit, lane / 8 + 4 * i);
            piece.words[i] = read_once(weight + (long long)row * WIDTH + at * PIECE + lane % 8 * 16);
            if (GROUPED) piece.scale[i] = __ldg(scale + row / SCALE_ROWS * GROUPS + group);
            if (ZERO) piece.zero[i] = __ldg(zero + row / SCALE_ROWS * GROUPS + group);
        }
    }
};

// Add up what a lane has of its two rows, in the half of a piece that its four lanes read.
__device__ void multiply(float (&total)[2], const Piece& piece, int at, const Shared& shared) {
    int lane = threadIdx.x % 32, half = lane / 4 % 2;
    const Part& of_x = shared.parts[at];
    int n[4] = {};
    float c[4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint4 x = *(const uint4*)shared.x[at][i / 2][lane % LANES];
        u32 v = word(piece.words[0], i), w = word(piece.words[1], i);
        u32 x0 = word(x, i % 2 * 2), x1 = word(x, i % 2 * 2 + 1);
        if (BITS == 8)
            multiply_halves(c, lower_halves(v), lower_halves(w), upper_halves(v), upper_halves(w), x0, x1);
        else
            multiply_bytes(n, less_8(v << 4), less_8(w << 4), less_8(v), less_8(w), x0, x1);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        // With 8 bits even columns are the first half's, odd ones the second's. With 4 bits two are the first's, and
        // the next two the second's; lanes that have those of the wrong half are not asked in the end.
        float sum = BITS == 8 ? half ? c[2 * i + 1] : c[2 * i] : __int2float_rn(256 * n[2 * i] + n[2 * i + 1]);
        if (ZERO) sum -= 16 * (scale_of(piece.zero[i]) - 8) * __int2float_rn(of_x.sums[half]);
        total[i] += sum * (GROUPED ? of_x.scale * scale_of(piece.scale[i]) : of_x.scale);
    }
}

// What becomes of the sums of some rows, one for each thread; all of it is read long before it is needed.
struct Outputs {
    static constexpr int TURNS = (UNITS * OUTPUTS + THREADS - 1) / THREADS;
    float scale[TURNS][2], bias[TURNS][2];
    u16 residual[TURNS];  // as it comes: who converts it waits for it
    int first_unit, rows;
    __device__ static int output(int turn) { return turn * THREADS + threadIdx.x; }
    __device__ int row(int turn) const { return first_unit * OUTPUTS + output(turn); }
    __device__ bool exists(int turn) const { return output(turn) < rows; }

    __device__ Outputs(int first_unit, int units, const Scale* scales, const u16* biases)
        : first_unit(first_unit), rows(units * OUTPUTS) {
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++)
#pragma unroll
            for (int part = 0; part < 1 + GATED; part++) {
                int of_weight = row(turn) + part * ROWS;
                scale[turn][part] = !GROUPED && exists(turn) ? scale_of(scales[of_weight / SCALE_ROWS]) : 1;
                bias[turn][part] = BIAS && exists(turn) ? to_float(biases[of_weight]) : 0;
            }
    }
    __device__ void read_residual(const u16* from) {
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) residual[turn] = ADD && exists(turn) ? from[row(turn)] : 0;
    }
    __device__ void write(u16* out, const Shared& shared, float factor) const {
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
            if (!exists(turn)) break;
            float value[2] = {};
            int unit = output(turn) / OUTPUTS, i = output(turn) % OUTPUTS;
#pragma unroll
            for (int part = 0; part < 1 + GATED; part++) {
#pragma unroll
                for (int warp = 0; warp < WARPS; warp++) value[part] += shared.sums[unit][warp][i + part * OUTPUTS];
                value[part] = value[part] * factor * scale[turn][part] + bias[turn][part];
            }
            if (GATED) value[0] = value[0] / (1 + __expf(-value[0])) * value[1];
            out[row(turn)] = pair(value[0] + to_float(residual[turn]), 0) & 0xffff;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    single_token_stream(const u16* x, const u16* norm, const char* weight, const Scale* scale, const Scale* zero,
                        const u16* bias, const u16* residual, u16* out, float eps) {
    extern __shared__ __align__(16) char memory[];
    Shared& shared = *(Shared*)memory;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // A block has as many units as the others, or one more.
    int first_unit = blockIdx.x * ALL_UNITS / gridDim.x, units = (blockIdx.x + 1) * ALL_UNITS / gridDim.x - first_unit;
    int count = units * PIECES;
    Weight rows = {weight, scale, zero};
    Piece pieces[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; i++) rows.load(pieces[i], first_unit, count, warp + i * WARPS);
    Input input(norm);
    Outputs outputs(first_unit, units, scale, bias);
    for (int i = threadIdx.x; i < UNITS * WARPS * UNIT; i += THREADS) (&shared.sums[0][0][0])[i] = 0;
    if (EARLY) {
        launch_dependents();
        wait_for_inputs();
    }
    outputs.read_residual(residual);
    input.store(shared, x);
    __syncthreads();
    float total[2] = {};
    int unit = 0;
    auto leave = [&] {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            total[i] += __shfl_xor_sync(~0u, total[i], 5);  // the first half in place 0 of its lanes, the second in 1
            if (lane % 8 == 0) shared.sums[unit][warp][lane / 8 + 4 * i] = total[i];
            total[i] = 0;
        }
    };
#pragma unroll 1
    for (int first = warp; first < count; first += DEPTH * WARPS) {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            int index = first + i * WARPS;
            if (index >= count) break;
            if (index / PIECES != unit) {
                leave();
                unit = index / PIECES;
            }
            multiply(total, pieces[i], index % PIECES, shared);
            rows.load(pieces[i], first_unit, count, index + DEPTH * WARPS);
        }
    }
    leave();
    __syncthreads();
    float factor = 1;
    if (NORM) {
        float squares = 0;
        for (int i = 0; i < WARPS; i++) squares += shared.squares[i];
        factor = rsqrtf(squares / COLUMNS + eps);
    }
    outputs.write(out, shared, factor);
}

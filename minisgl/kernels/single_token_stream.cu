// A product of one token with a quantised weight, ``W x``: see single_token_stream.py.
//
// On every multiprocessor a block stays to the end. Each has its share of the rows, eight at a time, and its warps take
// pieces of them in turn, 128 bytes of each row. The next pieces are on their way in registers, also beyond the end of
// the rows: memory is asked for something from the first moment, before the kernel in front has ended, to the last.
//
// Tensor cores do the sums. A matrix has 16 rows: of eight rows of W the first 64 bytes and the other 64, as lanes read
// them. The columns of the other matrix are the x that belongs to the one and to the other half, and a lane takes from
// the product what fits together. e4m3 becomes float16 in one instruction for two. Four bits stay integers: x becomes
// integers of 15 bits, with a scale for 128 columns, and their two bytes are two columns; so sums are exact. A tensor
// core wants the numbers of a row spread over four lanes in an order of its own; but a sum may be taken in any order.
// So a lane multiplies the bytes that it has, and x lies in shared memory as it needs it.
//
// Before this text stand quantized.cu, and the sizes that `single_token_stream.py` compiles it for, as constants.

constexpr int THREADS = 32 * WARPS, PIECE = 128, PART = 128;  // bytes of a row; columns that have a scale of x
constexpr int WIDTH = COLUMNS * BITS / 8, PIECES = WIDTH / PIECE, PARTS = COLUMNS / PART;
constexpr int OF_PIECE = 8 / BITS, LANES = 8 * OF_PIECE;  // parts; lanes that multiply with different x
constexpr int GROUPS = COLUMNS / GROUP, HALF = GROUP / 2;
constexpr int UNIT = 8, OUTPUTS = GATED ? UNIT / 2 : UNIT;  // rows; a gate's have the up projection's beside them
constexpr int ALL_UNITS = ROWS / OUTPUTS;
constexpr bool GROUPED = GROUPS > 1;
static_assert(WIDTH % PIECE == 0 && ROWS % OUTPUTS == 0 && GROUP % PART == 0, "single_token_stream.fits");

__device__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
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
__device__ void multiply_halves(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ void multiply_bytes(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

struct Part {  // of x
    float scale;
    int sum;  // of its integers
};

struct Shared {
    alignas(16) u32 x[PIECES][2][LANES][4];  // two float16 a word, or four bytes
    Part parts[PARTS];
    float sums[UNITS][WARPS][UNIT];
    float squares[WARPS];
};
static_assert(sizeof(Shared) <= SHARED, "single_token_stream.linear");

// x on its way to shared memory. The norm's weights are read before x is there.
struct Input {
    static constexpr int TURNS = (PARTS + WARPS - 1) / WARPS;
    uint2 weights[NORM ? TURNS : 1];

    __device__ static int part(int turn) { return turn * WARPS + threadIdx.x / 32; }
    // Of a lane's four columns the first. With 4 bits the low halves of a group's bytes come before its high halves.
    __device__ static int column(int turn) {
        int lane = threadIdx.x % 32, at = min(part(turn), PARTS - 1);
        if (BITS == 8) return at * PART + lane * 4;
        int byte = at * (PART / 2);
        return byte / HALF * GROUP + byte % HALF + lane / 16 * HALF + lane % 16 * 4;
    }
    __device__ Input(const u16* norm) {
#pragma unroll
        for (int turn = 0; NORM && turn < TURNS; turn++) weights[turn] = *(const uint2*)(norm + column(turn));
    }
    // What a norm multiplies by is taken up at the end, when `squares` are complete.
    __device__ void store(Shared& shared, const u16* x) const {
        int lane = threadIdx.x % 32;
        uint2 values[TURNS];
        float squares = 0;
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) values[turn] = *(const uint2*)(x + column(turn));
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
            if (part(turn) >= PARTS) break;
            float v[4] = {low(values[turn].x), high(values[turn].x), low(values[turn].y), high(values[turn].y)};
            if (NORM) {
                float w[4] = {low(weights[turn].x), high(weights[turn].x), low(weights[turn].y),
                              high(weights[turn].y)};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    squares += v[i] * v[i];
                    v[i] *= w[i];
                }
            }
            u32 largest = 0;
#pragma unroll
            for (int i = 0; i < 4; i++) largest = max(largest, __float_as_uint(v[i]) & 0x7fffffffu);
            // A power of two that takes the largest to 2¹³ or beyond, so that 14 bits and a sign have room for all.
            u32 exponent = max(__reduce_max_sync(~0u, largest) >> 23, 16u);
            float factor = __uint_as_float((267 - exponent) << 23);
            Part part_of_x = {__uint_as_float(exponent == 255 ? 0x7fc00000u : (exponent - 13) << 23), 0};
            // Four columns are those of word `lane % 4` of the 16 bytes that a lane reads; see `multiply`.
            int piece = part(turn) / OF_PIECE, quad = lane % 4 / 2, place = lane % 16 / 4, at = lane % 2 * 2;
            if (BITS == 8) {
                u32* to = shared.x[piece][quad][lane / 16 * 4 + place] + at;
                to[0] = halves(v[0] * factor, v[1] * factor);
                to[1] = halves(v[2] * factor, v[3] * factor);
            } else {
                // Beyond 1.5 × 2²³ a float32 counts in ones, and its last bits are the integer: nothing is converted.
                u32 n[4];
#pragma unroll
                for (int i = 0; i < 4; i++) n[i] = __float_as_uint(fmaf(v[i], factor, 12582912.0f));
                part_of_x.sum = __reduce_add_sync(~0u, (int)(n[0] + n[1] + n[2] + n[3] - 4 * 0x4b400000u));
                u32 lower = __byte_perm(__byte_perm(n[0], n[1], 0x40), __byte_perm(n[2], n[3], 0x40), 0x5410);
#pragma unroll
                for (int i = 0; i < 4; i++) n[i] += 128;  // since the lower byte has a sign, too
                u32 upper = __byte_perm(__byte_perm(n[0], n[1], 0x51), __byte_perm(n[2], n[3], 0x51), 0x5410);
                int of_lane = part(turn) % 2 * 8 + place;
                shared.x[piece][quad][of_lane][at + lane / 16] = upper;
                shared.x[piece][quad][of_lane + 4][at + lane / 16] = lower;
            }
            if (lane == 0) shared.parts[part(turn)] = part_of_x;
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
        int group = (at * OF_PIECE + lane / 4 % OF_PIECE) * PART / GROUP;
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
    Part of_x = shared.parts[at * OF_PIECE + half % OF_PIECE];
    int less = ZERO ? 0 : -8 * of_x.sum, n[4] = {0, less, 0, less};
    float c[4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint4 x = *(const uint4*)shared.x[at][i / 2][lane % LANES];
        u32 v = word(piece.words[0], i), w = word(piece.words[1], i);
        u32 x0 = word(x, i % 2 * 2), x1 = word(x, i % 2 * 2 + 1);
        if (BITS == 8)
            multiply_halves(c, lower_halves(v), lower_halves(w), upper_halves(v), upper_halves(w), x0, x1);
        else
            multiply_bytes(n, v & 0x0f0f0f0fu, w & 0x0f0f0f0fu, v >> 4 & 0x0f0f0f0fu, w >> 4 & 0x0f0f0f0fu, x0, x1);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        // With 8 bits even columns are the first half's, odd ones the second's. With 4 bits two are the first's, and
        // the next two the second's; lanes that have those of the wrong half are not asked in the end.
        float sum = BITS == 8 ? half ? c[2 * i + 1] : c[2 * i] : __int2float_rn(256 * n[2 * i] + n[2 * i + 1]);
        if (ZERO) sum -= scale_of(piece.zero[i]) * __int2float_rn(of_x.sum);
        total[i] += sum * (GROUPED ? of_x.scale * scale_of(piece.scale[i]) : of_x.scale);
    }
}

// What becomes of the sums of some rows, one for each thread; all of it is read long before it is needed.
struct Outputs {
    static constexpr int TURNS = (UNITS * OUTPUTS + THREADS - 1) / THREADS;
    float scale[TURNS][2], bias[TURNS][2], residual[TURNS];
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
        for (int turn = 0; turn < TURNS; turn++) residual[turn] = ADD && exists(turn) ? to_float(from[row(turn)]) : 0;
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
            out[row(turn)] = pair(value[0] + residual[turn], 0) & 0xffff;
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

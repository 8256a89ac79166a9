// A product of few tokens with a quantised weight, ``x Wᵀ``: see few_tokens.py.
//
// A block has 16 rows of W, or 32, and its warps take segments of 64 bytes of these rows in turn. A lane reads 16 bytes
// of a row at a time, straight to registers and several segments ahead, the first of them before the kernel in front
// has ended. Then numbers become bfloat16, two by two, and tensor cores multiply them: 16 rows by 8 tokens, whether
// there are so many or not. A tensor core wants the numbers of a row spread over four lanes in an order of its own; but
// a sum may be taken in any order, so lanes multiply what they have with the x that belongs to it.
//
// Before this text stand quantized.cu, and the sizes that `few_tokens.py` compiles it for, as constants.

constexpr int WARPS = 8, SEGMENT = 64;  // bytes of a row
constexpr int WIDTH = COLUMNS * BITS / 8, SEGMENTS = WIDTH / SEGMENT;
constexpr int GROUPS = COLUMNS / GROUP, HALF = GROUP / 2;
constexpr int TILE = 16, LOADS = 2 * TILES;              // rows of a tile, and of a lane: two of each tile
constexpr int OUTPUTS = TILE * TILES;                    // of a block
constexpr bool GROUPED = GROUPS > 1;
static_assert(WIDTH % SEGMENT == 0 && ROWS % OUTPUTS == 0 && TOKENS <= 8, "few_tokens.fits");
static_assert(!GROUPED || GROUP * BITS / 8 % SEGMENT == 0, "a segment has one scale");

__device__ u32 multiply_add(u32 a, u32 b, u32 c) {  // pairs
    u32 sum;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}
__device__ void multiply_matrices(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Bytes 0 and 2 of a word of four e4m3 numbers, or bytes 1 and 3, as bfloat16. Exponent and mantissa lie next to each
// other in both formats; moved to their places, the number is 2¹²⁰ times too small, also one without a leading 1.
__device__ u32 fp8(u32 signs, u32 rest) { return multiply_add((signs & 0x80008000u) | rest, 0x7b807b80u, 0x80008000u); }
__device__ u32 even_fp8(u32 w) { return fp8(w << 8, (w & 0x007f007fu) << 4); }
__device__ u32 odd_fp8(u32 w) { return fp8(w, w >> 4 & 0x07f007f0u); }
// Bits 0 to 3 and 16 to 19, minus 8. 0x4300 is 128 in bfloat16, and its last bits count in ones; 0xC308 is -136.
__device__ u32 four_bits(u32 w, u32 shift) {
    u32 number = multiply_add((w & 0x000f000fu) | 0x43004300u, 0x3f803f80u, 0xc308c308u);
    return ZERO ? multiply_add(number, 0x3f803f80u, shift) : number;
}

struct Piece {  // what a lane has of a segment
    uint4 words[LOADS];
    Scale scale[LOADS], zero[LOADS];
};

struct Weight {  // where a lane's first row is; the others lie at constant distances
    const char* weight;
    const Scale *scale, *zero;
    int row;
    __device__ static constexpr int further(int i) { return i / 2 * TILE + i % 2 * 8; }
    __device__ Weight(const char* weight, const Scale* scale, const Scale* zero) : scale(scale), zero(zero) {
        int lane = threadIdx.x % 32;
        row = blockIdx.x * OUTPUTS + lane / 4;
        this->weight = weight + (long long)row * WIDTH + lane % 4 * 16;
    }
    __device__ void load(Piece& piece, int segment) const {
        if (segment >= SEGMENTS) return;
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            piece.words[i] = read_once(weight + (long long)further(i) * WIDTH + segment * SEGMENT);
            int at = (row + further(i)) / SCALE_ROWS * GROUPS + segment * SEGMENT / (GROUP * BITS / 8);
            if (GROUPED) piece.scale[i] = __ldg(scale + at);
            if (ZERO) piece.zero[i] = __ldg(zero + at);
        }
    }
};

constexpr int EACH = 16;  // columns of a lane that follow each other

// Add the sums of a segment, [16 rows, 8 tokens] of each tile.
__device__ void multiply(float (&total)[TILES][4], const Piece& piece, int segment, const u16* x) {
    int token = threadIdx.x % 32 / 4, place = threadIdx.x % 4;
    float c[TILES][4] = {};
    u32 shift[LOADS] = {};
    if (ZERO)
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            float eight_less = 8 - scale_of(piece.zero[i]);
            shift[i] = pair(eight_less, eight_less);
        }
#pragma unroll
    for (int half = 0; half < 8 / BITS; half++) {
        int column = segment * SEGMENT + place * EACH;
        if (BITS == 4)  // the low halves of a group's bytes come before all of its high halves
            column = column / HALF * 2 * HALF + column % HALF + half * HALF;
        u32 inputs[EACH / 2] = {};
        if (token < TOKENS)
#pragma unroll
            for (int i = 0; i < EACH / 8; i++) {
                uint4 eight = *(const uint4*)(x + token * COLUMNS + column + 8 * i);
                u32* to = inputs + 4 * i;
                to[0] = eight.x, to[1] = eight.y, to[2] = eight.z, to[3] = eight.w;
            }
#pragma unroll
        for (int i = 0; i < EACH / 4; i++) {
            u32 even = __byte_perm(inputs[2 * i], inputs[2 * i + 1], 0x5410);  // columns 0 and 2, 1 and 3
            u32 odd = __byte_perm(inputs[2 * i], inputs[2 * i + 1], 0x7632);
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                u32 v = word(piece.words[2 * tile], i), w = word(piece.words[2 * tile + 1], i);
                if (BITS == 8) {
                    multiply_matrices(c[tile], even_fp8(v), even_fp8(w), odd_fp8(v), odd_fp8(w), even, odd);
                } else {
                    v >>= 4 * half, w >>= 4 * half;
                    u32 of_v = shift[2 * tile], of_w = shift[2 * tile + 1];
                    multiply_matrices(c[tile], four_bits(v, of_v), four_bits(w, of_w), four_bits(v >> 8, of_v),
                                      four_bits(w >> 8, of_w), even, odd);
                }
            }
        }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            total[tile][i] += GROUPED ? c[tile][i] * scale_of(piece.scale[2 * tile + i / 2]) : c[tile][i];
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT)
    few_tokens(const u16* x, const char* weight, const Scale* scale, const Scale* zero, const u16* bias, u16* out) {
    __shared__ float sums[WARPS][OUTPUTS][TOKENS];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Weight rows(weight, scale, zero);
    Piece pieces[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; i++) rows.load(pieces[i], warp + i * WARPS);
    if (EARLY) {
        launch_dependents();
        wait_for_inputs();
    }
    float total[TILES][4] = {};
#pragma unroll 1
    for (int first = warp; first < SEGMENTS; first += DEPTH * WARPS) {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            int segment = first + i * WARPS;
            if (segment < SEGMENTS) multiply(total, pieces[i], segment, x);
            rows.load(pieces[i], segment + DEPTH * WARPS);
        }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int token = lane % 4 * 2 + i % 2;
            if (token < TOKENS) sums[warp][tile * TILE + i / 2 * 8 + lane / 4][token] = total[tile][i];
        }
    __syncthreads();
    for (int e = threadIdx.x; e < OUTPUTS * TOKENS; e += 32 * WARPS) {
        int token = e / OUTPUTS, output = e % OUTPUTS, row = blockIdx.x * OUTPUTS + output;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += sums[w][output][token];
        if (!GROUPED) sum *= scale_of(scale[row / SCALE_ROWS]);
        if (BIAS) sum += to_float(bias[row]);
        out[(long long)token * ROWS + row] = pair(sum, 0) & 0xffff;
    }
}

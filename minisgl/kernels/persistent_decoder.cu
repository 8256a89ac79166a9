// All layers of a decoder for a single token, in one kernel whose blocks stay: see persistent_decoder.py.
//
// A block has eight warps that compute and one that fetches. The fetcher copies what its block will multiply with,
// weights, keys and values alike, into a ring of stages in shared memory, in the order in which it will be used and as
// far ahead as there is room.
//
// Eight blocks are a cluster: they write to each other's shared memory. A cluster has a KV head, so that queries, keys,
// values and the parts of attention stay inside it. What all blocks have to know are vectors in global memory whose
// every element carries a tag, the number of the layer that wrote it. A reader asks until the tags are there: no
// counter and no fence, and one trip to the L2 cache where a barrier has three. Each block of a cluster asks for an
// eighth, and sends it to the others. A vector may be overwritten a layer later: by then its writer has read an element
// of every block, each written after that block had read the vector.
//
// Before this text stand the sizes that `PersistentKernel` compiles it for, as constants.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;  // its bits

constexpr int WARPS = 8, THREADS = 32 * WARPS;  // that compute
constexpr int ROWS = 8;                         // of a weight in a stage, with COLUMNS each
constexpr int ROW_BYTES = 2 * COLUMNS + 16;     // sixteen apart, so that neighbours don't meet in a memory bank
constexpr int STAGE = ROWS * ROW_BYTES;
constexpr int KEY_BYTES = 2 * HEAD_DIM;
constexpr int KEYS = ROWS * COLUMNS / KEY_BYTES;  // in a stage, with their values behind them
constexpr int PIECE = PAGE_SIZE < KEYS ? PAGE_SIZE : KEYS;  // neighbouring keys that one copy brings
constexpr int LANES = HEAD_DIM / 8;             // that share a key, 8 elements each
constexpr int SEATS = 32 / LANES;               // keys that a warp takes at once
constexpr int HEADS = KV_HEADS * GROUP;
constexpr int ATTENDED = HEADS * HEAD_DIM, QKV = ATTENDED + 2 * KV_HEADS * HEAD_DIM;
constexpr bool WHOLE_STAGES = HIDDEN % COLUMNS + ATTENDED % COLUMNS + INTERMEDIATE % COLUMNS == 0;
constexpr float LOG2E = 1.4426950408889634f, NOTHING = -1e30f;  // below every score

__host__ __device__ constexpr int cdiv(int a, int b) { return (a + b - 1) / b; }

struct Layer {  // as `LayerTensors`
    const bf16 *qkv, *qkv_bias, *o, *gate_up, *down, *input_norm, *post_norm, *q_norm, *k_norm;
    const float* cos_sin;
    bf16 *k_cache, *v_cache;
};

// Blocks that attend have fewer rows of the other weights, since they have those of queries, keys and values.
constexpr int ATTENDING = KV_HEADS * CLUSTER, SHARES = ATTENDING + (PROGRAMS - ATTENDING) * FULL;
__host__ __device__ constexpr int tiles(int rows) {  // of a block, at most
    return cdiv(cdiv(rows * FULL, SHARES), ROWS);
}
constexpr int OF_HEAD = (GROUP + 2) * HEAD_DIM;       // rows of the packed projection that belong to a KV head
constexpr int QKV_TILES = cdiv(OF_HEAD / ROWS, CLUSTER), GATED_TILES = 2 * tiles(INTERMEDIATE);  // gate and up in turn
constexpr int TILES = QKV_TILES > GATED_TILES ? QKV_TILES : GATED_TILES;
static_assert(TILES * ROWS <= THREADS, "a thread finishes a row");

struct Small {  // what else a layer reads
    alignas(16) bf16 input_norm[HIDDEN], post_norm[HIDDEN], q_norm[HEAD_DIM], k_norm[HEAD_DIM];
    float cos_sin[HEAD_DIM];
};

struct Shared {
    alignas(128) char stages[STAGES][STAGE];
    alignas(16) bf16 hidden[HIDDEN], attended[ATTENDED], activated[INTERMEDIATE];
    Small small[2];  // of this layer and of the next
    Layer layers[LAYERS];
    alignas(16) float query[GROUP][HEAD_DIM];
    alignas(16) float own[2][HEAD_DIM];  // this token's key and value
    float part[WARPS][GROUP][HEAD_DIM], part_max[WARPS][GROUP], part_sum[WARPS][GROUP];
    float projected[OF_HEAD];                    // by the blocks of the cluster
    float2 parts[CLUSTER + GROUP * HEAD_DIM];    // by them too: attention over their keys, and the weight of these
    float sums[TILES][WARPS][ROWS];
    float squares[CLUSTER][WARPS];
    alignas(8) u64 full[STAGES], empty[STAGES], small_full[2], small_empty[2];
    u64 projected_full, parts_full, input_full[4];
};
static_assert(sizeof(Shared) <= 227 << 10, "PersistentShape.stages counts too little");

// -- the hardware's words --------------------------------------------------------------------------------------------

__device__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ float to_float(bf16 x) { return __uint_as_float((u32)x << 16); }
__device__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ bf16 to_bf16(float x) {
    bf16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
__device__ float rounded(float x) { return to_float(to_bf16(x)); }
__device__ void sync_warps() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }
__device__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
__device__ void init_barrier(u64* barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
__device__ void arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ void expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
__device__ void await(u64* barrier, u32 parity) {
    asm volatile(
        "{\n .reg .pred done;\n"
        "ASK:\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n @!done bra ASK;\n}" ::"r"(
            shared_address(barrier)),
        "r"(parity)
        : "memory");
}
// What is fetched is read once, so the L2 cache may forget it before the vectors that blocks tell each other.
__device__ u64 forgetful() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ void fetch(void* to, const void* from, u32 bytes, u64* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(forgetful())
        : "memory");
}
// A box of a matrix that `map` describes, its corner at some column and row.
__device__ void fetch_box(void* to, const void* map, int column, int row, u64* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)), "l"(map), "r"(column), "r"(row),
        "r"(shared_address(barrier)), "l"(forgetful())
        : "memory");
}
// Write to the same place of another block of the cluster, and count the bytes there.
__device__ void send(float* to, float value, u64* barrier, int rank) {
    asm volatile(
        "{\n .reg .b32 there, counter;\n"
        "mapa.shared::cluster.u32 there, %0, %3;\n mapa.shared::cluster.u32 counter, %2, %3;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %1, [counter];\n}" ::"r"(
            shared_address(to)),
        "f"(value), "r"(shared_address(barrier)), "r"(rank)
        : "memory");
}
__device__ void send(float2* to, float first, float second, u64* barrier, int rank) {
    asm volatile(
        "{\n .reg .b32 there, counter;\n"
        "mapa.shared::cluster.u32 there, %0, %4;\n mapa.shared::cluster.u32 counter, %3, %4;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [there], {%1, %2}, [counter];\n}" ::"r"(
            shared_address(to)),
        "f"(first), "f"(second), "r"(shared_address(barrier)), "r"(rank)
        : "memory");
}
__device__ void send(bf16* to, uint2 four, u64* barrier, int rank) {
    asm volatile(
        "{\n .reg .b32 there, counter;\n"
        "mapa.shared::cluster.u32 there, %0, %4;\n mapa.shared::cluster.u32 counter, %3, %4;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [there], {%1, %2}, [counter];\n}" ::"r"(
            shared_address(to)),
        "r"(four.x), "r"(four.y), "r"(shared_address(barrier)), "r"(rank)
        : "memory");
}
__device__ u32 pair(float first, float second) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
}
__device__ void load_matrices(u32 (&a)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address)
                 : "memory");
}
__device__ void multiply_matrices(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ float over_lanes(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

// -- vectors with tags -----------------------------------------------------------------------------------------------

__device__ void tell(u32* to, float value, u32 tag) {
    u32 word = (u32)to_bf16(value) << 16 | (tag & 0xffffu);
    u64 policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("st.relaxed.gpu.global.L2::cache_hint.u32 [%0], %1, %2;" ::"l"(to), "r"(word), "l"(policy) : "memory");
}
__device__ uint4 look(const u32* from) {
    uint4 words;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(from)
                 : "memory");
    return words;
}
__device__ bool tagged(uint4 words, u32 tag) {
    return (((words.x ^ tag) | (words.y ^ tag) | (words.z ^ tag) | (words.w ^ tag)) & 0xffffu) == 0;
}

// -- the ring --------------------------------------------------------------------------------------------------------

struct Ring {  // where one warp is
    int stage = 0;
    u32 phase = 0;
    __device__ void next() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

// The fetcher's place. No more than some stages are on their way at a time: that's enough for all of the memory's
// bandwidth, and what blocks tell each other would have to queue behind the rest.
struct Fetcher : Ring {
    Ring landed;
    int flying = 0;
    __device__ void claim(Shared& shared, u32 bytes, int lane) {
        if (flying == FLIGHT) {
            await(&shared.full[landed.stage], landed.phase);
            landed.next();
        } else {
            flying++;
        }
        await(&shared.empty[stage], phase ^ 1);
        if (lane == 0) expect(&shared.full[stage], bytes);
        __syncwarp();
    }
};

struct Share {  // neighbouring rows of a weight, or keys
    int begin, end;
};
__device__ Share share(int size, int part, int parts) {
    return {size * part / parts, size * (part + 1) / parts};
}

// Instruction `operation`, a product: W is [rows, width], or [2 rows, width] where it's gated.
enum { QKV_PROJ, ATTENTION, O_PROJ, GATE_UP_PROJ, DOWN_PROJ, OPERATIONS };
struct Product {
    int all, width, halves, tiles;
    Share rows;  // this block's
    __device__ Product(int operation) {
        all = operation == QKV_PROJ ? QKV : operation == GATE_UP_PROJ ? INTERMEDIATE : HIDDEN;
        width = operation == O_PROJ ? ATTENDED : operation == DOWN_PROJ ? INTERMEDIATE : HIDDEN;
        halves = operation == GATE_UP_PROJ ? 2 : 1;
        rows = {first_row(blockIdx.x), first_row(blockIdx.x + 1)};
        if (operation == QKV_PROJ) {
            // A cluster has the rows of its KV head, whose number among themselves this is.
            Share mine = share(OF_HEAD / ROWS, blockIdx.x % CLUSTER, CLUSTER);
            rows = {mine.begin * ROWS, blockIdx.x < ATTENDING ? mine.end * ROWS : mine.begin * ROWS};
        }
        tiles = cdiv(rows.end - rows.begin, ROWS) * halves;
    }
    __device__ int first_row(int block) const {
        int shares = block < ATTENDING ? block : ATTENDING + (block - ATTENDING) * FULL;
        return all * shares / SHARES;
    }
};
// The row of the packed projection that is row i of a KV head's: its queries, its key, its value.
__device__ int row_of_head(int i, int head) {
    if (i < GROUP * HEAD_DIM) return head * GROUP * HEAD_DIM + i;
    int kind = i / HEAD_DIM - GROUP;
    return (HEADS + kind * KV_HEADS + head) * HEAD_DIM + i % HEAD_DIM;
}

// The fetcher's side of a product: stages in the order in which `multiply` takes them.
__device__ void fetch_product(Shared& shared, Fetcher& ring, int operation, const bf16* weight, int lane) {
    Product product(operation);
    for (int tile = 0; tile < product.tiles; tile++) {
        int first = product.rows.begin + tile / product.halves * ROWS;
        int count = max(0, min(ROWS, product.rows.end - first));
        long long row = first + lane + tile % product.halves * product.all;
        if (operation == QKV_PROJ && lane < count) row = row_of_head(first + lane, blockIdx.x / CLUSTER);
        for (int begin = 0; begin < product.width; begin += COLUMNS) {
            int bytes = 2 * min(COLUMNS, product.width - begin);
            ring.claim(shared, count * bytes, lane);
            if (lane < count)
                fetch(shared.stages[ring.stage] + lane * ROW_BYTES, weight + row * product.width + begin, bytes,
                      &shared.full[ring.stage]);
            ring.next();
        }
    }
}

// If each thread asked for them when it needs them, they would come behind all weights that are on their way.
__device__ void fetch_small(Shared& shared, int l, int position, int lane) {
    const Layer& layer = shared.layers[l];
    Small& small = shared.small[l % 2];
    u64* full = &shared.small_full[l % 2];
    await(&shared.small_empty[l % 2], l / 2 % 2 ^ 1);
    if (lane > 0) return;
    expect(full, 4 * HIDDEN + 4 * HEAD_DIM + (QK_NORM ? 4 * HEAD_DIM : 0));
    fetch(small.input_norm, layer.input_norm, 2 * HIDDEN, full);
    fetch(small.post_norm, layer.post_norm, 2 * HIDDEN, full);
    fetch(small.cos_sin, layer.cos_sin + (long long)position * HEAD_DIM, 4 * HEAD_DIM, full);
    if (QK_NORM) {
        fetch(small.q_norm, layer.q_norm, 2 * HEAD_DIM, full);
        fetch(small.k_norm, layer.k_norm, 2 * HEAD_DIM, full);
    }
}

// Keys of earlier tokens that a block attends to: a cluster has a KV head, and a block of it some keys.
struct Keys {
    int head, split, splits, position, first;
    Share pieces;  // of `PIECE` positions each, counted from position 0
    __device__ Keys(int seq_len) : position(seq_len - 1) {
        first = WINDOW > 0 ? max(0, position + 1 - WINDOW) : 0;
        splits = min(CLUSTER, max(1, cdiv(position - first, KEYS)));
        head = blockIdx.x / CLUSTER, split = blockIdx.x % CLUSTER;
        int skipped = first / PIECE;
        pieces = share(cdiv(position, PIECE) - skipped, min(split, splits - 1), splits);
        pieces.begin += skipped, pieces.end += skipped;
    }
    __device__ bool any() const { return head < KV_HEADS && split < splits; }
    __device__ bool last() const { return split == splits - 1; }  // has this token's own key too
    __device__ bool has(int key) const { return key >= first && key < min(position, pieces.end * PIECE); }
};

// `maps` has the layer's keys as a matrix, [positions in memory, KV_HEADS × HEAD_DIM], and behind them its values.
__device__ void fetch_keys(Shared& shared, Fetcher& ring, const Keys& keys, const char* maps, const int* pages,
                           int lane) {
    for (int begin = keys.pieces.begin; begin < keys.pieces.end; begin += KEYS / PIECE) {
        int count = min(KEYS / PIECE, keys.pieces.end - begin);
        ring.claim(shared, count * PIECE * 2 * KEY_BYTES, lane);
        for (int piece = lane; piece < count; piece += 32) {
            int position = (begin + piece) * PIECE;
            int row = __ldg(pages + position / PAGE_SIZE) * PAGE_SIZE + position % PAGE_SIZE;
            char* to = shared.stages[ring.stage] + piece * PIECE * KEY_BYTES;
            fetch_box(to, maps, keys.head * HEAD_DIM, row, &shared.full[ring.stage]);
            fetch_box(to + KEYS * KEY_BYTES, maps + 128, keys.head * HEAD_DIM, row, &shared.full[ring.stage]);
        }
        ring.next();
    }
}

// -- products --------------------------------------------------------------------------------------------------------

// Bring a vector to shared memory, times the norm's weight if there is one; return what sums are scaled with. Every
// block of the cluster asks for a part and sends it to all. `plain` is the vector without tags, where it comes from the
// kernel before this.
__device__ float gather(Shared& shared, bf16* input, const u32* words, int width, u32 tag, const bf16* plain,
                        const bf16* norm, float eps, u64* barrier, u32 parity) {
    int rank = blockIdx.x % CLUSTER, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) expect(barrier, 2 * width + (norm ? sizeof(shared.squares) : 0));
    Share fours = share(width / 4, rank, CLUSTER);
    float squares = 0;
    for (int e = 4 * (fours.begin + threadIdx.x); e < 4 * fours.end; e += 4 * THREADS) {
        uint2 x;
        if (plain) {
            x = *(const uint2*)(plain + e);
        } else {
            uint4 got;
            do got = look(words + e);
            while (!tagged(got, tag));
            x = {got.x >> 16 | got.y & 0xffff0000u, got.z >> 16 | got.w & 0xffff0000u};
        }
        if (norm) {
            uint2 weights = *(const uint2*)(norm + e);
            float x0 = low(x.x), x1 = high(x.x), x2 = low(x.y), x3 = high(x.y);
            squares += x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3;
            x = {pair(x0 * low(weights.x), x1 * high(weights.x)), pair(x2 * low(weights.y), x3 * high(weights.y))};
        }
#pragma unroll
        for (int to = 0; to < CLUSTER; to++) send(input + e, x, barrier, to);
    }
    if (norm) {
        squares = over_lanes(squares);
        if (lane < CLUSTER) send(&shared.squares[rank][warp], squares, barrier, lane);
    }
    await(barrier, parity);
    if (!norm) return 1;
    squares = 0;
    for (int i = lane; i < CLUSTER * WARPS; i += 32) squares += shared.squares[0][i];
    return rsqrtf(over_lanes(squares) / width + eps);
}

// A block's share of ``W x``: thread 8 t + r returns the sum of row r of tile t. Every warp has its columns of each
// stage. All products are this one loop, since code that a multiprocessor hasn't at hand costs more than arithmetic.
// Rows that don't exist are multiplied too, with what is left in the stage, for no thread.
//
// Tensor cores multiply [16, 16] with [16, 8]. Our eight rows are there twice, the second time sixteen columns on, and
// of the eight columns of the right side, the even ones are x and the odd ones x sixteen elements on. Of the result,
// [16, 8], the upper half is right in even columns and the lower half in odd ones.
__device__ float multiply(Shared& shared, Ring& ring, const bf16* input, const Product& product) {
    constexpr int MINE = COLUMNS / WARPS;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 from = shared_address(shared.stages) + lane % 8 * ROW_BYTES + warp * MINE * 2;
    from += lane / 8 % 2 * 32 + lane / 16 * 16;
    const bf16* x = input + warp * MINE + lane / 4 % 2 * 16 + lane % 4 * 2;
#pragma unroll 1
    for (int tile = 0; tile < product.tiles; tile++) {
        float c[2][4] = {};
#pragma unroll 2
        for (int begin = 0; begin < product.width; begin += COLUMNS) {
            await(&shared.full[ring.stage], ring.phase);
#pragma unroll
            for (int k = 0; k < MINE; k += 32) {
                if (!WHOLE_STAGES && begin + warp * MINE + k >= product.width) break;
                u32 a[4];
                load_matrices(a, from + ring.stage * STAGE + k * 2);
                multiply_matrices(c[k / 32 % 2], a, *(const u32*)(x + begin + k), *(const u32*)(x + begin + k + 8));
            }
            __syncwarp();
            if (lane == 0) arrive(&shared.empty[ring.stage]);
            ring.next();
        }
        if (lane % 4 == 0) shared.sums[tile][warp][lane / 4] = c[0][0] + c[0][3] + c[1][0] + c[1][3];
    }
    sync_warps();
    float sum = 0;
    if (threadIdx.x < product.tiles * ROWS)
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) sum += shared.sums[threadIdx.x / ROWS][warp][threadIdx.x % ROWS];
    return sum;
}

// -- attention -------------------------------------------------------------------------------------------------------

// Softmax over the keys that a group of lanes has seen, for each query head of the group, and their values' sum.
struct Seen {
    float most[GROUP], sum[GROUP], values[GROUP][8];
    __device__ Seen() {
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            most[g] = NOTHING, sum[g] = 0;
#pragma unroll
            for (int i = 0; i < 8; i++) values[g][i] = 0;
        }
    }
    // Some keys at once; the arrays are this lane's elements. All lanes of a warp call it.
    template <int N>
    __device__ void add(const float (&query)[GROUP][8], const float (&key)[N][8], const float (&value)[N][8],
                        const bool (&real)[N]) {
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            float score[N], now = most[g];
#pragma unroll
            for (int n = 0; n < N; n++) {
                score[n] = 0;
#pragma unroll
                for (int i = 0; i < 8; i++) score[n] += query[g][i] * key[n][i];
            }
#pragma unroll
            for (int step = LANES / 2; step > 0; step /= 2)
#pragma unroll
                for (int n = 0; n < N; n++) score[n] += __shfl_xor_sync(~0u, score[n], step);
#pragma unroll
            for (int n = 0; n < N; n++) now = fmaxf(now, real[n] ? score[n] : NOTHING);
            float fade = exp2f(most[g] - now);
            most[g] = now, sum[g] *= fade;
#pragma unroll
            for (int i = 0; i < 8; i++) values[g][i] *= fade;
#pragma unroll
            for (int n = 0; n < N; n++) {
                float weight = real[n] ? exp2f(score[n] - now) : 0;
                sum[g] += weight;
#pragma unroll
                for (int i = 0; i < 8; i++) values[g][i] += weight * value[n][i];
            }
        }
    }
};

__device__ void read_pairs(const char* row, int lane, float (&to)[8]) {
    uint4 w = *(const uint4*)(row + lane * 16);
    to[0] = low(w.x), to[1] = high(w.x), to[2] = low(w.y), to[3] = high(w.y);
    to[4] = low(w.z), to[5] = high(w.z), to[6] = low(w.w), to[7] = high(w.w);
}
__device__ void read_floats(const float* row, int lane, float (&to)[8]) {
    *(float4*)&to[0] = *(const float4*)(row + lane * 8);
    *(float4*)&to[4] = *(const float4*)(row + lane * 8 + 4);
}

// A head of the packed projection, normalised and rotated. A lane has HEAD_DIM / 32 neighbours; those that are rotated
// with them are the lane's sixteen places on.
constexpr int EACH = HEAD_DIM / 32;
struct Head {
    float x[EACH], norm[EACH], cosine[EACH], sine[EACH];
    // What is there before the projection is.
    __device__ Head(const bf16* weights, const float* angles) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            cosine[i] = angles[lane % 16 * EACH + i], sine[i] = angles[HEAD_DIM / 2 + lane % 16 * EACH + i];
            norm[i] = QK_NORM ? to_float(weights[lane * EACH + i]) : 1;
        }
    }
    __device__ void turn(float eps) {
        if (QK_NORM) {
            float squares = 0;
#pragma unroll
            for (int i = 0; i < EACH; i++) squares += x[i] * x[i];
#pragma unroll
            for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
            float factor = rsqrtf(squares / HEAD_DIM + eps);
#pragma unroll
            for (int i = 0; i < EACH; i++) x[i] = x[i] * factor * norm[i];
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            float other = __shfl_xor_sync(~0u, x[i], 16);
            x[i] = x[i] * cosine[i] + (threadIdx.x % 32 < 16 ? -other : other) * sine[i];
        }
    }
};

// In global memory, one behind the other; zero before the first launch. All but `state` have tags.
struct Vectors {
    u32 *attended, *middle, *activated, *stream;
    u32* state;  // layers done by earlier launches, and blocks that have ended
    __device__ Vectors(u32* words) {
        attended = words, middle = attended + ATTENDED, activated = middle + HIDDEN;
        stream = activated + INTERMEDIATE, state = stream + HIDDEN;
    }
};

__device__ void attend(Shared& shared, Ring& ring, const Keys& keys, const Layer& layer, const Small& small,
                       const Vectors& vectors, u32 tag, int l, const int* pages, float scale, float eps, u64* moments) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // 1. Query heads, and if they are ours key and value, to shared memory. Warps take them in turn.
    for (int item = warp; item < GROUP + (keys.last() ? 2 : 0); item += WARPS) {
        bool query = item < GROUP, value = item == GROUP + 1;
        Head head(query ? small.q_norm : small.k_norm, small.cos_sin);
#pragma unroll
        for (int i = 0; i < EACH; i++) head.x[i] = shared.projected[item * HEAD_DIM + lane * EACH + i];
        if (!value) head.turn(eps);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (query) shared.query[item][lane * EACH + i] = rounded(head.x[i]) * scale * LOG2E;
            else shared.own[value][lane * EACH + i] = rounded(head.x[i]);
        }
    }
    sync_warps();
    if (TIMED && threadIdx.x == 0) moments[1] = nanoseconds();
    // 2. Every group of lanes takes keys in turn, as the stages bring them.
    int seat = lane / LANES, place = lane % LANES;
    constexpr int TURNS = cdiv(KEYS, WARPS * SEATS);
    float query[GROUP][8];
#pragma unroll
    for (int g = 0; g < GROUP; g++) read_floats(shared.query[g], place, query[g]);
    Seen seen;
#pragma unroll 1
    for (int first = keys.pieces.begin * PIECE; first < keys.pieces.end * PIECE; first += KEYS) {
        float key[TURNS][8], value[TURNS][8];
        bool real[TURNS];
        await(&shared.full[ring.stage], ring.phase);
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
            int at = (turn * WARPS + warp) * SEATS + seat;
            real[turn] = at < KEYS && keys.has(first + at);
            const char* row = shared.stages[ring.stage] + (at < KEYS ? at : 0) * KEY_BYTES;
            read_pairs(row, place, key[turn]);
            read_pairs(row + KEYS * KEY_BYTES, place, value[turn]);
            if (!real[turn])  // what lies there may be no number
#pragma unroll
                for (int i = 0; i < 8; i++) value[turn][i] = 0;
        }
        seen.add(query, key, value, real);
        __syncwarp();
        if (lane == 0) arrive(&shared.empty[ring.stage]);
        ring.next();
    }
    if (keys.last() && warp == WARPS - 1) {
        float key[1][8], value[1][8];
        bool real[1] = {seat == 0};
        read_floats(shared.own[0], place, key[0]);
        read_floats(shared.own[1], place, value[0]);
        seen.add(query, key, value, real);
    }
    if (keys.last()) {
        long long row = (long long)__ldg(pages + keys.position / PAGE_SIZE) * PAGE_SIZE + keys.position % PAGE_SIZE;
        long long offset = (row * KV_HEADS + keys.head) * HEAD_DIM;
        for (int e = threadIdx.x; e < 2 * HEAD_DIM; e += THREADS) {
            bf16* to = e < HEAD_DIM ? layer.k_cache : layer.v_cache;
            to[offset + e % HEAD_DIM] = to_bf16(shared.own[e / HEAD_DIM][e % HEAD_DIM]);
        }
    }
    // 3. What the lanes have seen becomes what the block has seen, and is sent to who merges it.
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
        float most = seen.most[g];
#pragma unroll
        for (int step = LANES; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        float fade = exp2f(seen.most[g] - most), sum = seen.sum[g] * fade;
#pragma unroll
        for (int step = LANES; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float total = seen.values[g][i] * fade;
#pragma unroll
            for (int step = LANES; step < 32; step *= 2) total += __shfl_xor_sync(~0u, total, step);
            if (seat == 0) shared.part[warp][g][place * 8 + i] = total;
        }
        if (lane == 0) shared.part_max[warp][g] = most, shared.part_sum[warp][g] = sum;
    }
    sync_warps();
    Share elements = share(GROUP * HEAD_DIM, keys.split, keys.splits);
    int count = elements.end - elements.begin;
    if (threadIdx.x == 0) expect(&shared.parts_full, count * keys.splits * sizeof(float2));
    for (int e = threadIdx.x; e < GROUP * HEAD_DIM; e += THREADS) {
        int g = e / HEAD_DIM, d = e % HEAD_DIM;
        float most = NOTHING, sum = 0, total = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) most = fmaxf(most, shared.part_max[w][g]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float fade = exp2f(shared.part_max[w][g] - most);
            sum += shared.part_sum[w][g] * fade, total += shared.part[w][g][d] * fade;
        }
        int to = ((e + 1) * keys.splits - 1) / (GROUP * HEAD_DIM);  // the block that merges it
        Share there = share(GROUP * HEAD_DIM, to, keys.splits);
        send(&shared.parts[keys.split * (there.end - there.begin) + e - there.begin], __fdividef(total, sum),
             most + __log2f(sum), &shared.parts_full, to);
    }
    // 4. Of the blocks of a head, each merges some elements, and each element has a lane for each part.
    await(&shared.parts_full, l % 2);
    int lanes = 1;
    while (lanes < keys.splits) lanes *= 2;
    int part = threadIdx.x & (lanes - 1);
    for (int first = 0; first < count; first += THREADS / lanes) {
        int e = first + threadIdx.x / lanes;
        float2 seen = {0, NOTHING};
        if (part < keys.splits && e < count) seen = shared.parts[part * count + e];
        float most = seen.y;
        for (int step = 1; step < lanes; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        float weight = exp2f(seen.y - most), sum = seen.x * weight;
        for (int step = 1; step < lanes; step *= 2) {
            sum += __shfl_xor_sync(~0u, sum, step);
            weight += __shfl_xor_sync(~0u, weight, step);
        }
        if (part == 0 && e < count)
            tell(vectors.attended + keys.head * GROUP * HEAD_DIM + elements.begin + e, __fdividef(sum, weight), tag);
    }
}

// -- the kernel ------------------------------------------------------------------------------------------------------

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS + 32, 1)
    decode(const Layer* layers, const char* maps, bf16* stream, u32* words, const int* slot, const int* seq_len,
           const int* page_table, int table_width, float scale, float eps, float head_eps, u64* times) {
    extern __shared__ __align__(128) char memory[];
    Shared& shared = *(Shared*)memory;
    int lane = threadIdx.x % 32;
    Vectors vectors(words);
    u32 before = *(volatile u32*)vectors.state;
    for (int i = threadIdx.x; i < (int)sizeof(shared.layers) / 8; i += THREADS + 32)
        ((u64*)shared.layers)[i] = ((const u64*)layers)[i];
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            init_barrier(&shared.full[stage], 1);
            init_barrier(&shared.empty[stage], WARPS);
        }
        for (int i = 0; i < 2; i++) init_barrier(&shared.small_full[i], 1), init_barrier(&shared.small_empty[i], WARPS);
        for (int i = 0; i < 4; i++) init_barrier(&shared.input_full[i], 1);
        init_barrier(&shared.projected_full, 1), init_barrier(&shared.parts_full, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    const int* pages = page_table + (long long)*slot * table_width;
    Keys keys(*seq_len);
    if (threadIdx.x >= THREADS) {
        Fetcher ring;
        for (int l = 0; l < LAYERS; l++) {
            const Layer& layer = shared.layers[l];
            fetch_small(shared, l, keys.position, lane);
            for (int operation = 0; operation < OPERATIONS; operation++) {
                if (operation == ATTENTION) {
                    if (keys.any()) fetch_keys(shared, ring, keys, maps + l * 256, pages, lane);
                    continue;
                }
                const bf16* weight = operation == QKV_PROJ       ? layer.qkv
                                     : operation == O_PROJ       ? layer.o
                                     : operation == GATE_UP_PROJ ? layer.gate_up
                                                                 : layer.down;
                fetch_product(shared, ring, operation, weight, lane);
            }
        }
        return;
    }
    Ring ring;
    Share mine = Product(DOWN_PROJ).rows;
    int of_stream = mine.begin + threadIdx.x;  // this thread's row of the residual stream
    float residual = of_stream < mine.end ? to_float(stream[of_stream]) : 0;
#pragma unroll 1
    for (int step = 0; step < LAYERS * OPERATIONS; step++) {
        int l = step / OPERATIONS, operation = step % OPERATIONS;
        const Layer& layer = shared.layers[l];
        const Small& small = shared.small[l % 2];
        if (operation == QKV_PROJ) await(&shared.small_full[l % 2], l / 2 % 2);
        u32 tag = before + l + 1;
        u64* moments = times + ((long long)step * PROGRAMS + blockIdx.x) * 3;
        if (TIMED && threadIdx.x == 0) moments[0] = nanoseconds();
        if (operation == ATTENTION) {
            if (keys.head < KV_HEADS) await(&shared.projected_full, l % 2);
            if (keys.any()) attend(shared, ring, keys, layer, small, vectors, tag, l, pages, scale, head_eps, moments);
        } else {
            Product product(operation);
            bool normed = operation == QKV_PROJ || operation == GATE_UP_PROJ;
            const u32* words = operation == QKV_PROJ       ? vectors.stream
                               : operation == O_PROJ       ? vectors.attended
                               : operation == GATE_UP_PROJ ? vectors.middle
                                                           : vectors.activated;
            u32* out = operation == O_PROJ         ? vectors.middle
                       : operation == GATE_UP_PROJ ? vectors.activated
                                                   : vectors.stream;
            bf16* input = normed ? shared.hidden : operation == O_PROJ ? shared.attended : shared.activated;
            const bf16* norm = operation == QKV_PROJ ? small.input_norm : normed ? small.post_norm : 0;
            float factor = gather(shared, input, words, product.width, operation == QKV_PROJ ? tag - 1 : tag,
                                  step == 0 ? stream : 0, norm, eps,
                                  &shared.input_full[operation == QKV_PROJ ? 0 : operation - 1], l % 2);
            if (TIMED && threadIdx.x == 0) moments[1] = nanoseconds();
            float sum = multiply(shared, ring, input, product) * factor;
            int tile = threadIdx.x / ROWS, row = product.rows.begin + tile / product.halves * ROWS + threadIdx.x % ROWS;
            bool writes = tile < product.tiles && row < product.rows.end;
            if (operation == QKV_PROJ) {
                int head = blockIdx.x / CLUSTER;
                if (QKV_BIAS && writes) sum += to_float(__ldg(layer.qkv_bias + row_of_head(row, head)));
                if (head < KV_HEADS && threadIdx.x == 0) expect(&shared.projected_full, OF_HEAD * sizeof(float));
                for (int rank = 0; writes && rank < CLUSTER; rank++)
                    send(&shared.projected[row], rounded(sum), &shared.projected_full, rank);
                writes = false;
            } else if (operation == GATE_UP_PROJ) {
                sum = __fdividef(sum, 1 + __expf(-sum)) * __shfl_down_sync(~0u, sum, ROWS);
                writes &= tile % 2 == 0;
            } else {
                sum = residual = rounded(residual + sum);
                if (writes && step == LAYERS * OPERATIONS - 1) stream[row] = to_bf16(sum);
            }
            if (writes) tell(out + row, sum, tag);
        }
        if (operation == DOWN_PROJ && lane == 0) arrive(&shared.small_empty[l % 2]);
        if (TIMED && threadIdx.x == 0) moments[2] = nanoseconds();
    }
    // Who ends last counts the layers: all others have read the old number.
    if (threadIdx.x == 0 && atomicAdd(vectors.state + 1, 1) == PROGRAMS - 1) {
        vectors.state[1] = 0;
        vectors.state[0] = before + LAYERS;
    }
}

// What CUDA C++ gives a kernel, on the CPU: see emulated.py.
//
// The threads of a block are fibers of one thread of the CPU. A fiber runs until it has to wait for others, in
// `__syncthreads` or an instruction of a whole warp; all of these go through `wait`. Blocks run one after the other,
// and memory that a block shares holds NaN when the block starts.

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <utility>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define alignas(bytes) __align__(bytes)  // g++ takes an attribute behind `__shared__`, but no `alignas`
#define __shared__ __attribute__((section("shared_memory"))) static
__attribute__((visibility("hidden"))) extern char __start_shared_memory[], __stop_shared_memory[];  // by the linker

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) int2 { int x, y; };
struct alignas(8) float2 { float x, y; };
struct dim3 { unsigned x; };
dim3 threadIdx, blockIdx, gridDim, blockDim;  // threadIdx is that of the fiber that runs
float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
float __int_as_float(int bits) { return __builtin_bit_cast(float, bits); }
unsigned __float_as_uint(float value) { return __builtin_bit_cast(unsigned, value); }

namespace emulated {
constexpr size_t MOST_THREADS = 1024, STACK = 128 << 10, GUARD = 64;

// Threads that wait for each other, and where the first of them does.
struct Group { int size, arrived, first, line; const char* what; };
struct Warp {
    Group group;
    alignas(16) char values[2][32][32];  // of each lane, by turns: some lanes may still read those of the turn before
    int turn;
};
struct Fiber { ucontext_t context; bool ended; Group* waits; };
Fiber fibers[MOST_THREADS];
Warp warps[MOST_THREADS / 32];
Group block;
ucontext_t scheduler;
jmp_buf failed;
char message[1000];
void *body, (*call)(void*);
__shared__ alignas(128) char dynamic[DYNAMIC_BYTES + GUARD];

[[noreturn]] void fail(int line, const char* format, ...) {  // from any fiber
    int at = snprintf(message, sizeof message, "line %d, block %u, thread %u: ", line, blockIdx.x, threadIdx.x);
    va_list values;
    va_start(values, format);
    vsnprintf(message + at, sizeof message - at, format, values);
    _longjmp(failed, 1);
}
void leave() { swapcontext(&fibers[threadIdx.x].context, &scheduler); }
void live() { for (;; leave()) call(body), fibers[threadIdx.x].ended = true; }  // once for each block
// Return when all threads of the group have come here.
void wait(Group& group, const char* what, int line) {
    if (group.arrived == 0) group = {group.size, 0, (int)threadIdx.x, line, what};
    if (strcmp(group.what, what) != 0 || group.line != line)
        fail(line, "%s, but thread %d waits in %s of line %d", what, group.first, group.what, group.line);
    if (++group.arrived < group.size) return fibers[threadIdx.x].waits = &group, leave();
    group.arrived = 0;
    for (unsigned i = 0; i < blockDim.x; i++)
        if (fibers[i].waits == &group) fibers[i].waits = nullptr;
}
// The values of all lanes of this warp.
template <class T> const T* exchange(const T& mine, const char* what, int line, unsigned mask = ~0u) {
    static_assert(sizeof(T) <= sizeof *Warp::values[0]);
    if (mask != ~0u) fail(line, "%s has the mask %#x; only whole warps are emulated", what, mask);
    Warp& warp = warps[threadIdx.x / 32];
    T* values = (T*)warp.values[warp.turn % 2];
    values[threadIdx.x % 32] = mine;
    if (warp.group.arrived == warp.group.size - 1) warp.turn++;
    wait(warp.group, what, line);
    return values;
}
[[noreturn]] void deadlock() {
    int ended = 0, length = 0, line = 0;
    char text[4000] = "";
    for (int i = blockDim.x; i-- > 0;) {
        ended += fibers[i].ended;
        const Group* group = fibers[i].waits;
        if (group == nullptr || group->first != i) continue;
        length += sprintf(text + length, ", %d wait in %s of line %d", group->arrived, group->what, group->line);
        threadIdx.x = i, line = group->line;
    }
    fail(line, "deadlock: of %u threads %d have ended%s", blockDim.x, ended, text);
}
void run(int blocks, int threads, char* stacks) {
    gridDim.x = blocks, blockDim.x = threads;
    for (int i = 0; i < threads; i++) {
        getcontext(&fibers[i].context);
        fibers[i].context.uc_stack.ss_sp = stacks + i * STACK, fibers[i].context.uc_stack.ss_size = STACK;
        makecontext(&fibers[i].context, live, 0);
    }
    for (int number = 0; number < blocks; number++) {
        blockIdx.x = number;
        memset(__start_shared_memory, 0xff, __stop_shared_memory - __start_shared_memory);
        block = {threads};
        for (int i = 0; i < threads; i++)
            fibers[i].ended = false, fibers[i].waits = nullptr, warps[i / 32].group = {32};
        for (int left = threads; left > 0;) {
            bool moved = false;
            for (int i = 0; i < threads; i++) {  // every second block backwards: one order may hide a missing barrier
                int thread = number % 2 ? threads - 1 - i : i;
                if (fibers[thread].ended || fibers[thread].waits != nullptr) continue;
                threadIdx.x = thread;
                swapcontext(&scheduler, &fibers[thread].context);
                moved = true, left -= fibers[thread].ended;
            }
            if (!moved) deadlock();
        }
        for (int i = 0; i < GUARD; i++)
            if (dynamic[DYNAMIC_BYTES + i] != -1) fail(0, "the block wrote behind its dynamic shared memory");
    }
}
template <class P>
constexpr char KIND = std::is_pointer_v<P> ? 'p' : std::is_same_v<P, float> ? 'f' : sizeof(P) == 4 ? 'i' : '?';
// What went wrong, or null. `kinds` has a letter for each argument, `arguments` the address of its value.
template <class... P>
const char* launch(void (*kernel)(P...), int blocks, int threads, const char* kinds, void** arguments) {
    static const char wanted[] = {KIND<P>..., 0};
    auto unpack = [=]<size_t... I>(std::index_sequence<I...>) { kernel(*(P*)arguments[I]...); };
    auto whole = [=] { unpack(std::index_sequence_for<P...>()); };
    call = [](void* of) { (*(decltype(whole)*)of)(); }, body = &whole;
    char* stacks = (char*)malloc(STACK * threads);
    bool good = _setjmp(failed) == 0;
    if (good && strcmp(kinds, wanted) != 0) fail(0, "the arguments are %s, the kernel's parameters %s", kinds, wanted);
    if (good) run(blocks, threads, stacks);
    free(stacks);
    return good ? nullptr : message;
}

// Numbers of other formats are exact in double. They lie in the lowest bits of a word; the bits above don't count.
double from_bfloat(unsigned bits) { return __uint_as_float(bits << 16); }
double from_half(unsigned bits) {  // exponent and mantissa at a float's place are 2¹¹² times too small
    double size = __uint_as_float((bits & 0x7fff) << 13) * 0x1p112;
    if ((bits & 0x7c00) == 0x7c00) size = bits & 0x3ff ? NAN : INFINITY;
    return bits & 0x8000 ? -size : size;
}
double from_e4m3(unsigned bits) {
    return (bits & 0x7f) == 0x7f ? NAN : from_half((bits & 0x80) << 8 | (bits & 0x7f) << 7) * 0x1p8;
}
int64_t from_byte(unsigned bits) { return (int8_t)bits; }
// To the nearest number of so many bits, of two the even one; there are fewer bits below 2^(lowest - 1).
double rounded(double value, int bits, int lowest) {
    int exponent;
    if (value == 0 || !isfinite(value)) return value;
    frexp(value, &exponent);
    int last = (exponent < lowest ? lowest : exponent) - bits;
    return ldexp(nearbyint(ldexp(value, -last)), last);
}
unsigned to_bfloat(double x) { return isnan(x) ? 0x7fff : __float_as_uint((float)rounded(x, 8, -125)) >> 16; }
unsigned to_half(double value) {
    double size = fabs(rounded(value, 11, -13));
    if (isnan(value)) return 0x7fff;
    return (size > 65504 ? 0x7c00 : __float_as_uint((float)(size * 0x1p-112)) >> 13) | (signbit(value) ? 0x8000 : 0);
}
// C += A B of a warp, matrices laid out as in the PTX ISA: a register has EACH numbers that follow each other.
struct Fragments { unsigned a[4], b[2]; };
template <int EACH, class Sum, class A, class B>
void multiply(Sum (&c)[4], const Fragments& mine, A of_a, B of_b, const char* what, int line) {
    const Fragments* all = exchange(mine, what, line);
    for (int i = 0; i < 4; i++) {
        int lane = threadIdx.x % 32, row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        auto sum = of_a(0) * of_b(0) + c[i];
        for (int k = 0; k < 8 * EACH; k++) {
            int quarter = k / EACH % 4, upper = k / EACH / 4, shift = k % EACH * (32 / EACH);
            unsigned a = all[row % 8 * 4 + quarter].a[row / 8 + 2 * upper], b = all[column * 4 + quarter].b[upper];
            sum += of_a(a >> shift) * of_b(b >> shift);
        }
        c[i] = (Sum)sum;
    }
}

// g++ calls these, because of -fsanitize=alignment,bounds.
struct Place { const char* file; int line, column; };
extern "C" void __ubsan_handle_type_mismatch_v1(Place* at, void* to) { fail(at->line, "%p isn't aligned", to); }
extern "C" void __ubsan_handle_out_of_bounds(Place* at, long i) { fail(at->line, "an array has no index %ld", i); }
}  // namespace emulated
#define CALLED_AT int line = __builtin_LINE()
namespace replacements {  // for functions of the same names that have `asm`; emulated.py knows their instructions
using namespace emulated;
using u32 = unsigned;
float scale_of(unsigned short half) { return from_half(half); }
u32 pair(float first, float second) { return to_bfloat(first) | to_bfloat(second) << 16; }
float larger(float first, float second) { return isnan(first) || first > second ? first : second; }
u32 less_8(u32 bytes) { return bytes & 0xf0f0f0f0u ^ 0x80808080u; }
u32 halves(float first, float second) { return to_half(first) | to_half(second) << 16; }
u32 lower_halves(u32 word) { return to_half(from_e4m3(word)) | to_half(from_e4m3(word >> 8)) << 16; }
u32 upper_halves(u32 word) { return lower_halves(word >> 16); }
u32 multiply_add(u32 a, u32 b, u32 c) {
    auto one = [=](int at) { return to_bfloat(from_bfloat(a >> at) * from_bfloat(b >> at) + from_bfloat(c >> at)); };
    return one(0) | one(16) << 16;
}
uint4 read_once(const char* from, CALLED_AT) {
    if ((uintptr_t)from % 16 != 0) fail(line, "read_once of %p, which is no multiple of 16", from);
    return *(const uint4*)from;
}
#define MULTIPLY(name, type, each, of_a, of_b)                                                 \
    void name(type (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, CALLED_AT) {       \
        multiply<each>(c, {{a0, a1, a2, a3}, {b0, b1}}, of_a, of_b, #name, line);              \
    }
MULTIPLY(multiply_matrices, float, 2, from_bfloat, from_bfloat)
MULTIPLY(multiply_halves, float, 2, from_half, from_half)
MULTIPLY(multiply_bytes, int, 4, from_byte, from_byte)
#undef MULTIPLY
void launch_dependents() {}
void wait_for_inputs() {}
}  // namespace replacements

void __syncthreads(CALLED_AT) { emulated::wait(emulated::block, "__syncthreads", line); }
template <class T> T __shfl_xor_sync(unsigned mask, T value, int bits, CALLED_AT) {
    return emulated::exchange(value, "__shfl_xor_sync", line, mask)[threadIdx.x % 32 ^ (bits & 31)];
}
unsigned __reduce_max_sync(unsigned mask, unsigned value, CALLED_AT) {
    const unsigned* all = emulated::exchange(value, "__reduce_max_sync", line, mask);
    for (int i = 0; i < 32; i++) value = all[i] > value ? all[i] : value;
    return value;
}
int __reduce_add_sync(unsigned mask, int value, CALLED_AT) {
    const int* all = emulated::exchange(value, "__reduce_add_sync", line, mask);
    for (int i = 1; i < 32; i++) value += all[(threadIdx.x + i) % 32];
    return value;
}
template <class T> T __ldg(const T* from) { return *from; }
unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    unsigned out = 0;
    for (int i = 0; i < 4; i++) {
        int8_t byte = ((uint64_t)y << 32 | x) >> 8 * (selector >> 4 * i & 7);
        out |= (uint8_t)(selector >> 4 * i & 8 ? byte >> 7 : byte) << 8 * i;
    }
    return out;
}
float __int2float_rn(int value) { return value; }
int __float2int_rn(float value) {
    return isnan(value) ? 0 : value >= 0x1p31f ? INT32_MAX : value <= -0x1p31f ? INT32_MIN : (int)nearbyintf(value);
}
float __expf(float value) { return expf(value); }
float rsqrtf(float value) { return 1 / sqrtf(value); }
template <class A, class B> auto min(A a, B b) { return b < a || a != a ? b : a; }
template <class A, class B> auto max(A a, B b) { return b > a || a != a ? b : a; }

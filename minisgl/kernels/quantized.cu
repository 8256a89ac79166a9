// What few_tokens.cu and single_token_stream.cu share: it stands before them when they are compiled.

typedef unsigned int u32;
typedef unsigned short u16;

template <int FLOATS> struct Pick { typedef u16 Type; };
template <> struct Pick<1> { typedef float Type; };
typedef Pick<FLOAT_SCALES>::Type Scale;
__device__ float scale_of(float scale) { return scale; }
__device__ float scale_of(u16 half) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}
__device__ float to_float(u16 bits) { return __uint_as_float((u32)bits << 16); }
__device__ u32 pair(float first, float second) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
}
__device__ uint4 read_once(const char* from) {
    uint4 words;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(from));
    return words;
}
// A kernel behind this one may start, and this one goes on when the one in front has written everything.
__device__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ u32 word(const uint4& w, int i) { return i == 0 ? w.x : i == 1 ? w.y : i == 2 ? w.z : w.w; }

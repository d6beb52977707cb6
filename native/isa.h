// Which instruction set a kernel runs with. One build serves every machine: each kernel is compiled
// once per instruction set through target attributes, and the choice is made at run time.
#pragma once

#include <stdexcept>
#include <string>

// -DPLAIT_X86=0 builds what a machine that is not x86 gets.
#ifndef PLAIT_X86
#if defined(__x86_64__) && defined(__GNUC__)
#define PLAIT_X86 1
#else
#define PLAIT_X86 0
#endif
#endif

#if PLAIT_X86
#define PLAIT_AVX2 __attribute__((target("avx2,fma,f16c,bmi2,sse4.2,crc32")))
#define PLAIT_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2,sse4.2,crc32")))
#endif

namespace plait {

enum class Isa : int { scalar = 0, avx2 = 1, avx512 = 2 };

inline bool available(Isa isa) {
#if PLAIT_X86
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("sse4.2");
    if (isa == Isa::avx2) return avx2;
    if (isa == Isa::avx512)
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    return isa == Isa::scalar;
}

// The instruction set of that name; throws where this machine, or this build, cannot run it.
inline Isa isa_named(const std::string &name) {
    Isa isa = Isa::scalar;
    if (name == "avx2") isa = Isa::avx2;
    else if (name == "avx512") isa = Isa::avx512;
    else if (name != "scalar") throw std::invalid_argument("unknown instruction set " + name);
    if (!available(isa)) throw std::invalid_argument("instruction set " + name + " cannot run here");
    return isa;
}

}  // namespace plait

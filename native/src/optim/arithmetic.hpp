// What bodies of optimizer steps are made of. A body is inlined into one function for each instruction set, which carries the
// set's attribute; its file is compiled with -ffp-contract=off, so that only what is written as an FMA is one.
#pragma once

#include <cstdint>

#include "optim/steps.hpp"

#define LASTGOOD_INLINE inline __attribute__((always_inline))

namespace lastgood {

LASTGOOD_INLINE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
LASTGOOD_INLINE double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }
LASTGOOD_INLINE float root(float x) { return __builtin_sqrtf(x); }
LASTGOOD_INLINE double root(double x) { return __builtin_sqrt(x); }

// `Body::over(step, tensor, begin, end)` steps elements [begin, end) of a tensor.
template <class Step, class Tensor>
using StepRunner = void (*)(const Step&, const Tensor&, std::uint64_t, std::uint64_t);

template <class Body, class Step, class Tensor>
void run_portable(const Step& step, const Tensor& tensor, std::uint64_t begin, std::uint64_t end) {
    Body::over(step, tensor, begin, end);
}

#if defined(__x86_64__)
template <class Body, class Step, class Tensor>
__attribute__((target("avx2,fma"))) void run_avx2(const Step& step, const Tensor& tensor, std::uint64_t begin,
                                                   std::uint64_t end) {
    Body::over(step, tensor, begin, end);
}

template <class Body, class Step, class Tensor>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512"))) void run_avx512(
    const Step& step, const Tensor& tensor, std::uint64_t begin, std::uint64_t end) {
    Body::over(step, tensor, begin, end);
}
#endif

// The function of an instruction set.
template <class Body, class Step, class Tensor>
StepRunner<Step, Tensor> step_runner(InstructionSet set) {
#if defined(__x86_64__)
    if (set == InstructionSet::avx512) return run_avx512<Body, Step, Tensor>;
    if (set == InstructionSet::avx2) return run_avx2<Body, Step, Tensor>;
#endif
    (void)set;
    return run_portable<Body, Step, Tensor>;
}

}  // namespace lastgood

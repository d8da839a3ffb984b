#include "wire/half.hpp"

#include "wire/half_bits.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lastgood {
namespace {

void add_float16_portable(std::uint16_t* target, const std::uint16_t* source, std::size_t elements) {
    for (std::size_t index = 0; index < elements; ++index)
        target[index] = to_float16(from_float16(source[index]) + from_float16(target[index]));
}

void divide_float16_portable(std::uint16_t* target, std::size_t elements, float divisor) {
    for (std::size_t index = 0; index < elements; ++index)
        target[index] = to_float16(from_float16(target[index]) / divisor);
}

#if defined(__x86_64__)

bool has_f16c() {
    static const bool found = __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
    return found;
}

__attribute__((target("avx,f16c"))) __m256 load_halves(const std::uint16_t* at) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}

__attribute__((target("avx,f16c"))) void store_halves(std::uint16_t* at, __m256 value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}

// Return how many elements are done; the portable way takes the rest.
__attribute__((target("avx,f16c"))) std::size_t add_float16_f16c(std::uint16_t* target, const std::uint16_t* source,
                                                                 std::size_t elements) {
    std::size_t index = 0;
    for (; index + 8 <= elements; index += 8)
        store_halves(target + index, _mm256_add_ps(load_halves(source + index), load_halves(target + index)));
    return index;
}

__attribute__((target("avx,f16c"))) std::size_t divide_float16_f16c(std::uint16_t* target, std::size_t elements,
                                                                    float divisor) {
    std::size_t index = 0;
    const __m256 by = _mm256_set1_ps(divisor);
    for (; index + 8 <= elements; index += 8)
        store_halves(target + index, _mm256_div_ps(load_halves(target + index), by));
    return index;
}

#endif

}  // namespace

void add_float16(std::uint16_t* target, const std::uint16_t* source, std::size_t elements) {
    std::size_t done = 0;
#if defined(__x86_64__)
    if (has_f16c()) done = add_float16_f16c(target, source, elements);
#endif
    add_float16_portable(target + done, source + done, elements - done);
}

void divide_float16(std::uint16_t* target, std::size_t elements, float divisor) {
    std::size_t done = 0;
#if defined(__x86_64__)
    if (has_f16c()) done = divide_float16_f16c(target, elements, divisor);
#endif
    divide_float16_portable(target + done, elements - done, divisor);
}

void add_bfloat16(std::uint16_t* target, const std::uint16_t* source, std::size_t elements) {
    for (std::size_t index = 0; index < elements; ++index)
        target[index] = to_bfloat16(from_bfloat16(source[index]) + from_bfloat16(target[index]));
}

void divide_bfloat16(std::uint16_t* target, std::size_t elements, float divisor) {
    for (std::size_t index = 0; index < elements; ++index)
        target[index] = to_bfloat16(from_bfloat16(target[index]) / divisor);
}

}  // namespace lastgood
